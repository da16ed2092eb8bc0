"""When a request that failed is made again: what is worth it, after which pause, and when it is given up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from edl_hvd.clock import SYSTEM_CLOCK, Clock

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# Most hiccups are over within a fraction of a second; a service that asks to slow down means seconds.

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long one request is tried.

    Attributes:
        stall_s: Time after which a connection that carries nothing is given up.
        retry_for_s: No new attempt begins later than this after the first, or after the last that brought anything.
        attempts: Most attempts of a request.
    """

    stall_s: float = 20.0
    # Storage answers in milliseconds; the slowest known answer, to the end of an upload in parts, keeps sending blanks.
    retry_for_s: float = 25.0
    # Two attempts that stall, and the clearing up after them, are over within a minute.
    attempts: int | None = None


class GaveUpError(Exception):
    """The last of several attempts failed too, in a way that might have passed."""

    def __init__(self, error: Exception, attempts: int, duration_s: float) -> None:
        super().__init__(f"{attempts} attempts within {duration_s:.0f} s")
        self.error = error


def pause_s(failures: int, numbers: random.Random) -> float:
    """The time to wait after ``failures`` failures in a row: anything up to a bound that doubles each time.

    The full range, because many ranks meet the same fault at once: those that wait alike would come back together.
    (Brooker 2015, "Exponential Backoff and Jitter", the variant called full jitter.)

    >>> [max(pause_s(n, random.Random(seed)) for seed in range(999)) > 0.95 * bound for n, bound in ((1, 0.2), (9, 5))]
    [True, True]
    """
    return numbers.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1)))


class Attempts:
    """Makes one request until it succeeds or is not worth another attempt.

    Args:
        patience: The bounds.
        passes: Whether an error may be gone at the next attempt.
        clock: Measures and waits.
        stopped: When set, nothing more is tried.
    """

    def __init__(
        self,
        patience: Patience,
        passes: Callable[[Exception], bool],
        clock: Clock = SYSTEM_CLOCK,
        stopped: threading.Event | None = None,
    ) -> None:
        self._patience = patience
        self._passes = passes
        self._clock = clock
        self._stopped = stopped
        self._numbers = random.Random()
        self.made = 0
        self._failures = 0
        self._since_s = clock.monotonic_s()

    def progress(self) -> None:
        """The present attempt has brought something that the next one need not do again."""
        self._failures = 0
        self._since_s = self._clock.monotonic_s()

    def make(self, act: Callable[[], Result]) -> Result:
        """What ``act`` returns.

        Raises:
            GaveUpError: It failed again and again.
            Exception: What it raised, if that will not pass, or if there was one attempt only.
        """
        while True:
            self.made += 1
            try:
                return act()
            except Exception as error:
                self._failures += 1
                if not self._passes(error):
                    raise
                if not self._wait():
                    if self.made == 1:
                        raise
                    raise GaveUpError(error, self.made, self._clock.monotonic_s() - self._since_s) from error

    def _wait(self) -> bool:
        """Wait for the next attempt; whether there is to be one."""
        left_s = self._since_s + self._patience.retry_for_s - self._clock.monotonic_s()
        if left_s <= 0 or (self._patience.attempts is not None and self.made >= self._patience.attempts):
            return False
        self._clock.sleep(min(left_s, pause_s(self._failures, self._numbers)))
        return not (self._stopped and self._stopped.is_set())
