"""The same jobs under ``edlrun``, and what stock ``horovodrun`` cannot survive."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import (
    CRASH,
    HostChange,
    Interrupt,
    Outside,
    add_host,
    crash,
    kill,
    pass_by,
    pause,
    remove_host,
    stop,
    terminate,
)
from harness import HERE, Job, Outcome
from invariants import check, check_faults, check_no_step_lost
from training import Training

from edl_hvd.driver.membership.events import End, Publish
from edl_hvd.driver.membership.history import read_history, replay

ONE_HOST = ("localhost:1",)
TWO_HOSTS = ("localhost:1", "127.0.0.1:1")
TWO_SLOTS = ("localhost:2",)
TWO_BY_TWO = ("localhost:2", "127.0.0.1:2")


def events(outcome: Outcome, kind: str) -> list[dict]:
    return [event for event in outcome.events if event["event"] == kind]


def check_record(path, outcome: Outcome) -> None:
    """A replay of the recorded history takes the very same decisions, up to the same end, and they are those seen."""
    history = read_history(path)
    decisions = list(replay(history))
    assert history.note == ""
    assert all(decision.recorded is not None for decision in decisions)
    assert [decision for decision in decisions if decision.differs] == []
    worlds = [action for decision in decisions for action in decision.actions if isinstance(action, Publish)]
    formed = [(event["generation"], event["members"]) for event in events(outcome, "world_formed")]
    assert [(world.generation, list(world.members)) for world in worlds] == formed
    assert decisions[-1].membership.end == End(outcome.exit_code)


def test_a_job_without_faults_runs_to_its_end(edlrun):
    outcome = edlrun(TWO_HOSTS)
    assert "edlrun: training starts with 2 workers" in outcome.output
    assert len(events(outcome, "world_formed")) == 1


def test_a_crashed_worker_comes_back_in_its_slot_and_the_other_trains_meanwhile(edlrun, tmp_path):
    """Stock Horovod ends the job: one failure sets the only host aside."""
    record = tmp_path / "history.jsonl"
    faults, training = kill(worker="localhost:1", step=7), Training(until_size=2)
    outcome = edlrun(TWO_SLOTS, faults, training=training, flags=("--record", str(record)))
    assert [event["size"] for event in events(outcome, "world_formed")] == [2, 1, 2]
    assert "localhost:1 lost (killed by SIGKILL) · 1 worker goes on" in outcome.output
    assert "localhost:1 joined · 2 workers go on" in outcome.output
    check_record(record, outcome)


def test_a_single_worker_keeps_its_output_in_files_over_a_crash(edlrun, tmp_path):
    """Stock Horovod trains nothing with these flags, and overwrites the output of a worker that comes back."""
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="4 steps")
    folder = tmp_path / "output"
    edlrun(ONE_HOST, crash(step=10), training=training, flags=("--output-filename", str(folder)))
    errors = (folder / "worker.localhost.0" / "stderr").read_text()
    assert CRASH in errors, "what the first life wrote is still there"


def test_one_of_four_workers_is_killed_and_the_others_go_on_at_once(edlrun):
    outcome = edlrun(TWO_BY_TWO, kill(rank=0, step=7), training=Training(until_size=4))
    assert [event["size"] for event in events(outcome, "world_formed")] == [4, 3, 4]


def test_both_workers_of_a_host_die_together_and_come_back(edlrun):
    training = Training(until_size=4)
    outcome = edlrun(TWO_BY_TWO, kill(rank=2, step=7), kill(rank=3, step=7), training=training)
    assert outcome.reports[0]["size"] == 4


def test_the_last_holder_of_the_state_dies_and_the_checkpoint_is_used(edlrun, tmp_path):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="4 steps", linger_s=0.1)
    outcome = edlrun(ONE_HOST, kill(step=10), training=training)
    [restored] = events(outcome, "restore")
    assert restored["step"] >= 4


def test_a_new_host_joins_when_it_is_warm(edlrun):
    outcome = edlrun(ONE_HOST, add_host("127.0.0.1:1", step=5), training=Training(until_size=2))
    [pause] = outcome.pauses(2)
    started = next(line["t"] for line in outcome.lines("start") if line["worker"] == "127.0.0.1:0")
    joined = next(line["t"] for line in outcome.lines("enter") if line["worker"] == "127.0.0.1:0")
    steps = [line for line in outcome.lines("step") if started < line["t"] < joined]
    assert len(steps) > 5, "the old worker trained while the new one started"
    assert pause < joined - started


def test_a_spare_takes_the_place_of_a_dead_worker(edlrun):
    hosts = (*TWO_HOSTS, "127.1:1")
    faults = (pass_by(at="ready", times=3), kill(rank=1, step=7, after=0))
    outcome = edlrun(hosts, *faults, training=Training(until_size=2), np=2, flags=("--max-np", "2", "--spares", "1"))
    before, after = [event["members"] for event in events(outcome, "world_formed")]
    assert len(set(before + after)) == 3, "no world without the spare came in between"
    assert after == [before[0], *(set(after) - set(before))]


def test_a_removed_host_leaves_and_loses_nothing(edlrun):
    outcome = edlrun(TWO_HOSTS, remove_host("127.0.0.1", step=5), training=Training(until_size=1))
    assert [event["worker"] for event in events(outcome, "worker_left")] == ["127.0.0.1:0"]
    assert events(outcome, "worker_lost") == []
    assert outcome.reports[0]["size"] == 1


def test_two_changes_within_a_second_are_both_acted_on(edlrun):
    faults = (add_host("127.0.0.1:1", step=5), add_host("127.1:1", delay_s=0.2))
    assert edlrun(ONE_HOST, *faults, training=Training(until_size=3)).reports[0]["size"] == 3


def test_all_hosts_are_replaced_at_once_and_the_state_is_handed_on(edlrun):
    """Stock Horovod ends the job: nobody is left who could sync."""
    replace = HostChange(add=("127.1:1",), drop=("localhost", "127.0.0.1"), step=5)
    outcome = edlrun(TWO_HOSTS, replace, training=Training(until_size=1))
    assert outcome.reports[0]["worker"] == "127.1:0"
    assert events(outcome, "worker_lost") == []


def test_below_the_least_number_the_survivor_waits_and_a_newcomer_revives_the_job(edlrun):
    """Stock Horovod hangs for ever (A8)."""
    faults = (remove_host("127.0.0.1", step=5), add_host("127.1:1", after=0, delay_s=3.0))
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=2), min_np=2)
    assert outcome.reports[0]["size"] == 2


def test_a_newcomer_that_dies_at_its_start_stops_nobody(edlrun):
    faults = (add_host("127.1:1", step=5), kill(worker="127.1:0", at="start"))
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=3))
    assert [event["size"] for event in events(outcome, "world_formed")] == [2, 3]


def test_a_newcomer_that_dies_before_another_has_heard_of_its_world_holds_nobody_up(edlrun):
    faults = (
        add_host("127.1:1", step=5),
        pause(2.0, at="rendezvous", worker="localhost:0", after=0),
        pause(1.0, at="rendezvous", worker="127.1:0"),
        kill(at="forming", worker="127.1:0", after=2),
    )
    outcome = edlrun(TWO_HOSTS, *faults, training=Training(until_size=3))
    assert {event["worker"] for event in events(outcome, "worker_lost")} <= {"127.1:0"}
    assert "stuck" not in outcome.output


def test_a_worker_that_dies_while_a_world_forms_costs_only_a_retry(edlrun):
    faults = (add_host("127.1:1", step=5), kill(worker="127.1:0", at="sync"))
    assert edlrun(TWO_HOSTS, *faults, training=Training(until_size=3)).reports[0]["size"] == 3


def test_a_worker_that_is_told_to_terminate_leaves_at_the_next_commit(edlrun):
    outcome = edlrun(TWO_HOSTS, terminate(worker="127.0.0.1:0", step=5), training=Training(linger_s=1.0))
    assert [event["worker"] for event in events(outcome, "worker_left")] == ["127.0.0.1:0"]
    assert outcome.reports[0]["size"] == 1


def test_a_host_of_which_the_source_says_that_it_will_go_is_left_in_time(run_job, alone, tmp_path):
    plan = tmp_path / "plan"
    plan.write_text("0 add localhost:1\n0 add 127.0.0.1:1\n")

    def announce() -> None:
        with open(plan, "a", encoding="utf-8") as file:
            file.write("0 notice 127.0.0.1 1h\n")

    program = str(Path(sys.executable).with_name("edlrun"))
    words = (
        program,
        "-np",
        "2",
        "--min-np",
        "1",
        "--drain-lead",
        "7200",
        "--discover",
        f"schedule:{plan}",
        sys.executable,
    )
    job = Job(
        hosts=TWO_HOSTS,
        faults=(Outside(announce, step=5),),
        training=Training(until_size=1),
        own_command=(*words, str(HERE / "worker_script.py")),
    )
    outcome = run_job(job)
    check(job, outcome, alone(job.training))
    assert re.search(r"127\.0\.0\.1 is to go in 3[56]\d\d s; its workers leave 3[56]\d\d s before that", outcome.output)
    assert [event["worker"] for event in events(outcome, "worker_left")] == ["127.0.0.1:0"]
    assert events(outcome, "worker_lost") == []


def test_what_cannot_be_saved_before_the_last_host_goes_is_not_begun_and_the_event_says_why(run_job, tmp_path):
    folder = str(tmp_path / "about")

    def announce() -> None:
        for host in ("localhost", "127.0.0.1"):
            words = ["drain", host, "--job", folder, "--notice", "0.001"]
            subprocess.run([Path(sys.executable).with_name("edl-hvd"), *words], check=True, stdout=subprocess.DEVNULL)

    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="2 steps", epochs=10_000)
    flags = ("--job-dir", folder)
    outcome = run_job(Job(faults=(Outside(announce, step=20),), training=training, launcher="edlrun", flags=flags))
    assert outcome.exit_code == 75
    assert outcome.left == []
    [event] = events(outcome, "emergency_checkpoint")
    assert not event["written"]
    assert re.search(r"it would take [0-9.]+ s at the speed of the last one, and 0.0 s are left", event["reason"])


def test_a_stopped_worker_is_ended_and_the_job_goes_on(edlrun):
    """Stock Horovod waits for ever (A3)."""
    outcome = edlrun(TWO_HOSTS, stop(worker="127.0.0.1:0", step=5), training=Training(until_size=2))
    assert "127.0.0.1:0 is killed: its process is stopped" in outcome.output
    assert outcome.reports[0]["size"] == 2


def test_an_error_of_every_worker_ends_the_job_with_the_first_failure(run_job):
    job = Job(faults=(crash(step=5, times=2),), launcher="edlrun")
    outcome = run_job(job)
    assert outcome.exit_code == 1
    assert "every worker failed at step 5: RuntimeError" in outcome.output
    assert "first failure: " in outcome.output
    assert len(events(outcome, "job_started")) == 2, "nobody tried again"
    assert outcome.left == []


def test_a_script_that_cannot_start_ends_the_job_soon(run_job):
    job = Job(faults=(kill(at="start", times=100),), launcher="edlrun")
    outcome = run_job(job)
    assert outcome.exit_code == 1
    assert "before they reached the training function" in outcome.output
    assert outcome.left == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_when_the_driver_goes_the_workers_save_and_a_second_run_goes_on(run_job, alone, tmp_path, signal_number):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), epochs=30, pause_s=0.05)
    job = Job(faults=(Interrupt(step=10, signal_number=signal_number),), training=training, launcher="edlrun")
    first = run_job(job, "first")
    assert first.exit_code == (75 if signal_number == signal.SIGTERM else -signal.SIGKILL)
    check_faults(job, first)
    check_no_step_lost(job, first)
    last = max(line["step"] for line in first.lines("step"))
    again = Training(checkpoint=training.checkpoint)
    job = Job(training=again, launcher="edlrun")
    second = run_job(job, "second")
    check(job, second, alone(again))
    [restored] = events(second, "restore")
    assert restored["step"] in (last, last + 1)
