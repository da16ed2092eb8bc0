"""Messages with arrays over a connection: a line that says what follows, then the arrays' bytes.

The sockets do not block, and torch is not needed; a caller without other work waits in :meth:`FrameStream.send` and
:meth:`FrameStream.receive_next`.
"""

from __future__ import annotations

import array
import itertools
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from edl_hvd.body_buffers import BodyBuffers, Buffer
from edl_hvd.body_slots import LEAST_BYTES, SlotReader, SlotWriter
from edl_hvd.errors import ProtocolError
from edl_hvd.frames import Frame, FrameHeader, Limits, SlotPlace, header_line, read_header

_READ_BYTES = 1 << 13
# What is read before it is known what comes; the rest of a body is read to where it stays.
_MOST_BUFFERS = 64
# Given to one sendmsg; IOV_MAX is 1024 on Linux.
_FD = struct.Struct("i")
_SLOT_SPACE = socket.CMSG_SPACE(_FD.size)


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
        self._header: FrameHeader | None = None
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
        self._header = read_header(line, self.limits)
        return True

    def _finish(self) -> Frame:
        assert self._header is not None
        header, bodies = self._header, self._bodies
        self._header, self._bodies, self._filled = None, [], 0
        return header.frame(bodies)

    # --- sending ---

    def put(self, frame: Frame) -> None:
        """Queue a frame; :meth:`flush` sends it. The content of its arrays must not change until then."""
        self._queued.append(frame)

    def _encode(self, frame: Frame) -> None:
        contents = [memoryview(one.content).cast("B") for one in frame.arrays if len(one.content)]
        slot = self._write_to_slot(contents, sum(map(len, contents)))
        line = memoryview(header_line(frame, slot))
        if slot is not None and slot.is_new:
            self._with_slot = line
        self._unsent.append(line)
        if slot is None:
            self._unsent.extend(contents)

    def _write_to_slot(self, contents: Sequence[memoryview], size_bytes: int) -> SlotPlace | None:
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
        return SlotPlace(number, is_new)

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
