"""Who gets how many slots: up from the least, always by the steepest step.

A step from 4 to 5 slots may make a job slower, when the fifth lies on another host, and one from 4 to 8 faster. So the
steps of a job are those of the upper concave envelope of its worths, each steeper than the next: a heap of one step per
job then finds the numbers with the largest sum, up to the last step, in O(steps · log jobs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from edl_hvd.planning.change_costs import after_change, starting_part
from edl_hvd.planning.ranks import Worth
from edl_hvd.planning.values import Curve, JobAsk

_LEAST_GAIN = 1e-9
# Of a worth of about 1: what is smaller is a rounding error, and no reason to give a slot.


def candidates(ask: JobAsk, curve: Curve, host_slots: int, most: int) -> list[int]:
    """Numbers of slots that a job may get, rising: powers of two below a host, whole hosts, and those of its curve.

    >>> candidates(JobAsk("a", least=1, most=20), Curve((1, 64), (1.0, 50.0)), host_slots=8, most=20)
    [1, 2, 4, 8, 16, 20]
    >>> candidates(JobAsk("a", least=2, most=6), Curve((2, 3, 6), (2.0, 3.0, 5.0)), host_slots=8, most=6)
    [2, 3, 4, 6]

    Args:
        ask: The job.
        curve: Its goodput over slots.
        host_slots: Slots of a usual host.
        most: Most slots that it may get.
    """
    found = {ask.least, most}
    size = 1
    while size < min(host_slots, most):
        found.add(size)
        size *= 2
    hosts = 1
    while hosts * host_slots <= most:
        found.add(hosts * host_slots)
        hosts += 1 if hosts < 16 else hosts // 8
    if len(curve.sizes) > 2:
        found.update(curve.sizes)
    return sorted(size for size in found if ask.least <= size <= most and size % ask.unit == 0)


@dataclass(frozen=True)
class Ladder:
    """The numbers of slots that a job may get, and what they are worth to it.

    Attributes:
        sizes: Numbers, rising; the first is its least.
        worths: Worth of each, without the cost of a change.
        changed: Worth of each, with it.
        starting: The part of the gain of each, over fewer slots, that is lost while workers start; empty: none.
    """

    sizes: list[int]
    worths: list[float]
    changed: list[float]
    starting: list[float] = field(default_factory=list)

    def after(self, held: int) -> list[float]:
        """What each number is worth to a job that holds one of them: that costs no change, and more have to start."""
        if held not in self.sizes or (self.changed is self.worths and not self.starting):
            return self.changed
        values = self.changed.copy()
        place = self.sizes.index(held)
        now = values[place] = self.worths[place]
        if self.starting:
            for more in range(place + 1, len(values)):
                values[more] = after_start(values[more], now, self.starting[more])
        return values


def after_start(value: float, now: float, starting: float) -> float:
    """What is left of the worth of more slots, of whose gain over the present ones a part is lost.

    >>> after_start(3.0, 2.0, 0.25), after_start(1.5, 2.0, 0.25)
    (2.75, 1.5)
    """
    return value - starting * (value - now) if value > now else value


def ladder(sizes: list[int], curve: Curve, worth: Worth, ask: JobAsk, horizon_s: float) -> Ladder:
    """The ladder of a job.

    Args:
        sizes: Numbers of slots.
        curve: Goodput over slots.
        worth: What goodput is worth.
        ask: The job.
        horizon_s: Time in which its change has to pay, as of :func:`after_change`.
    """
    goodput = [curve.at(size) for size in sizes]
    plain = [worth.of(value) for value in goodput]
    left = ask.left if worth.is_known else None
    changed, starting = plain, list[float]()
    if ask.change_s:
        changed = [worth.of(after_change(value, ask.change_s, horizon_s, left)) for value in goodput]
    if ask.start_s > ask.change_s:
        rests_s = [math.inf if left is None else left / value for value in goodput]
        starting = [starting_part(ask.start_s, ask.change_s, horizon_s, rest_s) for rest_s in rests_s]
    return Ladder(sizes, plain, changed, starting)


def envelope(sizes: Sequence[int], values: Sequence[float]) -> list[int]:
    """Places of the upper concave envelope, from the first to the highest.

    >>> envelope([1, 4, 5, 8], [1.0, 3.0, 2.0, 4.0])
    [0, 1, 3]
    """
    hull: list[int] = []
    for place, (size, value) in enumerate(zip(sizes, values, strict=True)):
        if hull and value <= values[hull[-1]] + _LEAST_GAIN:
            continue
        while len(hull) >= 2:
            first, second = hull[-2], hull[-1]
            rise = (values[second] - values[first]) * (size - sizes[second])
            if rise > (value - values[second]) * (sizes[second] - sizes[first]):
                break
            hull.pop()
        hull.append(place)
    return hull


def climb(
    ladders: Sequence[Ladder], held: Sequence[int], slots: int, queues: Sequence[int], limits: dict[int, int]
) -> list[int]:
    """The number of slots of each job, at least the first of its ladder.

    Args:
        ladders: Ladder of each job.
        held: Slots that each holds: that number costs no change.
        slots: Slots for all of them together, at least the sum of their first numbers.
        queues: Number of the queue of each.
        limits: Most slots of a queue beside the first numbers, by its number; one that is not there has no limit.
    """
    got = [rungs.sizes[0] for rungs in ladders]
    left = slots - sum(got)
    budget = dict(limits)
    values = [rungs.after(number) for rungs, number in zip(ladders, held, strict=True)]
    hulls: list[list[int]] = [[]] * len(ladders)
    heap: list[tuple[float, int, int]] = []
    if left > 0:
        for job, rungs in enumerate(ladders):
            if len(rungs.sizes) > 1:
                hull = hulls[job] = envelope(rungs.sizes, values[job])
                if len(hull) > 1:
                    heap.append((-_slope(rungs.sizes, values[job], hull, 1), job, 1))
        heapify(heap)
    while heap and left > 0:
        _, job, step = heap[0]
        rungs, hull, queue = ladders[job], hulls[job], queues[job]
        allowed = min(left, budget[queue]) if queue in budget else left
        more = rungs.sizes[hull[step]] - got[job]
        if more > allowed:
            # The last step of this job: the best number that still fits.
            below = range(hull[step - 1] + 1, hull[step])
            fitting = [place for place in below if rungs.sizes[place] - got[job] <= allowed]
            best = max(fitting, key=lambda place: (values[job][place], -place), default=None)
            if best is not None and values[job][best] > values[job][hull[step - 1]] + _LEAST_GAIN:
                more = rungs.sizes[best] - got[job]
                got[job] += more
                left -= more
                if queue in budget:
                    budget[queue] -= more
            heappop(heap)
            continue
        got[job] += more
        left -= more
        if queue in budget:
            budget[queue] -= more
        if step + 1 < len(hull):
            heapreplace(heap, (-_slope(rungs.sizes, values[job], hull, step + 1), job, step + 1))
        else:
            heappop(heap)
    return got


def _slope(sizes: Sequence[int], values: Sequence[float], hull: Sequence[int], step: int) -> float:
    low, high = hull[step - 1], hull[step]
    return (values[high] - values[low]) / (sizes[high] - sizes[low])
