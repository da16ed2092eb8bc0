"""Who gets its least, who waits, and who is stopped; claims come before.

A claim or a job's least takes, in this order: slots that nobody holds; what jobs of the same or a lower priority hold
above their least (of any priority, for a claim); and the slots of preemptible jobs of a strictly lower priority, which
stop. It is given whole or not at all. What cannot be given whole, even if all of these stopped, takes nothing, and the
room is lent: to extras, and to jobs that stop for it as soon as it can be met. Jobs that would not stop for it are held
back while it waits for jobs: those of its own priority, and lower ones that are not preemptible. So nothing large
starves behind small jobs. What would have no room beside claims and others even if there were no jobs holds back none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from edl_hvd.planning.making_room import Need, RoomMaker
from edl_hvd.planning.rooms import HostTable, Ledger, allowed_kinds, holdings
from edl_hvd.planning.values import Claim, JobAsk, PlanRules, WaitingClaim, WaitReason
from edl_hvd.values import count


@dataclass(frozen=True)
class ReasonToWait:
    """Why a job or a claim waits, for programs and for people."""

    reason: WaitReason
    why: str


@dataclass
class Floors:
    """What was decided of claims and of jobs' least.

    Attributes:
        claimed: Slots by host, for each claim that has room, by its number.
        waits: Why each job without slots waits, by its number.
        ahead: What holds jobs back, by its priority: the name of the first, a claim or a job.
    """

    claimed: dict[int, dict[int, int]] = field(default_factory=dict)
    waits: dict[int, ReasonToWait] = field(default_factory=dict)
    ahead: dict[int, str] = field(default_factory=dict)


class FloorPlanner:
    """Gives claims and jobs their least, in a ledger.

    Args:
        hosts: Table of the hosts.
        asks: Jobs, sorted by name; a job's number is its place.
        claims: Claims, sorted by name.
        rules: Patience, and limits of queues.
        now_s: The moment of the plan.

    Attributes:
        maker: Takes slots from jobs for those who come before them.
        result: What was decided.
    """

    def __init__(
        self, hosts: HostTable, asks: Sequence[JobAsk], claims: Sequence[Claim], rules: PlanRules, now_s: float
    ) -> None:
        self.hosts, self.asks, self.claims, self.rules, self.now_s = hosts, asks, claims, rules, now_s
        self.kinds = [allowed_kinds(ask, hosts) for ask in asks]
        self.all_kinds = tuple(sorted(hosts.usual))
        self.limits = {rule.queue: rule.limit for rule in rules.queues if rule.limit is not None}
        floors = [holdings(hosts, ask.floor, ask.unit) for ask in asks]
        self.maker = RoomMaker(Ledger(hosts, len(asks), floors), asks)
        self.result = Floors()
        self._capacity: dict[tuple[str, int], int] = {}

    @property
    def ledger(self) -> Ledger:
        """Who holds what."""
        return self.maker.ledger

    def start(self) -> None:
        """Put what claims and jobs hold into the ledger; what is too much is taken back."""
        self._hold_claims()
        for job, ask in enumerate(self.asks):
            held = holdings(self.hosts, ask.holds, ask.unit)
            if self.kinds[job] != self.all_kinds or len(self.all_kinds) > 1:
                held = self._on_one_kind(held, self.kinds[job])
            over = sum(held.values()) - ask.most
            if over > 0:
                floor = self.ledger.floors[job]
                for host in sorted(held, key=lambda host: (held[host] <= floor.get(host, 0), held[host], host)):
                    less = min(held[host], -(-over // ask.unit) * ask.unit)
                    held[host] -= less
                    over -= less
                    if over <= 0:
                        break
            for host, slots in held.items():
                if slots:
                    self.ledger.take(job, host, slots)
        for host, entries in enumerate(self.ledger.by_host):
            if entries and (self.ledger.free[host] < 0 or not self.hosts.is_open[host]):
                self._shed(host)
        for queue in sorted(self.limits):
            self._shed_queue(queue, f"the limit of queue {queue!r}")

    def _on_one_kind(self, held: dict[int, int], kinds: tuple[str, ...]) -> dict[int, int]:
        """What is held on the kind of hosts, of those that are allowed, on which most is."""
        on_kind = dict.fromkeys(kinds, 0)
        for host, slots in held.items():
            if self.hosts.kinds[host] in on_kind:
                on_kind[self.hosts.kinds[host]] += slots
        kept = min(on_kind, key=lambda kind: (-on_kind[kind], kind), default=None)
        return {host: slots for host, slots in held.items() if self.hosts.kinds[host] == kept}

    def _hold_claims(self) -> None:
        """Keep the room of claims that have it; a claim that has lost a part of it is placed anew."""
        for number, claim in enumerate(self.claims):
            held = holdings(self.hosts, claim.holds, claim.unit)
            if sum(held.values()) == claim.slots and all(
                slots <= self.hosts.left[host] - self._claimed_on(host) for host, slots in held.items()
            ):
                self._set_aside(number, held)

    def _claimed_on(self, host: int) -> int:
        return sum(held.get(host, 0) for held in self.result.claimed.values())

    def _set_aside(self, number: int, held: dict[int, int]) -> None:
        self.result.claimed[number] = held
        for host, slots in held.items():
            if self.hosts.is_open[host]:
                self.ledger.reserve(host, slots)

    def _shed(self, host: int) -> None:
        """Where others have come, jobs hold more than there is: take extras first, then what is left, lowest first."""
        used = sum(self.ledger.by_host[host].values())
        over = used + self._claimed_on(host) - self.hosts.left[host]
        for only_extras in (True, False):
            while over > 0:
                victims = [
                    (
                        self.asks[job].priority, not self.ledger.beyond_floor(job, host), -self.maker.slack(job),
                        self.asks[job].job, job,
                    )
                    for job in self.ledger.by_host[host]
                    if not only_extras or self.maker.extra(job, host) > 0
                ]  # fmt: skip
                if not victims:
                    break
                job = min(victims)[-1]
                unit = self.asks[job].unit
                most = self.maker.extra(job, host) if only_extras else self.ledger.by_job[job][host]
                less = min(most, self.ledger.can_give(job, host), -(-over // unit) * unit)
                self.maker.take_back(job, host, less, "others on its host")
                over -= less

    def _shed_queue(self, queue: str, taker: str) -> None:
        """Take extras from jobs of a queue while it has more than its limit, from those with most first."""
        limit = self.limits.get(queue)
        if limit is None:
            return
        members = [job for job, ask in enumerate(self.asks) if ask.queue == queue and self.ledger.held[job]]
        over = sum(self.ledger.held[job] for job in members) - limit
        while over > 0:
            givers = [job for job in members if self.maker.slack(job) >= self.asks[job].unit]
            if not givers:
                return
            job = max(givers, key=lambda job: (self.maker.slack(job), -job))
            host = self.ledger.first_to_give(job)
            unit = self.asks[job].unit
            less = min(self.maker.extra(job, host), self.ledger.can_give(job, host), -(-over // unit) * unit)
            self.maker.take_back(job, host, less, taker)
            over -= less

    # ------------------------------------------------------------------------------------------ one round

    def settle(self) -> bool:
        """Place claims, and give jobs their least.

        Returns:
            Whether any job's slots have changed.
        """
        self.maker.has_changed = False
        self.result.waits.clear()
        self.result.ahead.clear()
        self._place_claims()
        waiting: list[tuple[int, int, float, str, int]] = []
        for job, ask in enumerate(self.asks):
            held = self.ledger.held[job]
            if held >= ask.least and ask.most:
                continue
            if ask.most == 0:
                self._let_wait(job, WaitReason.SCALED_TO_ZERO, "it is asked to hold no slots")
            elif not self._can_ever_fit(ask, self.kinds[job]):
                self._let_wait(job, WaitReason.NEVER_FITS, self._never(ask, self.kinds[job]))
            else:
                place = 1 if held else 0 if self.now_s - ask.asked_s > self.rules.patience_s else 2
                waiting.append((-ask.priority, place, ask.asked_s, ask.job, job))
        for _, _, _, _, job in sorted(waiting):
            self._give_least(job)
        return self.maker.has_changed

    def _place_claims(self) -> None:
        """Set room aside for claims, as far as there is any."""
        order = sorted(
            (number for number in range(len(self.claims)) if number not in self.result.claimed),
            key=lambda number: (-self.claims[number].priority, self.claims[number].asked_s, self.claims[number].claim),
        )
        without_room: set[Need] = set()
        waiting: dict[Need, str] = {}
        for number in order:
            claim = self.claims[number]
            need = self._need_of(claim)
            if need in without_room or not self._can_ever_hold(claim):
                continue
            found = self.maker.make_room(need, f"claim {claim.claim!r}")
            if found is not None:
                self._set_aside(number, found)
                without_room.clear()
            else:
                without_room.add(need)
                waiting.setdefault(need, f"claim {claim.claim!r}")
        for need, name in waiting.items():  # beside all claims, those that were placed last, too
            self._note_wait(need, name)

    def _note_wait(self, need: Need, name: str) -> None:
        """Let jobs that would not stop for a need wait for it, if it waits for jobs: if it had room without them."""
        if need.priority not in self.result.ahead:
            claimed: Counter[int] = Counter()
            for held in self.result.claimed.values():
                claimed.update(held)
            room = {host: left - claimed[host] for host, left in enumerate(self.hosts.left) if self.hosts.is_open[host]}
            if self.maker.together(need, room) >= need.slots:
                self.result.ahead[need.priority] = name

    def _need_of(self, claim: Claim) -> Need:
        return Need(claim.slots, claim.unit, claim.priority, self.all_kinds, math.inf)

    def _held_back_by(self, ask: JobAsk) -> int | None:
        """The priority of what waits for room that this job would keep from it, as it would not stop for it."""
        if ask.preemptible:
            return ask.priority if ask.priority in self.result.ahead else None
        return max((priority for priority in self.result.ahead if priority >= ask.priority), default=None)

    def _give_least(self, job: int) -> None:
        """Give a job its least, or let it wait."""
        ask, held = self.asks[job], self.ledger.held[job]
        if (priority := self._held_back_by(ask)) is not None:
            reason = WaitReason.PRIORITY if priority > ask.priority else WaitReason.ROOM
            self._let_wait(job, reason, f"{self.result.ahead[priority]} comes before it, and waits for room")
        elif (over_limit := self._over_limit(ask, ask.least - held)) is not None:
            self._let_wait(job, WaitReason.QUEUE_LIMIT, over_limit)
        else:
            kind = self.ledger.kind_of(job)
            kinds = self.kinds[job] if kind is None else (kind,)
            need = Need(ask.least - held, ask.unit, ask.priority, kinds, ask.priority, job)
            found = self.maker.make_room(need, f"the minimum of job {ask.job!r}")
            if found is not None:
                for host, slots in found.items():
                    self.ledger.take(job, host, slots)
                self.maker.has_changed = True
                self._shed_queue(ask.queue, f"the minimum of job {ask.job!r}")
            else:
                # With a part of its least it cannot run; what it held may be enough for it elsewhere.
                lost = bool(self.ledger.release_all(job))
                self.maker.has_changed |= lost
                if lost:
                    self._give_least(job)
                    return
                higher = any(
                    other.priority > ask.priority and self.ledger.held[number] for number, other in enumerate(self.asks)
                )
                reason = WaitReason.PRIORITY if higher else WaitReason.ROOM
                self._let_wait(job, reason, self._short_of(ask))
                self._note_wait(need, f"job {ask.job!r}")

    def _let_wait(self, job: int, reason: WaitReason, why: str) -> None:
        """Let a job hold nothing, and wait."""
        if self.ledger.held[job]:
            self.ledger.release_all(job)
            self.maker.has_changed = True
        self.result.waits[job] = ReasonToWait(reason, why)

    def _over_limit(self, ask: JobAsk, more: int) -> str | None:
        limit = self.limits.get(ask.queue)
        if limit is None:
            return None
        used = sum(self.ledger.held[job] for job, other in enumerate(self.asks) if other.queue == ask.queue)
        extras = sum(
            max(0, self.maker.slack(job))
            for job, other in enumerate(self.asks)
            if other.queue == ask.queue and self.ledger.held[job]
        )
        if used - extras + more > limit:
            return (
                f"queue {ask.queue!r} may have {count(limit, 'slot')}, and the minimums of its jobs take "
                f"{used - extras} of them"
            )
        return None

    # ------------------------------------------------------------------------------------------ what can fit

    def _most_units(self, kind: str, unit: int) -> int:
        """Slots of a kind in whole units, if nothing else were there."""
        found = self._capacity.get((kind, unit))
        if found is None:
            found = sum(
                slots // unit * unit for slots, of in zip(self.hosts.total, self.hosts.kinds, strict=True) if of == kind
            )
            self._capacity[kind, unit] = found
        return found

    def _can_ever_fit(self, ask: JobAsk, kinds: tuple[str, ...]) -> bool:
        return any(self._most_units(kind, ask.unit) >= ask.least for kind in kinds)

    def _can_ever_hold(self, claim: Claim) -> bool:
        return any(self._most_units(kind, claim.unit) >= claim.slots for kind in self.all_kinds)

    def waiting_claims(self) -> tuple[WaitingClaim, ...]:
        """Claims without room, after the last round, and why."""
        whys: dict[Need, ReasonToWait] = {}
        found = []
        for number, claim in enumerate(self.claims):
            if number not in self.result.claimed:
                need = self._need_of(claim)
                if need not in whys:
                    whys[need] = self._why_claim_waits(claim)
                found.append(WaitingClaim(claim.claim, whys[need].reason, whys[need].why))
        return tuple(found)

    def _why_claim_waits(self, claim: Claim) -> ReasonToWait:
        is_on_one = claim.unit == claim.slots > 1
        on = " on one host" if is_on_one else f" in units of {claim.unit}" if claim.unit > 1 else ""
        needs = f"it needs {count(claim.slots, 'slot')}{on}"
        if not self._can_ever_hold(claim):
            most = max((self._most_units(kind, claim.unit) for kind in self.all_kinds), default=0)
            kind = " of one kind" * (len(self.all_kinds) > 1)
            has = f"all hosts{kind} together have {most}"
            if is_on_one:
                has = f"the largest host has {max(self.hosts.total, default=0)}"
            return ReasonToWait(WaitReason.NEVER_FITS, f"{needs}, and {has}; ask for fewer, or add hosts")
        need = self._need_of(claim)
        freed = self.maker.freed_for(need)
        can = max(freed.values(), default=0) if is_on_one else min(self.maker.together(need, freed), claim.slots - 1)
        return ReasonToWait(
            WaitReason.ROOM, f"{needs}, and at most {can} can be freed; others that do not stop for it hold the rest"
        )

    def _never(self, ask: JobAsk, kinds: tuple[str, ...]) -> str:
        most = max((self._most_units(kind, ask.unit) for kind in kinds), default=0)
        units = f" in units of {ask.unit}" if ask.unit > 1 else ""
        named = kinds or sorted({curve.kind for curve in ask.curves})
        where = f" of kind {', '.join(named)}" if any(named) else ""
        return (
            f"it needs at least {count(ask.least, 'slot')}{units}, and all hosts{where} together have {most}; "
            "ask for fewer, or add hosts"
        )

    def _short_of(self, ask: JobAsk) -> str:
        floors = sum(min(self.asks[job].least, held) for job, held in enumerate(self.ledger.held))
        room = sum(self.hosts.left) - sum(sum(held.values()) for held in self.result.claimed.values()) - floors
        left = f"{count(max(0, room), 'slot')} {'is' if room == 1 else 'are'} left"
        units = f" in units of {ask.unit}" if ask.unit > 1 else ""
        return f"it needs at least {count(ask.least, 'slot')}{units}; beside the minimums of others {left}"
