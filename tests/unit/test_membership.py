"""Who is a member, through histories told and histories left to chance."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppets import HOSTS, Stage, strike

from edl_hvd.driver.happenings import (
    Done,
    DrainAsked,
    Exited,
    Formed,
    HostsFound,
    Lost,
    Raised,
    Ready,
    Tick,
    from_json,
    to_json,
)
from edl_hvd.driver.membership import Rules, advance, begin
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

RULES = Rules(num_proc=2, min_np=1, max_np=4)


def hosts(*entries: str) -> HostsFound:
    return HostsFound(tuple(HostSlots(entry[0], int(entry[2])) for entry in entries))


def training(*entries: str, rules: Rules = RULES) -> Stage:
    """A job that trains on these hosts."""
    stage = Stage(rules)
    stage.happen(hosts(*entries))
    stage.settle(5)
    return stage


def test_a_job_starts_when_enough_workers_are_ready():
    stage = training("a:1")
    assert stage.running == []
    stage.happen(hosts("a:1", "b:1"))
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
    assert stage.puppets["a:1"].life == 2


def test_the_pause_before_a_restart_doubles_and_starts_small_again_after_a_steady_run():
    stage = training("a:2", rules=replace(RULES, host_failures=100))
    pauses = []
    for run_s in (0, 0, 0, 100):
        stage.settle(run_s)
        stage.exit("a:1")
        left_s = stage.now_s
        while "a:1" not in stage.puppets:
            stage.now_s += 0.25
            stage.happen(Tick())
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


def test_an_error_of_every_worker_at_the_same_step_ends_the_job():
    stage = training("a:2")
    for worker in ("a:0", "a:1"):
        stage.happen(Raised(worker, stage.puppets[worker].life, 7, "ValueError: bad"))
    stage.exit("a:0")
    assert stage.end is None
    stage.exit("a:1")
    assert stage.end is not None
    assert (stage.end.code, stage.end.reason) == (1, "every worker failed at step 7: ValueError: bad")


def test_an_error_of_one_worker_again_and_again_at_the_same_step_ends_the_job():
    stage = training("a:2", "b:1")
    for _ in range(3):
        assert stage.end is None
        stage.happen(Raised("b:0", stage.puppets["b:0"].life, 7, "ValueError: bad"))
        stage.exit("b:0")
        stage.settle(10)
    assert stage.end is not None
    assert "failed 3 times in a row" in stage.end.reason


def test_a_script_that_never_gets_to_training_ends_the_job_soon():
    stage = Stage(RULES)
    stage.happen(hosts("a:2"))
    while stage.end is None and stage.now_s < 100:
        for worker in list(stage.puppets):
            stage.exit(worker)
        stage.now_s += 0.25
        stage.happen(Tick())
    assert stage.end is not None
    assert "before they reached the training function" in stage.end.reason
    assert stage.now_s < 10


def test_newcomers_are_collected_and_join_together():
    stage = training("a:2")
    generation = stage.generation
    stage.happen(hosts("a:2", "b:2"))
    stage.be_ready("b:0")
    stage.now_s += 0.3
    stage.be_ready("b:1")
    stage.settle(5)
    assert stage.generation == generation + 1
    assert len(stage.running) == 4


def test_a_removed_host_leaves_at_the_next_commit():
    stage = training("a:1", "b:1")
    stage.happen(hosts("b:1"))
    assert stage.puppets["a:0"].change
    stage.settle(5)
    assert stage.running == ["b:0"]
    assert list(stage.puppets) == ["b:0"]


def test_when_all_hosts_are_replaced_the_state_is_handed_on():
    stage = training("a:1", "b:1")
    step = stage.step
    stage.happen(hosts("c:2"))
    stage.settle(20)
    assert stage.running == ["c:0", "c:1"]
    assert all(puppet.step > step for puppet in stage.puppets.values())


def test_the_state_is_handed_on_also_where_only_one_worker_is_allowed():
    stage = training("a:1", rules=Rules(num_proc=1, min_np=1, max_np=1, spares=1))
    stage.happen(hosts("c:1"))
    stage.settle(20)
    assert stage.running == ["c:0"]
    assert stage.generation <= 3


def test_when_every_host_is_drained_one_worker_saves_and_the_job_asks_to_be_run_again():
    stage = training("a:1", "b:1")
    for host in "ab":
        stage.happen(DrainAsked(host, 120))
    saved = [line for line in stage.history if "Dismiss" in line]
    stage.settle(30)
    assert stage.end is not None
    assert stage.end.code == 75
    assert saved == []


def test_below_the_least_number_survivors_wait_and_newcomers_revive_the_job():
    stage = training("a:1", "b:1", rules=replace(RULES, min_np=2))
    stage.happen(hosts("a:1"))
    stage.exit("b:0")
    stage.settle(60)
    assert stage.running == []
    assert stage.puppets["a:0"].state == "ready"
    stage.happen(hosts("a:1", "c:1"))
    stage.settle(10)
    assert stage.running == ["a:0", "c:0"]


def test_below_the_least_number_for_too_long_ends_the_job():
    stage = training("a:1", "b:1", rules=replace(RULES, min_np=2, elastic_timeout_s=60))
    stage.happen(hosts("a:1"))
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
    stage.happen(Tick())
    assert stage.puppets["a:1"].state == "dying"
    stage.settle(10)
    assert "a:0" in stage.running


def test_a_silent_worker_is_ended_and_the_others_go_on():
    stage = training("a:2")
    stage.happen(Lost("a:1", 1, "it said nothing for 3 s"))
    assert stage.puppets["a:1"].state == "dying"
    stage.move_on("a:0")
    stage.move_on("a:0")
    assert stage.running == ["a:0"]


def test_a_job_ends_well_when_all_are_done_even_if_one_is_killed_then():
    stage = training("a:2", "b:1")
    for worker in ("a:0", "a:1"):
        stage.happen(Done(worker, 1))
    stage.exit("b:0")
    for worker in ("a:0", "a:1"):
        stage.exit(worker, clean=True)
    stage.settle(1)
    assert stage.end is not None
    assert (stage.end.code, stage.end.reason) == (0, "")


def test_a_worker_that_fails_after_the_training_fails_the_job():
    stage = training("a:2")
    stage.happen(Done("a:0", 1))
    stage.exit("a:0")
    assert stage.end is not None
    assert stage.end.code == 1


def test_the_reset_limit_ends_the_job():
    stage = training("a:2", rules=replace(RULES, reset_limit=1, host_failures=100))
    stage.exit("a:1")
    stage.settle(10)  # one world without it, one with it again
    assert stage.end is not None
    assert "--reset-limit" in stage.end.reason


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_whatever_happens_what_always_holds_holds_and_the_job_recovers(seed):
    check_random_history(seed, strikes=250)


def test_two_hundred_thousand_happenings_break_nothing():
    events = seed = 0
    while events < 200_000:
        events += check_random_history(seed, strikes=400)
        seed += 1


def check_random_history(seed: int, strikes: int) -> int:
    """Strike at random, then let everybody be in good health: the job has to end or to train with all it may have."""
    chance = random.Random(seed)
    num_proc = chance.randint(1, 3)
    rules = Rules(num_proc, chance.randint(1, num_proc), chance.randint(num_proc, 5), spares=chance.randint(0, 1))
    stage = Stage(replace(rules, host_failures=5, elastic_timeout_s=3000, same_error_limit=5))
    try:
        stage.happen(HostsFound(tuple(HostSlots(host, 2) for host in HOSTS)))
        for _ in range(strikes):
            if stage.end is None:
                strike(stage, chance)
        stage.happen(HostsFound(tuple(HostSlots(host, 2) for host in HOSTS)))
        if stage.end is None:
            stage.settle(300)
        if stage.end is None:
            able = len([worker for worker in stage.membership.wanted(stage.now_s) if worker in stage.puppets])
            needed = rules.min_np if stage.generation else rules.num_proc
            if able >= needed:
                assert len(stage.running) >= min(able, rules.max_np)
    except BaseException:
        print("\n".join(stage.history))  # a script for replay
        raise
    return stage.events


workers = st.sampled_from(["a:0", "a:1", "b:0", "?"])
lives = st.integers(0, 3)
anything = st.one_of(
    st.builds(Ready, workers, lives, st.integers(-1, 9)),
    st.builds(Formed, workers, lives, st.integers(0, 4)),
    st.builds(Raised, workers, lives, st.integers(0, 3), st.sampled_from("xy")),
    st.builds(Done, workers, lives),
    st.builds(Exited, workers, lives, st.booleans(), st.just("?")),
    st.builds(Lost, workers, lives, st.just("?")),
    st.builds(DrainAsked, st.sampled_from(["a", "b", "a:0", "nowhere"]), st.floats(0, 100)),
    st.builds(lambda a, b: hosts(f"a:{a}", f"b:{b}"), st.integers(1, 2), st.integers(1, 2)),
    st.just(HostsFound(())),
    st.just(Tick()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(anything, st.floats(0, 100)), max_size=60))
def test_anything_is_accepted_in_any_state(history):
    membership, now_s = begin(RULES, 0), 0.0
    for happening, pause_s in history:
        now_s += pause_s
        membership, _ = advance(membership, happening, now_s)


@given(anything)
def test_a_happening_survives_being_written_down(happening):
    assert from_json(json.loads(json.dumps(to_json(happening)))) == happening


@pytest.mark.parametrize("line", [{}, {"what": "Magic"}, {"what": "Ready"}, {"what": "Tick", "extra": 1}])
def test_a_line_that_is_no_happening_is_refused(line):
    with pytest.raises(UsageError, match="cannot read"):
        from_json(line)
