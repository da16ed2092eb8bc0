"""Who gets how many slots: rules that hold for every cluster, and cases that can be checked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from random_clusters import (
    Question,
    broken_rules,
    carried_out,
    question_with_floors,
    question_with_services,
    random_question,
    shuffled,
)

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots, parse_host
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, Plan, PlanRules, QueueRule, Room, WaitingClaim, WaitReason

SEEDS = range(700)


def speedup(power: float, most: int, kind: str = "") -> tuple[Curve, ...]:
    sizes = tuple(range(1, most + 1))
    return (Curve(sizes, tuple(100.0 * size**power for size in sizes), kind),)


def holds(*entries: str) -> tuple[HostSlots, ...]:
    return tuple(parse_host(entry) for entry in entries)


def rooms(*entries: str) -> list[Room]:
    return [Room(host.host, host.slots) for host in holds(*entries)]


def shares(answer: Plan) -> dict[str, int]:
    return {share.job: share.slots for share in answer.shares}


def reasons(answer: Plan) -> dict[str, WaitReason]:
    return {one.job: one.reason for one in answer.waiting}


def answer(question_rooms: list[Room], asks: list[JobAsk], *claims: Claim, rules: PlanRules | None = None) -> Plan:
    """The plan, which is also checked as those of random clusters are."""
    question = Question(tuple(question_rooms), claims, tuple(asks), rules or PlanRules(), now_s=1_000.0)
    found = question.answer()
    assert broken_rules(question, found) == []
    again = carried_out(question, found).answer()
    assert (shares(again), again.changes) == (shares(found), 0)
    return found


class TestRandomClusters:
    """More of them are played by ``benchmarks/planning.py``."""

    @pytest.mark.parametrize("ask", [random_question, question_with_services, question_with_floors])
    def test_no_rule_is_broken(self, ask: Callable[[int], Question]) -> None:
        questions = {seed: ask(seed) for seed in SEEDS}
        broken = {seed: wrong for seed, q in questions.items() if (wrong := broken_rules(q, q.answer()))}
        assert broken == {}

    @pytest.mark.parametrize("ask", [random_question, question_with_services, question_with_floors])
    def test_a_plan_that_is_carried_out_changes_nothing_more(self, ask: Callable[[int], Question]) -> None:
        questions = {seed: ask(seed) for seed in SEEDS}
        unstable = [seed for seed, q in questions.items() if carried_out(q, q.answer()).answer().changes]
        assert unstable == []

    @pytest.mark.parametrize("seeds", [SEEDS, (12_823, 59_369, 61_027, 61_971)])
    def test_it_settles_where_the_least_has_moved_with_the_plan(self, seeds: Sequence[int]) -> None:
        """At the latest the second plan changes nothing; the last seeds are those of 24,000 that need it."""
        changes = []
        for question in map(question_with_floors, seeds):
            moved = carried_out(question, question.answer(), floors_move=True)
            changes.append(carried_out(moved, moved.answer(), floors_move=True).answer().changes)
        assert set(changes) == {0}

    def test_the_order_of_the_input_changes_nothing(self) -> None:
        assert [seed for seed in SEEDS if shuffled(q := random_question(seed), seed).answer() != q.answer()] == []

    @pytest.mark.parametrize("seed", [1_141_776, 1_178_907, 1_194_703])
    def test_several_jobs_that_grow_at_once_stay_under_the_limit_of_their_queue(self, seed: int) -> None:
        """The three of 200,000 random clusters in which a limit was passed."""
        question = random_question(seed)
        found = question.answer()
        assert broken_rules(question, found) == []
        assert carried_out(question, found).answer().changes == 0

    def test_the_checks_see_what_is_broken(self) -> None:
        """Each of them fails for a plan that was damaged on purpose."""
        asks = [JobAsk("a", least=2, most=8, curves=speedup(1.0, 8)), JobAsk("b", most=8, curves=speedup(1.0, 8))]
        question = Question(tuple(rooms("x:4", "y:4")), (), tuple(asks), PlanRules())
        good = question.answer()
        first, second = good.shares
        assert broken_rules(question, good) == []
        assert broken_rules(question, replace(good, shares=(first,)))
        assert broken_rules(question, replace(good, shares=(first, replace(second, hosts=holds("x:4", "y:4")))))
        assert broken_rules(question, replace(good, shares=(first, replace(second, why=""))))
        assert broken_rules(question, replace(good, shares=(replace(first, hosts=holds("x:1")), second)))
        with_claim = replace(question, claims=(Claim("web", 2),))
        assert broken_rules(with_claim, good)
        waits = replace(good, waiting_claims=(WaitingClaim("web", WaitReason.ROOM, "it waits"),))
        assert broken_rules(with_claim, waits)
        pinned = replace(question, asks=tuple(replace(ask, preemptible=False) for ask in asks))
        assert broken_rules(replace(pinned, claims=(Claim("web", 8, priority=1),)), waits)
        assert broken_rules(question, replace(good, waiting_claims=waits.waiting_claims))

    def test_quiet_ticks_change_nothing(self) -> None:
        """What was settled stays so, whatever the clock says."""
        question = next(
            q for seed in SEEDS if len((q := random_question(seed)).asks) >= 5 and q.rules.settle and len(q.rooms) >= 4
        )
        question = replace(question, asks=tuple(replace(ask, changed_s=-math.inf) for ask in question.asks))
        settled = carried_out(question, question.answer())
        changed = [tick for tick in range(1_000) if replace(settled, now_s=settled.now_s + tick).answer().changes]
        assert changed == []


class TestFloors:
    def test_a_newcomer_starts_at_once_by_shrinking_the_rich(self) -> None:
        rich = JobAsk("rich", most=4, curves=speedup(0.9, 4), holds=holds("x:4"))
        found = answer(rooms("x:4"), [rich, JobAsk("new", most=4, curves=speedup(0.9, 4))])
        assert shares(found) == {"new": 2, "rich": 2}
        assert "gives slots to the minimum of job 'new'" in found.shares[1].why

    def test_a_newcomer_changes_no_job_that_keeps_its_number(self) -> None:
        """Wherever its least would be free soonest: the long job gives slots, so the short one need not change."""
        short = JobAsk("short", most=4, curves=speedup(0.3, 4), left=1e2, holds=holds("x:4"), change_s=30.0)
        long = JobAsk("long", most=4, curves=speedup(0.5, 4), left=1e6, holds=holds("y:4"), change_s=30.0)
        found = answer(rooms("x:4", "y:4"), [short, long, JobAsk("new", most=4)])
        assert {share.job: share.hosts for share in found.shares} == {
            "short": holds("x:4"),
            "long": holds("y:2"),
            "new": holds("y:2"),
        }
        assert found.changes == 2

    def test_a_gang_does_not_starve_behind_small_jobs(self) -> None:
        running = JobAsk("running", least=2, most=4, asked_s=0.0, curves=speedup(0.9, 4), holds=holds("x:2"))
        gang = JobAsk("gang", least=3, most=4, asked_s=1.0)
        small = JobAsk("small", asked_s=2.0)
        found = answer(rooms("x:4"), [running, gang, small])
        assert shares(found) == {"running": 4}, "the room is lent as extras meanwhile"
        assert reasons(found) == {"gang": WaitReason.ROOM, "small": WaitReason.ROOM}
        assert "job 'gang' comes before it" in found.waiting[1].why

    def test_a_gang_that_waits_for_a_claim_holds_back_none(self) -> None:
        gang, small = JobAsk("gang", least=3, most=3, asked_s=1.0), JobAsk("small", asked_s=2.0)
        found = answer(rooms("x:4"), [gang, small], Claim("web", 2, holds=holds("x:2")))
        assert (shares(found), reasons(found)) == ({"small": 1}, {"gang": WaitReason.ROOM})
        again = answer(
            rooms("x:4"), [gang, replace(small, least=2, most=2, holds=holds("x:2")), JobAsk("later", asked_s=3.0)]
        )
        assert reasons(again) == {"gang": WaitReason.ROOM, "later": WaitReason.ROOM}

    def test_a_gang_of_higher_priority_holds_back_only_jobs_that_would_not_stop_for_it(self) -> None:
        running = JobAsk("running", least=2, most=2, priority=1, holds=holds("x:2"))
        gang = JobAsk("gang", least=3, most=3, priority=1)
        small = [JobAsk("small", least=2, most=2), JobAsk("stays", preemptible=False)]
        found = answer(rooms("x:4"), [running, gang, *small])
        assert (shares(found), reasons(found)) == (
            {"running": 2, "small": 2},
            {"gang": WaitReason.ROOM, "stays": WaitReason.PRIORITY},
        )
        later = answer(rooms("x:4"), [gang, replace(small[0], holds=holds("x:2")), small[1]])
        assert shares(later) == {"gang": 3, "stays": 1}

    def test_a_running_job_is_stopped_for_a_strictly_higher_priority_only(self) -> None:
        low = JobAsk("low", least=4, most=4, priority=1, holds=holds("x:4"))
        for priority, stopped in ((0, False), (1, False), (2, True)):
            found = answer(rooms("x:4"), [low, JobAsk("other", least=4, most=4, priority=priority)])
            assert (reasons(found).keys() == {"low"}) is stopped
            assert any(one.is_stopped for one in found.waiting) is stopped
        pinned = replace(low, preemptible=False)
        assert shares(answer(rooms("x:4"), [pinned, JobAsk("other", least=4, most=4, priority=2)])) == {"low": 4}

    def test_no_more_are_stopped_than_needed(self) -> None:
        low = [JobAsk(f"low{n}", least=2, most=2, holds=holds(f"{host}:2")) for n, host in enumerate("xyz")]
        found = answer(rooms("x:2", "y:2", "z:2"), [*low, JobAsk("high", least=2, most=2, priority=1)])
        assert len(found.waiting) == 1
        assert len(shares(found)) == 3

    def test_what_can_never_fit_waits_and_blocks_nobody(self) -> None:
        found = answer(rooms("x:4"), [JobAsk("huge", least=8, most=8, priority=9), JobAsk("small")])
        assert shares(found) == {"small": 1}
        assert reasons(found) == {"huge": WaitReason.NEVER_FITS}
        assert "all hosts together have 4" in found.waiting[0].why

    def test_sums_are_not_hosts(self) -> None:
        """Two halves of hosts are no room for a whole unit."""
        small = [JobAsk(f"s{n}", least=1, most=1, holds=holds(f"{host}:1")) for n, host in enumerate("xy")]
        found = answer(rooms("x:2", "y:2"), [*small, JobAsk("pair", least=2, most=2, unit=2)])
        assert reasons(found) == {"pair": WaitReason.ROOM}

    def test_a_job_that_has_lost_a_part_of_its_least_gets_it_back_or_waits(self) -> None:
        job = JobAsk("job", least=4, most=4, holds=holds("x:2", "gone:2"))
        assert shares(answer(rooms("x:4"), [job])) == {"job": 4}
        found = answer(rooms("x:2"), [job])
        assert (shares(found), found.waiting[0].is_stopped) == ({}, True)

    def test_a_job_of_no_slots_waits(self) -> None:
        found = answer(rooms("x:4"), [JobAsk("off", most=0, holds=holds("x:1"))])
        assert reasons(found) == {"off": WaitReason.SCALED_TO_ZERO}

    def test_a_host_that_is_not_open_keeps_what_it_has_and_gets_nothing_new(self) -> None:
        closed = [Room("x", 4, is_open=False), Room("y", 4)]
        asks = [JobAsk("old", most=2, holds=holds("x:2")), JobAsk("new", most=8, curves=speedup(1.0, 8))]
        found = answer(closed, asks)
        assert {share.job: share.hosts for share in found.shares} == {"new": holds("y:4"), "old": holds("x:2")}

    def test_a_job_gives_away_last_what_its_least_runs_on(self) -> None:
        """A newcomer, a claim, others on the host, and a smaller number: each takes the other host's slots first."""
        job = JobAsk("job", least=2, most=4, curves=speedup(0.9, 4), holds=holds("a:2", "b:2"))
        claim = Claim("web", 2, 2)
        for host in "ab":
            ask = replace(job, floor=holds(f"{host}:2"))
            there = rooms("a:2", "b:2")
            for found in (
                answer(there, [ask, JobAsk("new", least=2, most=2, unit=2)]),
                answer(there, [ask], claim),
                answer(there, [replace(ask, most=2)]),
            ):
                share = next(share for share in found.shares if share.job == "job")
                assert (share.hosts, share.floor) == (holds(f"{host}:2"), holds(f"{host}:2"))
        other = JobAsk("other", least=1, most=4, curves=speedup(0.9, 4), holds=holds("a:1", "c:1"))
        mine = JobAsk("mine", least=1, most=4, curves=speedup(0.9, 4), holds=holds("a:1", "b:1"), floor=holds("a:1"))
        full = [Room("a", 2, others=1), *rooms("b:1", "c:1")]
        assert [share.hosts for share in answer(full, [mine, other]).shares] == [holds("a:1", "b:1"), holds("c:1")]


