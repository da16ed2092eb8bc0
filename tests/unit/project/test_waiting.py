"""What tests wait with: it returns what came, and fails when nothing comes."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from waiting import soon


def test_what_comes_is_returned():
    event, items, barrier = threading.Event(), queue.Queue(), threading.Barrier(2)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(lambda: 7)
        pool.submit(event.set)
        pool.submit(items.put, "item")
        pool.submit(barrier.wait, 60)
        assert (soon(future), soon(event), soon(items), soon(barrier)) == (7, None, "item", None)
    thread = threading.Thread(target=event.clear)
    thread.start()
    assert soon(thread) is None
    assert not event.is_set()
    assert soon(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])) == 3


@pytest.mark.parametrize(
    "awaited",
    [threading.Event(), queue.Queue(), queue.SimpleQueue(), threading.Barrier(2), Future()],
    ids=lambda awaited: type(awaited).__name__,
)
def test_what_does_not_come_is_named(awaited: Any):
    with pytest.raises(AssertionError) as failed:
        soon(awaited, timeout_s=0.01)
    assert str(failed.value).startswith(repr(awaited)[:20])
    assert str(failed.value).endswith(" did not come within 0.01 s")


def test_a_thread_and_a_process_that_go_on_are_named():
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(60,), name="the one that waits")
    thread.start()
    with pytest.raises(AssertionError, match="the one that waits"):
        soon(thread, timeout_s=0.01)
    go_on.set()
    soon(thread)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process, pytest.raises(AssertionError, match="Popen"):
        soon(process, timeout_s=0.01)


def test_a_timeout_that_a_future_holds_is_its_own():
    future: Future[None] = Future()
    future.set_exception(TimeoutError("of the work"))
    with pytest.raises(TimeoutError, match="of the work"):
        soon(future)
