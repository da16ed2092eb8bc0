"""A digest of a few bytes of every tensor of a state, to tell two states apart quickly."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

_SAMPLES = 256  # of a tensor; makes some 100 KB of a large model, read in milliseconds


def sample_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """32 bits, the same for equal tensors on whatever device and wherever they lie in memory."""
    digest = 0
    for name, tensor in sorted(tensors.items()):
        few = _some_of(tensor).cpu().contiguous().view(-1).view(torch.uint8)
        digest = zlib.crc32(few.numpy().tobytes(), zlib.crc32(name.encode(), digest))
    return digest


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """At most ``_SAMPLES`` elements, spread over it; the same ones however it lies in memory."""
    count = min(_SAMPLES, tensor.numel())
    if tensor.dim() == 0 or count == 0:
        return tensor
    places = torch.arange(count, device=tensor.device) * (tensor.numel() // count)
    index = []
    for size in reversed(tensor.shape):  # torch.unravel_index imports five hundred modules first
        index.append(places % size)
        places = places.div(size, rounding_mode="floor")
    return tensor[tuple(reversed(index))]
