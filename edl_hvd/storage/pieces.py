"""Data to be written, without a copy of it: one buffer, or several that make up the object together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

Buffer = bytes | bytearray | memoryview
Data = Buffer | Sequence[Buffer]


class Pieces:
    """The bytes of an object, read where they lie.

    >>> pieces = Pieces([b"head", memoryview(b"tensor")])
    >>> pieces.size_bytes
    10
    >>> [bytes(view) for view in pieces.views(2, 8, largest_bytes=3)]
    [b'ad', b'ten', b's']

    Args:
        data: One buffer, or several in their order; contiguous in memory, of any element type.
    """

    def __init__(self, data: Data) -> None:
        buffers = [data] if isinstance(data, Buffer) else data
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))
        self.size_bytes = self._ends[-1] if self._ends else 0

    def views(self, start: int, stop: int, largest_bytes: int) -> Iterator[memoryview]:
        """The bytes from ``start`` up to ``stop``, in order, in views of at most ``largest_bytes`` each."""
        while start < stop:
            index = bisect_right(self._ends, start)
            view = self._views[index]
            begin = start - (self._ends[index] - view.nbytes)
            found = view[begin : min(view.nbytes, begin + stop - start, begin + largest_bytes)]
            yield found
            start += found.nbytes

    def joined(self) -> bytes:
        """A copy of everything."""
        return b"".join(self._views)
