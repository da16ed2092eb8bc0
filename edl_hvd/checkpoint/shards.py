"""Tensors as the bytes of a safetensors file, and checksums of them."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch

from edl_hvd.checkpoint.checksum import checksum as checksum
from edl_hvd.checkpoint.element_types import ELEMENT_TYPES
from edl_hvd.checkpoint.header import read_header

# What the format can hold and this torch has: torch's type -> the name a manifest uses.
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)}


def checksum_of(tensor: torch.Tensor) -> str:
    """Checksum of the tensor's elements in row-major order; the tensor must be contiguous."""
    return checksum(tensor.reshape(-1).view(torch.uint8).numpy().data)


def contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, each tensor row-major and none overlapping another; copies only where needed."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        result[name] = tensor.detach().resolve_conj().resolve_neg().contiguous()
    end = 0
    # The format stores every tensor apart, and its library refuses memory that two tensors share.
    for name in sorted(result, key=lambda name: result[name].data_ptr()):
        start = result[name].data_ptr()
        if start < end:
            result[name] = result[name].clone()
        end = max(end, start + result[name].nbytes)
    return result


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file of these tensors, which are as ``contiguous`` returns them."""
    return safetensors.torch.save(dict(tensors))


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; runs no code whatever it contains.

    Raises:
        ValueError: The bytes are not such a file.
    """
    try:
        # The library accepts more than a shard may be, and fails in other ways over some of it.
        read_header(data)
        return safetensors.torch.load(data)
    except (ValueError, safetensors.SafetensorError, KeyError) as error:
        # KeyError is how the library says that a type of tensor is unknown to this torch.
        raise ValueError(f"not a readable safetensors file: {error}") from error
