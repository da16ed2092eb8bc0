"""The top of an epoch: the part of its body before the loop over batches, whose changes of the state count once.

Where an epoch is continued, in another world or from a checkpoint, its top runs again. Without this module it would cut
the learning rate a second time, or set a counter to zero in the middle of the epoch. The state at that time is one of
after the top. So when the loop over batches continues, what the top has changed again is restored.

A commit may leave out what only optimizer steps change. Where a top writes into such a tensor, that is noticed when the
top first runs. Commits carry the names of these tensors, and they are copied before the top runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.trace import TensorTrace


@dataclass(frozen=True)
class EpochTop:
    """The state when the body of an epoch began.

    Attributes:
        plain: Plain state.
        live: The live tensors of that time, by name.
        copies: Copies of those tensors that the top may write, by name.
        trace: Versions of the live tensors.
        was_dirty: Whether the script had changed parameters by itself since the last check.
        is_continued: Whether the top has run before, in another world or before the checkpoint.
    """

    plain: Any
    live: Mapping[str, torch.Tensor]
    copies: Mapping[str, torch.Tensor]
    trace: TensorTrace
    was_dirty: bool
    is_continued: bool

    @classmethod
    def of(cls, store: StateStore, is_continued: bool) -> EpochTop:
        """Return the present state.

        Args:
            store: State of the job.
            is_continued: Whether the top has run before. Only then are tensors copied, and only those that the last
                commit has no copy of.
        """
        delta = store.delta(store.commit)
        plain, tensors = store.merged(delta, store.to_skip)
        # Detached: these keep the present memory, also where the script gives a parameter other memory.
        live = {name: tensor.detach() for name, tensor in tensors.items()}
        copies: Mapping[str, torch.Tensor] = {}
        if is_continued:
            held = store.last.state.tensors if store.last is not None else {}
            wanted = (delta.tensors.keys() | store.top_writes) & live.keys()
            copies = {**{name: live[name].clone() for name in wanted - held.keys()}, **held}
        return cls(plain, live, copies, TensorTrace(list(live.values())), store.tracker.is_dirty(), is_continued)

    def close(self, store: StateStore) -> frozenset[str]:
        """The loop over batches begins: restore what the top has written, or note it where the top ran first.

        Does nothing where the script has committed in the top.

        Returns:
            Names of tensors that could not be restored: the top had not written them when it ran before.
        """
        if store.commit != self.plain["counters"]["commit"]:
            return frozenset()
        names = list(self.live)
        now = store.merged(store.delta(store.commit), store.to_skip).tensors
        # In the place of these there are other tensors now; the old ones still have the old values.
        replaced = {name for name in names if name not in now or now[name].data_ptr() != self.live[name].data_ptr()}
        written = {names[number] for number in self.trace.moved()} - replaced
        if not self.is_continued:
            store.top_writes |= written
            return frozenset()
        lost = frozenset(written - self.copies.keys())
        store.load_changed(Encoded(self.plain, {**self.live, **self.copies}), (written | replaced) - lost)
        if not lost and not self.was_dirty:
            store.tracker.accept_changes()
        return lost
