"""Memory that processes of one host share for the bodies of messages, which pass no socket then.

A slot is a file in memory without a name: the writer sends it over a Unix socket, and the system frees it with the last
process that has it. Its first page holds the number of the body that was read last; one body follows. All streams
of a writer's thread share one slot, as a body is read at once. While it is not, the next ones go over the socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Sequence

from edl_hvd.errors import ProtocolError

LEAST_BYTES = 1 << 18
# A smaller body is not worth it.
_HEAD_BYTES = mmap.PAGESIZE
_PIECE_BYTES = 1 << 20
# Copied at once, so that other threads have their turn.
_ABANDON_S = 1.0
# A process that is stopped, or dead, does not read.
_MOST_FILES = 4
_NUMBER = struct.Struct("=Q")


class SlotWriter:
    """Writes bodies. One thread.

    Attributes:
        fd: File of the present slot; -1 without one.
        slot: Number of the present slot, from 1.
    """

    def __init__(self) -> None:
        self.fd, self.slot = -1, 0
        self._memory: mmap.mmap | None = None
        self._number = 0
        self._written_s = 0.0

    @property
    def is_used(self) -> bool:
        """Whether the slot takes memory, as much as the largest body."""
        return self._memory is not None

    def write(self, arrays: Sequence[memoryview], size_bytes: int) -> int | None:
        """Write a body.

        Args:
            arrays: Its bytes.
            size_bytes: Number of them.

        Returns:
            The number of the body; ``None`` if the last one is not read yet, or the system gives no memory.
        """
        is_read = self._memory is None or _NUMBER.unpack_from(self._memory)[0] == self._number
        if not is_read and time.monotonic() - self._written_s < _ABANDON_S:
            return None
        if self._memory is None or not is_read or len(self._memory) < _HEAD_BYTES + size_bytes:
            self.close()
            self._memory = self._make(size_bytes)
        if self._memory is None:
            return None
        place, memory = _HEAD_BYTES, memoryview(self._memory)
        for array in arrays:
            _copy(array, memory[place : place + len(array)])
            place += len(array)
        self._number, self._written_s = self._number + 1, time.monotonic()
        return self._number

    def close(self) -> None:
        """Give the slot up; whoever was sent it can still read it."""
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _make(self, size_bytes: int) -> mmap.mmap | None:
        try:
            self.fd = os.memfd_create("edl_hvd-body", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, _HEAD_BYTES + size_bytes)
            # A file that shrinks would end the process that reads it.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = mmap.mmap(self.fd, _HEAD_BYTES + size_bytes)
        except (OSError, AttributeError):
            self.close()
            return None
        _NUMBER.pack_into(memory, 0, self._number)
        self.slot += 1
        return memory


class SlotReader:
    """Reads the bodies of one connection. One thread."""

    def __init__(self) -> None:
        self._files: deque[int] = deque()
        self._memory: mmap.mmap | None = None

    def take(self, fds: Sequence[int]) -> None:
        """Files have come; each is the next slot.

        Raises:
            ProtocolError: There are more than can be needed.
        """
        self._files.extend(fds)
        if len(self._files) > _MOST_FILES:
            self.close()
            raise ProtocolError(f"more than {_MOST_FILES} files came that no message has used")

    def read(self, number: int, is_new: bool, bodies: Sequence[bytearray | memoryview]) -> None:
        """Read a body into these arrays, and let the writer write the next one.

        Args:
            number: Number of the body.
            is_new: Whether it is the first one of the next slot.
            bodies: Arrays.

        Raises:
            ProtocolError: There is no such slot, or it is smaller, or may shrink.
        """
        size_bytes = sum(map(len, bodies))
        if is_new:
            self._memory = self._next_slot()
        if self._memory is None or len(self._memory) < _HEAD_BYTES + size_bytes:
            raise ProtocolError(f"a message has a body of {size_bytes} bytes in shared memory, which did not come")
        place, memory = _HEAD_BYTES, memoryview(self._memory)
        for body in bodies:
            _copy(memory[place : place + len(body)], memoryview(body))
            place += len(body)
        _NUMBER.pack_into(self._memory, 0, number)

    def close(self) -> None:
        """Give all slots up."""
        self._memory = None
        while self._files:
            os.close(self._files.popleft())

    def _next_slot(self) -> mmap.mmap | None:
        if not self._files:
            return None
        fd = self._files.popleft()
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("a file came that may shrink; expected shared memory that keeps its size")
            return mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a file came that is no shared memory: {error}") from None
        finally:
            os.close(fd)


def _copy(source: memoryview, target: memoryview) -> None:
    for begin in range(0, len(source), _PIECE_BYTES):
        end = begin + _PIECE_BYTES
        target[begin:end] = source[begin:end]
