"""Doing something in a thread of its own meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from edl_hvd.tensor_threads import TensorThread

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
        self._thread = TensorThread(self._run, "edl-hvd-checkpoint-aside")

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
