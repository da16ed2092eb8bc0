"""The copy of the training state that a commit makes: buffers kept for the whole run, filled in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edl_hvd.errors import InternalError


class SnapshotBuffers:
    """One consistent point of the training state, in memory.

    Buffers live on the tensors' own device while it has room for them (a copy there runs at device
    memory speed), else in pinned host memory. They are allocated by the first fill and reused.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._plain: Any = None
        self._whole = False

    @property
    def whole(self) -> bool:
        """It holds a complete point: not before the first fill, nor after one that was interrupted."""
        return self._whole

    def invalidate(self) -> None:
        """It holds no point any more; its memory stays for the next."""
        self._whole = False

    @property
    def plain(self) -> Any:
        """The JSON part of the point; do not change it."""
        if not self._whole:
            raise InternalError("a snapshot was read that is not whole")
        return self._plain

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the point; do not change them."""
        if not self._whole:
            raise InternalError("a snapshot was read that is not whole")
        return self._buffers

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor], plain: Any) -> None:
        """Copy a new point in. ``plain`` is kept as it is: the caller hands over a fresh value.

        Everything that can fail (encoding, allocation) comes before the first byte is overwritten;
        an interruption after that leaves a snapshot that is known not to be whole.
        """
        buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        self._whole = False
        self._copy(buffers, tensors)
        self._buffers, self._plain = buffers, plain
        self._whole = True

    @torch.no_grad()
    def refill(self, tensors: Mapping[str, torch.Tensor], plain: Any) -> bool:
        """Make it another point that differs in some tensors, with these values; false if one does not fit."""
        if not self._whole or any(
            self._buffer_for(name, tensor) is not self._buffers.get(name) for name, tensor in tensors.items()
        ):
            return False
        self._whole = False
        self._copy(self._buffers, tensors)
        self._plain, self._whole = plain, True
        return True

    @staticmethod
    def _copy(buffers: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors:
            torch._foreach_copy_([buffers[name] for name in tensors], list(tensors.values()), non_blocking=True)
            if any(tensor.is_cuda for tensor in tensors.values()):
                torch.cuda.current_stream().synchronize()

    def _buffer_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        if tensor.is_cuda and not _has_room(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _has_room(tensor: torch.Tensor) -> bool:
    free_bytes, total_bytes = torch.cuda.mem_get_info(tensor.device)
    # A fifth stays free: activations and the allocator's caches grow after the first commit.
    return free_bytes - tensor.numel() * tensor.element_size() > total_bytes // 5
