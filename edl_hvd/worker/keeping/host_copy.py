"""The copy of a commit that a checkpoint is written from: in host memory that is kept for the whole run.

Where nothing but optimizer steps moves the parameters, it need not be made at the commit: until the next step they are
what they were. So it is made beside the next batch (as in CheckFreq, Mohan et al., FAST 2021), by whoever comes first,
the thread that writes the checkpoint or the worker about to make that step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.errors import StateError


class HostCopies:
    """Of one worker; one at a time, since all use the same memory."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._late: _LateCopy | None = None

    def make(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """A copy of these now."""
        self.drop()
        snapshot = self._of(plain, tensors)
        _copy(tensors, self._kept)
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
        self._late = _LateCopy(dict(tensors), dict(self._kept), is_disturbed)
        return snapshot, self._late.make

    def finish(self) -> None:
        """The tensors are about to move: make the copy that waits to be made, or wait for who is making it."""
        late, self._late = self._late, None
        if late is not None:
            late.complete()

    def drop(self) -> None:
        """Nobody wants the copy any more."""
        self._late = None

    def _of(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        _keep_room(tensors, self._kept)
        counters = plain["counters"]
        return Snapshot(
            dict(self._kept), plain, step=counters["step"], epoch=counters["epoch"], samples=counters["samples"]
        )


def host_copy(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    """A commit as a value for the checkpoint layer, in memory of its own."""
    return HostCopies().make(plain, tensors)


class _LateCopy:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        is_disturbed: Callable[[], bool],
    ) -> None:
        self._tensors, self._into, self._is_disturbed = tensors, into, is_disturbed
        self._making = threading.Lock()
        self._made = self._torn = False

    def complete(self) -> None:
        with self._making:
            if not self._made:
                _copy(self._tensors, self._into)
                self._torn = self._is_disturbed()  # afterwards: what is found undisturbed was so all along
                self._made = True

    def make(self) -> None:
        self.complete()
        if self._torn:
            raise StateError(
                "the script moved parameters besides its optimizers between a commit and the next step, while they "
                "were being copied; the next checkpoint is copied at its commit"
            )


def _keep_room(tensors: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    for name in kept.keys() - tensors.keys():
        del kept[name]
    for name, tensor in tensors.items():
        buffer = kept.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@torch.no_grad()
def _copy(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
    torch._foreach_copy_([into[name] for name in tensors], list(tensors.values()))
