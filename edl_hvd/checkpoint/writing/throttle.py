"""What writing a checkpoint may use of the processors beside the training."""

from __future__ import annotations

import threading
import time

from edl_hvd.clock import Clock

_EVER_S = 1e9
_LONGEST_PAUSE_S = 5.0
# S3 closes a connection that carries nothing for 20 s.


class CpuThrottle:
    """A bound on the processor time of several threads, until somebody waits for what they do.

    Args:
        processors: Number of processors that may be busy with it on average, such as 0.1; ``None``: any number.
        most_s: Time in seconds after which nothing is held back any more.
        clock: Clock that measures.
    """

    def __init__(self, processors: float | None, most_s: float, clock: Clock) -> None:
        self._processors = processors
        self._clock = clock
        self._unlimited = threading.Event()
        if processors is None or most_s <= 0:
            self._unlimited.set()
        self._ends_s = clock.monotonic_s() + min(most_s, _EVER_S)
        self._paid_until_s = clock.monotonic_s()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._held_s = 0.0

    @property
    def held_s(self) -> float:
        """Seconds that the thread that was held back most has waited."""
        return self._held_s

    def expedite(self) -> None:
        """Hold no thread back any more."""
        self._unlimited.set()

    def throttle(self) -> None:
        """Wait until what the threads have used so far is within the share. Each calls it after every bit of work."""
        if self._unlimited.is_set() or self._processors is None:
            return
        used_s = time.thread_time() - getattr(self._own, "used_s", 0.0)
        now_s = self._clock.monotonic_s()
        with self._lock:
            # What was not used before is not saved up.
            self._paid_until_s = max(self._paid_until_s, now_s - used_s) + used_s / self._processors
            pause_s = min(self._paid_until_s - now_s, self._ends_s - now_s, _LONGEST_PAUSE_S)
        if now_s >= self._ends_s:
            self._unlimited.set()
        elif pause_s > 0:
            self._unlimited.wait(pause_s)
            self._own.held_s = getattr(self._own, "held_s", 0.0) + self._clock.monotonic_s() - now_s
            with self._lock:
                self._held_s = max(self._held_s, self._own.held_s)
        self._own.used_s = time.thread_time()
