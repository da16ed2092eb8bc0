"""The copy of a commit that a checkpoint is written from: in host memory that is kept for the whole run.

Where only optimizer steps change the parameters, it need not be made at the commit: until the next step they are what
they were. So it is made beside the next batch (as in CheckFreq, Mohan et al., FAST 2021), by the thread that writes the
checkpoint, and by the worker when it is about to make that step.

The copy is made in chunks. Each thread takes half of what is left (guided self-scheduling, Polychronopoulos and Kuck,
IEEE Transactions on Computers 1987, for two). So a thread that is alone asks for Python's lock a dozen times, and two
threads end together.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.errors import StateError
from edl_hvd.worker.codec import Encoded, decode
from edl_hvd.worker.commits.live_state import METRICS

_LEAST_CHUNK_BYTES = 1024 * 1024
# Copied in a tenth of a millisecond, a few times as long as it takes to have the next chunk.
_LARGE_BYTES, _LARGE_PART = 4 * 1024 * 1024, 64
# A tensor that is larger than both is cut into blocks of that size: there are few of them.

Chunk = tuple[list[torch.Tensor], list[torch.Tensor]]


class Blocks:
    """Memory for copies, cut into blocks; the same for every copy into it.

    Args:
        targets: Tensors without gaps, which are the memory.

    Attributes:
        into: Blocks.
        ends: Bytes up to the end of each block.
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
        """Return tensors of the same shapes, cut like the targets: each whole, or by rows where it is large."""
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
        is_dirty: Returns whether the source tensors have changed meanwhile. Asked once, when all is copied, unless the
            caller of ``complete`` says so.
    """

    def __init__(self, tensors: Collection[torch.Tensor], blocks: Blocks, is_dirty: Callable[[], bool]) -> None:
        self._from, self._into, self._ends = blocks.cut(tensors), blocks.into, blocks.ends
        self._is_dirty = is_dirty
        self._changed = threading.Condition()
        self._next = 0  # first block that no thread has taken
        self._in_flight: dict[int, Chunk] = {}  # by thread
        self._made = self._inconsistent = False
        self._checked = False

    def complete(self, is_whole: bool | None = None) -> bool:
        """Copy what no thread has copied yet, and return when all is copied: whether the copy is consistent.

        Args:
            is_whole: Whether the source tensors are unchanged so far, where the caller has just looked, and changes
                them when this returns. ``None``: it has not looked.
        """
        me = threading.get_ident()
        if is_whole is not None:
            with self._changed:
                self._checked, self._inconsistent = True, self._inconsistent or not (is_whole or self._made)
        try:
            while chunk := self._take(me):
                _copy_chunk(chunk)
                self._in_flight.pop(me)
        finally:
            with self._changed:
                # Nobody waits for a thread that was interrupted.
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
            wanted_bytes = max(_LEAST_CHUNK_BYTES, (self._ends[-1] - taken_bytes) // 2)
            stop = min(bisect_left(self._ends, taken_bytes + wanted_bytes, first) + 1, last)
            chunk = self._in_flight[me] = self._from[first:stop], self._into[first:stop]
            self._next = stop
            return chunk

    def _end_if_over(self) -> None:
        if not self._made and not self._in_flight and self._next == len(self._into):
            # Afterwards: what is found unchanged was so all along.
            self._inconsistent = self._inconsistent or (not self._checked and self._is_dirty())
            self._made = True
            self._changed.notify_all()


@torch.no_grad()
def _copy_chunk(chunk: Chunk) -> None:
    tensors, into = chunk
    torch._foreach_copy_(into, tensors)


@dataclass(frozen=True)
class DeferredCommit:
    """A commit that is copied later; a ``DeferredSnapshot`` for the checkpoint layer.

    Attributes:
        value: Snapshot of the commit.
        copy: Copies the commit into the tensors of the snapshot.
    """

    value: Snapshot
    copy: DeferredCopy

    def materialise(self) -> None:
        """Have the tensors of the snapshot hold the commit. Any thread; blocks until all is copied.

        Raises:
            StateError: The script changed parameters by itself before they were copied.
        """
        if not self.copy.complete():
            raise StateError(
                "the script moved parameters besides its optimizers between a commit and the next step, while they "
                "were being copied; the next checkpoint is copied at its commit"
            )


class CheckpointCopies:
    """Makes the copies of one worker, one at a time, since all use the same memory."""

    def __init__(self) -> None:
        self._buffers = _HostBuffers({})
        self._pending: DeferredCopy | None = None

    def make(self, state: Encoded) -> Snapshot:
        """Return a copy of a state, made now."""
        self.drop()
        snapshot = self._snapshot_of(state)
        _copy(state.tensors, snapshot.tensors)
        return snapshot

    def defer(self, state: Encoded, is_dirty: Callable[[], bool]) -> DeferredCommit:
        """Return a copy of a state that is made later.

        Args:
            state: State whose tensors may be live. Whoever is about to change them calls ``finish`` first.
            is_dirty: Returns whether somebody has changed them without doing so.
        """
        snapshot = self._snapshot_of(state)
        self._pending = DeferredCopy(state.tensors.values(), self._buffers.blocks, is_dirty)
        return DeferredCommit(snapshot, self._pending)

    @property
    def is_pending(self) -> bool:
        """Whether a copy has been deferred that :meth:`finish` may have to make."""
        return self._pending is not None

    def finish(self, is_whole: bool | None = None) -> None:
        """Make what is left of the deferred copy: the tensors are about to change.

        Args:
            is_whole: Whether they are unchanged so far, where the caller has just looked.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.complete(is_whole)

    def drop(self) -> None:
        """Give up the deferred copy."""
        self._pending = None

    def _snapshot_of(self, state: Encoded) -> Snapshot:
        if not self._buffers.fit(state.tensors):
            self._buffers = _HostBuffers(state.tensors, self._buffers)
        counters = state.plain["counters"]
        return Snapshot(
            self._buffers.by_name, state.plain, step=counters["step"], epoch=counters["epoch"],
            samples=counters["samples"], metrics=decode(state.plain["attributes"].get(METRICS, {}), {}),
        )  # fmt: skip


class _HostBuffers:
    """Host memory for the tensors of one state.

    Args:
        tensors: Tensors that will be copied.
        before: Buffers whose memory is used where it fits.

    Attributes:
        by_name: Buffers by name; never changed, so who has checked them once need not again.
        blocks: The same memory, in blocks.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], before: _HostBuffers | None = None) -> None:
        kept = before.by_name if before else {}
        self.by_name: Mapping[str, torch.Tensor] = {
            name: _buffer_for(tensor, kept.get(name)) for name, tensor in tensors.items()
        }
        self.blocks = Blocks(self.by_name.values())
        self._kinds = _kinds(tensors)

    def fit(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are tensors of the same names, shapes and types."""
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
