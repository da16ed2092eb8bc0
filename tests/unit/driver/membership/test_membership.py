"""Who is a member, through histories told and histories left to chance."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fake_workers import FakeJob, check_replay, kept_if_it_fails, random_job, run_at_random
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.history import Decision, Recorder
from edl_hvd.driver.membership.state import LIVE, Rules, Slot, begin, host_of, with_changes
from edl_hvd.hosts import HostSlots

RULES = Rules(num_proc=2, min_np=1, max_np=4)


def hosts(*entries: str) -> events.HostsFound:
    return events.HostsFound(tuple(HostSlots(entry[0], int(entry[2])) for entry in entries))


def training(*entries: str, rules: Rules = RULES) -> FakeJob:
    """A job that trains on these hosts."""
    job = FakeJob(rules)
    job.handle(hosts(*entries))
    job.settle(5)
    return job


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


@pytest.mark.parametrize("seed", range(40))
def test_what_a_membership_keeps_of_the_one_before_is_what_it_would_find_itself(seed: int) -> None:
    chance = random.Random(seed)
    job = random_job(chance)
    run_at_random(job, chance, 150)
    for decision in job.lived:
        kept, fresh = decision.membership, replace(decision.membership)
        assert kept == fresh
        for states in (("empty",), *((state,) for state in LIVE), LIVE, ("member", "ready")):
            assert kept.having(*states) == fresh.having(*states) == [
                worker for worker, slot in kept.slots.items() if slot.state in states
            ]  # fmt: skip
        assert kept.wanted(decision.at_s) == fresh.wanted(decision.at_s)
        assert kept.listed_hosts == {entry.host for entry in kept.hosts}
        assert kept.world.hosts == {host_of(worker) for worker in kept.world.members}


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="a slot has no such fields as sice_s"):
        with_changes(Slot(), {"sice_s": 1.0})
    with pytest.raises(TypeError, match="a membership has no such fields as host"):
        begin(RULES, 0.0).changed({"host": ()})


def test_a_job_starts_when_enough_workers_are_ready():
    job = training("a:1")
    assert job.running == []
    job.handle(hosts("a:1", "b:1"))
    job.settle(5)
    assert job.running == ["a:0", "b:0"]


def test_a_crashed_worker_comes_back_in_its_slot_and_the_others_train_meanwhile():
    job = training("a:2")
    job.exit("a:1")
    job.move_on("a:0")
    job.move_on("a:0")
    assert job.running == ["a:0"]
    job.settle(5)
    assert job.running == ["a:0", "a:1"]
    assert job.workers["a:1"].incarnation == 2


def test_a_worker_that_ends_early_without_an_error_is_replaced():
    """Its script called ``sys.exit(0)``, say: the training is not complete."""
    job = training("a:2")
    job.exit("a:1", clean=True)
    job.settle(10)
    assert job.end is None
    assert job.running == ["a:0", "a:1"]
    assert job.workers["a:1"].incarnation == 2


def test_ranks_follow_the_order_in_which_hosts_are_listed():
    job = training("b:2", "a:1", "c:1")
    assert job.membership.world.members == ("b:0", "b:1", "a:0", "c:0")


def test_the_pause_before_a_restart_doubles_and_starts_small_again_after_a_steady_run():
    job = training("a:2", rules=replace(RULES, host_failures=100))
    pauses = []
    for run_s in (0, 0, 0, 100):
        job.settle(run_s)
        job.exit("a:1")
        left_s = job.now_s
        while "a:1" not in job.workers:
            job.now_s += 0.25
            job.handle(events.Tick())
        pauses.append(job.now_s - left_s)
        job.settle(5)
    assert pauses == [1, 2, 4, 1]


def test_a_host_that_keeps_failing_is_set_aside_and_comes_back_after_its_cooldown():
    job = training("a:1", "b:1")
    for _ in range(3):
        job.exit("b:0")
        job.settle(10)
    assert job.running == ["a:0"]
    job.settle(60)
    assert job.running == ["a:0", "b:0"]


def test_whoever_is_well_on_a_host_that_is_set_aside_stays():
    job = training("a:2", rules=replace(RULES, min_np=2))
    step = job.step
    for _ in range(3):
        job.exit("a:1")
        job.settle(10)
    assert list(job.workers) == ["a:0"], "the other slot gets no new worker for a while"
    assert job.workers["a:0"].state == "ready"
    job.settle(60)
    assert job.running == ["a:0", "a:1"]
    assert job.step > step


def test_the_others_do_not_wait_for_the_end_of_a_process_whose_script_has_failed():
    job = training("a:2", "b:1")
    job.fail("b:0", 7, "ValueError: bad")
    job.be_ready("a:0")
    job.be_ready("a:1")
    assert job.membership.world.members == ("a:0", "a:1")
    assert job.workers["b:0"].state == "failing", "it still ends"
    job.exit("b:0")
    job.settle(10)
    assert len(job.running) == 3


def test_a_process_that_does_not_end_after_its_error_is_ended():
    job = training("a:2", "b:1")
    job.fail("b:0", 7, "ValueError: bad")
    job.now_s += RULES.shutdown_timeout_s + 1
    job.handle(events.Tick())
    assert job.workers["b:0"].state == "dying"


def test_an_error_that_those_who_are_left_meet_as_well_ends_the_job():
    job = training("a:2")
    job.fail("a:1", 7, "ValueError: bad")
    job.be_ready("a:0")
    job.form("a:0")
    job.fail("a:0", 7, "ValueError: bad")
    job.exit("a:1")
    job.exit("a:0")
    assert job.end is not None
    assert job.end.reason == "every worker failed at step 7: ValueError: bad"


def test_an_error_of_every_worker_at_the_same_step_ends_the_job():
    job = training("a:2")
    for worker in ("a:0", "a:1"):
        job.fail(worker, 7, "ValueError: bad")
    job.exit("a:0")
    assert job.end is None
    job.exit("a:1")
    assert job.end is not None
    assert (job.end.code, job.end.reason) == (1, "every worker failed at step 7: ValueError: bad")


def test_an_error_of_one_worker_again_and_again_at_the_same_step_ends_the_job():
    job = training("a:2", "b:1")
    for _ in range(3):
        assert job.end is None
        job.fail("b:0", 7, "ValueError: bad")
        job.exit("b:0")
        job.settle(10)
    assert job.end is not None
    assert "failed 3 times in a row" in job.end.reason


LOST = "ProgressLostError: the job had reached step 9, but every worker that held its state is gone"


def fail_and_start_again(job: FakeJob, worker: str, step: int, error: str) -> None:
    job.fail(worker, step, error)
    job.exit(worker)
    job.settle(5)


@pytest.mark.parametrize("entry", ["a:1", "a:2"])
def test_an_error_of_the_script_that_loses_the_training_ends_the_job_and_is_its_reason(entry):
    """Without a pause: another try could only find again that nobody has the state."""
    job = training(entry, rules=replace(RULES, num_proc=1))
    workers = list(job.running)
    for worker in workers:
        job.fail(worker, 9, f"ValueError: bad label of {worker}")
    for worker in workers:
        job.exit(worker)
    job.settle(5)
    assert (job.end, job.running) == (None, workers)
    for worker in workers:
        job.fail(worker, 0, LOST)
    job.exit(workers[0])
    assert job.end is not None
    assert job.end.code == 1
    assert job.end.reason.startswith(f"step 9 failed: ValueError: bad label of {workers[-1]}; no worker and no checkp")


def test_a_lost_training_is_looked_for_again_while_another_worker_may_hold_it():
    job = training("a:2")
    fail_and_start_again(job, "a:0", 9, "ValueError: bad")
    job.fail("a:0", 0, LOST)
    job.exit("a:0")
    assert job.end is None


def test_an_error_that_was_long_ago_is_not_the_reason_for_lost_training():
    job = training("a:1", rules=replace(RULES, num_proc=1))
    fail_and_start_again(job, "a:0", 9, "ValueError: bad")
    job.exit("a:0")
    job.settle(5)
    job.fail("a:0", 0, LOST)
    job.exit("a:0")
    assert job.end is None


def test_a_script_that_never_gets_to_training_ends_the_job_soon():
    job = FakeJob(RULES)
    job.handle(hosts("a:2"))
    while job.end is None and job.now_s < 100:
        for worker in list(job.workers):
            job.exit(worker)
        job.now_s += 0.25
        job.handle(events.Tick())
    assert job.end is not None
    assert "before they reached the training function" in job.end.reason
    assert job.now_s < 10


def test_a_removed_host_leaves_at_the_next_commit():
    job = training("a:1", "b:1")
    job.handle(hosts("b:1"))
    assert job.workers["a:0"].change
    job.settle(5)
    assert job.running == ["b:0"]
    assert list(job.workers) == ["b:0"]


def test_when_all_hosts_are_replaced_the_state_is_handed_on():
    job = training("a:1", "b:1")
    step = job.step
    job.handle(hosts("c:2"))
    job.settle(20)
    assert job.running == ["c:0", "c:1"]
    assert all(fake.step > step for fake in job.workers.values())


def test_the_state_is_handed_on_also_where_only_one_worker_is_allowed():
    job = training("a:1", rules=Rules(num_proc=1, min_np=1, max_np=1, spares=1))
    job.handle(hosts("c:1"))
    job.settle(20)
    assert job.running == ["c:0"]
    assert job.generation <= 3


def test_a_host_that_is_unfit_gets_no_workers_and_the_job_begins_with_the_least_number_without_it():
    job = FakeJob(replace(RULES, num_proc=2, min_np=1))
    job.handle(events.HostsFound((HostSlots("a", 1), HostSlots("b", 1)), failed_preflight=("b",)))
    job.settle(5)
    assert job.running == ["a:0"]
    assert list(job.workers) == ["a:0"]
    job.handle(hosts("a:1", "b:1"))
    job.settle(5)
    assert job.running == ["a:0", "b:0"]


def test_below_the_least_number_survivors_wait_and_newcomers_revive_the_job():
    job = training("a:1", "b:1", rules=replace(RULES, min_np=2))
    job.handle(hosts("a:1"))
    job.exit("b:0")
    job.settle(60)
    assert job.running == []
    assert job.workers["a:0"].state == "ready"
    job.handle(hosts("a:1", "c:1"))
    job.settle(10)
    assert job.running == ["a:0", "c:0"]


def test_below_the_least_number_for_too_long_ends_the_job():
    job = training("a:1", "b:1", rules=replace(RULES, min_np=2, elastic_timeout_s=60))
    job.handle(hosts("a:1"))
    job.exit("b:0")
    job.settle(100)
    assert job.end is not None
    assert job.end.code == 1
    assert "--elastic-timeout" in job.end.reason


def test_a_spare_takes_the_place_of_a_lost_worker_at_once():
    job = training("a:1", "b:1", "c:1", rules=replace(RULES, max_np=2, spares=1))
    assert job.running == ["a:0", "b:0"]
    job.exit("b:0")
    for _ in range(3):
        for worker in ("a:0", "c:0"):
            job.move_on(worker)
    assert job.running == ["a:0", "c:0"]


def test_a_worker_that_stays_in_a_broken_world_is_ended():
    job = training("a:2", "b:1")
    job.exit("b:0")
    job.be_ready("a:0")
    job.now_s += 61
    job.handle(events.Tick())
    assert job.workers["a:1"].state == "dying"
    job.settle(10)
    assert "a:0" in job.running


def test_a_silent_worker_is_ended_and_the_others_go_on():
    job = training("a:2")
    job.handle(events.Lost("a:1", 1, "it said nothing for 3 s"))
    assert job.workers["a:1"].state == "dying"
    job.move_on("a:0")
    job.move_on("a:0")
    assert job.running == ["a:0"]


def test_the_others_go_on_before_the_memory_of_a_killed_process_has_been_freed():
    job = training("a:2")
    job.begin_to_end("a:1")
    assert events.NotifyPeerLost(1, "a:1") in job.lived[-1].actions
    job.move_on("a:0")
    job.move_on("a:0")
    assert job.running == ["a:0"]
    assert "a:1" in job.workers, "its slot is free when it has ended"
    job.exit("a:1")
    assert job.membership.slots["a:1"].not_before_s == job.now_s + RULES.backoff_s, "a crash as any other"
    job.settle(5)
    assert sorted(job.running) == ["a:0", "a:1"]


def test_a_worker_that_is_ready_after_all_has_only_lost_a_connection():
    job = training("a:2")
    job.begin_to_end("a:1")
    job.move_on("a:0")
    job.workers["a:1"].step = 0
    job.be_ready("a:1")
    job.settle(5)
    assert sorted(job.running) == ["a:0", "a:1"]
    assert job.workers["a:1"].incarnation == 1


def test_a_process_that_never_comes_to_its_end_is_killed():
    job = training("a:2")
    job.begin_to_end("a:1")
    job.now_s += RULES.shutdown_timeout_s + 1
    job.handle(events.Tick())
    assert events.Kill("a:1", 1, "it did not end within 600 s of the end of its first thread") in job.lived[-1].actions


def test_a_process_that_ends_after_its_training_disturbs_nobody():
    job = training("a:2")
    job.handle(events.Done("a:1", 1))
    job.handle(events.Exiting("a:1", 1))
    assert job.lived[-1].actions == ()
    assert job.membership.slots["a:1"].state == "member"


def test_a_newcomer_that_begins_to_end_is_no_member_of_the_next_world():
    job = FakeJob(RULES)
    job.handle(hosts("a:2"))
    job.be_ready("a:0")
    job.begin_to_end("a:0")
    job.be_ready("a:1")
    job.now_s += 1
    job.handle(events.Tick())
    assert "a:0" not in job.membership.world.members


def test_a_job_ends_well_when_all_are_done_even_if_one_is_killed_then():
    job = training("a:2", "b:1")
    for worker in ("a:0", "a:1"):
        job.handle(events.Done(worker, 1))
    job.exit("b:0")
    for worker in ("a:0", "a:1"):
        job.exit(worker, clean=True)
    job.settle(1)
    assert job.end is not None
    assert (job.end.code, job.end.reason) == (0, "")


def test_a_worker_that_fails_after_the_training_fails_the_job():
    job = training("a:2")
    job.handle(events.Done("a:0", 1))
    job.exit("a:0")
    assert job.end is not None
    assert job.end.code == 1


def test_the_reset_limit_ends_the_job():
    job = training("a:2", rules=replace(RULES, reset_limit=1, host_failures=100))
    job.exit("a:1")
    job.settle(10)  # one world without it, one with it again
    assert job.end is not None
    assert "--reset-limit" in job.end.reason


@pytest.mark.parametrize("asked", [False, True], ids=["running", "changing"])
def test_a_deadlock_ends_the_job_whose_next_world_would_come_to_the_same_place(asked):
    job = training("a:2")
    job.handle(events.Deadlocked(job.generation - 1, "it is of a world before"))
    assert job.end is None
    if asked:
        job.handle(events.DrainRequested("a:0", 30.0))
    job.handle(events.Deadlocked(job.generation, "they wait for each other"))
    assert job.end == events.End(1, "they wait for each other")


def test_a_world_that_is_broken_already_is_not_deadlocked():
    job = training("a:2")
    job.exit("a:1")
    job.handle(events.Deadlocked(job.generation, "they waited for each other"))
    assert job.end is None


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> Path:
    """Where a history that fails is kept."""
    return tmp_path_factory.mktemp("failures")


@settings(max_examples=60, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_what_always_holds_holds_and_the_job_recovers(seed, failures):
    check_random_history(seed, injections=250, failures=failures)


def test_two_hundred_thousand_events_break_nothing(failures):
    events = seed = 0
    while events < 200_000:
        events += check_random_history(seed, injections=400, failures=failures)
        seed += 1


def check_random_history(seed: int, injections: int, failures: Path) -> int:
    """Strike at random, then let everybody be in good health: the job has to end or to train with all it may have."""
    chance = random.Random(seed)
    job = random_job(chance)
    with kept_if_it_fails(job, failures / f"seed-{seed}.jsonl"):
        run_at_random(job, chance, injections)
        if job.end is None:
            job.settle(300)
        if job.end is None:
            able = len([worker for worker in job.membership.wanted(job.now_s) if worker in job.workers])
            needed = job.rules.min_np if job.generation else job.rules.num_proc
            if able >= needed:
                assert len(job.running) >= min(able, job.rules.max_np)
    return len(job.lived)


workers = st.sampled_from(["a:0", "a:1", "b:0", "?"])
incarnations = st.integers(0, 3)
anything = st.one_of(
    st.builds(events.Ready, workers, incarnations, st.integers(-1, 9)),
    st.builds(events.Formed, workers, incarnations, st.integers(0, 4)),
    st.builds(events.Raised, workers, incarnations, st.integers(0, 3), st.sampled_from("xy")),
    st.builds(events.Done, workers, incarnations),
    st.builds(events.Exiting, workers, incarnations),
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


def test_a_worker_that_starts_where_nobody_lists_its_slot_any_more_ends_at_once():
    """Its slot may be another job's from now on; it used to be kept until the first world had formed."""
    job = FakeJob(RULES)
    job.handle(hosts("a:3"))
    job.handle(hosts("a:2"))
    assert {worker: fake.state for worker, fake in job.workers.items()} == {
        "a:0": "starting", "a:1": "starting", "a:2": "terminating"
    }  # fmt: skip
    job.settle(5)
    assert sorted(job.running) == ["a:0", "a:1"]
