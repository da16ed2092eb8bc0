"""Data to be written, without a copy of it: one buffer, or several that make up the object together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Pieces:
    """The bytes of an object, read where they lie.

    >>> pieces = Pieces([b"head", memoryview(b"tensor")])
    >>> pieces.size_bytes
    10
    >>> [bytes(view) for view in pieces.views(2, 8, largest_bytes=3)]
    [b'ad', b'ten', b's']

    Args:
        data: One buffer, or several in their order; contiguous in memory, of any element type.
        between: Called, in whatever thread, whenever some of the bytes are about to be read.
    """

    def __init__(self, data: Buffer | Sequence[Buffer], between: Callable[[], None] | None = None) -> None:
        self._between = between
        buffers = [data] if isinstance(data, Buffer) else data
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self.size_bytes = self._ends[-1] if self._ends else 0

    @classmethod
    def of(cls, data: Data) -> Pieces:
        """What was given as any kind of data."""
        return data if isinstance(data, Pieces) else cls(data)

    def views(self, start: int, stop: int, largest_bytes: int) -> Iterator[memoryview]:
        """The bytes from ``start`` up to ``stop``, in order, in views of at most ``largest_bytes`` each."""
        while start < stop:
            if self._between is not None:
                self._between()
            index = bisect_right(self._ends, start)
            view = self._views[index]
            begin = start - (self._ends[index] - view.nbytes)
            found = view[begin : min(view.nbytes, begin + stop - start, begin + largest_bytes)]
            yield found
            start += found.nbytes

    def joined(self) -> bytes:
        """A copy of everything."""
        return b"".join(self._views)


Data: TypeAlias = Buffer | Sequence[Buffer] | Pieces
