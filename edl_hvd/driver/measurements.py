"""What a driver measures of its job while it trains: how long steps take, and what a change of the workers costs.

From this follows the job's curve, its goodput by number of workers, which a planner of many jobs needs
(``edl_hvd/planning``). Rank 0's heartbeats say how far it is and how it divides its batch; nothing is measured in the
first seconds of a world, and nothing while it validates or writes.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from edl_hvd.errors import UsageError
from edl_hvd.planning.values import Curve
from edl_hvd.protocol import Beat, WorkerPhase
from edl_hvd.rescale.curve import throughput_by_size
from edl_hvd.timings import SHARED_TIMINGS, Timing, pooled, with_timing
from edl_hvd.work_report import WorkReport

_SETTLE_S = 2.0
# A new process reads its first batches, and compiles.
_WINDOW_S = 5.0
_LEAST_STEPS = 3
_TRAINS: tuple[WorkerPhase, ...] = ("compute", "input", "collective", "commit")
_CHANGES = 9
_KEPT_TIMINGS = 64


@dataclass(frozen=True)
class WorkStatus:
    """What a job makes of its slots, and what is left of its work.

    Attributes:
        curve: Goodput by number of workers; ``None`` before it was measured.
        left: Work left, in units of the curve's goodput times seconds; ``None``: not known.
        change_s: Seconds that another number of workers costs, in the median; ``None`` before there was a change.
        timings: What the job has measured itself, of which the curve is made.
    """

    curve: Curve | None = None
    left: float | None = None
    change_s: float | None = None
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class _Point:
    at_s: float
    step: int


class Measurements:
    """See the module.

    Args:
        before: What an earlier run of the job has measured.
        family: What other jobs of its family have measured.
    """

    def __init__(self, before: WorkStatus | None = None, family: Sequence[Timing] = ()) -> None:
        self.timings = before.timings if before is not None else ()
        self.family = tuple(family)
        self._changes_s: deque[float] = deque([] if before is None or before.change_s is None else [before.change_s],
                                              maxlen=_CHANGES)  # fmt: skip
        self.work: WorkReport | None = None
        self.size = 0
        self._generation = 0
        self._entered_s = 0.0
        self._begin: _Point | None = None
        self._last: _Point | None = None
        self._step_s = 0.0
        self._was_resized = False

    @property
    def change_s(self) -> float | None:
        """Seconds that another number of workers costs, in the median."""
        return round(statistics.median(self._changes_s), 3) if self._changes_s else None

    def update(self, beat: Beat, size: int, hosts: int, now_s: float) -> None:
        """Take in a heartbeat of rank 0 of the present world, which has ``size`` workers on ``hosts`` hosts."""
        before, self.work = self.work, beat.work
        if beat.generation != self._generation:
            self._was_resized = self._last is not None and size != self.size
            self._generation, self._entered_s, self.size = beat.generation, now_s, size
            self._begin = None
        if beat.phase not in _TRAINS:
            self._begin = None
        last = self._last
        if last is None or beat.step > last.step:
            if last is not None and self._was_resized:
                self._changes_s.append(max(0.0, now_s - last.at_s - self._step_s))
            elif last is not None:
                self._step_s = (now_s - last.at_s) / (beat.step - last.step)
            self._was_resized = False
            self._last = _Point(now_s, beat.step)
        elif beat.step < last.step:  # it was put back
            self._begin, self._last = None, _Point(now_s, beat.step)
            return
        else:
            return
        is_early = beat.phase not in _TRAINS or now_s - self._entered_s < _SETTLE_S
        if is_early or beat.work is None or before is None or _kind(beat.work) != _kind(before):
            self._begin = None
            return
        if self._begin is None:
            self._begin = self._last
            return
        steps, lasted_s = self._last.step - self._begin.step, now_s - self._begin.at_s
        if steps >= _LEAST_STEPS and lasted_s >= _WINDOW_S:
            self._add(beat.work, hosts, lasted_s / steps)
            self._begin = self._last

    def _add(self, work: WorkReport, hosts: int, step_s: float) -> None:
        micro_batch = work.micro_batch or -(-work.global_batch // self.size)
        parts = -(-work.global_batch // (micro_batch * self.size))
        timing = Timing(self.size, micro_batch, parts, step_s, hosts=hosts)
        self.timings = with_timing(self.timings, timing)[-_KEPT_TIMINGS:]


def work_status(
    timings: Sequence[Timing], work: WorkReport | None, size: int, slots_of_host: int, family: Sequence[Timing] = ()
) -> WorkStatus:
    """The curve that follows from what was measured. Pure; takes some 20 ms. Leaves out what a change costs.

    Args:
        timings: How long steps took.
        work: What rank 0 said last; ``None`` for nothing.
        size: Workers of its world.
        slots_of_host: Slots of a host, at least 1.
        family: How long steps took in other jobs of the family; of a plan that this job has measured, its own count.
    """
    found: Mapping[int, float] = {}
    if work is not None and work.sizes:
        found, timings = dict(zip(work.sizes, work.goodput, strict=False)), work.timings
    elif work is not None and (timings or family):
        known = pooled((*family, *timings), _KEPT_TIMINGS + SHARED_TIMINGS)
        with suppress(ArithmeticError):  # steps that no model explains
            found = throughput_by_size(known, work, size, slots_of_host)
    try:
        curve = Curve(tuple(found), tuple(round(value, 3) for value in found.values()))
    except UsageError:
        curve = None
    return WorkStatus(curve, timings=tuple(timings))


def work_left(work: WorkReport | None) -> float | None:
    """The work left, in samples of the script's own batch; ``None``: not known."""
    return None if work is None or work.samples_left is None else round(work.samples_left * work.sample_worth, 1)


def _kind(work: WorkReport) -> tuple[int, int | None]:
    return work.global_batch, work.micro_batch
