"""The copy of a commit that a checkpoint is written from: in host memory that is kept for the whole run.

Where nothing but optimizer steps moves the parameters, it need not be made at the commit: until the next step they are
what they were. So it is made beside the next batch (as in CheckFreq, Mohan et al., FAST 2021), by the thread that
writes the checkpoint, and by the worker when it is about to make that step.

The copy is made in chunks. Of what is left, the next who comes takes the half (guided self-scheduling, Polychronopoulos
and Kuck, IEEE Transactions on Computers 1987, for two). So a thread that is alone asks for Python's lock a dozen times,
and two end together.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import accumulate
from typing import Any

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.errors import StateError

_LEAST_BYTES = 1024 * 1024
# Of a portion: copied in a tenth of a millisecond, a few times as long as it takes to have the next one.
_LARGE_BYTES, _LARGE_PART = 4 * 1024 * 1024, 64
# A tensor that is larger than both is dealt out in blocks of that size: there are few of them.

Chunk = tuple[list[torch.Tensor], list[torch.Tensor]]


class Blocks:
    """Memory for copies, cut into blocks that are dealt out; the same for every copy into it.

    Args:
        targets: The memory; tensors without gaps.

    Attributes:
        into: The blocks.
        ends: Bytes up to the end of each.
    """

    def __init__(self, targets: Collection[torch.Tensor]) -> None:
        block_bytes = max(_LARGE_BYTES, sum(target.nbytes for target in targets) // _LARGE_PART)
        self._rows = {
            number: max(1, block_bytes * len(target) // target.nbytes)
            for number, target in enumerate(targets)
            if target.nbytes > block_bytes and target.dim()
        }
        self.into = self.cut(targets)
        self.ends = list(accumulate(block.nbytes for block in self.into))

    def cut(self, tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the same shapes, cut like the targets: each whole, or by rows where it is large."""
        if not self._rows:
            return list(tensors)
        blocks: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            rows = self._rows.get(number)
            blocks += tensor.detach().split(rows) if rows else [tensor]
        return blocks


class DeferredCopy:
    """Copies tensors into others of the same shapes, in chunks. Every method may be called from any thread.

    Args:
        tensors: Source tensors.
        blocks: Target memory.
        is_disturbed: Somebody has moved the tensors meanwhile. Asked once, when all is copied, or by the caller of
            ``complete``.
    """

    def __init__(self, tensors: Collection[torch.Tensor], blocks: Blocks, is_dirty: Callable[[], bool]) -> None:
        self._from, self._into, self._ends = blocks.cut(tensors), blocks.into, blocks.ends
        self._is_dirty = is_dirty
        self._changed = threading.Condition()
        self._next = 0  # block that nobody has taken
        self._in_flight: dict[int, Chunk] = {}  # by thread
        self._made = self._inconsistent = False
        self._checked = False

    def complete(self, is_whole: bool | None = None) -> bool:
        """Return when all is copied, having copied what nobody else did; false if it is of no use.

        Args:
            is_whole: Whether nobody has moved the tensors yet, where the caller has just looked, and moves them when
                this returns. ``None``: it has not looked.
        """
        me = threading.get_ident()
        if is_whole is not None:
            with self._changed:
                self._checked, self._inconsistent = True, self._inconsistent or not (is_whole or self._made)
        try:
            while portion := self._take(me):
                _copy_chunk(portion)
                self._in_flight.pop(me)
        finally:
            with self._changed:
                # Nobody waits for one who was interrupted.
                self._inconsistent = self._in_flight.pop(me, None) is not None or self._inconsistent
                self._end_if_over()
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            return not self._inconsistent

    def _take(self, me: int) -> Chunk | None:
        with self._changed:
            first, last = self._next, len(self._into)
            if first == last:
                return None
            taken_bytes = self._ends[first - 1] if first else 0
            wanted_bytes = max(_LEAST_BYTES, (self._ends[-1] - taken_bytes) // 2)
            stop = min(bisect_left(self._ends, taken_bytes + wanted_bytes, first) + 1, last)
            portion = self._in_flight[me] = self._from[first:stop], self._into[first:stop]
            self._next = stop
            return portion

    def _end_if_over(self) -> None:
        if not self._made and not self._in_flight and self._next == len(self._into):
            # Afterwards: what is found undisturbed was so all along.
            self._inconsistent = self._inconsistent or (not self._checked and self._is_dirty())
            self._made = True
            self._changed.notify_all()


@torch.no_grad()
def _copy_chunk(portion: Chunk) -> None:
    tensors, into = portion
    torch._foreach_copy_(into, tensors)


class CheckpointCopies:
    """Makes the copies of one worker, one at a time, since all use the same memory."""

    def __init__(self) -> None:
        self._room = _HostBuffers({})
        self._deferred: DeferredCopy | None = None

    def make(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """A copy of these now."""
        self.drop()
        snapshot = self._of(plain, tensors)
        _copy(tensors, snapshot.tensors)
        return snapshot

    def defer(
        self, plain: Any, tensors: Mapping[str, torch.Tensor], is_dirty: Callable[[], bool]
    ) -> tuple[Snapshot, Callable[[], None]]:
        """A copy that holds these only when the second value has been called, which any thread may do.

        Args:
            plain: Of the commit.
            tensors: Live ones. Whoever is about to move them calls ``finish`` first.
            is_disturbed: Somebody has moved them without doing so.

        Returns:
            The copy, and what makes it; that raises StateError if they were disturbed before it was made.
        """
        snapshot = self._of(plain, tensors)
        self._deferred = late = DeferredCopy(tensors.values(), self._room.blocks, is_dirty)

        def make() -> None:
            if not late.complete():
                raise StateError(
                    "the script moved parameters besides its optimizers between a commit and the next step, while they "
                    "were being copied; the next checkpoint is copied at its commit"
                )

        return snapshot, make

    def finish(self, is_whole: bool | None = None) -> None:
        """The tensors are about to move: make what is left of the copy.

        Args:
            is_whole: Whether nobody has moved them yet, where the caller has just looked.
        """
        late, self._deferred = self._deferred, None
        if late is not None:
            late.complete(is_whole)

    def drop(self) -> None:
        """Nobody wants the copy any more."""
        self._deferred = None

    def _of(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        if not self._room.fits(tensors):
            self._room = _HostBuffers(tensors, self._room)
        counters = plain["counters"]
        return Snapshot(
            self._room.buffers, plain, step=counters["step"], epoch=counters["epoch"], samples=counters["samples"]
        )


def host_copy(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """A commit as a value for the checkpoint layer, in memory of its own."""
    return CheckpointCopies().make(plain, tensors)


class _HostBuffers:
    """Memory for these, what there was before included where it fits.

    Attributes:
        buffers: It, by name; never changed, so whoever has seen to it once need not again.
        blocks: The same, as it is dealt out.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], before: _HostBuffers | None = None) -> None:
        kept = before.buffers if before else {}
        self.buffers: Mapping[str, torch.Tensor] = {
            name: _buffer_for(tensor, kept.get(name)) for name, tensor in tensors.items()
        }
        self.blocks = Blocks(self.buffers.values())
        self._kinds = _kinds(tensors)

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return _kinds(tensors) == self._kinds


def _kinds(tensors: Mapping[str, torch.Tensor]) -> list[Hashable]:
    values = tensors.values()
    return [*tensors, *[tensor.shape for tensor in values], *[tensor.dtype for tensor in values]]


def _buffer_for(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@torch.no_grad()
def _copy(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    torch._foreach_copy_([into[name] for name in tensors], list(tensors.values()))
