"""A clock for tests: time passes only when somebody sleeps, and then at once."""

from __future__ import annotations

from collections.abc import Callable


class FakeClock:
    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


class WatchedClock(FakeClock):
    """Something happens whenever somebody waits."""

    def __init__(self, on_sleep: Callable[[], None]) -> None:
        super().__init__()
        self._on_sleep = on_sleep

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self._on_sleep()
