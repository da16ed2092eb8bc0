"""Messages with arrays over a connection: one JSON line that says what follows, then the arrays' bytes.

A header and a body have largest sizes, which are checked before anything is allocated. Nothing is pickled; what arrives
can only become numbers, texts and bytes. The sockets do not block, and torch is not needed; who has nothing else to do
waits in :meth:`FrameStream.send` and :meth:`FrameStream.receive_next`.
"""

from __future__ import annotations

import json
import math
import select
import socket
import sys
from collections import deque
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
_READ_BYTES = 1 << 13
# What is read before it is known what comes; the rest of a body is read to where it stays.
_MOST_BUFFERS = 64
# Given to one sendmsg; IOV_MAX is 1024 on Linux.


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


class BodyBuffers:
    """Memory for bodies that is used again once nothing refers to it, so that the system need not clear new pages.

    >>> buffers = BodyBuffers(most=2)
    >>> first = buffers.take(8)
    >>> buffers.take(8) is first
    False

    Args:
        most: Number of buffers that are kept, at least 1.
    """

    def __init__(self, most: int) -> None:
        self._kept: deque[bytearray] = deque(maxlen=most)

    def take(self, size_bytes: int) -> bytearray:
        """A buffer of this size; what it holds is not defined."""
        if not size_bytes:
            return bytearray()
        for buffer in self._kept:
            if len(buffer) == size_bytes and sys.getrefcount(buffer) == _UNUSED:
                return buffer
        buffer = bytearray(size_bytes)
        self._kept.append(buffer)
        return buffer


_UNUSED = 3
# References to a buffer that only the loop above, its list and the question itself have. Views of it count, too.


