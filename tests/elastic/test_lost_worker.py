"""Workers die at every place of their life; the others go on."""

from __future__ import annotations

import pytest
from engines import fails_on_stock
from faults import broken_collective, crash, kill
from harness import TWO_HOSTS, Job
from invariants import check, no_worker_failed
from servers import AwsServer
from training import Training

THREE_HOSTS = (*TWO_HOSTS, "127.1:1")
TWO_BY_TWO = ("localhost:2", "127.0.0.1:2")
# Recovery must not need it: a job that waits for it once does not end within its deadline.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


def test_the_survivor_of_two_goes_on(run_job, alone):
    job = Job(faults=(kill(rank=0, step=7),), flags=LONG_GLOO_TIMEOUT)
    outcome = run_job(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 1


@fails_on_stock("survivors wait for each other until the Gloo timeout (C1)")
def test_one_of_four_workers_dies_and_nobody_waits_for_the_gloo_timeout(run_job, alone, engine):
    job = Job(engine, TWO_BY_TWO, faults=(kill(rank=3, step=7),), flags=LONG_GLOO_TIMEOUT)
    outcome = run_job(job)
    check(job, outcome, alone(job.training) if engine == "edl_hvd" else None)
    assert outcome.reports[0]["size"] == 2  # the launcher sets the whole host aside


@pytest.mark.parametrize(("at", "rank"), [("reduced", 1), ("commit", 0)])
def test_a_death_between_reduction_and_agreement_loses_nothing(run_either, alone, at, rank):
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=rank, at=at, step=7),), flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))


def test_all_survivors_have_moved_past_the_commit_and_no_step_is_made_twice(run_either, alone):
    """A commit copies no parameters: who breaks off after the optimizer has moved repeats the step without it."""
    training = Training(micro_batch=None, extra=("metric",))
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=1, at="update", step=7),), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
    again = [line for line in outcome.lines("step") if line["step"] == 7 and line["size"] == 2]
    assert len(again) == 2, "the survivors went through it again"


def test_one_worker_breaks_off_after_a_step_where_the_others_do_not(run_either, alone):
    job = Job(hosts=THREE_HOSTS, faults=(broken_collective(rank=1, at="update", step=7),), flags=LONG_GLOO_TIMEOUT)
    check(job, run_either(job), alone(job.training))


def test_a_commit_that_one_survivor_has_made_and_another_has_not_stands(run_either, alone):
    there = {"at": "reduced", "step": 7}
    faults = (kill(rank=0, **there), broken_collective(rank=1, **there))
    job = Job(hosts=THREE_HOSTS, faults=faults, flags=LONG_GLOO_TIMEOUT)
    # Rank 2 may also hear of the death before it commits: then none of them has made it.
    check(job, run_either(job), alone(job.training))


def test_a_second_worker_dies_while_the_others_recover(run_either, alone):
    faults = (kill(rank=2, step=7), kill(size=2, rank=1, at="sync", after=0))
    job = Job(hosts=THREE_HOSTS, faults=faults, flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert outcome.reports[0]["size"] == 1


def test_a_second_worker_dies_on_its_way_to_the_new_world(run_either, alone):
    faults = (kill(rank=2, step=7), kill(rank=1, at="rendezvous", after=0))
    job = Job(hosts=THREE_HOSTS, faults=faults, flags=LONG_GLOO_TIMEOUT)
    outcome = run_either(job)
    check(job, outcome)


def test_a_host_that_crashed_comes_back_after_its_cooldown(run_job, alone):
    training = Training(until_size=2, epochs=3)
    flags = (*LONG_GLOO_TIMEOUT, "--blacklist-cooldown-range", "1", "2")
    job = Job(faults=(kill(rank=1, step=7),), training=training, flags=flags)
    outcome = run_job(job)
    check(job, outcome, alone(training))


def test_uncommitted_steps_are_done_again_exactly_once(run_either, alone):
    training = Training(commit_every=5)
    job = Job(faults=(kill(rank=1, step=9),), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
    # Commits were at 5 and, because an epoch ended, at 6.
    assert [line["step"] for line in outcome.lines("enter") if line["size"] == 1] == [6]


def test_a_failed_collective_without_a_death_costs_no_worker(run_either, alone):
    job = Job(faults=(broken_collective(rank=1, step=7),))
    outcome = run_either(job)
    check(job, outcome, alone(job.training))
    assert no_worker_failed(outcome)
    assert outcome.reports[0]["size"] == 2


@pytest.mark.parametrize("storage", ["file", "s3"])
def test_a_job_that_ended_goes_on_from_its_checkpoint_with_more_workers(run_job, alone, tmp_path, storage):
    with AwsServer() as server:
        url = str(tmp_path / "checkpoints") if storage == "file" else f"s3://{server.new_bucket()}/run"
        training = Training(checkpoint=url, checkpoint_every="4 steps")
        first = Job(faults=(crash(step=11, times=2),), training=training, environment=server.environment)
        assert run_job(first, "first").exit_code != 0
        job = Job(hosts=THREE_HOSTS, training=training, environment=server.environment)
        outcome = run_job(job, "second")
        check(job, outcome, alone(training))
    restored = [event["step"] for event in outcome.events if event["event"] == "restore"]
    assert len(restored) == 1
    assert restored[0] >= 4


def test_an_exception_of_one_worker_ends_that_worker_only(run_job, alone):
    job = Job(faults=(crash(rank=1, step=7),))
    outcome = run_job(job)
    check(job, outcome, alone(job.training))
    assert "RuntimeError: this failure was ordered by the test" in outcome.output


def test_an_exception_on_every_worker_ends_the_job_with_its_traceback(run_job):
    outcome = run_job(Job(faults=(crash(step=7, times=2),)))
    assert outcome.exit_code != 0
    assert outcome.fired == {0: 2}
    assert "RuntimeError: this failure was ordered by the test" in outcome.output
    assert outcome.left == []
