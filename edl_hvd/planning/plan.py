"""The planner: ranked shares. One function, total and pure.

1. Rooms (``rooms.py``): what is left on each host, beside others.
2. Claims, then the least of each job (``floors.py``).
3. What slots are worth to each job (``ranks.py``).
4. Who gets how many: up from the least, by the steepest step (``climb.py``), on which kind of hosts (``kinds.py``).
5. On which hosts (``places.py``).
6. Whether that pays (``change_costs.py``).

Where step 2 gave a least, the first round shares from what jobs held before it, not from what it left them.

Steps 2 to 6 are repeated on their own result until they change nothing. So the plan of a plan that was carried out
changes nothing, by construction: its first round is the last one of the plan before. It ends, because each round gives
a claim or a least that was missing, or raises the sum of the worths.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edl_hvd.errors import InternalError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.change_costs import is_settling, pays
from edl_hvd.planning.climb import Choice
from edl_hvd.planning.floors import FloorPlanner
from edl_hvd.planning.kinds import JobOnKind, KindSearch, KindSlots, mean_curve
from edl_hvd.planning.places import Placer
from edl_hvd.planning.ranks import ASSUMED, Worth, worths
from edl_hvd.planning.rooms import HostTable, Ledger
from edl_hvd.planning.sentences import Growth, KindChange, why_share
from edl_hvd.planning.values import (
    Claim,
    Curve,
    JobAsk,
    Plan,
    PlanRules,
    Reserved,
    Room,
    Share,
    WaitingJob,
    WaitReason,
)

_MOST_ROUNDS = 1000
# Far more than any has taken; each round gives or raises something, so that reaching it is a defect.


def plan(
    rooms: Sequence[Room], claims: Sequence[Claim], asks: Sequence[JobAsk], rules: PlanRules, now_s: float
) -> Plan:
    """Share the slots of a cluster among jobs, beside claims.

    The same arguments give the same plan, in whatever order they are given.

    >>> rooms = [Room("a", 4), Room("b", 4)]
    >>> curves = (Curve((1, 8), (1.0, 8.0)),)
    >>> asks = [JobAsk("long", most=8, curves=curves, holds=(HostSlots("a", 4), HostSlots("b", 4))),
    ...         JobAsk("new", least=2, most=8, curves=curves)]
    >>> for share in plan(rooms, [], asks, PlanRules(), now_s=0.0).shares:
    ...     print(share.job, *share.hosts)
    long a:4
    new b:4

    Args:
        rooms: Hosts, each once.
        claims: Room that others need.
        asks: Jobs, each once.
        rules: How slots are shared.
        now_s: The moment, on the clock of the asks' times.

    Raises:
        UsageError: A host, a claim or a job is given twice, or the name of a host is not usable.
    """
    for what, names in (("claim", [claim.claim for claim in claims]), ("job", [ask.job for ask in asks])):
        if len(set(names)) < len(names):
            twice = min(name for name in names if names.count(name) > 1)
            raise UsageError(f"{what} {twice!r} is given more than once; expected each {what} once")
    return _Planning(rooms, claims, asks, rules, now_s).run()


@dataclass
class _Sharing:
    """What the jobs that have their least are worth, for one set of them.

    Attributes:
        jobs: Their numbers, rising.
        slots: Slots that they share.
        worth: What goodput is worth to each.
        on_kinds: What slots of a kind are worth to each, as far as it was looked for.
        weights: The sum of worths at the fair shares.
        known: Number of jobs whose rest is known.
    """

    jobs: list[int]
    slots: int
    worth: dict[int, Worth] = field(default_factory=dict)
    on_kinds: dict[tuple[int, str], JobOnKind] = field(default_factory=dict)
    weights: float = 0.0
    known: int = 0


@dataclass
class _InUse:
    """What is in use when a plan is made.

    Attributes:
        by_queue: Slots of the jobs of each queue, by its number.
        growing: Number of jobs that have more than their least, by kind of hosts.
        free: Slots that nothing has, by kind of hosts.
    """

    by_queue: Counter[int] = field(default_factory=Counter)
    growing: Counter[str] = field(default_factory=Counter)
    free: Counter[str] = field(default_factory=Counter)


class _Planning:
    """One plan in the making."""

    def __init__(
        self, rooms: Sequence[Room], claims: Sequence[Claim], asks: Sequence[JobAsk], rules: PlanRules, now_s: float
    ) -> None:
        self.rules, self.now_s = rules, now_s
        self.asks = sorted(asks, key=lambda ask: ask.job)
        self.claims = sorted(claims, key=lambda claim: claim.claim)
        self.hosts = HostTable(rooms)
        self.floors = FloorPlanner(self.hosts, self.asks, self.claims, rules, now_s)
        self.floors.start()
        names = sorted({ask.queue for ask in self.asks})
        self.queue = [names.index(ask.queue) for ask in self.asks]
        self.limits = {names.index(queue): limit for queue, limit in self.floors.limits.items() if queue in names}
        self.before = self.ledger.copy()
        self.settling = {job for job, ask in enumerate(self.asks) if is_settling(ask, rules, now_s)}
        self.sharing = _Sharing([], 0)
        self.can_move = any(len(kinds) > 1 for kinds in self.floors.kinds)
        self.kinds: dict[int, str] = {}
        self._curves: dict[int, dict[str, Curve]] = {}

    @property
    def ledger(self) -> Ledger:
        return self.floors.ledger

    def run(self) -> Plan:
        has_need = self.floors.maker.has_changed or self._has_lost()
        for turn in range(_MOST_ROUNDS):
            has_given = self.floors.settle()
            self.sharing = self._look()
            has_need = turn == 0 and (has_need or has_given or self._fill(only_ask=True))
            has_shared = (turn == 0 and has_given and self._share_from_before()) or self._share(has_need)
            has_filled = self._fill()
            if not (has_given or has_shared or has_filled):
                return self._result()
        raise InternalError(f"a plan for {len(self.asks)} jobs does not settle; please report its arguments")

    def _has_lost(self) -> bool:
        """Whether a job holds less than what it was given: a host is gone, or others have come."""
        return any(ask.held != held for ask, held in zip(self.asks, self.ledger.held, strict=True))

    # ------------------------------------------------------------------------------------------ worths

    def _curves_of(self, job: int) -> dict[str, Curve]:
        """The goodput of a job, by the kinds of hosts that it may be on."""
        found = self._curves.get(job)
        if found is None:
            ask = self.asks[job]
            by_kind = {curve.kind: curve for curve in reversed(ask.curves)}
            any_kind = by_kind.get("", ask.curves[0] if ask.curves else ASSUMED)
            found = self._curves[job] = {kind: by_kind.get(kind, any_kind) for kind in self.floors.kinds[job]}
        return found

    def _look(self) -> _Sharing:
        """What the slots are worth to the jobs that have their least; the same as before while these are the same."""
        jobs = [job for job in range(len(self.asks)) if self.ledger.held[job]]
        self.kinds = {job: self.ledger.kind_of(job) or "" for job in jobs}
        claimed = sum(sum(held.values()) for held in self.floors.result.claimed.values())
        slots = max(1, sum(self.hosts.left) - claimed)
        if (jobs, slots) == (self.sharing.jobs, self.sharing.slots):
            return self.sharing
        curves = [mean_curve(self._curves_of(job), self.hosts.left_on) for job in jobs]
        worth = worths([self.asks[job] for job in jobs], curves, slots, self.rules)
        found = _Sharing(jobs, slots, dict(zip(jobs, worth, strict=True)))
        found.weights = sum(one.weight for one in worth)
        found.known = sum(one.is_known for one in worth)
        return found

    def _on(self, job: int, kind: str | None = None) -> JobOnKind:
        """What slots are worth to a job, on a kind of hosts, or on the one that it is on."""
        kind = self.kinds[job] if kind is None else kind
        found = self.sharing.on_kinds.get((job, kind))
        if found is None:
            found = self.sharing.on_kinds[job, kind] = JobOnKind(
                self.asks[job], self._curves_of(job)[kind], self.sharing.worth[job], self.hosts.usual[kind],
                self.rules.horizon_s,
            )  # fmt: skip
        return found

    def _worth_beside(self, job: int, ledger: Ledger, before: Ledger) -> float:
        """The worth of what a job holds in one ledger, if it has held what another one says."""
        slots, had = ledger.held[job], before.held[job]
        kind = ledger.kind_of(job) if self.can_move else None
        on = self._on(job, kind)
        if ledger.by_job[job] == before.by_job[job]:
            return on.worth(slots)
        if kind is not None and had and before.kind_of(job) != kind:
            return on.worth_moved(slots)
        return on.worth_after(slots, had)

    # ------------------------------------------------------------------------------------------ sharing

    def _share(self, has_need: bool) -> bool:
        """Share anew, if there is need or if it pays; whether anything has changed."""
        if not self.sharing.jobs:
            return False
        placed = self._improved(frozenset(), has_need)
        if placed is not None and not has_need and self.settling:
            # Only those may change whose shares are old enough, also those that this plan has changed already.
            changed = {job for job in self.sharing.jobs if self.asks[job].change_s and not self._is_kept(job)}
            placed = self._improved(frozenset(self.settling | changed), has_need)
        if placed is None:
            return False
        self._take_over(placed)
        return True

    def _take_over(self, ledger: Ledger) -> None:
        self.floors.maker.ledger = ledger
        if self.can_move:
            self.kinds = {job: ledger.kind_of(job) or "" for job in self.sharing.jobs}

    def _share_from_before(self) -> bool:
        """Share anew from what jobs held before others were given their least; whether that is better.

        The first host with extras gives the least of a newcomer, whatever they are worth to the job that has them.
        Shared from there, that job would have to pay for a change to get them back.
        """
        sharing, before = self.sharing, self.before
        ledger = self.ledger.copy()
        for job in sharing.jobs:
            if not before.held[job]:
                ledger.release_all(job)
        for job in sharing.jobs:
            held, had = ledger.by_job[job], before.by_job[job]
            gave = {host: slots - held.get(host, 0) for host, slots in had.items() if slots > held.get(host, 0)}
            # A job that was given slots elsewhere has its least there.
            if all(slots <= had.get(host, 0) for host, slots in held.items()) and all(
                ledger.free[host] >= slots for host, slots in gave.items()
            ):
                ledger.take_all(job, gave)
        for stays in (frozenset[int](), frozenset(sharing.jobs)) if self.can_move else (frozenset(sharing.jobs),):
            placed = ledger if stays else ledger.copy()
            self._place(self._numbers(frozenset(), ledger, stays), placed, frozenset())
            if all(placed.held[job] >= self.asks[job].least for job in sharing.jobs):
                break
        else:
            return False
        ledger = placed
        gain = sum(
            self._worth_beside(job, ledger, before) - self._worth_beside(job, self.ledger, before)
            for job in sharing.jobs
            if ledger.by_job[job] != self.ledger.by_job[job]
        )
        if not self._is_enough(gain, has_need=True):
            return False
        self._take_over(ledger)
        return True

    def _improved(self, fixed: frozenset[int], has_need: bool) -> Ledger | None:
        """The best ledger found in which the jobs that are fixed keep their slots, if it is worth it."""
        ledger, stays = self.ledger, frozenset[int]()
        for attempt in range(3):
            numbers = self._numbers(fixed, ledger, stays)
            moved = {job for job, one in numbers.items() if one.kind != self.kinds[job]}
            differing = {job: one for job, one in numbers.items() if job in moved or one.slots != ledger.held[job]}
            if not differing:
                return None
            gain = sum(
                (self._on(job, one.kind).worth_moved(one.slots) if job in moved
                 else self._on(job).worth_after(one.slots, ledger.held[job])) - self._on(job).worth(ledger.held[job])
                for job, one in differing.items()
            )  # fmt: skip
            if not self._is_enough(gain, has_need):
                return None
            placed = ledger.copy()
            self._place(differing, placed, fixed)
            without_room = {job for job in moved if placed.held[job] < self.asks[job].least}
            if not without_room:
                gain = sum(
                    self._worth_beside(job, placed, ledger) - self._on(job).worth(ledger.held[job])
                    for job in self.sharing.jobs
                    if placed.by_job[job] != ledger.by_job[job]
                )
                if self._is_enough(gain, has_need):
                    return placed
                if not moved:
                    return None
                without_room = moved
            # What fits by its number may fit on no hosts: these stay on their kind, and then all do.
            stays = frozenset(self.sharing.jobs if attempt else without_room)
        return None

    def _place(self, numbers: Mapping[int, KindSlots], placed: Ledger, fixed: frozenset[int]) -> None:
        """Bring jobs as near to these numbers as there is room; one that comes from another kind may find none."""
        kinds = {job: one.kind for job, one in numbers.items()}
        placer = Placer(placed, self.asks, self.rules.may_span_together, lambda job: job not in fixed, kinds)
        moved = set()
        if self.can_move:
            moved = {job for job, kind in kinds.items() if placed.held[job] and placed.kind_of(job) != kind}
            for job in moved:
                placed.release_all(job)
        slots = {job: one.slots for job, one in numbers.items() if one.slots != placed.held[job]}

        def sizes(job: int) -> list[int]:
            return self._on(job, kinds[job]).sizes

        if moved:
            # They have nothing to stay with: they come before those that grow.
            first = {job: number for job, number in slots.items() if job in moved or number < placed.held[job]}
            placer.place(first, sizes)
            slots = {job: number for job, number in slots.items() if job not in first}
        placer.place(slots, sizes)

    def _is_enough(self, gain: float, has_need: bool) -> bool:
        return gain > 1e-6 * self.sharing.weights if has_need else pays(gain, self.sharing.weights, self.rules)

    def _numbers(
        self, fixed: frozenset[int], ledger: Ledger, stays: frozenset[int] = frozenset()
    ) -> dict[int, KindSlots]:
        """The numbers of slots that would be best, and on which kind of hosts.

        Args:
            fixed: Jobs that keep what they hold.
            ledger: What jobs hold: that costs no change.
            stays: Jobs that stay on their kind.
        """
        kinds, asks = self.kinds, self.asks
        # What is left of a host beside whole units is of no use: counted in, it would be promised and not given.
        units: dict[str, int] = {}
        for job in self.sharing.jobs:
            for kind in self.floors.kinds[job]:
                if kind not in units or asks[job].unit < units[kind]:
                    units[kind] = asks[job].unit
        rooms = dict.fromkeys(units, 0)
        for host, slots in enumerate(ledger.free):
            if slots and (kind := self.hosts.kinds[host]) in units:
                rooms[kind] += slots // units[kind] * units[kind]
        spoken_for = dict.fromkeys(self.limits, 0)
        choices = {}
        for job in self.sharing.jobs:
            held, on = ledger.held[job], kinds[job]
            if self.queue[job] in spoken_for:
                spoken_for[self.queue[job]] += held if job in fixed else asks[job].least
            if job not in fixed:
                rooms[on] += held
                offered = choices[job] = {on: Choice(self._on(job).rungs(held), held)}
                if self.can_move and job not in stays:
                    for kind in self.floors.kinds[job]:
                        if kind != on:
                            there = self._on(job, kind)
                            offered[kind] = Choice(there.moved if held else there.rungs(0), 0)
        limits = {queue: self.limits[queue] - slots for queue, slots in spoken_for.items()}
        return KindSearch(choices, kinds, rooms, self.queue, limits).run()

    def _fill(self, only_ask: bool = False) -> bool:
        """Give slots that nobody holds to jobs that use them where they are, the steepest step first.

        Args:
            only_ask: Whether to change nothing, and only say whether any job would be given some.

        Returns:
            Whether any job was, or would be, given slots.
        """
        free = sum(self.ledger.free)
        if not free:
            return False
        ledger = self.ledger
        placer = Placer(ledger, self.asks, self.rules.may_span_together, lambda job: False)
        has_filled = False
        steps = sorted(step for job in self.sharing.jobs if (step := self._next_step(job, free)) is not None)
        if only_ask:
            return any(placer.room_in_place(job, slots) is not None for _, job, slots in steps)
        while steps:
            later = []
            for _, job, slots in steps:
                more = slots - ledger.held[job]
                # Others of its queue may have grown since this step was found.
                if more <= free and more <= self._under_limit(job) and placer.grow_in_place(job, slots):
                    has_filled = True
                    free -= more
                    step = self._next_step(job, free)
                    if step is not None:
                        later.append(step)
            steps = sorted(later)
        return has_filled

    def _under_limit(self, job: int) -> float:
        """Slots that the queue of a job may still get."""
        limit = self.limits.get(self.queue[job])
        if limit is None:
            return math.inf
        others = (other for other in self.sharing.jobs if self.queue[other] == self.queue[job])
        return limit - sum(self.ledger.held[other] for other in others)

    def _next_step(self, job: int, free: float) -> tuple[float, int, int] | None:
        """The next number of slots of a job that is worth its change: minus its slope, the job, the number."""
        held = self.ledger.held[job]
        free = min(free, self._under_limit(job))
        on = self._on(job)
        now = on.worth(held)
        for slots in on.sizes[bisect_right(on.sizes, held) :]:
            if slots - held > free:
                return None
            gain = on.worth_after(slots, held) - now
            if gain > 1e-9:
                return -gain / (slots - held), job, slots
        return None

    # ------------------------------------------------------------------------------------------ the answer

    def _result(self) -> Plan:
        floors, ledger = self.floors.result, self.ledger
        given = [0] * len(self.hosts.names)
        for ask in self.asks:
            for entry in ask.holds:
                if (number := self.hosts.numbers.get(entry.host)) is not None:
                    given[number] += entry.slots
        reserved = []
        for number in sorted(floors.claimed):
            held = floors.claimed[number]
            is_free = True
            for host, slots in held.items():
                given[host] += slots
                is_free &= given[host] <= self.hosts.left[host]
            reserved.append(Reserved(self.claims[number].claim, ledger.host_slots(held), is_free))
        shares, waiting, changes = [], [], 0
        slots_in_use = self._in_use()
        for job, ask in enumerate(self.asks):
            is_kept = self._is_kept(job)
            changes += not is_kept
            # Where nothing has changed these are the values that came, whose names need not be checked again.
            hosts = tuple(sorted(ask.holds)) if is_kept else ledger.host_slots(ledger.by_job[job])
            if hosts:
                shares.append(Share(ask.job, hosts, self._floor(job), self._why(job, slots_in_use)))
            else:
                wait = floors.waits[job]
                waiting.append(WaitingJob(ask.job, wait.reason, wait.why, is_stopped=bool(ask.holds)))
        return Plan(
            tuple(shares),
            tuple(waiting),
            tuple(one.claim for one in reserved if one.is_free),
            self._lacking(),
            tuple(reserved),
            changes,
            self.floors.waiting_claims(),
        )

    def _is_kept(self, job: int) -> bool:
        """Whether the share of a job is what it holds."""
        held, numbers, given = self.ledger.by_job[job], self.hosts.numbers, self.asks[job].holds
        return len(given) == len(held) and all(held.get(numbers.get(one.host, -1)) == one.slots for one in given)

    def _floor(self, job: int) -> tuple[HostSlots, ...]:
        """The slots of a job's least: where it is already, then on the hosts where the job has most."""
        held, floor, left = self.ledger.by_job[job], self.ledger.floors[job], self.asks[job].least
        found: dict[int, int] = {}
        for host in sorted(held, key=lambda host: (-min(held[host], floor.get(host, 0)), -held[host], host)):
            if left > 0:
                found[host] = min(left, held[host])
                left -= found[host]
        return self.ledger.host_slots(found)

    def _in_use(self) -> _InUse:
        found = _InUse()
        for job, kind in self.kinds.items():
            found.by_queue[self.queue[job]] += self.ledger.held[job]
            found.growing[kind] += self.floors.maker.slack(job) > 0
        for host, slots in enumerate(self.ledger.free):
            found.free[self.hosts.kinds[host]] += slots
        return found

    def _why(self, job: int, in_use: _InUse) -> str:
        rank, held, useful = self.sharing.worth[job].rank, self.ledger.held[job], self._on(job).useful
        growth = self._growth(job, in_use)
        had, kind = self.before.kind_of(job) if self.can_move else None, self.kinds[job]
        moves = None if had is None or had == kind else KindChange(had, kind)
        return why_share(self.asks[job], held, useful, self._givers(job), rank, self.sharing.known, growth, moves)

    def _givers(self, job: int) -> list[str]:
        """What takes slots of a job: it has fewer than before, and they have theirs."""
        if self.ledger.held[job] >= self.asks[job].held:
            return []
        names = self.floors.maker.gave.get(job, [])
        if not names:
            return []
        without = {
            f"the minimum of job {ask.job!r}" for other, ask in enumerate(self.asks) if not self.ledger.held[other]
        }
        claimed = self.floors.result.claimed
        without |= {f"claim {claim.claim!r}" for number, claim in enumerate(self.claims) if number not in claimed}
        return [name for name in names if name not in without]

    def _growth(self, job: int, in_use: _InUse) -> Growth:
        """What the next slots of a job would need."""
        held, sizes, kind = self.ledger.held[job], self._on(job).sizes, self.kinds[job]
        place = bisect_right(sizes, held)
        more = sizes[place] - held if place < len(sizes) else self.asks[job].unit
        limit = self.limits.get(self.queue[job])
        is_full = limit is not None and in_use.by_queue[self.queue[job]] + more > limit
        others = in_use.growing[kind] - (self.floors.maker.slack(job) > 0)
        return Growth(more, in_use.free[kind], others > 0, limit if is_full else None)

    def _lacking(self) -> int:
        floors = self.floors.result
        claims = sum(claim.slots for number, claim in enumerate(self.claims) if number not in floors.claimed)
        room = (WaitReason.ROOM, WaitReason.PRIORITY, WaitReason.NEVER_FITS)
        waiting = sum(self.asks[job].least for job, wait in floors.waits.items() if wait.reason in room)
        more = sum(max(0, self._on(job).useful - self.ledger.held[job]) for job in self.sharing.jobs)
        return claims + waiting + more
