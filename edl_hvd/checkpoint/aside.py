"""Doing something in a thread of its own meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Aside(Generic[Result]):
    """What ``act`` returns, worked out while the body of the ``with`` goes on; it has come to its end after that.

    >>> with Aside(lambda: 6 * 7) as answer:
    ...     pass
    >>> answer.result()
    42
    """

    def __init__(self, act: Callable[[], Result]) -> None:
        self._act = act
        self._found: list[Result] = []
        self._error: BaseException | None = None
        # A daemon, so that it does not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name="edl-hvd-checkpoint-aside", daemon=True)

    def _run(self) -> None:
        try:
            self._found.append(self._act())
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Aside[Result]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()

    def result(self) -> Result:
        """Raises what ``act`` has raised."""
        if self._error is not None:
            raise self._error
        return self._found[0]
