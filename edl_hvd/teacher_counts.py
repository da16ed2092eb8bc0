"""What this process has got from teachers lately, for whoever reports it.

The distillation writes it and the worker's heartbeat reads it; neither of them knows the other.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.stage_times import StageTimes, mean_stages

_WINDOW_S = 10.0


@dataclass(frozen=True)
class TeacherCounts:
    """How a worker's distillation goes.

    Attributes:
        teachers: Number of teachers that are ready.
        samples_per_s: Samples per second that the training has got answers for, over about the last ten seconds.
        lead: Number of answers that lie ready ahead of the training.
        window: Number of micro-batches that were read and not consumed.
        waited_share: Part of the last ten seconds in which the training waited for an answer, from 0 to 1.
        stages: Where the time of a micro-batch goes; ``None`` before the first answer.
    """

    teachers: int
    samples_per_s: float
    lead: int
    window: int
    waited_share: float
    stages: StageTimes | None = None


@dataclass(frozen=True)
class _Point:
    at_s: float
    samples: int
    waited_s: float


class AnswerCounts:
    """Written by the thread of the script, read by another one."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._points: deque[_Point] = deque()
        self._waits_since_s: float | None = None
        self._teachers = self._lead = self._window = 0
        self._stages: StageTimes | None = None

    def begin(self) -> None:
        """The training asks for the next micro-batch."""
        with self._lock:
            self._waits_since_s = self._clock.monotonic_s()
            if not self._points:
                self._points.append(_Point(self._waits_since_s, 0, 0.0))

    def end(self, samples: int, teachers: int, lead: int, window: int, stages: StageTimes | None = None) -> None:
        """The training has got it, with answers to this number of samples."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            since_s = now_s if self._waits_since_s is None else self._waits_since_s
            last = self._points[-1] if self._points else _Point(since_s, 0, 0.0)
            self._points.append(_Point(now_s, last.samples + samples, last.waited_s + now_s - since_s))
            while len(self._points) > 2 and self._points[1].at_s < now_s - _WINDOW_S:
                self._points.popleft()
            self._waits_since_s, self._teachers, self._lead, self._window = None, teachers, lead, window
            self._stages = stages

    def forget(self) -> None:
        """There are no teachers any more."""
        with self._lock:
            self._points.clear()
            self._waits_since_s = self._stages = None

    def look(self) -> TeacherCounts | None:
        """How it goes now; ``None`` without teachers."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if not self._points:
                return None
            first, last = self._points[0], self._points[-1]
            waited_s = last.waited_s - first.waited_s
            if self._waits_since_s is not None:
                waited_s += now_s - self._waits_since_s
            lasted_s = max(1e-3, now_s - first.at_s)
            per_s, share = (last.samples - first.samples) / lasted_s, min(1.0, waited_s / lasted_s)
            return TeacherCounts(
                self._teachers, round(per_s, 1), self._lead, self._window, round(share, 4), self._stages
            )


def combine(counts: list[TeacherCounts]) -> TeacherCounts | None:
    """The counts of all workers as those of their job; ``None`` if there are none.

    >>> combine([TeacherCounts(4, 100.0, 7, 9, 0.0), TeacherCounts(3, 50.0, 2, 8, 0.5)])
    TeacherCounts(teachers=4, samples_per_s=150.0, lead=2, window=8, waited_share=0.25, stages=None)
    """
    if not counts:
        return None
    neediest = min(counts, key=lambda one: one.lead)
    return TeacherCounts(
        max(one.teachers for one in counts), round(sum(one.samples_per_s for one in counts), 1), neediest.lead,
        neediest.window, round(sum(one.waited_share for one in counts) / len(counts), 4),
        mean_stages([one.stages for one in counts if one.stages is not None]),
    )  # fmt: skip


answer_counts = AnswerCounts()
"""Those of this process."""
