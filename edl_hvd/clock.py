"""Time as an argument: code that waits or stamps takes a ``Clock``, tests hand it a fake one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def wall_s(self) -> float:
        """Seconds since the epoch; for people and logs, never for ordering."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start, never going back; for durations and deadlines."""

    def sleep(self, duration_s: float) -> None:
        """Block the calling thread."""


class SystemClock:
    """The clock of this machine: the functions of ``time`` themselves, which every step calls several times."""

    wall_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = SystemClock()
