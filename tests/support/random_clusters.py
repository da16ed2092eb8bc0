"""Random questions for the planner, what carrying a plan out makes of them, and what no plan may do."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edl_hvd.hosts import HostSlots
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, Plan, PlanRules, QueueRule, Room, WaitReason

QUEUES = ("vision", "language")


@dataclass(frozen=True)
class Question:
    """Everything that the planner is asked at a moment."""

    rooms: tuple[Room, ...]
    claims: tuple[Claim, ...]
    asks: tuple[JobAsk, ...]
    rules: PlanRules
    now_s: float = 10_000.0

    def answer(self) -> Plan:
        return plan(self.rooms, self.claims, self.asks, self.rules, self.now_s)


def random_question(seed: int) -> Question:
    """A small cluster with all that is awkward: units, kinds, dips, lost hosts, hosts that others have filled."""
    dice = random.Random(seed)
    kinds = ("",) if dice.random() < 0.7 else ("a100", "v100")
    zones = ("",) if dice.random() < 0.8 else ("east", "west")
    size = dice.choice((1, 2, 4, 4, 8))
    rooms = tuple(
        Room(f"h{number}", size if dice.random() < 0.8 else dice.randint(0, 8), dice.choice((0, 0, 0, 0, 1, 2)),
             dice.choice(kinds), dice.choice(zones), dice.random() < 0.93)
        for number in range(dice.choice((1, 2, 3, 4, 6, 9)))
    )  # fmt: skip
    asks = tuple(_random_ask(dice, f"j{number}", rooms, kinds) for number in range(dice.choice((0, 1, 2, 3, 5, 8, 12))))
    claims = tuple(_random_claim(dice, f"c{number}", rooms) for number in range(dice.choice((0, 0, 0, 1, 2))))
    queues = tuple(QueueRule(queue, dice.choice((1.0, 2.0)), dice.choice((None, 2, 6, 20))) for queue in QUEUES)
    rules = PlanRules(
        elasticity=dice.choice((0.0, 0.5, 0.8)),
        favour_short=dice.choice((0.5, 1.0)),
        gain=dice.choice((0.0, 0.02, 0.1)),
        settle=dice.choice((0.0, 20.0)),
        may_span_together=dice.random() < 0.5,
        queues=queues if dice.random() < 0.3 else (),
    )
    return Question(rooms, claims, asks, rules)


def question_with_services(seed: int) -> Question:
    """A random cluster, beside services that lie on it and others that want all their slots on one host."""
    dice, question = random.Random(f"services of {seed}"), random_question(seed)
    claims = list(question.claims)
    for number in range(dice.choice((1, 2, 3, 5))):
        on = dice.choice(question.rooms)
        slots = dice.randint(1, max(1, on.slots))
        holds = (HostSlots(on.host, slots),) if dice.random() < 0.5 else ()
        claims.append(Claim(f"s{number}", slots, slots, dice.choice((0, 5, 20)), dice.uniform(0, 10_000), holds))
    return replace(question, claims=tuple(claims))


def question_with_floors(seed: int) -> Question:
    """The same jobs, some of which give a part of what they hold away last."""
    question, dice = random_question(seed), random.Random(seed)
    asks = []
    for ask in question.asks:
        kept = [entry for entry in ask.holds if dice.random() < 0.4]
        floor = tuple(HostSlots(entry.host, dice.randint(1, entry.slots)) for entry in kept)
        asks.append(replace(ask, floor=floor if dice.random() < 0.8 else ()))
    return replace(question, asks=tuple(asks))


def _random_claim(dice: random.Random, name: str, rooms: Sequence[Room]) -> Claim:
    unit = dice.choice((1, 1, 2))
    holds = _random_holds(dice, rooms, unit) if dice.random() < 0.3 else ()
    slots = sum(entry.slots for entry in holds) // unit * unit if dice.random() < 0.7 else 0
    slots = slots or unit * dice.randint(1, 5)
    return Claim(name, slots, unit, dice.choice((0, 0, 5)), dice.uniform(0, 10_000), holds)


def _random_holds(dice: random.Random, rooms: Sequence[Room], unit: int) -> tuple[HostSlots, ...]:
    chosen = dice.sample(rooms, dice.randint(1, min(3, len(rooms))))
    holds = [HostSlots(room.host, max(1, dice.randint(1, max(1, room.slots)) // unit * unit)) for room in chosen]
    return (*holds, HostSlots("gone", unit)) if dice.random() < 0.05 else tuple(holds)


def _random_ask(dice: random.Random, name: str, rooms: Sequence[Room], kinds: Sequence[str]) -> JobAsk:
    unit = dice.choice((1, 1, 1, 2, 4))
    least = unit * dice.choice((1, 1, 1, 2, 3))
    most = 0 if dice.random() < 0.03 else least + unit * dice.choice((0, 1, 3, 7, 30))
    with_kinds = kinds if len(kinds) > 1 and dice.random() < 0.5 else ("",)
    curves = () if dice.random() < 0.2 else tuple(_random_curve(dice, kind) for kind in with_kinds)
    return JobAsk(
        name,
        queue=dice.choice(QUEUES),
        priority=dice.choice((0, 0, 0, 5, 10)),
        weight=dice.choice((1.0, 1.0, 3.0)),
        preemptible=dice.random() < 0.8,
        least=least,
        most=most,
        unit=unit,
        curves=curves,
        left=None if dice.random() < 0.5 else dice.uniform(0.0, 1e5),
        asked_s=dice.choice((0.0, 9_000.0, 9_900.0)),
        changed_s=dice.choice((-math.inf, 9_990.0, 5_000.0)),
        holds=_random_holds(dice, rooms, unit) if dice.random() < 0.6 else (),
        change_s=dice.choice((0.0, 0.25, 30.0)),
        start_s=5.0,
        seen=dice.choice((0, 1, 4)),
    )


def _random_curve(dice: random.Random, kind: str) -> Curve:
    sizes = tuple(sorted(dice.sample((1, 2, 3, 4, 5, 8, 12, 16, 32), dice.randint(1, 6))))
    power = dice.uniform(0.0, 1.1)
    noise = dice.choice((0.0, 0.3))
    return Curve(sizes, tuple(100.0 * size**power * (1 + dice.uniform(-noise, noise)) for size in sizes), kind)


def carried_out(question: Question, answer: Plan, floors_move: bool = False) -> Question:
    """The question after the plan was carried out, at the same moment.

    Args:
        question: The question.
        answer: Its plan.
        floors_move: Whether what jobs give away last is what the plan says, not what it was.
    """
    hosts = {share.job: share.hosts for share in answer.shares}
    floors = {share.job: share.floor for share in answer.shares}
    reserved = {one.claim: one.hosts for one in answer.reserved}
    asks = []
    for ask in question.asks:
        new = hosts.get(ask.job, ())
        has_changed = sorted(new) != sorted(ask.holds)
        changed_s = question.now_s if has_changed else ask.changed_s
        floor = floors.get(ask.job, ()) if floors_move else ask.floor
        asks.append(replace(ask, holds=new, floor=floor, changed_s=changed_s))
    claims = tuple(replace(claim, holds=reserved.get(claim.claim, ())) for claim in question.claims)
    return replace(question, asks=tuple(asks), claims=claims)


def shuffled(question: Question, seed: int) -> Question:
    """The same question in another order."""
    dice = random.Random(seed)

    def mixed(values: Sequence) -> tuple:
        return tuple(dice.sample(values, len(values)))

    asks = tuple(replace(ask, holds=mixed(ask.holds)) for ask in mixed(question.asks))
    return replace(question, rooms=mixed(question.rooms), claims=mixed(question.claims), asks=asks)


def broken_rules(question: Question, answer: Plan) -> list[str]:
    """What is wrong with a plan."""
    wrong = []
    asks = {ask.job: ask for ask in question.asks}
    rooms = {room.host: room for room in question.rooms}
    answered = Counter([share.job for share in answer.shares] + [one.job for one in answer.waiting])
    if answered != Counter(list(asks)):
        wrong.append(f"not every job is answered once: {answered}")
    used: Counter[str] = Counter()
    for hosts in [share.hosts for share in answer.shares] + [one.hosts for one in answer.reserved]:
        for entry in hosts:
            used[entry.host] += entry.slots
    wrong += [f"{host} has {rooms[host].left} slots, {slots} are given" for host, slots in used.items()
              if slots > rooms[host].left]  # fmt: skip
    for share in answer.shares:
        wrong += _broken_share(asks[share.job], share.hosts, share.floor, rooms)
    sentences = {share.job: share.why for share in answer.shares} | {one.job: one.why for one in answer.waiting}
    wrong += [f"{job} has no reason" for job, why in sentences.items() if not why]
    wrong += _broken_queues(question, answer)
    return wrong + _lost_room(question, answer)


def _broken_share(
    ask: JobAsk, hosts: Sequence[HostSlots], floor: Sequence[HostSlots], rooms: dict[str, Room]
) -> list[str]:
    wrong = []
    slots = sum(entry.slots for entry in hosts)
    given, held = {entry.host: entry.slots for entry in hosts}, Counter[str]()
    for entry in ask.holds:
        held[entry.host] += entry.slots
    if not ask.least <= slots <= ask.most:
        wrong.append(f"{ask.job} has {slots} slots, of {ask.least} to {ask.most}")
    if any(entry.slots % ask.unit for entry in hosts) or len(given) < len(hosts):
        wrong.append(f"{ask.job} has {hosts} in units of {ask.unit}")
    if sum(entry.slots for entry in floor) != ask.least or any(
        entry.slots > given.get(entry.host, 0) for entry in floor
    ):
        wrong.append(f"{ask.job} has a floor of {floor} in {hosts}")
    wrong += [f"{ask.job} gets new slots on {host}, which is not open" for host in given
              if not rooms[host].is_open and given[host] > held[host]]  # fmt: skip
    named = {curve.kind for curve in ask.curves}
    if len({rooms[host].kind for host in given}) > 1 or (
        named and "" not in named and not {rooms[host].kind for host in given} <= named
    ):
        wrong.append(f"{ask.job} lies on hosts of other kinds: {hosts}")
    return wrong


def _broken_queues(question: Question, answer: Plan) -> list[str]:
    wrong = []
    asks = {ask.job: ask for ask in question.asks}
    for rule in question.rules.queues:
        shares = [share for share in answer.shares if asks[share.job].queue == rule.queue]
        has_extras = any(share.slots >= asks[share.job].least + asks[share.job].unit for share in shares)
        if rule.limit is not None and sum(share.slots for share in shares) > rule.limit and has_extras:
            wrong.append(f"queue {rule.queue} has {sum(share.slots for share in shares)} of {rule.limit} slots")
    return wrong


def _lost_room(question: Question, answer: Plan) -> list[str]:
    """Claims and jobs that wait although there is room that they may have; only of units for which this is easy to see.

    That is what is free, what others hold above their least and, for a claim, what jobs hold that it may stop.
    """
    wrong = []
    asks = {ask.job: ask for ask in question.asks}
    kinds = {room.host: room.kind for room in question.rooms}
    is_open = {room.host: room.is_open for room in question.rooms}
    used: Counter[str] = Counter()
    for hosts in [share.hosts for share in answer.shares] + [one.hosts for one in answer.reserved]:
        for entry in hosts:
            used[entry.host] += entry.slots
    free_on = {room.host: max(0, room.left - used[room.host]) if room.is_open else 0 for room in question.rooms}
    free: Counter[str] = Counter()
    for host, slots in free_on.items():
        free[kinds[host]] += slots

    def takes(kind: str, most_priority: float, stops_below: float) -> int:
        """What can be taken of jobs of units of 1."""
        found = 0
        for share in answer.shares:
            ask, there = asks[share.job], sum(entry.slots for entry in share.hosts if is_open[entry.host])
            if kinds[share.hosts[0].host] != kind:
                continue
            if ask.preemptible and ask.priority < stops_below:
                found += there
            elif ask.priority <= most_priority and ask.unit == 1:
                found += min(share.slots - ask.least, there)
        return found

    def takes_on(host: str, stops_below: float) -> int:
        """What can be taken of jobs on one host."""
        found = 0
        for share in answer.shares:
            ask, there = asks[share.job], sum(entry.slots for entry in share.hosts if entry.host == host)
            is_stopped = ask.preemptible and ask.priority < stops_below
            found += there if is_stopped else min(share.slots - ask.least, there) // ask.unit * ask.unit
        return found

    waiting_claims = [claim for claim in question.claims if claim.claim not in {one.claim for one in answer.reserved}]
    for claim in waiting_claims:
        below = claim.priority
        if claim.unit == 1 and any(free[kind] + takes(kind, math.inf, below) >= claim.slots for kind in free):
            wrong.append(f"claim {claim.claim} waits beside extras, or jobs that it may stop")
        if claim.unit == claim.slots and any(
            is_open[host] and free_on[host] + takes_on(host, below) >= claim.slots for host in is_open
        ):
            wrong.append(f"claim {claim.claim} waits beside a host that can be freed")
    claims_ahead = [claim.priority for claim in waiting_claims if _waits_for_jobs(question, answer, claim)]
    waits = [asks[one.job] for one in answer.waiting if one.reason in (WaitReason.ROOM, WaitReason.PRIORITY)]
    for priority in {ask.priority for ask in waits}:
        level = [ask for ask in waits if ask.priority == priority]
        head = min(level, key=lambda ask: (ask.asked_s, ask.job))
        ahead = claims_ahead + [ask.priority for ask in waits if ask.priority > priority]
        is_held_back = priority in claims_ahead or (not head.preemptible and max(ahead, default=priority) > priority)
        if head.unit > 1 or is_held_back or len({ask.asked_s for ask in level}) < len(level):
            continue
        allowed = {curve.kind for curve in head.curves if curve.kind} or set(free)
        patient = question.now_s - head.asked_s > question.rules.patience_s
        if patient and any(free[kind] + takes(kind, priority, -math.inf) >= head.least for kind in allowed):
            wrong.append(f"job {head.job} waits beside extras")
    return wrong + _taken_from_claims(question, answer, claims_ahead)


def _waits_for_jobs(question: Question, answer: Plan, claim: Claim) -> bool:
    """Whether a claim without room would have it if there were no jobs."""
    free = {room.host: room.left for room in question.rooms if room.is_open}
    for one in answer.reserved:
        for entry in one.hosts:
            if entry.host in free:
                free[entry.host] -= entry.slots
    on_kind: Counter[str] = Counter()
    for room in question.rooms:
        if room.is_open:
            on_kind[room.kind] += free[room.host] // claim.unit * claim.unit
    on_one = max(free.values(), default=0)
    return (on_one if claim.unit == claim.slots else max(on_kind.values(), default=0)) >= claim.slots


def _taken_from_claims(question: Question, answer: Plan, claims_ahead: Sequence[int]) -> list[str]:
    """Claims that are not answered, and jobs that start before one that cannot stop them later."""
    wrong = []
    claims = sorted(claim.claim for claim in question.claims)
    if sorted([one.claim for one in answer.reserved] + [one.claim for one in answer.waiting_claims]) != claims:
        wrong.append(f"not every claim is answered once: {answer.waiting_claims}, {answer.reserved}")
    wrong += [f"claim {one.claim} has no reason" for one in answer.waiting_claims if not one.why]
    for share in answer.shares:
        ask = next(ask for ask in question.asks if ask.job == share.job)
        if not ask.holds and any(
            priority == ask.priority or (priority > ask.priority and not ask.preemptible) for priority in claims_ahead
        ):
            wrong.append(f"{ask.job} starts before a claim that waits for room and could not stop it")
    return wrong
