"""Whether a tensor has been written into since, told without a copy of it."""

from __future__ import annotations

import torch


class Mark:
    """Tells later whether a tensor is the same, with nothing written into it meanwhile.

    It keeps the tensor's memory from being given to another one. Not seen: writing through ``.data``, and BatchNorm
    keeping its statistics.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._tensor.data_ptr() and tensor._version == self._version


def marks_of(tensors: dict[str, torch.Tensor]) -> dict[str, Mark]:
    """The marks of live tensors, by their names."""
    return {name: Mark(tensor) for name, tensor in tensors.items()}
