"""Large objects in parts: how they are cut, and several parts under way at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edl_hvd.storage.pieces import Buffer

_MIB = 1024 * 1024

MEMORY_MB = 64.0
# What one transfer may take beside the data: enough for all the connections that S3 is given.

CHUNK_BYTES = _MIB
# What one connection holds in memory of what it reads; larger ones make nothing faster.

_MEMORY_PER_CONNECTION_BYTES = 3 * _MIB
# A chunk that was read, the same in the HTTP library, and the socket's buffers.

_MOST_CONNECTIONS = 16
# S3 gives one connection some 80 MB/s: sixteen fill a link of ten gigabits.

_MOST_PARTS = 9_000
# S3 takes 10,000 of one object.

_LARGE_PART_BYTES = 32 * _MIB
# Each part costs some 2 ms of Python beside the training. Larger ones would save little of it, and cost half a second
# each when a connection drops.


@dataclass(frozen=True)
class ByteRange:
    """Bytes ``start`` up to ``stop`` of an object; parts are numbered from 1."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """How large objects are taken apart.

    Attributes:
        part_bytes: Least length of a part; an object that is no longer is not taken apart. S3 demands 5 MiB at least.
        connections: Parts under way at once.
    """

    part_bytes: int = 8 * _MIB
    # What a dropped connection costs at most. It takes 100 ms at the least, and a request as such some 2 ms.
    connections: int = _MOST_CONNECTIONS

    @classmethod
    def within(cls, memory_mb: float) -> Cut:
        """As many connections as can be had with so much memory."""
        affordable = int(memory_mb * 1e6 / _MEMORY_PER_CONNECTION_BYTES)
        return cls(connections=max(1, min(_MOST_CONNECTIONS, affordable)))

    def parts(self, start: int, stop: int) -> list[ByteRange]:
        """The parts of these bytes, each once and in order; equally long but for the last.

        As few as keep all connections busy, as long as they do not get too large.

        >>> [(part.number, part.start, part.stop) for part in Cut(part_bytes=10).parts(5, 30)]
        [(1, 5, 15), (2, 15, 25), (3, 25, 30)]
        >>> [len(Cut().parts(0, size_mib * _MIB)) for size_mib in (9, 128, 512, 1024)]
        [2, 16, 16, 32]
        """
        size_bytes = stop - start
        busy_bytes = min(_LARGE_PART_BYTES, -(-size_bytes // self.connections))
        length = max(self.part_bytes, busy_bytes, -(-size_bytes // _MOST_PARTS))
        starts = range(start, stop, length)
        return [ByteRange(number, begin, min(begin + length, stop)) for number, begin in enumerate(starts, start=1)]


class ChangedError(Exception):
    """The object was replaced while it was read."""


class Delivery:
    """Where fetched bytes go. After its ``with`` is left nothing is written there, whatever still arrives."""

    def __init__(self, view: Buffer | None, start: int) -> None:
        self.view = memoryview(view if view is not None else b"")
        self._start = start
        self._lock = threading.Lock()
        self._open = False

    @property
    def size_bytes(self) -> int:
        return self.view.nbytes

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open = False

    def __call__(self, position: int, data: bytes) -> None:
        begin = position - self._start
        with self._lock:
            if self._open:
                self.view[begin : begin + len(data)] = data


def side_by_side(
    work: Callable[[ByteRange, threading.Event], None], parts: Sequence[ByteRange], connections: int
) -> None:
    """Call ``work(part, stopped)`` for every part, several at once, each in a thread; returns when all are done.

    The first error is raised at once, without waiting for calls that are under way: they find ``stopped`` set, and what
    they come to is of no interest.
    """
    stopped = threading.Event()
    waiting: queue.SimpleQueue[ByteRange] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for part in parts:
        waiting.put(part)

    def go_on() -> None:
        while not stopped.is_set():
            try:
                part = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(part, stopped)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

    for number in range(min(connections, len(parts))):
        # Daemons, so that a connection that stalls does not hold up the end of the process.
        threading.Thread(target=go_on, name=f"edl-hvd-storage-{number}", daemon=True).start()
    try:
        for _ in parts:
            if error := done.get():
                raise error
    finally:
        stopped.set()