class TestClaims:
    def test_a_claim_takes_extras_and_no_least(self) -> None:
        jobs = [JobAsk(f"j{n}", least=1, most=4, curves=speedup(0.9, 4), holds=holds(f"{host}:2"))
                for n, host in enumerate("xy")]  # fmt: skip
        found = answer(rooms("x:2", "y:2"), jobs, Claim("web", 2))
        assert shares(found) == {"j0": 1, "j1": 1}
        assert [(one.claim, one.is_free) for one in found.reserved] == [("web", False)]
        assert found.yielded == ()
        freed = [replace(job, holds=share.hosts) for job, share in zip(jobs, found.shares, strict=True)]
        later = answer(rooms("x:2", "y:2"), freed, Claim("web", 2, holds=found.reserved[0].hosts))
        assert later.yielded == ("web",)
        too_large = answer(rooms("x:2", "y:2"), jobs, Claim("web", 3))
        assert (too_large.reserved, shares(too_large)) == ((), {"j0": 2, "j1": 2})

    def test_a_claim_of_a_higher_priority_stops_jobs(self) -> None:
        found = answer(rooms("x:2"), [JobAsk("j", least=2, most=2, holds=holds("x:2"))], Claim("web", 2, priority=1))
        assert reasons(found) == {"j": WaitReason.ROOM}
        assert found.waiting[0].is_stopped

    def test_a_claim_that_cannot_be_met_yet_holds_back_no_job_that_it_can_stop(self) -> None:
        """A service has a part of the only large host: the claim waits for its end, and jobs need not."""
        there = [*rooms("large:8", "small:2"), Room("off", 8, others=4)]
        service = Claim("service", 4, 4, priority=1, holds=holds("large:4"))
        claim = Claim("web", 8, 8, priority=1)
        jobs = [JobAsk("new", most=2), JobAsk("old", least=2, most=2, holds=holds("large:2"))]
        found = answer(there, jobs, service, claim)
        assert shares(found) == {"new": 2, "old": 2}
        assert [one.claim for one in found.reserved] == ["service"]
        (waits,) = found.waiting_claims
        assert (waits.claim, waits.reason) == ("web", WaitReason.ROOM)
        assert waits.why.startswith("it needs 8 slots on one host, and at most 4 can be freed")
        running = [replace(job, holds=share.hosts) for job, share in zip(jobs, found.shares, strict=True)]
        met = answer(there, running, claim)
        assert [(one.claim, one.hosts) for one in met.reserved] == [("web", holds("large:8"))]
        assert met.waiting_claims == ()

    def test_jobs_yield_to_a_claim_as_soon_as_it_can_be_met(self) -> None:
        service, claim = Claim("service", 3, priority=1, holds=holds("x:3")), Claim("web", 2, priority=1)
        job = JobAsk("job")
        waits = answer(rooms("x:4"), [job], service, claim)
        assert shares(waits) == {"job": 1}
        assert "at most 1 can be freed" in waits.waiting_claims[0].why
        running = replace(job, holds=waits.shares[0].hosts)
        met = answer(rooms("x:2"), [running], claim)
        assert (shares(met), [one.claim for one in met.reserved]) == ({}, ["web"])
        assert met.waiting[0].is_stopped

    @pytest.mark.parametrize(
        ("priority", "preemptible", "starts"), [(0, True, True), (0, False, False), (1, True, False), (2, False, True)]
    )
    def test_a_claim_that_waits_holds_back_jobs_that_would_not_stop_for_it(
        self, priority: int, preemptible: bool, starts: bool
    ) -> None:
        """One after the other they would keep its room from it."""
        job = JobAsk("job", priority=priority, preemptible=preemptible)
        running = JobAsk("running", least=3, most=3, priority=1, holds=holds("x:3"))
        found = answer(rooms("x:4"), [job, running], Claim("web", 2, priority=1))
        assert ("job" in shares(found)) is starts
        if not starts:
            assert "claim 'web' comes before it" in found.waiting[0].why

    def test_a_claim_that_waits_for_others_than_jobs_holds_back_none(self) -> None:
        """It waits as long either way; when the others have gone, no further job starts before it."""
        job = JobAsk("job", priority=1, preemptible=False)
        claim = Claim("web", 2, priority=1, asked_s=5.0)
        service = Claim("service", 3, priority=1, holds=holds("x:3"))
        beside = answer(rooms("x:4"), [job], service, claim)
        assert shares(beside) == {"job": 1}
        assert [one.claim for one in beside.waiting_claims] == ["web"]
        others = [Room("x", 4, others=3)]
        assert shares(answer(others, [job], claim)) == {"job": 1}
        started = replace(job, least=3, most=3, holds=holds("x:3"))
        found = answer(rooms("x:4"), [started, replace(job, job="later")], claim)
        assert reasons(found) == {"later": WaitReason.ROOM}

    def test_a_claim_larger_than_all_hosts_says_so(self) -> None:
        found = answer(rooms("x:4", "y:4"), [JobAsk("job", preemptible=False)], Claim("web", 8, 8), Claim("wide", 9))
        assert shares(found) == {"job": 1}
        assert {one.claim: (one.reason, one.why) for one in found.waiting_claims} == {
            "web": (
                WaitReason.NEVER_FITS,
                "it needs 8 slots on one host, and the largest host has 4; ask for fewer, or add hosts",
            ),
            "wide": (
                WaitReason.NEVER_FITS,
                "it needs 9 slots, and all hosts together have 8; ask for fewer, or add hosts",
            ),
        }

    def test_jobs_take_the_room_of_a_claim_that_has_ended(self) -> None:
        job = JobAsk("j", most=4, curves=speedup(0.9, 4), holds=holds("x:2"))
        assert shares(answer(rooms("x:4"), [job])) == {"j": 4}


