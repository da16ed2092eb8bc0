"""What a script changes at the top of an epoch, before its loop over batches, counts once.

Where an epoch is continued, in another world or from a checkpoint, its top runs again: the rate would be cut twice, a
counter would begin anew in mid-epoch. The state that the epoch is continued from is that behind its top. So what the
top has changed of it is put back when the loop goes on.

A commit may leave out what only optimizer steps change. Tops that write into such tensors are noticed when they first
run, and commits carry the names of these tensors, so that a copy is made before the top runs again.
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
    """The state in which the body of an epoch has begun.

    Attributes:
        plain: Plain state.
        live: The live tensors of that moment, by name.
        copies: Copies of those that the script may write, by name.
        trace: What the live tensors were.
        was_dirty: Whether the script had changed parameters before, since the last check.
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
        """Return the present state. Nothing is copied for a top that has not run before, nor what a commit holds."""
        delta = store.delta(store.commit)
        plain, tensors = store.merged(delta, store.to_skip)
        # Where the script gives a parameter other memory, these still have what it had.
        live = {name: tensor.detach() for name, tensor in tensors.items()}
        copies: Mapping[str, torch.Tensor] = {}
        if is_continued:
            held = store.last.state.tensors if store.last is not None else {}
            wanted = (delta.tensors.keys() | store.top_writes) & live.keys()
            copies = {**{name: live[name].clone() for name in wanted - held.keys()}, **held}
        return cls(plain, live, copies, TensorTrace(list(live.values())), store.tracker.is_dirty(), is_continued)

    def close(self, store: StateStore) -> frozenset[str]:
        """The loop over batches begins: note what the top has written, and put it back where the top ran once more.

        Nothing is put back, nor noted, where there was a commit meanwhile.

        Returns:
            Names of tensors that could not be put back: the top had not written them when it ran before.
        """
        if store.commit != self.plain["counters"]["commit"]:
            return frozenset()
        names = list(self.live)
        now = store.merged(store.delta(store.commit), store.to_skip).tensors
        # Another tensor has taken the place of these, and they are what they were.
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
