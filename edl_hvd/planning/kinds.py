"""On which kind of hosts each job is.

A job is on one kind at a time. What a number of slots is worth to it there, :class:`JobOnKind` says; from one kind to
another it moves as a whole, which costs it a start. :class:`KindSearch` begins with the kinds that jobs are on. It
moves one job, or lets one replace another, as long as the sum of worths grows; the numbers of slots are those of the
climb on each kind. It is a local search: the best sum is an integer program (Sia, SOSP 2023), which needs a solver.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from edl_hvd.planning.change_costs import after_change, starting_part
from edl_hvd.planning.climb import Choice, Climbed, Ladder, after_start, candidates, climb, ladder
from edl_hvd.planning.ranks import Worth, reach
from edl_hvd.planning.values import Curve, JobAsk

_LEAST_GAIN = 1e-6
# Of a worth of about 1 for each job: what is smaller is no reason to move one.
_MOST_WORK = 20_000
# Jobs that the climbs of one search look at together, some tenth of a second of a processor. The next plan goes on.
_PAIRS_PER_JOB = 8
# Pairs of jobs that are compared in the time of one job in a climb.
_MOVED_ALONE = 100
# Where more jobs than that may move, a tenth of the others moves at once.


@dataclass(frozen=True, slots=True)
class KindSlots:
    """What a job has, or gets: a number of slots on hosts of one kind."""

    kind: str
    slots: int


class JobOnKind:
    """What numbers of slots on hosts of one kind are worth to a job.

    Args:
        ask: The job.
        curve: Its goodput there.
        value: What goodput is worth to it.
        host_slots: Slots of a usual host of this kind.
        horizon_s: Time in which a change has to pay, as in ``PlanRules``.

    Attributes:
        sizes: Numbers of slots that it may have there, rising; the first is its least.
        ladder: What these are worth.
    """

    def __init__(self, ask: JobAsk, curve: Curve, value: Worth, host_slots: int, horizon_s: float) -> None:
        self._ask, self._curve, self._value, self._horizon_s = ask, curve, value, horizon_s
        self.sizes = candidates(ask, curve, host_slots, reach(ask))
        self.ladder = ladder(self.sizes, curve, value, ask, horizon_s)
        self._left = ask.left if value.is_known else None

    def worth(self, slots: int) -> float:
        """What a number of slots is worth that it has already."""
        return self._value.of(self._curve.at(slots))

    def worth_after(self, slots: int, held: int) -> float:
        """What a change from one number of slots, or from the same on other hosts, leaves of the worth of another."""
        ask, goodput = self._ask, self._curve.at(slots)
        value = self._value.of(after_change(goodput, ask.change_s, self._horizon_s, self._left))
        if slots <= held or not held or ask.start_s <= ask.change_s:
            return value
        rest_s = math.inf if self._left is None else self._left / goodput
        starting = starting_part(ask.start_s, ask.change_s, self._horizon_s, rest_s)
        return after_start(value, self.worth(held), starting)

    def worth_moved(self, slots: int) -> float:
        """What a number of slots is worth that it moves to from another kind: it starts there anew."""
        cost_s = max(self._ask.change_s, self._ask.start_s)
        return self._value.of(after_change(self._curve.at(slots), cost_s, self._horizon_s, self._left))

    def rungs(self, held: int) -> Ladder:
        """The ladder, with the number that it holds on it; without any cost where it holds nothing and has to start."""
        if not held:
            return Ladder(self.sizes, self.ladder.worths, self.ladder.worths)
        if held in self.sizes:
            return self.ladder
        return ladder(sorted({*self.sizes, held}), self._curve, self._value, self._ask, self._horizon_s)

    @cached_property
    def moved(self) -> Ladder:
        """The ladder of a job that comes from another kind."""
        values = [self.worth_moved(size) for size in self.sizes]
        return Ladder(self.sizes, values, values)

    @cached_property
    def useful(self) -> int:
        """The number of slots beyond which it makes no more of them."""
        return self.sizes[self.ladder.worths.index(max(self.ladder.worths))]


def mean_curve(curves: Mapping[str, Curve], slots: Mapping[str, int]) -> Curve:
    """The goodput of a job over slots that it has on each kind in proportion to how many there are.

    >>> both = mean_curve({"a": Curve((1, 4), (9.0, 36.0)), "v": Curve((1, 2), (1.0, 2.0))}, {"a": 8, "v": 24})
    >>> both.sizes, both.goodput
    ((1, 2, 4), (3.0, 6.0, 10.5))

    Args:
        curves: Its goodput on each kind that it may be on; at least one.
        slots: Slots of each kind.
    """
    first = next(iter(curves.values()))
    if len(curves) == 1 or all((one.sizes, one.goodput) == (first.sizes, first.goodput) for one in curves.values()):
        return first
    total = sum(slots[kind] for kind in curves)
    parts = {kind: slots[kind] / total if total else 1 / len(curves) for kind in curves}
    sizes = tuple(sorted({size for one in curves.values() for size in one.sizes}))
    return Curve(sizes, tuple(sum(parts[kind] * one.at(size) for kind, one in curves.items()) for size in sizes))


@dataclass(frozen=True, slots=True)
class _Moves:
    """Jobs that change their kinds together, and what that promises."""

    gain: float
    to: tuple[tuple[int, str], ...]

    def __lt__(self, other: _Moves) -> bool:
        return (-self.gain, self.to) < (-other.gain, other.to)


class KindSearch:
    """Finds the kind and the number of slots of each job.

    Args:
        choices: For each job the kinds that it may be on, in the order of their numbers.
        on: The kind that each is on.
        rooms: Slots of each kind for all of them.
        queues: Number of the queue of each job.
        limits: Most slots of a queue beside the least of all its jobs, by its number.
    """

    def __init__(
        self, choices: Mapping[int, Mapping[str, Choice]], on: Mapping[int, str], rooms: Mapping[str, int],
        queues: Sequence[int], limits: Mapping[int, int],
    ) -> None:  # fmt: skip
        self._choices, self._rooms, self._queues, self._limits = choices, rooms, queues, limits
        self._on = {job: on[job] for job in choices}
        self._members: dict[str, list[int]] = {kind: [] for kind in sorted(rooms)}
        for job, kind in self._on.items():
            self._members[kind].append(job)
        self._slots: dict[int, int] = {}
        self._prices: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._movable = [job for job, offered in choices.items() if len(offered) > 1]
        self._work = _MOST_WORK

    def run(self) -> dict[int, KindSlots]:
        """What each job gets: a number on the kind that it is on, where no move is worth more."""
        self._take(self._climb(self._members))
        if self._movable:
            while any(self._make_all(look()) for look in (self._single_moves, self._replacements)):
                pass
        return {job: KindSlots(self._on[job], slots) for job, slots in self._slots.items()}

    # ------------------------------------------------------------------------------------------ numbers

    def _climb(self, members: Mapping[str, Sequence[int]]) -> dict[str, Climbed]:
        """The numbers of the members of some kinds; jobs of other kinds keep theirs."""
        budget = dict(self._limits)
        if budget:
            climbing = {job for jobs in members.values() for job in jobs}
            for job, slots in self._slots.items():
                if job not in climbing:
                    self._spend(budget, job, self._on[job], slots)
        found = {}
        for kind, jobs in members.items():
            chosen, queues = [self._choices[job][kind] for job in jobs], [self._queues[job] for job in jobs]
            found[kind] = climb(chosen, self._rooms[kind], queues, budget)
            if budget:
                for job, slots in zip(jobs, found[kind].slots, strict=True):
                    self._spend(budget, job, kind, slots)
            self._work -= len(jobs)
        return found

    def _spend(self, budget: dict[int, int], job: int, kind: str, slots: int) -> None:
        """Count what a job has beside its least against the limit of its queue."""
        if self._queues[job] in budget:
            budget[self._queues[job]] -= slots - self._choices[job][kind].least

    def _take(self, climbed: Mapping[str, Climbed]) -> None:
        for kind, one in climbed.items():
            self._slots.update(zip(self._members[kind], one.slots, strict=True))
            self._prices[kind] = one.price
            if self._movable:
                self._sums[kind] = self._sum(kind, self._members[kind], one)

    def _sum(self, kind: str, jobs: Sequence[int], climbed: Climbed) -> float:
        return sum([self._choices[job][kind].worth(slots) for job, slots in zip(jobs, climbed.slots, strict=True)])

    def _now(self, job: int) -> float:
        """What a job's slots are worth to it."""
        return self._choices[job][self._on[job]].worth(self._slots[job])

    # ------------------------------------------------------------------------------------------ moves

    def _single_moves(self) -> list[_Moves]:
        """Jobs that would get more of another kind than it costs others, by the prices."""
        found = []
        self._work -= len(self._movable)
        for job in self._movable:
            on = self._on[job]
            given_up = self._now(job) - self._prices[on] * self._slots[job]
            for kind, choice in self._choices[job].items():
                if kind != on and (gain := choice.best_beyond(self._prices[kind]) - given_up) > _LEAST_GAIN:
                    found.append(_Moves(gain, ((job, kind),)))
        return found

    def _replacements(self) -> list[_Moves]:
        """A job gets the slots of another, on another kind, and that one goes where it is best beside."""
        self._work -= len(self._movable) ** 2 // _PAIRS_PER_JOB
        if self._work <= 0:
            return []
        leaving: dict[str, list[_Moves]] = {kind: [] for kind in self._members}
        for job in self._movable:
            on, now = self._on[job], self._now(job)
            for kind, choice in self._choices[job].items():
                if kind != on:
                    leaving[on].append(_Moves(choice.best_beyond(self._prices[kind]) - now, ((job, kind),)))
        found = []
        for job in self._movable:
            on = self._on[job]
            given_up = self._now(job) - self._prices[on] * self._slots[job]
            for kind, choice in self._choices[job].items():
                for other in leaving[kind] if kind != on else ():
                    gain = choice.best_within(self._slots[other.to[0][0]]) - given_up + other.gain
                    if gain > _LEAST_GAIN:
                        found.append(_Moves(gain, ((job, kind), *other.to)))
        return found

    def _make_all(self, promising: Sequence[_Moves]) -> bool:
        """Make those with which the sum of worths grows, the most promising first; whether there was one.

        Of many jobs some move at once, as long as that pays for all of them together.
        """
        has_moved: set[int] = set()
        waiting, at_once = sorted(promising), max(1, (len(self._movable) - _MOVED_ALONE) // 10)
        while waiting and self._work > 0:
            together: dict[int, str] = {}
            taken = 0
            for moves in waiting:
                if len(together) >= at_once:
                    break
                taken += 1
                # A job that has moved meanwhile is looked at anew, from where it is.
                if not any(job in has_moved or job in together for job, _ in moves.to):
                    together.update(moves.to)
            if together and self._make(together):
                has_moved.update(together)
            elif at_once > 1 and together:
                at_once //= 2
                continue
            waiting = waiting[taken:]
        return bool(has_moved)

    def _make(self, moves: Mapping[int, str]) -> bool:
        """Make moves if the sum of worths grows; whether it does."""
        kinds = sorted({*moves.values(), *(self._on[job] for job in moves)})
        members = {kind: [job for job in self._members[kind] if moves.get(job, kind) == kind] for kind in kinds}
        for job, kind in moves.items():
            insort(members[kind], job)
        for kind, jobs in members.items():
            if sum([self._choices[job][kind].least for job in jobs]) > self._rooms[kind]:
                return False
        climbed = self._climb(members)
        after = sum(self._sum(kind, jobs, climbed[kind]) for kind, jobs in members.items())
        if after <= sum(self._sums[kind] for kind in kinds) + _LEAST_GAIN:
            return False
        self._on.update(moves)
        self._members.update(members)
        self._take(climbed)
        return True