class TestShares:
    def test_equal_jobs_get_equal_shares(self) -> None:
        asks = [JobAsk(f"j{n}", most=16, curves=speedup(0.8, 16)) for n in range(4)]
        assert set(shares(answer(rooms("a:4", "b:4", "c:4", "d:4"), asks)).values()) == {4}

    def test_the_shorter_job_gets_more(self) -> None:
        asks = [JobAsk(job, most=8, curves=speedup(0.8, 8), left=left) for job, left in (("short", 1e3), ("long", 1e6))]
        found = shares(answer(rooms("x:8"), asks))
        assert found["short"] > found["long"]
        equal = shares(answer(rooms("x:8"), asks, rules=PlanRules(favour_short=0.0, elasticity=0.0)))
        assert equal == {"long": 4, "short": 4}

    def test_longer_jobs_have_more_than_would_be_best_if_no_job_came_later(self) -> None:
        """With 1, the weights are heSRPT's; these suit jobs that are all present."""
        asks = [JobAsk(f"j{n}", most=32, curves=speedup(0.8, 32), left=10.0 ** (3 + n)) for n in range(3)]
        given, last = (
            shares(answer(rooms("x:32"), asks, rules=rules)) for rules in (None, PlanRules(favour_short=1.0))
        )
        assert given == {"j0": 25, "j1": 6, "j2": 1}
        assert last == {"j0": 27, "j1": 4, "j2": 1}

    def test_a_dip_of_the_curve_is_stepped_over(self) -> None:
        curve = Curve((4, 5, 8), (400.0, 300.0, 700.0))
        assert shares(answer(rooms("x:4", "y:4"), [JobAsk("j", least=4, most=8, curves=(curve,))])) == {"j": 8}

    def test_a_job_without_a_curve_goes_up_to_twice_what_it_was_seen_with(self) -> None:
        assert shares(answer(rooms("x:8"), [JobAsk("j", most=8)])) == {"j": 2}
        assert shares(answer(rooms("x:8"), [JobAsk("j", most=8, seen=2)])) == {"j": 4}

    def test_twice_the_weight_is_twice_the_slots(self) -> None:
        asks = [JobAsk("a", most=9, curves=speedup(1.0, 9)), JobAsk("b", most=9, weight=2.0, curves=speedup(1.0, 9))]
        assert shares(answer(rooms("x:9"), asks)) == {"a": 3, "b": 6}

    def test_queues_have_weights_and_limits(self) -> None:
        asks = [JobAsk(f"j{n}", queue="many" if n else "one", most=12, curves=speedup(1.0, 12)) for n in range(4)]
        assert shares(answer(rooms("x:12"), asks))["j0"] == 3
        by_queue = PlanRules(queues=(QueueRule("one"), QueueRule("many")))
        assert shares(answer(rooms("x:12"), asks, rules=by_queue))["j0"] == 6
        limited = PlanRules(queues=(QueueRule("many", limit=2),))
        found = answer(rooms("x:12"), asks, rules=limited)
        assert shares(found) == {"j0": 10, "j1": 1, "j2": 1}
        assert reasons(found) == {"j3": WaitReason.QUEUE_LIMIT}

    def test_small_gains_do_not_move_shares(self) -> None:
        first, second = Curve((1, 2, 3), (100.0, 150.0, 176.0)), Curve((1, 2, 3), (100.0, 150.0, 175.0))
        asks = [
            JobAsk("a", most=3, curves=(first,), holds=holds("x:2"), change_s=0.2),
            JobAsk("b", most=3, curves=(second,), holds=holds("x:1"), weight=0.98),
        ]
        assert answer(rooms("x:3"), asks).changes == 0

    def test_a_job_that_ends_soon_is_not_changed(self) -> None:
        """It would end before the change has paid: with two slots after 20 s, with four after 30 s and another 12."""
        curves = speedup(0.8, 4)
        job = JobAsk("job", most=4, curves=curves, holds=holds("x:2"), change_s=30.0)
        for seconds, slots in ((20.0, 2), (3_600.0, 4)):
            left = seconds * curves[0].at(2)
            assert shares(answer(rooms("x:4"), [replace(job, left=left)])) == {"job": slots}
        assert shares(answer(rooms("x:4"), [job])) == {"job": 4}

    def test_a_job_that_ends_before_newcomers_have_started_does_not_grow(self) -> None:
        """The others train on meanwhile, so that growing costs a second; but nobody would train on the new slots."""
        curves = speedup(0.8, 4)
        job = JobAsk("job", most=4, curves=curves, holds=holds("x:2"), change_s=1.0, start_s=30.0)
        for seconds, slots in ((20.0, 2), (3_600.0, 4)):
            left = seconds * curves[0].at(2)
            assert shares(answer(rooms("x:4"), [replace(job, left=left)])) == {"job": slots}
        assert shares(answer(rooms("x:4"), [job])) == {"job": 4}

    def test_slots_that_are_in_use_are_not_given_to_those_who_start_on_them_for_little(self) -> None:
        """A tenth of what the new slots bring is counted as lost while they start."""
        rules = PlanRules(gain=0.0)
        for more, start_s, slots in ((105.0, 0.0, (1, 2)), (105.0, 30.0, (2, 1)), (120.0, 30.0, (1, 2))):
            asks = [
                JobAsk("a", most=2, curves=(Curve((1, 2), (100.0, 150.0)),), holds=holds("x:2")),
                JobAsk("b", most=2, curves=(Curve((1, 2), (100.0, 100.0 + more / 2)),), holds=holds("x:1")),
            ]
            found = answer(rooms("x:3"), [replace(ask, start_s=start_s) for ask in asks], rules=rules)
            assert tuple(share.slots for share in found.shares) == slots, (more, start_s)

    def test_a_share_that_has_just_changed_stays(self) -> None:
        rich = JobAsk("rich", most=8, curves=speedup(0.8, 8), holds=holds("x:7"), change_s=30.0, changed_s=900.0)
        poor = JobAsk("poor", most=8, curves=speedup(0.8, 8), holds=holds("x:1"), change_s=30.0)
        assert answer(rooms("x:8"), [rich, poor]).changes == 0
        assert answer(rooms("x:8"), [replace(rich, changed_s=100.0), poor]).changes == 2

    def test_jobs_run_on_hosts_of_the_kinds_of_their_curves(self) -> None:
        there = [Room("a", 4, kind="a100"), Room("v", 4, kind="v100")]
        asks = [
            JobAsk("j", most=4, curves=speedup(1.0, 4, "v100")),
            JobAsk("k", most=4, curves=speedup(1.0, 4, "h100")),
        ]
        found = answer(there, asks)
        assert {share.job: share.hosts for share in found.shares} == {"j": holds("v:4")}
        assert reasons(found) == {"k": WaitReason.NEVER_FITS}

    def test_two_jobs_that_span_hosts_share_none(self) -> None:
        there = rooms("a:4", "b:4", "c:4")
        asks = [JobAsk("j", most=6, curves=speedup(1.0, 6)), JobAsk("k", most=6, curves=speedup(1.0, 6))]
        together = answer(there, asks, rules=PlanRules(may_span_together=True))
        assert shares(together) == {"j": 6, "k": 6}
        apart = answer(there, asks)
        spanning = [{entry.host for entry in share.hosts} for share in apart.shares if len(share.hosts) > 1]
        assert sum(len(hosts) for hosts in spanning) == len(set().union(*spanning))


