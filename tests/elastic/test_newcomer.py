"""Workers join a running job, and something goes wrong meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import fails_on_stock
from faults import add_host, kill
from harness import TWO_HOSTS, Job
from invariants import check
from training import Training
from waiting import LONG_S

ONE_HOST = ("localhost:1",)
OLD, NEW = "localhost:0", "127.0.0.1:0"
LATE = add_host("127.0.0.1:1", step=5)
# Above what a test takes: nobody may need it to notice a death.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


def test_a_new_host_joins_without_changing_what_is_learned(run_job, alone):
    training = Training(until_size=2)
    job = Job(hosts=ONE_HOST, faults=(LATE,), training=training)
    outcome = run_job(job)
    check(job, outcome, alone(training))


def test_two_more_slots_on_each_host_join(run_job, alone):
    training = Training(until_size=4)
    faults = (add_host("127.0.0.1:2", step=5), add_host("localhost:2"))
    job = Job(faults=faults, training=training)
    outcome = run_job(job)
    check(job, outcome, alone(training))


@fails_on_stock("the only holder of the state dies while a newcomer syncs: training restarts at step 0 (B1)")
def test_the_last_old_worker_dies_while_a_newcomer_syncs_and_the_checkpoint_is_used(run_job, alone, engine, tmp_path):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="4 steps")
    job = Job(engine, ONE_HOST, faults=(LATE, kill(worker=OLD, at="sync", size=2)), training=training)
    outcome = run_job(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)
    # Not its first step: when the checkpoint is that of the last epoch's end, none is left to do.
    entered = next(line["step"] for line in outcome.lines("enter") if line["worker"] == NEW)
    assert entered >= 4
    assert [event["step"] for event in outcome.events if event["event"] == "restore"] == [entered]


def test_the_last_old_worker_dies_while_a_newcomer_syncs_and_no_checkpoint_covers_it(run_job):
    outcome = run_job(Job(hosts=ONE_HOST, faults=(LATE, kill(worker=OLD, at="sync", size=2))))
    assert outcome.exit_code != 0
    assert "ProgressLostError" in outcome.output
    assert not [line for line in outcome.lines("step") if line["worker"] == NEW], "trained on from nothing"
    assert outcome.left == []


@fails_on_stock("a newcomer that has not committed yet restores its initial weights (B2)")
def test_a_failure_before_a_newcomers_first_commit_returns_to_the_synced_weights(run_either, alone, engine):
    training = Training(commit_every=10, epochs=8)
    faults = (LATE, kill(worker=OLD, size=2, visit=4))
    job = Job(engine, ONE_HOST, faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@fails_on_stock("the optimizer steps with zero gradients after the weights were broadcast (B3)")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_newcomers_replica_is_identical_under_weight_decay(run_either, alone, engine, optimizer):
    training = Training(optimizer=optimizer, until_size=2)
    job = Job(engine, ONE_HOST, faults=(LATE,), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@fails_on_stock("a newcomer's scheduler is replaced by a copy that drives nothing (B6)")
def test_a_scheduler_in_the_state_drives_every_rank(run_either, alone, engine):
    training = Training(optimizer="plain", until_size=2, extra=("scheduler",))
    job = Job(engine, ONE_HOST, faults=(LATE,), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)
    rates = {(line["step"] // 6, line["lr"]) for line in outcome.lines("step")}
    assert rates == {(epoch, 0.01 * 0.5**epoch) for epoch, _ in rates}


@fails_on_stock("a dead newcomer leaves the others in Gloo's rendezvous until they abort (A5)")
@pytest.mark.parametrize("at", ["start", "rendezvous"])
def test_a_newcomer_dies_before_it_joins(run_either, alone, engine, at):
    faults = (add_host("127.1:1", step=5), kill(worker="127.1:0", at=at))
    job = Job(engine, TWO_HOSTS, faults=faults, training=Training(linger_s=0.5))
    outcome = run_either(job)
    check(job, outcome, alone(job.training) if engine == "edl_hvd" else None)
    assert outcome.reports[0]["size"] == 2


def test_a_newcomer_dies_while_it_syncs(run_either, alone):
    faults = (add_host("127.1:1", step=5), kill(worker="127.1:0", at="sync"))
    job = Job(hosts=TWO_HOSTS, faults=faults, training=Training(linger_s=0.5), flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 2


def test_one_of_two_old_workers_dies_while_a_newcomer_syncs(run_either, alone):
    faults = (add_host("127.1:1", step=5), kill(rank=0, at="sync", size=3))
    job = Job(hosts=TWO_HOSTS, faults=faults, flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 2


@pytest.mark.parametrize("worker", [OLD, NEW], ids=["old", "new"])
def test_a_worker_dies_at_the_newcomers_first_step(run_either, alone, worker):
    job = Job(hosts=ONE_HOST, faults=(LATE, kill(worker=worker, size=2)), training=Training(commit_every=4))
    outcome = run_either(job)
    check(job, outcome, alone(job.training))


def test_a_worker_killed_inside_the_start_of_horovod_does_not_end_the_others(run_either, alone):
    """The others' ``hvd.init()`` ends with an error, and they meet again: the same processes, with their state."""
    faults = (add_host("127.1:1", step=5), kill(worker="127.1:0", at="forming"))
    job = Job(hosts=TWO_HOSTS, faults=faults, training=Training(linger_s=0.5), flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 2
    starts = [line["worker"] for line in outcome.lines("start")]
    assert starts.count("localhost:0") == 1
    assert starts.count("127.0.0.1:0") == 1


def test_a_newcomer_joins_a_loop_without_an_optimizer(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("edlrun")), "-np", "1", "--max-np", "2", "--discover", f"file:{hosts}",
         sys.executable, str(Path(__file__).with_name("bare_loop_script.py")), str(hosts)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    counted = {line.partition(">:")[2] for line in done.stdout.splitlines() if "has counted to" in line}
    assert {line.partition(" has")[0] for line in counted} == {"rank 0", "rank 1"}, done.stdout
    assert len({line.partition("to ")[2] for line in counted}) == 1, done.stdout
