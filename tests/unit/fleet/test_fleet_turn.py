"""The turn of a fleet: what follows from what happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet_world import World

from edl_hvd.fleet import events
from edl_hvd.fleet import turn as turn_module
from edl_hvd.fleet.events import FleetAction, FleetEvent
from edl_hvd.fleet.planned import asks_of, members_of, prior
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import Fleet, FleetRules, JobPhase, JobSpec, as_hosts, total
from edl_hvd.fleet.store import FleetEntry
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.family import shared_timings
from edl_hvd.planning.values import Curve
from edl_hvd.timings import Timing

FOUR = (HostSlots("a", 2), HostSlots("b", 2))


def spec(name: str, least: int = 1, most: int = 4, **more) -> JobSpec:
    return JobSpec(name, ("python", "train.py"), "/work", least, most, **more)


def play(*happened: FleetEvent, fleet: Fleet | None = None) -> tuple[Fleet, list[FleetAction]]:
    """The fleet after these events, a second apart; each run starts as soon as it is to."""
    fleet = Fleet() if fleet is None else fleet
    done: list[FleetAction] = []
    for second, event in enumerate(happened):
        fleet, actions = turn(fleet, event, float(second))
        done = [action for action in actions if not isinstance(action, events.Tell)]
        for action in actions:
            if isinstance(action, events.StartRun):
                fleet, _ = turn(fleet, events.RunStarted(action.job, second + 100, "token"), float(second))
    return fleet, done


def on(*hosts: str) -> tuple[HostSlots, ...]:
    return tuple(HostSlots(host[:-1], int(host[-1])) for host in hosts)


def test_the_first_job_gets_all_slots_that_it_can_use():
    fleet, done = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")))
    assert done == [events.StartRun("one", FOUR)]
    assert fleet.jobs["one"].phase is JobPhase.RUNNING


def test_a_second_job_starts_when_workers_of_the_first_have_left_and_not_before():
    fleet, done = play(
        events.HostsListed(FOUR),
        events.JobSubmitted(spec("one")),
        events.RunObserved("one", FOUR, 3, has_trained=True),
        events.JobSubmitted(spec("two")),
    )
    shrunk = fleet.jobs["one"].given
    assert done == [events.GiveHosts("one", shrunk)]
    assert total(shrunk) < 4
    assert fleet.jobs["two"].phase is JobPhase.WAITING
    fleet, done = play(events.RunObserved("one", shrunk, 9, has_trained=True), fleet=fleet)
    assert [type(action) for action in done] == [events.StartRun]
    assert fleet.jobs["two"].phase is JobPhase.RUNNING


def test_a_job_counts_by_the_curve_of_its_family_until_it_has_its_own():
    """The first job is hardly faster on four slots than on one; so the second, which is alike, is given one as well."""
    flat = Curve((1, 2, 4), (100.0, 101.0, 102.0))
    measured = (Timing(1, 8, 1, 0.1),)
    fleet, _ = play(
        events.HostsListed(FOUR),
        events.JobSubmitted(spec("one", family="text")),
        events.RunObserved("one", FOUR, 3, has_trained=True, curve=flat, timings=measured),
        events.RunEnded("one", 0, "training is complete", 9),
        events.RunObserved("one", (), 9),
        events.JobSubmitted(spec("two", family="text")),
        events.JobSubmitted(spec("three")),
    )
    [two, three] = asks_of(fleet, 100.0)
    assert two.curves == (flat,)
    assert three.curves == (prior(4),)
    assert shared_timings(members_of(fleet, "text")) == measured
    assert fleet.jobs["one"].phase is JobPhase.COMPLETE


def test_a_claim_is_granted_when_workers_have_left_and_is_given_back():
    fleet, _ = play(
        events.HostsListed(FOUR),
        events.JobSubmitted(spec("one")),
        events.RunObserved("one", FOUR, 3, has_trained=True),
        events.SlotsClaimed("web", 2, 0, for_s=None),
    )
    assert total(fleet.jobs["one"].given) == 2
    assert fleet.claims["web"].granted == ()
    fleet, _ = play(events.RunObserved("one", fleet.jobs["one"].given, 3, has_trained=True), fleet=fleet)
    assert total(fleet.claims["web"].granted) == 2
    fleet, done = play(events.ClaimReleased("web"), fleet=fleet)
    assert done == [events.GiveHosts("one", FOUR)]


def test_a_claim_without_room_says_why_and_jobs_start_beside_it_until_it_has():
    fleet, _ = play(
        events.HostsListed(FOUR),
        events.SlotsClaimed("db", 3, 1000, for_s=None),
        events.SlotsClaimed("web", 2, 1000, for_s=None),
        events.JobSubmitted(spec("one")),
    )
    assert fleet.jobs["one"].phase is JobPhase.RUNNING
    assert fleet.claims["web"].why.startswith("it needs 2 slots, and at most 1 can be freed")
    assert fleet.claims["db"].why == ""
    fleet, _ = play(events.ClaimReleased("db"), fleet=fleet)
    assert fleet.claims["web"].why == ""
    assert total(fleet.claims["web"].granted) == 2
    assert total(fleet.jobs["one"].given) == 2


def test_a_claim_ends_by_itself():
    fleet, _ = play(events.HostsListed(FOUR), events.SlotsClaimed("web", 2, 0, for_s=1.0))
    fleet, actions = turn(fleet, events.TimePassed(), 1.5)
    assert fleet.claims
    fleet, actions = turn(fleet, events.TimePassed(), 2.0)
    assert not fleet.claims
    assert events.Tell("web", "gives its slots back: its time is over") in actions


def test_a_job_of_higher_priority_stops_another_which_goes_on_later():
    low, high = spec("low", 4), spec("high", 4, priority=5)
    fleet, done = play(events.HostsListed(FOUR), events.JobSubmitted(low), events.JobSubmitted(high))
    assert done == [events.EndRun("low")]
    assert fleet.jobs["low"].phase is JobPhase.STOPPING
    fleet, done = play(events.RunEnded("low", 75, "all hosts were left", 7), fleet=fleet)
    assert done == [events.StartRun("high", FOUR)]
    assert (fleet.jobs["low"].phase, fleet.jobs["low"].preemptions) == (JobPhase.WAITING, 1)
    fleet, done = play(events.RunEnded("high", 0, ""), fleet=fleet)
    assert done == [events.StartRun("low", FOUR)]
    assert fleet.jobs["low"].run == 2


def test_a_job_that_must_not_be_stopped_is_not():
    low, high = spec("low", 4, preemptible=False), spec("high", 4, priority=5)
    fleet, done = play(events.HostsListed(FOUR), events.JobSubmitted(low), events.JobSubmitted(high))
    assert done == []
    assert fleet.jobs["high"].phase is JobPhase.WAITING
    assert fleet.jobs["high"].reason


def test_a_job_is_stopped_and_resumed_by_its_user():
    begun = (events.HostsListed(FOUR), events.JobSubmitted(spec("one")), events.JobStopAsked("one"))
    fleet, done = play(*begun)
    assert done == [events.EndRun("one")]
    fleet, done = play(events.JobStopAsked("one"), fleet=fleet)
    assert done == [], "a second signal would end it without a checkpoint"
    fleet, _ = play(events.RunEnded("one", 75, "", 12), fleet=fleet)
    assert fleet.jobs["one"].phase is JobPhase.STOPPED
    fleet, done = play(events.TimePassed(), fleet=fleet)
    assert done == []
    fleet, done = play(events.JobResumeAsked("one"), fleet=fleet)
    assert done == [events.StartRun("one", FOUR)]


def test_a_stop_that_is_taken_back_ends_in_another_run():
    fleet, _ = play(
        events.HostsListed(FOUR),
        events.JobSubmitted(spec("one")),
        events.JobStopAsked("one"),
        events.JobResumeAsked("one"),
    )
    assert fleet.jobs["one"].phase is JobPhase.STOPPING
    fleet, done = play(events.RunEnded("one", 75, "", 12), fleet=fleet)
    assert done == [events.StartRun("one", FOUR)]


def test_scaling_takes_and_gives_while_it_trains():
    fleet, done = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")), events.JobScaled("one", 1))
    assert total(fleet.jobs["one"].given) == 1
    assert len(done) == 1
    fleet, done = play(events.JobScaled("one", 3), fleet=fleet)
    assert total(fleet.jobs["one"].given) == 3


@pytest.mark.parametrize(
    ("code", "phase"),
    [(0, JobPhase.COMPLETE), (1, JobPhase.FAILED), (2, JobPhase.FAILED), (130, JobPhase.FAILED)],
)
def test_how_a_run_ends(code: int, phase: JobPhase):
    fleet, done = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")), events.RunEnded("one", code, "so"))
    assert (fleet.jobs["one"].phase, fleet.jobs["one"].exit_code, done) == (phase, code, [])


def test_a_failed_run_is_repeated_as_often_as_its_user_allows_with_growing_pauses():
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one", retries=2)))
    for pause_s in (1.0, 2.0):
        fleet, actions = turn(fleet, events.RunEnded("one", 1, "a mistake"), 10.0)
        assert not any(isinstance(action, events.StartRun) for action in actions)
        assert fleet.jobs["one"].not_before_s == 10.0 + pause_s
        fleet, actions = turn(fleet, events.TimePassed(), 10.0 + pause_s)
        assert any(isinstance(action, events.StartRun) for action in actions)
        fleet, _ = turn(fleet, events.RunStarted("one", 5, "token"), 13.0)
    fleet, _ = turn(fleet, events.RunEnded("one", 1, "a mistake"), 14.0)
    assert (fleet.jobs["one"].phase, fleet.jobs["one"].why) == (JobPhase.FAILED, "a mistake")


def test_a_run_that_has_failed_thousands_of_times_is_repeated_after_the_longest_pause():
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one", retries=5000)))
    fleet = replace(fleet, jobs={"one": replace(fleet.jobs["one"], failures=2000)})
    fleet, _ = turn(fleet, events.RunEnded("one", 1, "a mistake"), 10.0)
    assert fleet.jobs["one"].not_before_s == 70.0


def test_a_run_that_was_killed_after_it_came_further_goes_on_at_once():
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")))
    for step in range(10, 100, 10):
        fleet, _ = play(events.RunEnded("one", None, "edlrun was killed", step), events.TimePassed(), fleet=fleet)
        fleet, _ = turn(fleet, events.TimePassed(), 60.0)
        assert fleet.jobs["one"].phase.wants_slots
        fleet, _ = turn(fleet, events.RunStarted("one", step, "token"), 60.0)
    assert fleet.jobs["one"].failures <= 1


def test_processes_that_a_killed_run_has_left_keep_their_slots():
    fleet, _ = play(
        events.HostsListed(FOUR),
        events.JobSubmitted(spec("one", 4)),
        events.RunObserved("one", FOUR, 3, has_trained=True),
        events.RunEnded("one", None, "edlrun was killed", 3),
        events.JobSubmitted(spec("two", 4, priority=3)),
        events.TimePassed(),
    )
    assert fleet.jobs["two"].phase is JobPhase.WAITING
    fleet, done = play(events.RunObserved("one", ()), fleet=fleet)
    assert events.StartRun("two", FOUR) in done


def test_a_run_that_does_not_end_is_killed():
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")), events.JobStopAsked("one"))
    fleet, actions = turn(fleet, events.TimePassed(), 2.0 + FleetRules.kill_after_s - 1)
    assert events.KillRun("one") not in actions
    fleet, actions = turn(fleet, events.TimePassed(), 2.0 + FleetRules.kill_after_s)
    assert events.KillRun("one") in actions


def test_events_of_jobs_that_are_not_there_change_nothing():
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")))
    for event in (
        events.JobScaled("two", 3),
        events.JobStopAsked("two"),
        events.JobResumeAsked("one"),
        events.RunEnded("two", 0, ""),
        events.RunStarted("one", 8, "another"),
        events.ClaimReleased("web"),
        events.JobSubmitted(spec("one", 2, 2)),
    ):
        assert turn(fleet, event, 9.0) == (fleet, ()), event


def test_a_plan_that_fails_leaves_everything_as_it_is(monkeypatch):
    fleet, _ = play(events.HostsListed(FOUR), events.JobSubmitted(spec("one")))

    def fail(*arguments):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(turn_module, "planned", fail)
    after, actions = turn(fleet, events.TimePassed(), 9.0)
    assert [type(action) for action in actions] == [events.Tell]
    assert "a mistake of ours" in actions[0].text
    assert after.jobs == fleet.jobs
    monkeypatch.undo()
    after, _ = turn(after, events.TimePassed(), 10.0)
    assert after.planner_failures == 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_no_slot_is_given_twice_and_everything_comes_to_rest(seed: int):
    world = World(seed, as_hosts({"a": 2, "b": 2, "c": 4}))
    for _ in range(100):
        world.anything()
        world.pass_time()
    world.settle()
    assert world.starts > 5, "something happened"
    for job in world.fleet.jobs.values():
        if job.phase.keeps_slots:
            assert world.is_carried_out(job), f"{job.name} has {job.given} instead of {job.share}"
    for claim in world.fleet.claims.values():
        assert claim.granted == claim.share
    entries = [FleetEntry(*line) for line in world.history]
    assert [decision.actions for decision in decide_again(entries)] == [actions for _, _, actions in world.history]


def test_a_quiet_fleet_stays_as_it_is():
    world = World(7, FOUR)
    for name in ("one", "two", "three"):
        world.happen(events.JobSubmitted(spec(name)))
        world.settle()
    before = world.actions
    for _ in range(1000):
        world.now_s += 1.0
        world.happen(events.TimePassed())
    assert world.actions == before


def test_a_job_of_which_nothing_changes_is_the_same_object_and_so_not_stored_again():
    names = [f"job{number}" for number in range(6)]
    fleet, _ = play(events.HostsListed(FOUR), *(events.JobSubmitted(spec(name, 1, 2)) for name in names))
    fleet, _ = play(events.RunEnded("job0", 0, "so"), events.TimePassed(), fleet=fleet)
    seen = events.RunObserved("job1", fleet.jobs["job1"].given, 7, has_trained=True)
    for event in (events.TimePassed(), seen):
        after, _ = turn(fleet, event, 60.0)
        assert {job.phase for job in after.jobs.values()} >= {JobPhase.COMPLETE, JobPhase.RUNNING, JobPhase.WAITING}
        changed = {name for name, job in after.jobs.items() if job is not fleet.jobs[name]}
        assert changed == ({"job1"} if event is seen else set())
