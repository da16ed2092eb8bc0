"""Writes that never block their caller: one thread makes them, in order.

A reader that pauses (``edlrun ... | less``, Ctrl-S on a terminal) or a disk that hangs must not stop the event loop of
a driver, which recovers the job meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Place = TypeVar("Place", bound=Hashable)

MOST_WAITING_BYTES = 16 << 20
_MOST_AT_ONCE_BYTES = 1 << 18


class BackgroundWrites(Generic[Place]):
    """A queue of writes and its thread, which starts with the first of them and does not keep the process alive.

    Args:
        write: Writes bytes to a place; called in the thread, may block, must not raise.
        most_waiting_bytes: Bytes that may wait; see :attr:`has_room`.
    """

    def __init__(self, write: Callable[[Place, bytes], None], most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self._write = write
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting: deque[tuple[Place, bytes]] = deque()
        self._waiting_bytes = 0  # of the one that is being written, too
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Whether more may be put; without room, callers leave out what they have, and say so."""
        return self._waiting_bytes < self._most_waiting_bytes

    def put(self, place: Place, data: bytes) -> None:
        """Have ``data`` written behind all that was put before. Returns at once."""
        with self._changed:
            self._waiting.append((place, data))
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writes", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                place, data = self._take()
            self._write(place, data)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _take(self) -> tuple[Place, bytes]:
        """The next write, joined with those to the same place that follow it."""
        place, first = self._waiting.popleft()
        pieces, size = [first], len(first)
        while self._waiting and self._waiting[0][0] == place and size < _MOST_AT_ONCE_BYTES:
            pieces.append(self._waiting.popleft()[1])
            size += len(pieces[-1])
        return place, b"".join(pieces)
