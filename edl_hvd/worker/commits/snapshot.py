"""Memory for the copies that commits make: kept for the whole run, filled in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class SnapshotBuffers:
    """Memory for the copy of one commit, used again for the next one.

    Buffers lie on the tensors' own device while it has room for them (a copy there runs at device memory speed), else
    in pinned host memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return buffers of the shapes of these tensors, by name: those of the last copy where they fit.

        Nothing is written. All that can fail in :meth:`fill` fails here, while the commit before is still whole.
        """
        return {
            name: self._buffers[name] if self._fits(name, tensor) else _new_buffer(tensor)
            for name, tensor in tensors.items()
        }

    def can_refill(self, buffers: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are the buffers of the last copy, and the tensors fit into them."""
        return buffers is self._buffers and all(self._fits(name, tensor) for name, tensor in tensors.items())

    @torch.no_grad()
    def fill(self, buffers: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into buffers of :meth:`reserve`, by name, and keep these for the next copy."""
        if tensors:
            torch._foreach_copy_([buffers[name] for name in tensors], list(tensors.values()), non_blocking=True)
            if any(tensor.is_cuda for tensor in tensors.values()):
                torch.cuda.current_stream().synchronize()
        self._buffers = buffers

    def release(self) -> None:
        """Leave the memory to whoever holds the last copy; the next one takes other memory."""
        self._buffers = {}

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        kept = self._buffers.get(name)
        return kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype


def _new_buffer(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda and not _has_room(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _has_room(tensor: torch.Tensor) -> bool:
    free_bytes, total_bytes = torch.cuda.mem_get_info(tensor.device)
    # A fifth stays free: activations and the allocator's caches grow after the first commit.
    return free_bytes - tensor.numel() * tensor.element_size() > total_bytes // 5
