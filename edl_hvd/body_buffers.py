"""Memory for the bodies of messages, used again once nothing refers to it; see :class:`BodyBuffers`."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Buffer: TypeAlias = bytearray | memoryview
_LEAST_MAPPED_BYTES = 1 << 20
# Mapped memory goes back to the system without Python's lock; of a gigabyte that takes some tenths of a second.


class BodyBuffers:
    """Memory for bodies that is used again once nothing refers to it, so that the system need not clear new pages.

    >>> buffers = BodyBuffers(most=2)
    >>> first = buffers.take(8)
    >>> first[0] = 7
    >>> buffers.take(8)[0]
    0
    >>> del first
    >>> buffers.take(8)[0]
    7

    Args:
        most: Number of buffers that are kept, at least 1.
        least_bytes: Size from which a buffer is kept; a smaller one is new each time.
    """

    def __init__(self, most: int, least_bytes: int = 1) -> None:
        self._kept: deque[_KeptMemory] = deque(maxlen=most)
        self._least_bytes = least_bytes

    def take(self, size_bytes: int) -> Buffer:
        """A buffer of this size; what it holds is not defined."""
        if size_bytes < self._least_bytes:
            return bytearray(size_bytes)
        for kept in self._kept:
            if len(kept.memory) == size_bytes and kept.user() is None:
                return kept.lend()
        new = _KeptMemory(_map(size_bytes) if size_bytes >= _LEAST_MAPPED_BYTES else bytearray(size_bytes))
        self._kept.append(new)
        return new.lend()


class _KeptMemory:
    """Memory that is lent to one user after another.

    Attributes:
        memory: The memory, which no user refers to itself.
        user: Weak reference to what all views of the present user have their bytes from; dead once none is left.
    """

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self.memory = memory
        self.user: Callable[[], object] = lambda: None
        self._kind = ctypes.c_ubyte * len(memory)

    def lend(self) -> memoryview:
        """All of the memory."""
        user = self._kind.from_buffer(self.memory)
        self.user = weakref.ref(user)
        return memoryview(user).cast("B")


def _map(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
