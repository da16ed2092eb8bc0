"""Who gets how many slots: up from the least, always by the steepest step.

A step from 4 to 5 slots may make a job slower, when the fifth lies on another host, and one from 4 to 8 faster. So the
steps of a job are those of the upper concave envelope of its worths, each steeper than the next: a heap of one step per
job then finds the numbers with the largest sum, up to the last step, in O(steps · log jobs).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, pairwise

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


@dataclass(frozen=True, slots=True)
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
    measured = dict(zip(curve.sizes, curve.goodput, strict=True))
    goodput = [measured[size] if size in measured else curve.at(size) for size in sizes]
    plain = worth.of_each(goodput)
    left = ask.left if worth.is_known else None
    changed, starting = plain, list[float]()
    if ask.change_s:
        changed = worth.of_each([after_change(value, ask.change_s, horizon_s, left) for value in goodput])
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


class Choice:
    """A job that may get slots of one kind of hosts. It does not change.

    Args:
        rungs: Numbers of slots that it may have there.
        held: Slots that it holds there, which costs no change; 0 where it would start, or come from elsewhere.

    Attributes:
        sizes: These numbers.
        values: What each is worth to it, after the change.
        least: The fewest slots that it may have.
        hull: Places of the envelope of the values.
        slopes: What a slot of each step of the envelope is worth.
    """

    __slots__ = ("_up_to", "hull", "least", "sizes", "slopes", "values")

    def __init__(self, rungs: Ladder, held: int) -> None:
        sizes = self.sizes = rungs.sizes
        values = self.values = rungs.after(held)
        self.least = sizes[0]
        hull = self.hull = envelope(sizes, values)
        self.slopes = [(values[high] - values[low]) / (sizes[high] - sizes[low]) for low, high in pairwise(hull)]
        self._up_to: list[float] = []

    def worth(self, slots: int) -> float:
        """What one of its numbers is worth to it."""
        return self.values[bisect_left(self.sizes, slots)]

    def best_within(self, slots: int) -> float:
        """The most that it can have of a number of slots; minus infinity if that is less than its least."""
        self._up_to = self._up_to or list(accumulate(self.values, max))
        place = bisect_right(self.sizes, slots)
        return self._up_to[place - 1] if place else -math.inf

    def best_beyond(self, price: float) -> float:
        """The most that it can have, less the price of the slots."""
        return max([value - price * size for size, value in zip(self.sizes, self.values, strict=True)])


@dataclass(frozen=True, slots=True)
class Climbed:
    """Who gets how many slots.

    Attributes:
        slots: The number of slots of each job.
        price: What a slot more would be worth to whoever got it; 0 where everyone has what is of use.
    """

    slots: list[int]
    price: float


def climb(choices: Sequence[Choice], slots: int, queues: Sequence[int], limits: Mapping[int, int]) -> Climbed:
    """The number of slots of each job, at least its least.

    Args:
        choices: The jobs.
        slots: Slots for all of them together, at least the sum of their least.
        queues: Number of the queue of each.
        limits: Most slots of a queue beside the least of its jobs, by its number; one that is not there has no limit.
    """
    got = [choice.least for choice in choices]
    left = slots - sum(got)
    budget = dict(limits)
    price = 0.0
    heap = [(-choice.slopes[0], job, 1) for job, choice in enumerate(choices) if choice.slopes]
    heapify(heap)
    while heap and left > 0:
        slope, job, step = heap[0]
        choice, queue = choices[job], queues[job]
        sizes, hull = choice.sizes, choice.hull
        allowed = min(left, budget[queue]) if queue in budget else left
        more = sizes[hull[step]] - got[job]
        if more > allowed:
            if more > left:
                price = max(price, -slope)
            # The last step of this job: the best number that still fits.
            below = range(hull[step - 1] + 1, hull[step])
            fitting = [place for place in below if sizes[place] - got[job] <= allowed]
            best = max(fitting, key=lambda place: (choice.values[place], -place), default=None)
            if best is not None and choice.values[best] > choice.values[hull[step - 1]] + _LEAST_GAIN:
                more = sizes[best] - got[job]
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
        if step < len(choice.slopes):
            heapreplace(heap, (-choice.slopes[step], job, step + 1))
        else:
            heappop(heap)
    return Climbed(got, max(price, -heap[0][0]) if heap else price)
