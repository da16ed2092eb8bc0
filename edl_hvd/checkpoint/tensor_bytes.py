"""The tensors of a safetensors file as views of its bytes, where torch may be missing."""

from __future__ import annotations

from collections.abc import Mapping

from edl_hvd.checkpoint.checksum import checksum
from edl_hvd.checkpoint.decoding import bytes_of_shape, show
from edl_hvd.checkpoint.element_types import ELEMENT_TYPES
from edl_hvd.checkpoint.header import read_header
from edl_hvd.checkpoint.manifest import TensorEntry


def size_bytes(entry: TensorEntry) -> int:
    """Bytes of a tensor's elements."""
    return bytes_of_shape(entry.shape, ELEMENT_TYPES[entry.dtype].size_bytes, "a tensor")


def check_tensors(data: bytes, expected: Mapping[str, TensorEntry]) -> None:
    """Raises ``ValueError`` unless the file holds just these tensors, as described."""
    for name, view in tensor_views(data, expected).items():
        if checksum(view) != expected[name].checksum:
            raise ValueError(f"the checksum of tensor {show(name)} is not the manifest's")


def tensor_views(data: bytes, expected: Mapping[str, TensorEntry]) -> dict[str, memoryview]:
    """The elements of each tensor of a safetensors file, row-major, not copied.

    Raises:
        ValueError: The bytes are not such a file, or it holds others than ``expected``.
    """
    header = read_header(data)
    different = sorted(header.keys() ^ expected.keys())
    if different:
        raise ValueError(f"it holds other tensors than listed, or lacks some: {show(different)}")
    for name, entry in expected.items():
        found = header[name]
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise ValueError(f"tensor {show(name)} is {found.dtype} {show(found.shape)}")
    whole = memoryview(data)
    return {name: whole[header[name].start : header[name].end] for name in expected}
