"""Jobs on several kinds of hosts: who moves, who stays, and how near that is to the best."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
from random_clusters import Question, broken_rules, carried_out

from edl_hvd.hosts import HostSlots, parse_host
from edl_hvd.planning.climb import Choice
from edl_hvd.planning.kinds import JobOnKind, KindSearch, KindSlots, mean_curve
from edl_hvd.planning.ranks import worths
from edl_hvd.planning.values import Curve, JobAsk, Plan, PlanRules, QueueRule, Room, Share

SIZES = (1, 2, 4, 8, 16)


def on_kinds(power: float = 0.9, **speeds: float) -> tuple[Curve, ...]:
    """Goodput of a job that has these speeds with one slot."""
    return tuple(
        Curve(SIZES, tuple(100 * speed * size**power for size in SIZES), kind) for kind, speed in speeds.items()
    )


def job(name: str, curves: tuple[Curve, ...], *held: str, **fields: object) -> JobAsk:
    values: dict = {"most": 4, "change_s": 1.0, "start_s": 30.0} | fields
    return JobAsk(name, curves=curves, holds=tuple(parse_host(entry) for entry in held), **values)


def hosts(**kinds: str) -> tuple[Room, ...]:
    """Hosts by kind: ``a100="a:4 b:4"``."""
    entries = [(kind, parse_host(entry)) for kind, given in kinds.items() for entry in given.split()]
    return tuple(Room(entry.host, entry.slots, kind=kind) for kind, entry in entries)


def planned(rooms: tuple[Room, ...], asks: list[JobAsk], rules: PlanRules | None = None) -> dict[str, Share]:
    question = Question(rooms, (), tuple(asks), rules or PlanRules(), now_s=1_000.0)
    found: Plan = question.answer()
    assert broken_rules(question, found) == []
    again = carried_out(question, found).answer()
    assert (again.shares, again.changes) == (
        tuple(replace(share, why=one.why) for share, one in zip(found.shares, again.shares, strict=True)), 0
    )  # fmt: skip
    return {share.job: share for share in found.shares}


def on(*entries: str) -> tuple[HostSlots, ...]:
    return tuple(sorted(parse_host(entry) for entry in entries))


def test_a_job_moves_to_free_hosts_on_which_it_is_faster() -> None:
    found = planned(hosts(a100="a:4", t4="t:4"), [job("j", on_kinds(a100=4.0, t4=1.0), "t:4")])
    assert (found["j"].hosts, found["j"].why) == (on("a:4"), "4 of 4, moved from t4 to a100: all that it asks for")


def test_the_job_that_gains_most_of_the_fast_hosts_gets_them() -> None:
    rooms = hosts(a100="a:4", t4="t:4")
    much, little = on_kinds(a100=8.0, t4=1.0), on_kinds(a100=1.2, t4=1.0)
    new = planned(rooms, [job("little", little, asked_s=0.0), job("much", much, asked_s=1.0)])
    assert (new["much"].hosts, new["little"].hosts) == (on("a:4"), on("t:4"))
    exchanged = planned(rooms, [job("little", little, "a:4"), job("much", much, "t:4")])
    assert (exchanged["much"].hosts, exchanged["little"].hosts) == (on("a:4"), on("t:4"))


def test_four_slow_slots_are_left_for_two_fast_ones() -> None:
    found = planned(hosts(a100="a:2", t4="t:8"), [job("j", on_kinds(a100=6.0, t4=1.0), "t:8", most=8)])
    assert found["j"].hosts == on("a:2")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"left": 100.0 * 20}, "it ends before the move has paid"),
        ({"change_s": 30.0, "changed_s": 900.0}, "its share has just changed"),
        ({"curves": on_kinds(a100=1.01, t4=1.0)}, "it gains less than 2 %"),
        ({"curves": on_kinds(t4=1.0)}, "it may not run there"),
        ({"curves": (Curve(SIZES, SIZES),)}, "any kind is the same to it"),
        ({"unit": 4, "least": 4}, "no host has its unit"),
    ],
)  # fmt: skip
def test_a_job_stays(fields: dict, why: str) -> None:
    ask = replace(job("j", on_kinds(a100=1.5, t4=1.0), "t:4"), **fields)
    found = planned(hosts(a100="a:2 b:2", t4="t:4"), [ask])
    assert found["j"].hosts == on("t:4"), why


def test_where_one_of_two_jobs_finds_no_hosts_the_other_one_moves() -> None:
    curves = on_kinds(a100=4.0, t4=1.0)
    asks = [job("one", curves, "t:4", unit=4, least=4), job("two", curves, "u:2", most=2)]
    found = planned(hosts(a100="a:3 b:3", t4="t:4 u:2"), asks)
    assert (found["one"].hosts, found["two"].slots, found["two"].hosts[0].host in "ab") == (on("t:4"), 2, True)


def test_a_move_keeps_the_limit_of_a_queue() -> None:
    asks = [
        job("j", on_kinds(a100=4.0, t4=1.0), "t:2", queue="q", most=8),
        job("k", on_kinds(t4=1.0), "t:2", queue="q", most=8),
    ]
    rules = PlanRules(queues=(QueueRule("q", limit=5),))
    found = planned(hosts(a100="a:8", t4="t:4"), asks, rules)
    assert found["j"].hosts[0].host == "a"
    assert found["j"].slots + found["k"].slots <= 5


def test_a_job_that_is_given_its_least_starts_where_that_is_worth_most() -> None:
    curves = on_kinds(a100=4.0, t4=1.0)
    found = planned(hosts(a100="z:4", t4="t:4"), [job("j", curves)])
    assert found["j"].hosts == on("z:4")


@dataclass(frozen=True)
class Case:
    """Jobs on three kinds of hosts, each with one slot."""

    choices: dict[int, dict[str, Choice]]
    on: dict[int, str]
    rooms: dict[str, int]

    def found(self, choices: dict[int, dict[str, Choice]], on: dict[int, str]) -> dict[int, KindSlots]:
        return KindSearch(choices, on, self.rooms, [0] * len(on), {}).run()

    def worth(self, kinds: dict[int, str]) -> float:
        """The most that jobs make of it on these kinds."""
        alone = {number: {kind: self.choices[number][kind]} for number, kind in kinds.items()}
        return self.total(self.found(alone, kinds))

    def total(self, found: dict[int, KindSlots]) -> float:
        return sum(self.choices[number][one.kind].worth(one.slots) for number, one in found.items())


def random_case(seed: int) -> Case:
    dice = random.Random(seed)
    rooms = {"a100": dice.choice((4, 8)), "rtx": dice.choice((8, 12)), "t4": dice.choice((8, 16))}
    asks = []
    for number in range(dice.randint(2, 5)):
        favour = dice.uniform(0, 2)
        curves = on_kinds(dice.uniform(0.3, 1.0), a100=1.0, rtx=0.5**favour, t4=0.3**favour)
        left = dice.choice((None, dice.uniform(1e3, 1e6)))
        change_s = dice.choice((0.0, 30.0))
        asks.append(job(f"j{number}", curves, most=dice.choice((4, 8, 16)), left=left, change_s=change_s))
    means = [mean_curve({curve.kind: curve for curve in ask.curves}, rooms) for ask in asks]
    values = worths(asks, means, sum(rooms.values()), PlanRules())
    places = {number: dice.choice(list(rooms)) for number in range(len(asks))}
    choices = {}
    for number, (ask, value) in enumerate(zip(asks, values, strict=True)):
        there = {curve.kind: JobOnKind(ask, curve, value, 4, horizon_s=60.0) for curve in ask.curves}
        choices[number] = {
            kind: Choice(one.rungs(1), 1) if kind == places[number] else Choice(one.moved, 0)
            for kind, one in there.items()
        }
    return Case(choices, places, rooms)


def test_the_search_is_near_the_best_of_all_kinds_for_all_jobs() -> None:
    are_best, gained, possible = 0, 0.0, 0.0
    for seed in range(150):
        case = random_case(seed)
        if any(list(case.on.values()).count(kind) > slots for kind, slots in case.rooms.items()):
            continue
        kinds = [dict(enumerate(each)) for each in itertools.product(case.rooms, repeat=len(case.on))]
        best = max(
            case.worth(each)
            for each in kinds
            if all(list(each.values()).count(kind) <= slots for kind, slots in case.rooms.items())
        )
        stays, found = case.worth(case.on), case.found(case.choices, case.on)
        assert all(
            sum(one.slots for one in found.values() if one.kind == kind) <= slots for kind, slots in case.rooms.items()
        )
        assert stays - 1e-9 <= case.total(found) <= best + 1e-9
        are_best += case.total(found) > best - 1e-9
        gained, possible = gained + case.total(found) - stays, possible + best - stays
    assert are_best > 0.9 * 150
    assert gained > 0.98 * possible > 0
