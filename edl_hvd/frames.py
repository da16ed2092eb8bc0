"""Messages with arrays, as values: what one holds, and the JSON line that says which arrays follow it.

A header and a body have largest sizes, which are checked before anything is allocated. Nothing is pickled; what arrives
can only become numbers, texts and bytes. Torch is not needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl_hvd.errors import ProtocolError, UsageError
from edl_hvd.json_values import show

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip
_MOST_DIMENSIONS = 16
_PARTS = {"what", "fields", "arrays", "slot"}


@dataclass(frozen=True)
class ArrayType:
    """The name, the element type and the shape of an array.

    Attributes:
        name: Name by which both sides know it.
        dtype: Element type as torch calls it, one of ``ELEMENT_BYTES``.
        shape: Number of elements in each dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"array {show(self.name)} has elements of {show(self.dtype)}; expected one of "
                             f"{', '.join(ELEMENT_BYTES)}")  # fmt: skip
        if len(self.shape) > _MOST_DIMENSIONS or not all(0 <= count < 1 << 48 for count in self.shape):
            raise UsageError(f"array {show(self.name)} has shape {show(self.shape)}; expected up to "
                             f"{_MOST_DIMENSIONS} counts of at least 0")  # fmt: skip

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Array:
    """An array: its type, and its elements as bytes in C order."""

    type: ArrayType
    content: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        if len(self.content) != self.type.size_bytes:
            raise UsageError(f"{self.type} was given {len(self.content)} bytes; expected {self.type.size_bytes}")


@dataclass(frozen=True)
class Frame:
    """One message.

    Attributes:
        what: Kind of the message.
        fields: JSON part of the message.
        arrays: Arrays, in the order in which their bytes travel.
    """

    what: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What is accepted of a message.

    Attributes:
        header_bytes: Largest header.
        body_bytes: Largest sum of the arrays' bytes; 0 refuses arrays that have any.
        arrays: Largest number of arrays.
    """

    header_bytes: int = 4096
    body_bytes: int = 0
    arrays: int = 64


@dataclass(frozen=True)
class SlotPlace:
    """Where a body is in shared memory.

    Attributes:
        number: Number of the body, from 1.
        is_new: Whether it is the first in the next slot.
    """

    number: int
    is_new: bool


@dataclass(frozen=True)
class FrameHeader:
    """What a message begins with.

    Attributes:
        what: Kind of the message.
        fields: JSON part of the message.
        types: Types of the arrays.
        slot: Where the body is in shared memory; ``None`` if it follows.
    """

    what: str
    fields: Mapping[str, Any]
    types: tuple[ArrayType, ...]
    slot: SlotPlace | None

    def frame(self, bodies: Sequence[bytearray | memoryview]) -> Frame:
        """The message with this header.

        Args:
            bodies: Bytes of each array.
        """
        return Frame(self.what, self.fields, tuple(map(Array, self.types, bodies)))


def header_line(frame: Frame, slot: SlotPlace | None = None) -> bytes:
    """The line that a message begins with, its end included.

    >>> header_line(Frame("give", {"number": 1}, (Array(ArrayType("x", "uint8", (3,)), b"abc"),)))
    b'{"what": "give", "fields": {"number": 1}, "arrays": [["x", "uint8", [3]]]}\\n'

    Args:
        frame: The message.
        slot: Where its body is in shared memory; ``None`` if it follows the line.
    """
    header: dict[str, Any] = {"what": frame.what, "fields": frame.fields}
    if frame.arrays:
        header["arrays"] = [[one.type.name, one.type.dtype, list(one.type.shape)] for one in frame.arrays]
    if slot is not None:
        header["slot"] = [slot.number, int(slot.is_new)]
    return json.dumps(header).encode() + b"\n"


def read_header(line: bytes, limits: Limits) -> FrameHeader:
    """The header in a line.

    Args:
        line: The line without its end.
        limits: Bounds of the arrays that it may announce.

    Raises:
        ProtocolError: The line is no header, or announces more than the limits allow.
    """
    header = _parse(line, limits.arrays)
    size_bytes = sum(one.size_bytes for one in header.types)
    if size_bytes > limits.body_bytes:
        raise ProtocolError(
            f"a message {show(header.what)} announced {size_bytes} bytes of arrays; the most here is "
            f"{limits.body_bytes}"
        )
    return header


def _parse(line: bytes, most_arrays: int) -> FrameHeader:
    try:
        header = json.loads(line)
        what, fields, entries = header["what"], header["fields"], header.get("arrays", [])
        if not isinstance(what, str) or not isinstance(fields, dict) or not set(header) <= _PARTS:
            raise ValueError("its parts are not those of a header")
        if not isinstance(entries, list) or len(entries) > most_arrays:
            raise ValueError(f"its arrays are no list of at most {most_arrays}")
        return FrameHeader(
            what, fields, tuple(_read_array_type(entry) for entry in entries), _read_slot(header.get("slot"))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:200]
        raise ProtocolError(f"the line {show(line[:80])} is no header of a message: {reason}") from None


def _read_slot(entry: Any) -> SlotPlace | None:
    if entry is None:
        return None
    number, is_new = entry
    if type(number) is not int or not 0 < number < 1 << 63 or is_new not in (0, 1):
        raise ValueError(f"{show(entry)} is no place in shared memory")
    return SlotPlace(number, bool(is_new))


def _read_array_type(entry: Sequence[Any]) -> ArrayType:
    if not isinstance(entry, list):
        raise ValueError(f"{show(entry)} is no array")
    name, dtype, shape = entry
    is_shape = isinstance(shape, list) and all(type(count) is int for count in shape)
    if not isinstance(name, str) or not isinstance(dtype, str) or not is_shape:
        raise ValueError(f"{show(entry)} is no array")
    return ArrayType(name, dtype, tuple(shape))
