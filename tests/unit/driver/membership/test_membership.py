"""Who is a member, through histories told and histories left to chance."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppets import Stage, check_replay, kept_if_it_fails, play_at_random, random_stage

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.history import Decision, Recorder
from edl_hvd.driver.membership.state import Rules, Slot, begin
from edl_hvd.hosts import HostSlots

RULES = Rules(num_proc=2, min_np=1, max_np=4)


def hosts(*entries: str) -> events.HostsFound:
    return events.HostsFound(tuple(HostSlots(entry[0], int(entry[2])) for entry in entries))


def training(*entries: str, rules: Rules = RULES) -> Stage:
    """A job that trains on these hosts."""
    stage = Stage(rules)
    stage.handle(hosts(*entries))
    stage.settle(5)
    return stage


def test_what_was_seen_of_a_draft_does_not_change():
    draft = Draft(begin(RULES, 0.0), 5.0)
    draft.set("a:0", "starting", incarnation=1)
    seen = draft.membership
    draft.set("a:0", "ready")
    draft.set("b:0", "starting")
    draft.set_phase("forming")
    assert ({worker: slot.state for worker, slot in seen.slots.items()}, seen.world.phase) == (
        {"a:0": "starting"},
        "broken",
    )
    assert (draft.slot("a:0"), draft.slot("c:0"), draft.world.phase) == (Slot("ready", 1, 5.0), None, "forming")
    now = draft.membership
    assert {worker: slot.state for worker, slot in now.slots.items()} == {"a:0": "ready", "b:0": "starting"}
    assert now.world == draft.world


def test_a_job_starts_when_enough_workers_are_ready():
    stage = training("a:1")
    assert stage.running == []
    stage.handle(hosts("a:1", "b:1"))
    stage.settle(5)
    assert stage.running == ["a:0", "b:0"]


def test_a_crashed_worker_comes_back_in_its_slot_and_the_others_train_meanwhile():
    stage = training("a:2")
    stage.exit("a:1")
    stage.move_on("a:0")
    stage.move_on("a:0")
    assert stage.running == ["a:0"]
    stage.settle(5)
    assert stage.running == ["a:0", "a:1"]
    assert stage.puppets["a:1"].incarnation == 2


def test_a_worker_that_ends_early_without_an_error_is_replaced():
    """Its script called ``sys.exit(0)``, say: the training is not complete."""
    stage = training("a:2")
    stage.exit("a:1", clean=True)
    stage.settle(10)
    assert stage.end is None
    assert stage.running == ["a:0", "a:1"]
    assert stage.puppets["a:1"].incarnation == 2


def test_ranks_follow_the_order_in_which_hosts_are_listed():
    stage = training("b:2", "a:1", "c:1")
    assert stage.membership.world.members == ("b:0", "b:1", "a:0", "c:0")


def test_the_pause_before_a_restart_doubles_and_starts_small_again_after_a_steady_run():
    stage = training("a:2", rules=replace(RULES, host_failures=100))
    pauses = []
    for run_s in (0, 0, 0, 100):
        stage.settle(run_s)
        stage.exit("a:1")
        left_s = stage.now_s
        while "a:1" not in stage.puppets:
            stage.now_s += 0.25
            stage.handle(events.Tick())
        pauses.append(stage.now_s - left_s)
        stage.settle(5)
    assert pauses == [1, 2, 4, 1]


def test_a_host_that_keeps_failing_is_set_aside_and_comes_back_after_its_cooldown():
    stage = training("a:1", "b:1")
    for _ in range(3):
        stage.exit("b:0")
        stage.settle(10)
    assert stage.running == ["a:0"]
    stage.settle(60)
    assert stage.running == ["a:0", "b:0"]


def test_whoever_is_well_on_a_host_that_is_set_aside_stays():
    stage = training("a:2", rules=replace(RULES, min_np=2))
    step = stage.step
    for _ in range(3):
        stage.exit("a:1")
        stage.settle(10)
    assert list(stage.puppets) == ["a:0"], "the other slot gets no new worker for a while"
    assert stage.puppets["a:0"].state == "ready"
    stage.settle(60)
    assert stage.running == ["a:0", "a:1"]
    assert stage.step > step


def test_the_others_do_not_wait_for_the_end_of_a_process_whose_script_has_failed():
    stage = training("a:2", "b:1")
    stage.fail("b:0", 7, "ValueError: bad")
    stage.be_ready("a:0")
    stage.be_ready("a:1")
    assert stage.membership.world.members == ("a:0", "a:1")
    assert stage.puppets["b:0"].state == "failing", "it still ends"
    stage.exit("b:0")
    stage.settle(10)
    assert len(stage.running) == 3


def test_a_process_that_does_not_end_after_its_error_is_ended():
    stage = training("a:2", "b:1")
    stage.fail("b:0", 7, "ValueError: bad")
    stage.now_s += RULES.shutdown_timeout_s + 1
    stage.handle(events.Tick())
    assert stage.puppets["b:0"].state == "dying"


def test_an_error_that_those_who_are_left_meet_as_well_ends_the_job():
    stage = training("a:2")
    stage.fail("a:1", 7, "ValueError: bad")
    stage.be_ready("a:0")
    stage.form("a:0")
    stage.fail("a:0", 7, "ValueError: bad")
    stage.exit("a:1")
    stage.exit("a:0")
    assert stage.end is not None
    assert stage.end.reason == "every worker failed at step 7: ValueError: bad"


def test_an_error_of_every_worker_at_the_same_step_ends_the_job():
    stage = training("a:2")
    for worker in ("a:0", "a:1"):
        stage.fail(worker, 7, "ValueError: bad")
    stage.exit("a:0")
    assert stage.end is None
    stage.exit("a:1")
    assert stage.end is not None
    assert (stage.end.code, stage.end.reason) == (1, "every worker failed at step 7: ValueError: bad")


def test_an_error_of_one_worker_again_and_again_at_the_same_step_ends_the_job():
    stage = training("a:2", "b:1")
    for _ in range(3):
        assert stage.end is None
        stage.fail("b:0", 7, "ValueError: bad")
        stage.exit("b:0")
        stage.settle(10)
    assert stage.end is not None
    assert "failed 3 times in a row" in stage.end.reason


def test_a_script_that_never_gets_to_training_ends_the_job_soon():
    stage = Stage(RULES)
    stage.handle(hosts("a:2"))
    while stage.end is None and stage.now_s < 100:
        for worker in list(stage.puppets):
            stage.exit(worker)
        stage.now_s += 0.25
        stage.handle(events.Tick())
    assert stage.end is not None
    assert "before they reached the training function" in stage.end.reason
    assert stage.now_s < 10


def test_a_removed_host_leaves_at_the_next_commit():
    stage = training("a:1", "b:1")
    stage.handle(hosts("b:1"))
    assert stage.puppets["a:0"].change
    stage.settle(5)
    assert stage.running == ["b:0"]
    assert list(stage.puppets) == ["b:0"]


def test_when_all_hosts_are_replaced_the_state_is_handed_on():
    stage = training("a:1", "b:1")
    step = stage.step
    stage.handle(hosts("c:2"))
    stage.settle(20)
    assert stage.running == ["c:0", "c:1"]
    assert all(puppet.step > step for puppet in stage.puppets.values())


def test_the_state_is_handed_on_also_where_only_one_worker_is_allowed():
    stage = training("a:1", rules=Rules(num_proc=1, min_np=1, max_np=1, spares=1))
    stage.handle(hosts("c:1"))
    stage.settle(20)
    assert stage.running == ["c:0"]
    assert stage.generation <= 3


def test_a_host_that_is_unfit_gets_no_workers_and_the_job_begins_with_the_least_number_without_it():
    stage = Stage(replace(RULES, num_proc=2, min_np=1))
    stage.handle(events.HostsFound((HostSlots("a", 1), HostSlots("b", 1)), failed_preflight=("b",)))
    stage.settle(5)
    assert stage.running == ["a:0"]
    assert list(stage.puppets) == ["a:0"]
    stage.handle(hosts("a:1", "b:1"))
    stage.settle(5)
    assert stage.running == ["a:0", "b:0"]


def test_below_the_least_number_survivors_wait_and_newcomers_revive_the_job():
    stage = training("a:1", "b:1", rules=replace(RULES, min_np=2))
    stage.handle(hosts("a:1"))
    stage.exit("b:0")
    stage.settle(60)
    assert stage.running == []
    assert stage.puppets["a:0"].state == "ready"
    stage.handle(hosts("a:1", "c:1"))
    stage.settle(10)
    assert stage.running == ["a:0", "c:0"]


def test_below_the_least_number_for_too_long_ends_the_job():
    stage = training("a:1", "b:1", rules=replace(RULES, min_np=2, elastic_timeout_s=60))
    stage.handle(hosts("a:1"))
    stage.exit("b:0")
    stage.settle(100)
    assert stage.end is not None
    assert stage.end.code == 1
    assert "--elastic-timeout" in stage.end.reason


def test_a_spare_takes_the_place_of_a_lost_worker_at_once():
    stage = training("a:1", "b:1", "c:1", rules=replace(RULES, max_np=2, spares=1))
    assert stage.running == ["a:0", "b:0"]
    stage.exit("b:0")
    for _ in range(3):
        for worker in ("a:0", "c:0"):
            stage.move_on(worker)
    assert stage.running == ["a:0", "c:0"]


def test_a_worker_that_stays_in_a_broken_world_is_ended():
    stage = training("a:2", "b:1")
    stage.exit("b:0")
    stage.be_ready("a:0")
    stage.now_s += 61
    stage.handle(events.Tick())
    assert stage.puppets["a:1"].state == "dying"
    stage.settle(10)
    assert "a:0" in stage.running


def test_a_silent_worker_is_ended_and_the_others_go_on():
    stage = training("a:2")
    stage.handle(events.Lost("a:1", 1, "it said nothing for 3 s"))
    assert stage.puppets["a:1"].state == "dying"
    stage.move_on("a:0")
    stage.move_on("a:0")
    assert stage.running == ["a:0"]


def test_a_job_ends_well_when_all_are_done_even_if_one_is_killed_then():
    stage = training("a:2", "b:1")
    for worker in ("a:0", "a:1"):
        stage.handle(events.Done(worker, 1))
    stage.exit("b:0")
    for worker in ("a:0", "a:1"):
        stage.exit(worker, clean=True)
    stage.settle(1)
    assert stage.end is not None
    assert (stage.end.code, stage.end.reason) == (0, "")


def test_a_worker_that_fails_after_the_training_fails_the_job():
    stage = training("a:2")
    stage.handle(events.Done("a:0", 1))
    stage.exit("a:0")
    assert stage.end is not None
    assert stage.end.code == 1


def test_the_reset_limit_ends_the_job():
    stage = training("a:2", rules=replace(RULES, reset_limit=1, host_failures=100))
    stage.exit("a:1")
    stage.settle(10)  # one world without it, one with it again
    assert stage.end is not None
    assert "--reset-limit" in stage.end.reason


@pytest.mark.parametrize("asked", [False, True], ids=["running", "changing"])
def test_a_deadlock_ends_the_job_whose_next_world_would_come_to_the_same_place(asked):
    stage = training("a:2")
    stage.handle(events.Deadlocked(stage.generation - 1, "it is of a world before"))
    assert stage.end is None
    if asked:
        stage.handle(events.DrainRequested("a:0", 30.0))
    stage.handle(events.Deadlocked(stage.generation, "they wait for each other"))
    assert stage.end == events.End(1, "they wait for each other")


def test_a_world_that_is_broken_already_is_not_deadlocked():
    stage = training("a:2")
    stage.exit("a:1")
    stage.handle(events.Deadlocked(stage.generation, "they waited for each other"))
    assert stage.end is None


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> Path:
    """Where a history that fails is kept."""
    return tmp_path_factory.mktemp("failures")


@settings(max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_what_always_holds_holds_and_the_job_recovers(seed, failures):
    check_random_history(seed, strikes=250, failures=failures)


def test_two_hundred_thousand_events_break_nothing(failures):
    events = seed = 0
    while events < 200_000:
        events += check_random_history(seed, strikes=400, failures=failures)
        seed += 1


def check_random_history(seed: int, strikes: int, failures: Path) -> int:
    """Strike at random, then let everybody be in good health: the job has to end or to train with all it may have."""
    chance = random.Random(seed)
    stage = random_stage(chance)
    with kept_if_it_fails(stage, failures / f"seed-{seed}.jsonl"):
        play_at_random(stage, chance, strikes)
        if stage.end is None:
            stage.settle(300)
        if stage.end is None:
            able = len([worker for worker in stage.membership.wanted(stage.now_s) if worker in stage.puppets])
            needed = stage.rules.min_np if stage.generation else stage.rules.num_proc
            if able >= needed:
                assert len(stage.running) >= min(able, stage.rules.max_np)
    return len(stage.lived)


workers = st.sampled_from(["a:0", "a:1", "b:0", "?"])
incarnations = st.integers(0, 3)
anything = st.one_of(
    st.builds(events.Ready, workers, incarnations, st.integers(-1, 9)),
    st.builds(events.Formed, workers, incarnations, st.integers(0, 4)),
    st.builds(events.Raised, workers, incarnations, st.integers(0, 3), st.sampled_from("xy")),
    st.builds(events.Done, workers, incarnations),
    st.builds(events.Exited, workers, incarnations, st.booleans(), st.just("?")),
    st.builds(events.Lost, workers, incarnations, st.just("?")),
    st.builds(events.Deadlocked, st.integers(0, 4), st.just("?")),
    st.builds(events.DrainRequested, st.sampled_from(["a", "b", "a:0", "nowhere"]), st.floats(0, 100)),
    st.builds(lambda a, b: hosts(f"a:{a}", f"b:{b}"), st.integers(1, 2), st.integers(1, 2)),
    st.just(events.HostsFound(())),
    st.just(events.Tick()),
)


@settings(max_examples=200)
@given(history=st.lists(st.tuples(anything, st.floats(0, 100)), min_size=1, max_size=60))
def test_anything_is_accepted_in_any_state_and_can_be_replayed(history, failures):
    membership, now_s = begin(RULES, 0), 0.0
    path, lived = failures / "anything.jsonl", []
    with path.open("w") as file:
        recorder = Recorder(file, membership)
        for event, pause_s in history:
            now_s += pause_s
            membership, actions = recorder.transition(membership, event, now_s)
            lived.append(Decision(now_s, event, actions, membership, actions))
        recorder.flush()
    check_replay(lived, path)


@given(anything)
def test_an_event_survives_being_written_down(event):
    assert events.event_from_json(json.loads(json.dumps(events.to_json(event)))) == event
