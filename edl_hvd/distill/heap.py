"""Free memory inside the heap of this process, which the C library keeps unless it is told to give it back.

A batch is made of samples that are freed, while it stays in the window. Between the batches of a window there are gaps
then, which nobody counts: half as much as the window, measured with 32 samples of 32 KB in a batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_SHARE = 16
# Of the window: it is asked for after as much was read. One call takes 0.3 ms of a heap of 100 MB.


def _find() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # another C library than glibc


class Heap:
    """Gives the gaps back now and then. One thread.

    Args:
        window_bytes: Memory that micro-batches may take.
    """

    def __init__(self, window_bytes: int) -> None:
        self._every_bytes = window_bytes // _SHARE
        self._read_bytes = 0
        self._trim = _find()

    def note(self, size_bytes: int) -> None:
        """So much was read. Not collective."""
        self._read_bytes += size_bytes
        if self._trim is not None and self._read_bytes >= self._every_bytes:
            self._read_bytes = 0
            self._trim(0)
