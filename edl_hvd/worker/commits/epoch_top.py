"""The tops of epochs and steps: parts of a body before its loop over batches, whose changes of the state count once.

Where an epoch is continued, in another world or from a checkpoint, its top runs again. Without this module it would cut
the learning rate a second time, or set a counter to zero in the middle of the epoch. The state at that time is one of
after the top. So when the loop over batches continues, what the top has changed again is restored.

The same holds for what an elastic function does before its loop over epochs, where that loop has begun before.

A step has a top as well, before its first loop over the step. A step that is made again begins from a copy of the state
before its top, but for what commits leave out. Where the top has written there, that is still written, and restored
when the loop over the step begins.

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
class StepTop:
    """What the top of a step has written before, as the body of the step begins once more.

    Attributes:
        copies: Copies of these tensors, by name.
    """

    copies: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, store: StateStore) -> StepTop | None:
        """Return the present values; ``None`` where there is nothing to restore."""
        if not store.step_writes:
            return None
        live = store.live(store.commit).tensors
        return cls({name: live[name].clone() for name in store.step_writes & live.keys()})

    @torch.no_grad()
    def close(self, store: StateStore) -> None:
        """The first loop over the step begins: restore what the top has written once more."""
        live = store.live(store.commit).tensors
        for name, copy in self.copies.items():
            if name in live and live[name].shape == copy.shape:
                live[name].copy_(copy)
        store.tracker.accept_changes()


@dataclass(frozen=True)
class TopChanges:
    """What a top has changed again.

    Attributes:
        restored: Names of what has its former value again.
        lost: Names of tensors that could not be restored: the top had not written them when it ran before.
    """

    restored: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EpochTop:
    """The state when the body of an epoch began, or what stands in the function before a loop over epochs.

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

    @property
    def epoch(self) -> int:
        """The number of epochs that were finished."""
        return int(self.plain["counters"]["epoch"])

    def close(self, store: StateStore, is_function: bool = False, keeps_options: bool = False) -> TopChanges:
        """The loop begins: restore what the top has written, or note it where the top ran first.

        Does nothing where the script has committed in the top.

        Args:
            store: State of the job.
            is_function: Whether it stands before a loop over epochs, so that it must not set counters either.
            keeps_options: Whether optimizers keep the options that they have now.
        """
        if store.commit != self.plain["counters"]["commit"]:
            return TopChanges()
        names = list(self.live)
        now = store.merged(store.delta(store.commit), store.to_skip).tensors
        # In the place of these there are other tensors now, or none.
        replaced = {name for name in names if name not in now or now[name].data_ptr() != self.live[name].data_ptr()}
        # The script may write into a tensor before it takes it away.
        written = {names[number] for number in self.trace.moved()}
        if not self.is_continued:
            store.top_writes |= written
            return TopChanges()
        lost = frozenset(written - self.copies.keys())
        state = Encoded(self.plain, {**self.live, **self.copies})
        restored = store.load_changed(state, (written | replaced) - lost, keeps_options)
        if is_function:
            restored += store.load_position(self.plain["counters"])
        if not lost and not self.was_dirty:
            store.tracker.accept_changes()
        return TopChanges(tuple(restored), lost)