@pytest.mark.parametrize("together", [False, True])
def test_where_jobs_span_side_by_side_none_leaves_all_its_hosts(together: bool) -> None:
    rules, there = PlanRules(may_span_together=together), rooms("a:10", "b:10", "c:10", "d:10")
    both = holds("a:5", "b:5", "c:5")
    sizes = {most: tuple(range(5, most + 1, 5)) for most in (5, 10, 15, 30)}
    curves = {most: (Curve(one, tuple(map(float, one))),) for most, one in sizes.items()}
    shrinks = JobAsk("shrinks", least=5, most=15, unit=5, curves=curves[15], left=1e6, holds=both)
    short = JobAsk("short", least=15, most=30, unit=5, curves=curves[30], left=10.0, holds=both)
    found = {share.job: share.hosts for share in plan(there, [], [shrinks, short], rules, 0.0).shares}
    assert found["shrinks"] == (holds("b:5", "c:5") if together else holds("d:10"))
    grows = JobAsk("grows", least=5, most=10, unit=5, curves=curves[10], left=10.0, holds=holds("a:5"))
    stays = JobAsk("stays", least=5, most=5, unit=5, curves=curves[5], left=10.0, holds=holds("a:5"))
    found = {share.job: share.hosts for share in plan(there, [], [grows, stays], rules, 0.0).shares}
    assert found["grows"] == (holds("a:5", "b:5") if together else holds("b:10"))


