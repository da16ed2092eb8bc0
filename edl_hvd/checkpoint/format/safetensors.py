"""Safetensors files, where torch may be missing: what elements may be, and the header.

A header is checked before anything is made of what it says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edl_hvd.checkpoint.format import document
from edl_hvd.checkpoint.format.document import show

_LENGTH_BYTES = 8
# A safetensors file: the length of its header as 64 bits, little end first; the header, in JSON; the elements.

_ALIGNMENT = 8
# Readers that map the file find elements of any type where they can be used.


@dataclass(frozen=True)
class ElementType:
    """A type of element: its name in safetensors files, and its size."""

    name: str
    size_bytes: int


# By torch's name, as manifests have it.
ELEMENT_TYPES = {
    "bool": ElementType("BOOL", 1),
    "uint8": ElementType("U8", 1),
    "uint16": ElementType("U16", 2),
    "uint32": ElementType("U32", 4),
    "uint64": ElementType("U64", 8),
    "int8": ElementType("I8", 1),
    "int16": ElementType("I16", 2),
    "int32": ElementType("I32", 4),
    "int64": ElementType("I64", 8),
    "float8_e4m3fn": ElementType("F8_E4M3", 1),
    "float8_e4m3fnuz": ElementType("F8_E4M3FNUZ", 1),
    "float8_e5m2": ElementType("F8_E5M2", 1),
    "float8_e5m2fnuz": ElementType("F8_E5M2FNUZ", 1),
    "float16": ElementType("F16", 2),
    "bfloat16": ElementType("BF16", 2),
    "float32": ElementType("F32", 4),
    "float64": ElementType("F64", 8),
    "complex64": ElementType("C64", 8),
}

_NAMES = {element.name: name for name, element in ELEMENT_TYPES.items()}


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor: torch's name of its type, its shape, and which bytes of the whole file are its elements."""

    dtype: str
    shape: list[int]
    start: int
    end: int


def write_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, HeaderEntry]]:
    """The header of a file of these tensors, and where in the file the elements of each go, in that order.

    Args:
        tensors: Torch's name of the type and the shape of each, by name.
        metadata: Metadata of the file, if it is to have any.
    """
    # The widest elements first: then each tensor begins at a multiple of its elements' size.
    names = sorted(tensors, key=lambda name: (-ELEMENT_TYPES[tensors[name][0]].size_bytes, name))
    described: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + document.bytes_of_shape([*shape], ELEMENT_TYPES[dtype].size_bytes, name)
        offsets[name] = (start, end)
        described[name] = {"dtype": ELEMENT_TYPES[dtype].name, "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    begin = len(header)
    return header, {
        name: HeaderEntry(tensors[name][0], [*tensors[name][1]], begin + start, begin + end)
        for name, (start, end) in offsets.items()
    }


def read_header(data: bytes | bytearray | memoryview, size_bytes: int) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file that is nothing but these tensors, in the order of their elements.

    Args:
        data: Bytes of the file, or its beginning with all of the header.
        size_bytes: Length of the file.

    Raises:
        ValueError: It is none: of every byte it must be clear what it is for.
    """
    begin, described = _described(data, size_bytes)
    entries = {name: _entry(value, f"{show(name)} in the header", begin) for name, value in described.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = begin
    for name, entry in entries.items():
        if entry.start != end:
            raise ValueError(
                f"{show(name)} in the header begins at byte {entry.start - begin} of the data, the tensor before it "
                f"ends at {end - begin}; tensors must neither overlap nor leave a gap"
            )
        end = entry.end
    if end != size_bytes:
        raise ValueError(f"it has {size_bytes - begin} bytes of data, its tensors need {end - begin}")
    return entries


def header_length(data: bytes | bytearray | memoryview) -> int:
    """What the beginning of a file says of its header's length in bytes; 0 if it is too short to say."""
    if len(data) < _LENGTH_BYTES:
        return 0
    (length_bytes,) = struct.unpack_from("<Q", data)
    return _LENGTH_BYTES + int(length_bytes)


def _described(data: bytes | bytearray | memoryview, size_bytes: int) -> tuple[int, dict[str, object]]:
    """Where the elements begin, and the header as JSON."""
    if len(data) < _LENGTH_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for it to have a header")
    begin = header_length(data)
    if begin > len(data):
        raise ValueError(f"a header of {begin - _LENGTH_BYTES} bytes does not fit into a file of {size_bytes}")
    described = document.mapping(document.parse(bytes(data[_LENGTH_BYTES:begin]), "its header"), "its header")
    if "__metadata__" in described:
        raise ValueError(f"its header has unexpected metadata {show(described['__metadata__'])}")
    return begin, described


def _entry(value: object, what: str, begin: int) -> HeaderEntry:
    told = document.fields(value, what, ("dtype", "shape", "data_offsets"))
    dtype = _NAMES[document.one_of(told["dtype"], f"'dtype' of {what}", _NAMES)]
    shape = document.shape(told["shape"], f"'shape' of {what}")
    needed = document.bytes_of_shape(shape, ELEMENT_TYPES[dtype].size_bytes, what)
    offsets = document.shape(told["data_offsets"], f"'data_offsets' of {what}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"'data_offsets' of {what} is {show(offsets)}; expected where it begins and where it ends")
    start, end = offsets
    if end - start != needed:
        raise ValueError(f"{what} has {end - start} bytes, its type and shape need {needed}")
    return HeaderEntry(dtype, shape, begin + start, begin + end)
