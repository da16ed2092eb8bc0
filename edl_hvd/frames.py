"""Messages with arrays over a connection: one JSON line that says what follows, then the arrays' bytes.

A header and a body have largest sizes, which are checked before anything is allocated. Nothing is pickled; what arrives
can only become numbers, texts and bytes. The sockets do not block, and torch is not needed; who has nothing else to do
waits in :meth:`FrameStream.send` and :meth:`FrameStream.receive_next`.
"""

from __future__ import annotations

import array
import itertools
import json
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl_hvd.body_buffers import BodyBuffers, Buffer
from edl_hvd.body_slots import LEAST_BYTES, SlotReader, SlotWriter
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
_PARTS = {"what", "fields", "arrays", "slot"}
_FD = struct.Struct("i")
_SLOT_SPACE = socket.CMSG_SPACE(_FD.size)


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


class FrameStream:
    """Frames over a socket that does not block; one thread at a time.

    Args:
        connection: Connected stream socket; it is set to not block. The caller closes it.
        limits: Bounds of what is received. ``limits`` may be changed between two frames.
        buffers: Memory for bodies; left out, each has its own. Streams of one thread may share it. It may be changed
            between two frames, as ``limits``.
    """

    def __init__(
        self, connection: socket.socket, limits: Limits = Limits(), buffers: BodyBuffers | None = None
    ) -> None:
        self.buffers = buffers
        connection.setblocking(False)
        self.connection = connection
        self.limits = limits
        self.received_bytes = self.sent_bytes = 0
        self._input = bytearray()
        self._is_drained = False  # all that had come is read, so there is no need to ask for more at once
        self._searched = 0
        self._header: _Header | None = None
        self._bodies: list[Buffer] = []  # one for each array, so that none keeps the others in memory
        self._filled = 0  # bytes of the last one
        self._queued: deque[Frame] = deque()
        self._unsent: deque[memoryview] = deque()
        self._writer: SlotWriter | None = None
        self._reader: SlotReader | None = None
        self._slot = 0  # the last one that was sent
        self._with_slot: memoryview | None = None  # the line with which a new one is sent,
        self._slot_fd = -1  # and its file

    def write_slots(self, writer: SlotWriter) -> None:
        """Put large bodies into shared memory from now on; a Unix socket only, whose other side reads slots."""
        self._writer = writer

    def read_slots(self) -> None:
        """Take bodies from shared memory from now on, as the other side has proved who it is; a Unix socket only."""
        self._reader = self._reader or SlotReader()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        self._close_slot_fd()
        if self._reader is not None:
            self._reader.close()

    def _close_slot_fd(self) -> None:
        if self._slot_fd >= 0:
            os.close(self._slot_fd)
        self._slot_fd, self._with_slot = -1, None

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
        if self._is_drained:
            self._is_drained = False
            return False
        try:
            chunk = self.connection.recv(_READ_BYTES) if self._reader is None else self._read_with_slot(self._reader)
        except (BlockingIOError, InterruptedError):
            return False
        if not chunk:
            raise EOFError("the connection has ended")
        # TLS may hold back more than it gives.
        self._is_drained = type(self.connection) is socket.socket and len(chunk) < _READ_BYTES
        self.received_bytes += len(chunk)
        self._input += chunk
        return True

    def _read_with_slot(self, reader: SlotReader) -> bytes:
        """Read what has come, and take the slot that has come with it."""
        chunk, extra, _, _ = self.connection.recvmsg(_READ_BYTES, _SLOT_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                reader.take([fd for (fd,) in _FD.iter_unpack(content[: len(content) // _FD.size * _FD.size])])
        return chunk

    def _read_bodies(self) -> bool:
        """Read the arrays that the header announces, one after the other; whether all are there."""
        assert self._header is not None
        types = self._header.types
        if self._header.slot is not None:
            if self._reader is None:
                raise ProtocolError("a message has its body in shared memory; expected it to follow")
            self._bodies = [self._new_body(one.size_bytes) for one in types]
            self._reader.read(self._header.slot.number, self._header.slot.is_new, self._bodies)
            return True
        while True:
            if self._bodies and self._filled < len(self._bodies[-1]) and not self._read_body(self._bodies[-1]):
                return False
            if len(self._bodies) == len(types):
                return True
            body = self._new_body(types[len(self._bodies)].size_bytes)
            self._filled = min(len(body), len(self._input))
            body[: self._filled] = self._input[: self._filled]
            del self._input[: self._filled]
            self._bodies.append(body)

    def _new_body(self, size_bytes: int) -> Buffer:
        return bytearray(size_bytes) if self.buffers is None else self.buffers.take(size_bytes)

    def _read_body(self, body: Buffer) -> bool:
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
        header = _read_header(line, self.limits.arrays)
        size_bytes = sum(one.size_bytes for one in header.types)
        if size_bytes > self.limits.body_bytes:
            raise ProtocolError(
                f"a message {show(header.what)} announced {size_bytes} bytes of arrays; the most here is "
                f"{self.limits.body_bytes}"
            )
        self._header = header
        return True

    def _finish(self) -> Frame:
        assert self._header is not None
        header, bodies = self._header, self._bodies
        self._header, self._bodies, self._filled = None, [], 0
        return Frame(header.what, header.fields, tuple(map(Array, header.types, bodies)))

    # --- sending ---

    def put(self, frame: Frame) -> None:
        """Queue a frame; :meth:`flush` sends it. The content of its arrays must not change until then."""
        self._queued.append(frame)

    def _encode(self, frame: Frame) -> None:
        types = [[one.type.name, one.type.dtype, list(one.type.shape)] for one in frame.arrays]
        header: dict[str, Any] = {"what": frame.what, "fields": frame.fields}
        if types:
            header["arrays"] = types
        contents = [memoryview(one.content).cast("B") for one in frame.arrays if len(one.content)]
        size_bytes = sum(map(len, contents))
        slot = self._write_to_slot(contents, size_bytes)
        if slot is not None:
            header["slot"], contents = [slot.number, int(slot.is_new)], []
        line = memoryview(json.dumps(header).encode() + b"\n")
        if slot is not None and slot.is_new:
            self._with_slot = line
        self._unsent.append(line)
        self._unsent.extend(contents)

    def _write_to_slot(self, contents: Sequence[memoryview], size_bytes: int) -> _InSlot | None:
        """Where a body lies in shared memory now; ``None`` if it is to pass the socket."""
        # A stream has one file to send at a time.
        if self._writer is None or size_bytes < LEAST_BYTES or self._slot_fd >= 0:
            return None
        number = self._writer.write(contents, size_bytes)
        if number is None:
            return None
        is_new = self._slot != self._writer.slot
        if is_new:
            try:
                self._slot_fd = os.dup(self._writer.fd)
            except OSError:  # too many files
                return None
        self._slot = self._writer.slot
        return _InSlot(number, is_new)

    @property
    def is_flushed(self) -> bool:
        return not self._unsent and not self._queued

    @property
    def needs_write(self) -> bool:
        """Whether it goes on when there is room to write; in a handshake of TLS it goes on when something comes."""
        waits = not self.is_flushed and not getattr(self.connection, "needs_read", False)
        return waits or bool(getattr(self.connection, "needs_write", False))

    def flush(self) -> bool:
        """Send what the system takes; whether nothing is left.

        Raises:
            OSError: The connection has failed.
        """
        while self._queued:
            self._encode(self._queued.popleft())
        while self._unsent:
            try:
                count = self._send_some()
            except (BlockingIOError, InterruptedError):
                return False
            self.sent_bytes += count
            self._drop_sent(count)
        return True

    def _send_some(self) -> int:
        if self._with_slot is self._unsent[0]:
            files = array.array("i", [self._slot_fd])
            count = self.connection.sendmsg([self._unsent[0]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
            self._close_slot_fd()
            return count
        # Whoever reads a body takes no file, so a slot comes with the first byte of a line.
        some = itertools.takewhile(lambda one: one is not self._with_slot, self._unsent)
        return self.connection.sendmsg(list(itertools.islice(some, _MOST_BUFFERS)))

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


@dataclass(frozen=True)
class _InSlot:
    """The number of a body in shared memory, and whether it is the first in the next slot."""

    number: int
    is_new: bool


@dataclass(frozen=True)
class _Header:
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
    slot: _InSlot | None


def _read_header(line: bytes, most_arrays: int) -> _Header:
    """The parts of a header.

    Raises:
        ProtocolError: The line is none.
    """
    try:
        header = json.loads(line)
        what, fields, entries = header["what"], header["fields"], header.get("arrays", [])
        if not isinstance(what, str) or not isinstance(fields, dict) or not set(header) <= _PARTS:
            raise ValueError("its parts are not those of a header")
        if not isinstance(entries, list) or len(entries) > most_arrays:
            raise ValueError(f"its arrays are no list of at most {most_arrays}")
        return _Header(
            what, fields, tuple(_read_array_type(entry) for entry in entries), _read_slot(header.get("slot"))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:200]
        raise ProtocolError(f"the line {show(line[:80])} is no header of a message: {reason}") from None


def _read_slot(entry: Any) -> _InSlot | None:
    if entry is None:
        return None
    number, is_new = entry
    if type(number) is not int or not 0 < number < 1 << 63 or is_new not in (0, 1):
        raise ValueError(f"{show(entry)} is no place in shared memory")
    return _InSlot(number, bool(is_new))


def _read_array_type(entry: Sequence[Any]) -> ArrayType:
    if not isinstance(entry, list):
        raise ValueError(f"{show(entry)} is no array")
    name, dtype, shape = entry
    is_shape = isinstance(shape, list) and all(type(count) is int for count in shape)
    if not isinstance(name, str) or not isinstance(dtype, str) or not is_shape:
        raise ValueError(f"{show(entry)} is no array")
    return ArrayType(name, dtype, tuple(shape))
