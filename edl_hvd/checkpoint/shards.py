"""Tensors of torch into the bytes of a shard, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy
import torch

from edl_hvd.checkpoint.checksum import CHUNK_BYTES, checksum, chunks
from edl_hvd.checkpoint.element_types import ELEMENT_TYPES
from edl_hvd.checkpoint.entries import FileEntry
from edl_hvd.checkpoint.header import write_header

# What the format can hold and this torch has: torch's type -> the name a manifest uses, and back.
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Packed:
    """A shard in memory.

    Attributes:
        data: All of it.
        entry: What a manifest says of it.
        checksums: Of each tensor, of each chunk of its elements.
    """

    data: memoryview
    entry: FileEntry
    checksums: dict[str, list[str]]


def pack(
    tensors: Mapping[str, torch.Tensor],
    chunk_bytes: int = CHUNK_BYTES,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Packed:
    """A safetensors file of these tensors, each row-major and apart from the others whatever they are in memory.

    Takes memory for the file and for nothing else, and goes over the bytes once: each chunk is copied, and
    checksummed while it is still in the processor's cache.

    Args:
        tensors: Host tensors of the types in ``DTYPE_NAMES``.
        chunk_bytes: Length of what gets one checksum.
        guard: Entered for each copy out of ``tensors``; a copy is of one chunk, or of a tensor that is not
            contiguous. An exception from it ends the work.
    """
    described = {name: (DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    header, places = write_header(described)
    end = max((place.end for place in places.values()), default=len(header))
    # Not zeroed: every byte is written below.
    file = numpy.empty(end, dtype=numpy.uint8)
    file[: len(header)] = numpy.frombuffer(header, dtype=numpy.uint8)
    checksums: dict[str, list[str]] = {}
    for name, place in places.items():
        tensor, target = tensors[name].detach(), file[place.start : place.end]
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain and target.size:
            with guard():
                torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        checksums[name] = []
        for start, stop in chunks(target.size, chunk_bytes):
            if plain:
                with guard():
                    # One thread, and not holding Python's lock: beside it the training goes on.
                    numpy.copyto(target[start:stop], bytes_of(tensor)[start:stop])
            checksums[name].append(checksum(target[start:stop].data))
    return Packed(file.data, FileEntry(end, len(header), checksum(header), chunk_bytes), checksums)


def bytes_of(tensor: torch.Tensor) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
