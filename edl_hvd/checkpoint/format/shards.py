"""Tensors of torch into the bytes of a shard, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy
import torch

from edl_hvd.checkpoint.format.checksum import CHUNK_BYTES, checksum, chunks
from edl_hvd.checkpoint.format.entries import FileEntry
from edl_hvd.checkpoint.format.safetensors import ELEMENT_TYPES, write_header

# What the format can hold and this torch has: torch's type -> the name a manifest uses, and back.
DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Guard = Callable[[], AbstractContextManager[None]]
# Entered for each look at tensors that may be somebody else's soon: at one chunk, or at one that is not contiguous. An
# exception from it ends the work.


@dataclass(frozen=True)
class Packed:
    """A shard, where its bytes lie.

    Attributes:
        data: Buffers in the order of the file: the header, then the memory of the tensors themselves.
        entry: Entry of a manifest for it.
        elements: Memory of the tensors, by name.
    """

    data: list[memoryview]
    entry: FileEntry
    elements: dict[str, memoryview]

    def checksums(self, guard: Guard = nullcontext) -> dict[str, list[str]]:
        """The checksums of each tensor, one per chunk of its elements; goes over the bytes once."""
        return {name: checksums_of(elements, self.entry.chunk_bytes, guard) for name, elements in self.elements.items()}


def pack(tensors: Mapping[str, torch.Tensor], chunk_bytes: int = CHUNK_BYTES, guard: Guard = nullcontext) -> Packed:
    """A safetensors file of these tensors, each row-major and apart from the others whatever they are in memory.

    Copies nothing but tensors that are not contiguous, and looks at no others.

    Args:
        tensors: Host tensors of the types in ``DTYPE_NAMES``; they must stay as they are until the file is written.
        chunk_bytes: Length of what gets one checksum.
        guard: Context for each look at tensors, see ``Guard``.
    """
    described = {name: (DTYPE_NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    header, places = write_header(described)
    end = max((place.end for place in places.values()), default=len(header))
    # In the order of the file.
    elements = {name: elements_of(tensors[name], guard) for name in places}
    entry = FileEntry(end, len(header), checksum(header), chunk_bytes)
    return Packed([memoryview(header), *elements.values()], entry, elements)


def elements_of(tensor: torch.Tensor, guard: Guard = nullcontext) -> memoryview:
    """The elements of a tensor, row-major: its own memory, or a copy if it is not contiguous."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        with guard():
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes_of(tensor).data


def checksums_of(elements: memoryview, chunk_bytes: int = CHUNK_BYTES, guard: Guard = nullcontext) -> list[str]:
    """The checksum of each chunk."""
    found = []
    for start, stop in chunks(elements.nbytes, chunk_bytes):
        with guard():
            # Not holding Python's lock: beside it the training goes on.
            found.append(checksum(elements[start:stop]))
    return found


def bytes_of(tensor: torch.Tensor) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
