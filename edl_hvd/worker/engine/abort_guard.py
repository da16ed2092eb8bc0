"""Outliving an abort of Horovod's own thread, while it starts.

When a member dies while the others connect to it, Gloo throws in Horovod's thread where nobody catches, and C++ ends
the whole process with SIGABRT (horovod/horovod#2484). The process holds the training state, perhaps the only one there
is. So the thread that aborts is held in the handler of the signal, which never returns; the others go on, and run the
process anew (``rebirth.py``), which ends that thread.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SIGACTION_BYTES = 256  # glibc's structure has 152, other systems' are smaller


@contextmanager
def hold_aborts() -> Iterator[threading.Event]:
    """As long as the block lasts, a thread that aborts only sets the event, and never runs again.

    Python's lock has to be free for that sooner or later, so the thread that aborts must not hold it.
    """
    aborted = threading.Event()

    def hold(number: int) -> None:
        aborted.set()
        threading.Event().wait()

    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, _Handler]
    library.signal.restype = ctypes.c_void_p
    handler = _Handler(hold)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    library.sigaction(signal.SIGABRT, None, before)
    library.signal(signal.SIGABRT, handler)
    try:
        yield aborted
    finally:
        if not aborted.is_set():  # else somebody still stands in the handler
            library.sigaction(signal.SIGABRT, before, None)
