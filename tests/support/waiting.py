"""Waits with a bound, for tests: what never comes fails the test that waits for it, and does not hang it."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeAlias, TypeVar, overload

Value = TypeVar("Value")
Carrier: TypeAlias = "queue.Queue[Value] | queue.SimpleQueue[Value] | Future[Value]"

LONG_S = 300.0
# A bound and no measure: longer than any wait of a test that passes, however busy the machine is, and longer than
# faulthandler_timeout (setup.cfg), which has shown by then where every thread stands.


class Event(Protocol):
    """One of ``threading`` or ``multiprocessing``."""

    def wait(self, timeout: float | None = None, /) -> bool: ...


@overload
def soon(awaited: Carrier[Value], timeout_s: float = LONG_S) -> Value: ...
@overload
def soon(awaited: subprocess.Popen[Any], timeout_s: float = LONG_S) -> int: ...
@overload
def soon(awaited: threading.Thread | BaseProcess | threading.Barrier | Event, timeout_s: float = LONG_S) -> None: ...
def soon(awaited: Any, timeout_s: float = LONG_S) -> Any:
    """Wait for an event, a barrier, or the end of a thread, process or future; or take the next item of a queue.

    Args:
        awaited: What is waited for.
        timeout_s: How long at most.

    Returns:
        An item, the result of a future, the exit code of a ``Popen``; else nothing.

    Raises:
        AssertionError: It has not come; the message names it.
    """
    __tracebackhide__ = True
    try:
        if isinstance(awaited, (queue.Queue, queue.SimpleQueue)):
            return awaited.get(timeout=timeout_s)
        if isinstance(awaited, subprocess.Popen):
            return awaited.wait(timeout_s)
        if isinstance(awaited, Future):
            return awaited.result(timeout_s)
        if isinstance(awaited, (threading.Thread, BaseProcess)):
            awaited.join(timeout_s)
            if not awaited.is_alive():
                return None
        elif isinstance(awaited, threading.Barrier):
            awaited.wait(timeout_s)
            return None
        elif awaited.wait(timeout_s):
            return None
    except (queue.Empty, subprocess.TimeoutExpired, threading.BrokenBarrierError):
        pass
    except (TimeoutError, FutureTimeoutError):  # one and the same since Python 3.11
        if awaited.done():
            raise
    raise AssertionError(f"{awaited!r} did not come within {timeout_s:g} s")


def until(holds: Callable[[], object], failure: Callable[[], str | None] = lambda: None, every_s: float = 0.01) -> None:
    """Ask until the answer is true.

    Args:
        holds: What is asked.
        failure: Why it can no longer become true, asked as well; ``None`` while it can.
        every_s: Pause between two questions.

    Raises:
        AssertionError: It cannot become true, or has not within ``LONG_S``.
    """
    __tracebackhide__ = True
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        why = failure()
        assert why is None, why
        assert time.monotonic() < deadline_s, f"it was not so within {LONG_S:g} s"
        time.sleep(every_s)
