"""The copy of a commit that a checkpoint is written from: in host memory that is kept for the whole run.

Where nothing but optimizer steps moves the parameters, it need not be made at the commit: until the next step they are
what they were. So it is made beside the next batch (as in CheckFreq, Mohan et al., FAST 2021), by the thread that
writes the checkpoint, and by the worker when it is about to make that step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.errors import StateError
from edl_hvd.worker.keeping.late_copy import Blocks, LateCopy


class HostCopies:
    """The copies of one worker's state in host memory; one at a time, since all use the same memory."""

    def __init__(self) -> None:
        self._room = _Room({})
        self._late: LateCopy | None = None

    def make(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """A copy of these now."""
        self.drop()
        snapshot = self._of(plain, tensors)
        _copy(tensors, snapshot.tensors)
        return snapshot

    def make_late(
        self, plain: Any, tensors: Mapping[str, torch.Tensor], is_disturbed: Callable[[], bool]
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
        self._late = late = LateCopy(tensors.values(), self._room.blocks, is_disturbed)

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
        late, self._late = self._late, None
        if late is not None:
            late.complete(is_whole)

    def drop(self) -> None:
        """Nobody wants the copy any more."""
        self._late = None

    def _of(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        if not self._room.fits(tensors):
            self._room = _Room(tensors, self._room)
        counters = plain["counters"]
        return Snapshot(
            self._room.buffers, plain, step=counters["step"], epoch=counters["epoch"], samples=counters["samples"]
        )


def host_copy(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """A commit as a value for the checkpoint layer, in memory of its own."""
    return HostCopies().make(plain, tensors)


class _Room:
    """Memory for these, what there was before included where it fits.

    Attributes:
        buffers: It, by name; never changed, so whoever has seen to it once need not again.
        blocks: The same, as it is dealt out.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], before: _Room | None = None) -> None:
        kept = before.buffers if before else {}
        self.buffers: Mapping[str, torch.Tensor] = {
            name: _room_for(tensor, kept.get(name)) for name, tensor in tensors.items()
        }
        self.blocks = Blocks(self.buffers.values())
        self._kinds = _kinds(tensors)

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return _kinds(tensors) == self._kinds


def _kinds(tensors: Mapping[str, torch.Tensor]) -> list[Hashable]:
    values = tensors.values()
    return [*tensors, *[tensor.shape for tensor in values], *[tensor.dtype for tensor in values]]


def _room_for(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@torch.no_grad()
def _copy(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    torch._foreach_copy_([into[name] for name in tensors], list(tensors.values()))
