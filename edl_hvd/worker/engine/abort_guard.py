"""Outliving an abort of a thread of Horovod's or Gloo's.

Gloo throws where nobody catches, and C++ ends the whole process with SIGABRT: when a member dies while the others
connect to it (horovod/horovod#2484), and seldom when one dies later and a survivor is sent more than it expects
(``EnforceNotMet``, ``op.preamble.length <= op.nbytes``). The process holds the training state, perhaps the only one
there is. So the thread that aborts is held in the handler of the signal, which never returns; the others go on, and
run the process anew (``rebirth.py``), which ends that thread.

Any other abort ends the process as ever: one of a thread that Python runs in, and one in a world that nobody leaves.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time

from edl_hvd.worker.engine.departures import Departures

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_SIGACTION_BYTES = 256  # glibc's structure has 152, other systems' are smaller
_NEWS_S = 5.0  # a death is known within milliseconds, on a busy machine a little later
_POLL_S = 0.01


class AbortGuard:
    """Of one world; on from the beginning.

    Python's lock has to be free sooner or later for a thread to be held, so one that holds it must not abort.

    Args:
        departures: Tells who has left the world.
        news_s: So long an abort waits for the news that somebody has.

    Attributes:
        held: A thread has aborted and never runs again.
    """

    def __init__(self, departures: Departures, news_s: float = _NEWS_S) -> None:
        self.held = threading.Event()
        self._departures = departures
        self._news_s = news_s
        self._holds_all = True
        self._library = ctypes.CDLL(None)
        self._library.signal.argtypes = [ctypes.c_int, _Handler]
        self._library.signal.restype = ctypes.c_void_p
        self._handler = _Handler(self._meet)
        self._before = self._action()
        self._library.signal(signal.SIGABRT, self._handler)
        self._own = _address(self._action())

    def started(self) -> None:
        """All members are connected: from now on an abort is held only if somebody leaves."""
        self._holds_all = False

    def broke(self) -> None:
        """The world is known to have broken, whoever left it."""
        self._holds_all = True

    def end(self) -> None:
        """From now on every abort ends the process, but that of a thread that is held."""
        if not self.held.is_set() and _address(self._action()) == self._own:  # else it is somebody else's by now
            self._library.sigaction(signal.SIGABRT, self._before, None)

    def _action(self) -> ctypes.Array[ctypes.c_char]:
        action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        self._library.sigaction(signal.SIGABRT, None, action)
        return action

    def _meet(self, number: int) -> None:
        """The handler, in the thread that aborts."""
        of_python = sys._getframe().f_back is not None
        if not of_python and self._hears_of_a_departure():
            self.held.set()
            threading.Event().wait()
        # As soon as this has returned, whoever handled the signal before does.
        self._library.sigaction(signal.SIGABRT, self._before, None)
        signal.pthread_kill(threading.get_ident(), number)

    def _hears_of_a_departure(self) -> bool:
        deadline = time.monotonic() + self._news_s
        while not self._holds_all and self._departures.reason is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _address(action: ctypes.Array[ctypes.c_char]) -> bytes:
    """Of the handler, with which the structure begins; the rest of its mask is whatever was on the stack."""
    return action.raw[: ctypes.sizeof(ctypes.c_void_p)]
