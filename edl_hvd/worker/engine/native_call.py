"""Calling native code that may never return, from a thread that has to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL_S = 0.005


class NativeCall:
    """A call that runs in a thread of its own from now on.

    Args:
        call: What to run.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="edl-native-call", daemon=True).start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._done.set()

    def returns_within(self, timeout_s: float, hopeless: Callable[[], object] = lambda: False) -> bool:
        """Wait for its end; false if it goes on after the timeout, or once ``hopeless`` is true. Blocks.

        Raises:
            BaseException: What the call raised.
        """
        deadline = time.monotonic() + timeout_s
        while not self._done.wait(_POLL_S):
            if time.monotonic() > deadline or hopeless():
                break
        if self._error is not None:
            raise self._error
        return self._done.is_set()