def test_what_is_left_of_hosts_beside_whole_units_is_promised_to_nobody() -> None:
    """12 hosts have three units of 5 each; 20 have 2 slots, which no unit fits into."""
    hosts = [Room(f"a{number:02d}", 17) for number in range(12)]
    hosts += [Room(f"b{number:02d}", 17, 15) for number in range(20)]
    curve = Curve(tuple(range(5, 61, 5)), tuple(size**0.8 for size in range(5, 61, 5)))
    asks = [JobAsk(f"job-{number}", least=5, most=60, unit=5, curves=(curve,)) for number in range(4)]
    assert shares(answer(hosts, asks)) == {ask.job: 45 for ask in asks}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (([Room("a", 1), Room("a", 2)], [], []), "host 'a' has more than one room"),
        (([Room("a", 1)], [Claim("c", 1), Claim("c", 1)], []), "claim 'c' is given more than once"),
        (([Room("a", 1)], [], [JobAsk("j"), JobAsk("j")]), "job 'j' is given more than once"),
    ],
)
def test_what_is_given_twice_is_refused(ask: tuple[list[Room], list[Claim], list[JobAsk]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(*ask, PlanRules(), 0.0)


def test_an_empty_cluster_has_a_plan() -> None:
    assert plan([], [], [], PlanRules(), 0.0) == Plan()
    found = plan([], [Claim("c", 1)], [JobAsk("j")], PlanRules(), 0.0)
    assert reasons(found) == {"j": WaitReason.NEVER_FITS}
    assert found.lacking == 2
