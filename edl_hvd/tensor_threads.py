"""Threads that handle tensors beside the training.

A process that ends takes Python's lock away from its daemon threads. One that is inside torch's C++ then, and comes
back for the lock, aborts the process (SIGABRT, "terminate called without an active exception"; Python 3.14 lets it
wait instead): a worker that has done its work would count as failed. So the end of the process waits for such threads.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

_PATIENCE_S = 2.0
# All have been told to end by then, and end before their next tensor. A thread that waits for a server is not in torch:
# one that has not computed for this time, nor waited for a processor, is not waited for.
_LONGEST_S = 30.0
_LOOK_EVERY_S = 0.05

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class TensorThread(threading.Thread):
    """A daemon thread that may call torch; the end of the process waits for it, but not long.

    Args:
        act: What it does. Whoever starts it sees to it that this ends before the process does.
        name: Shown where threads are listed.
    """

    def __init__(self, act: Callable[[], object], name: str) -> None:
        super().__init__(target=act, name=name, daemon=True)

    def start(self) -> None:
        super().start()
        _started.add(self)


def run_in_tensor_thread(act: Callable[[], Result], name: str) -> Future[Result]:
    """Start ``act`` in a ``TensorThread``; the future of its result.

    Not a ``ThreadPoolExecutor``: the end of the process waits for the threads of that one without a bound.

    >>> run_in_tensor_thread(lambda: 6 * 7, "edl-hvd-example").result()
    42

    Args:
        act: Function to run; what it raises, the future raises.
        name: Name of the thread.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    TensorThread(run, name).start()
    return future


@atexit.register
def _let_them_end() -> None:
    last_s = time.monotonic() + _LONGEST_S
    for thread in list(_started):
        work, idle_s = _work_of(thread), time.monotonic() + _PATIENCE_S
        while thread.is_alive() and time.monotonic() < min(idle_s, last_s):
            thread.join(_LOOK_EVERY_S)
            now = _work_of(thread)
            if now is not None and (now.is_running or now != work):
                work, idle_s = now, time.monotonic() + _PATIENCE_S


@dataclass(frozen=True)
class _Work:
    """What the kernel says of a thread: whether it computes or waits for a processor, and how long it has computed."""

    is_running: bool
    ticks: int


def _work_of(thread: threading.Thread) -> _Work | None:
    """``None`` where the kernel does not tell, or the thread has ended."""
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Work(fields[0] == "R", int(fields[11]) + int(fields[12]))