class FrameStream:
    """Frames over a socket that does not block; one thread at a time.

    Args:
        connection: Connected stream socket; it is set to not block. The caller closes it.
        limits: Bounds of what is received. ``limits`` may be changed between two frames.
        buffers: Memory for bodies; left out, each has its own. Streams of one thread may share it.
    """

    def __init__(
        self, connection: socket.socket, limits: Limits = Limits(), buffers: BodyBuffers | None = None
    ) -> None:
        self._buffers = buffers
        connection.setblocking(False)
        self.connection = connection
        self.limits = limits
        self.received_bytes = self.sent_bytes = 0
        self._input = bytearray()
        self._searched = 0
        self._header: tuple[str, Mapping[str, Any], tuple[ArrayType, ...]] | None = None
        self._bodies: list[bytearray] = []  # one for each array, so that none keeps the others in memory
        self._filled = 0  # bytes of the last one
        self._unsent: deque[memoryview] = deque()

    # --- receiving ---

    def receive(self) -> Frame | None:
        """The next frame; ``None`` if no more of it has arrived yet.

        Raises:
            ProtocolError: What came is no frame, or exceeds the limits.
            EOFError: The connection has ended.
            OSError: The connection has failed.
        """
        while True:
            if self._header is None and not self._take_header() and not self._read_input():
                return None
            if self._header is not None:
                if not self._read_bodies():
                    return None
                return self._finish()

    def receive_next(self, timeout_s: float) -> Frame:
        """The next frame. Blocks for as long as more of it arrives.

        Args:
            timeout_s: Longest time without a byte.

        Raises:
            TimeoutError: Nothing has come for that time.
            ProtocolError, EOFError, OSError: As for :meth:`receive`.
        """
        while (frame := self.receive()) is None:
            self._wait(select.POLLIN, timeout_s)
        return frame

    def _wait(self, event: int, timeout_s: float) -> None:
        waiting = select.poll()
        waiting.register(self.connection, event)
        if not waiting.poll(1000 * timeout_s):
            raise TimeoutError(f"the other side of a connection has not moved for {timeout_s:g} s")

    def _read_input(self) -> bool:
        try:
            chunk = self.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if not chunk:
            raise EOFError("the connection has ended")
        self.received_bytes += len(chunk)
        self._input += chunk
        return True

    def _read_bodies(self) -> bool:
        """Read the arrays that the header announces, one after the other; whether all are there."""
        assert self._header is not None
        types = self._header[2]
        while True:
            if self._bodies and self._filled < len(self._bodies[-1]) and not self._read_body(self._bodies[-1]):
                return False
            if len(self._bodies) == len(types):
                return True
            size_bytes = types[len(self._bodies)].size_bytes
            body = bytearray(size_bytes) if self._buffers is None else self._buffers.take(size_bytes)
            self._filled = min(len(body), len(self._input))
            body[: self._filled] = self._input[: self._filled]
            del self._input[: self._filled]
            self._bodies.append(body)

    def _read_body(self, body: bytearray) -> bool:
        view = memoryview(body)
        while self._filled < len(body):
            try:
                count = self.connection.recv_into(view[self._filled :])
            except (BlockingIOError, InterruptedError):
                return False
            if not count:
                raise EOFError("the connection has ended inside a message")
            self.received_bytes += count
            self._filled += count
        return True

    def _take_header(self) -> bool:
        end = self._input.find(b"\n", self._searched)
        length = len(self._input) if end < 0 else end
        if length > self.limits.header_bytes:
            raise ProtocolError(
                f"a message began with a line of at least {length} bytes; the most here is {self.limits.header_bytes}"
            )
        if end < 0:
            self._searched = len(self._input)
            return False
        line = bytes(self._input[:end])
        del self._input[: end + 1]
        self._searched = 0
        what, fields, types = _read_header(line, self.limits.arrays)
        size_bytes = sum(one.size_bytes for one in types)
        if size_bytes > self.limits.body_bytes:
            raise ProtocolError(
                f"a message {show(what)} announced {size_bytes} bytes of arrays; the most here is "
                f"{self.limits.body_bytes}"
            )
        self._header = (what, fields, types)
        return True

    def _finish(self) -> Frame:
        assert self._header is not None
        (what, fields, types), bodies = self._header, self._bodies
        self._header, self._bodies, self._filled = None, [], 0
        return Frame(what, fields, tuple(map(Array, types, bodies)))

    # --- sending ---

    def put(self, frame: Frame) -> None:
        """Queue a frame; :meth:`flush` sends it. The content of its arrays must not change until then."""
        types = [[one.type.name, one.type.dtype, list(one.type.shape)] for one in frame.arrays]
        header: dict[str, Any] = {"what": frame.what, "fields": frame.fields}
        if types:
            header["arrays"] = types
        self._unsent.append(memoryview(json.dumps(header).encode() + b"\n"))
        self._unsent.extend(memoryview(one.content).cast("B") for one in frame.arrays if len(one.content))

    @property
    def is_flushed(self) -> bool:
        return not self._unsent

    @property
    def needs_write(self) -> bool:
        """Whether it goes on when there is room to write; in a handshake of TLS it goes on when something comes."""
        waits = bool(self._unsent) and not getattr(self.connection, "needs_read", False)
        return waits or bool(getattr(self.connection, "needs_write", False))

    def flush(self) -> bool:
        """Send what the system takes; whether nothing is left.

        Raises:
            OSError: The connection has failed.
        """
        while self._unsent:
            buffers = [self._unsent[number] for number in range(min(_MOST_BUFFERS, len(self._unsent)))]
            try:
                count = self.connection.sendmsg(buffers)
            except (BlockingIOError, InterruptedError):
                return False
            self.sent_bytes += count
            self._drop_sent(count)
        return True

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Send a frame. Blocks until the system has taken it.

        Args:
            frame: Frame to send.
            timeout_s: Longest time in which the other side takes nothing.

        Raises:
            TimeoutError: It has taken nothing for that time.
            OSError: The connection has failed.
        """
        self.put(frame)
        while not self.flush():
            self._wait(select.POLLOUT, timeout_s)

    def _drop_sent(self, count: int) -> None:
        while count:
            first = self._unsent[0]
            if count < len(first):
                self._unsent[0] = first[count:]
                return
            count -= len(first)
            self._unsent.popleft()


def _read_header(line: bytes, most_arrays: int) -> tuple[str, Mapping[str, Any], tuple[ArrayType, ...]]:
    """The parts of a header.

    Raises:
        ProtocolError: The line is none.
    """
    try:
        header = json.loads(line)
        what, fields, entries = header["what"], header["fields"], header.get("arrays", [])
        if not isinstance(what, str) or not isinstance(fields, dict) or not set(header) <= {"what", "fields", "arrays"}:
            raise ValueError("its parts are not those of a header")
        if not isinstance(entries, list) or len(entries) > most_arrays:
            raise ValueError(f"its arrays are no list of at most {most_arrays}")
        return what, fields, tuple(_read_array_type(entry) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:200]
        raise ProtocolError(f"the line {show(line[:80])} is no header of a message: {reason}") from None


def _read_array_type(entry: Sequence[Any]) -> ArrayType:
    if not isinstance(entry, list):
        raise ValueError(f"{show(entry)} is no array")
    name, dtype, shape = entry
    is_shape = isinstance(shape, list) and all(type(count) is int for count in shape)
    if not isinstance(name, str) or not isinstance(dtype, str) or not is_shape:
        raise ValueError(f"{show(entry)} is no array")
    return ArrayType(name, dtype, tuple(shape))
