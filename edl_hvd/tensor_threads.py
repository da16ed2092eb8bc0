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
from typing import TypeVar

Result = TypeVar("Result")

_PATIENCE_S = 2.0
# All have been told to end by then, and end before their next tensor. A thread that waits for a server is not in torch.

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
    deadline_s = time.monotonic() + _PATIENCE_S
    for thread in list(_started):
        thread.join(max(0.0, deadline_s - time.monotonic()))
