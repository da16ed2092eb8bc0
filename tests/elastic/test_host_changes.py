"""Hosts are added and removed while everybody is well."""

from __future__ import annotations

import signal

import pytest
from engines import fails_on_stock
from faults import Interrupt, add_host, broken_collective, kill, pass_by, remove_host
from harness import Job
from invariants import check, no_worker_failed
from training import Training

ONE_HOST = ("localhost:1",)


@fails_on_stock("the survivor keeps the sampler of the old world (B7); the leaver aborts (D3)")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_removed_host_leaves_politely_and_its_samples_are_dealt_anew(run_job, alone, engine, rank):
    training = Training(until_size=1, leavers_gone=True)
    job = Job(engine, faults=(remove_host(rank=rank, step=5),), training=training)
    outcome = run_job(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)
    assert no_worker_failed(outcome), outcome.output[-3000:]


@fails_on_stock("the survivor skips the sync that the newcomer waits for (A8)")
def test_a_removal_below_the_minimum_and_another_host_instead(run_job, alone, engine):
    training = Training(until_size=2)
    faults = (remove_host(rank=1, step=5), add_host("127.1:1", delay_s=3))
    job = Job(engine, min_np=2, faults=faults, training=training)
    outcome = run_job(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@fails_on_stock("steps since the last commit are rolled back, their weights are not (B4)")
def test_a_host_update_between_commits_counts_no_sample_twice(run_either, alone, engine):
    training = Training(until_size=2, commit_every=10, extra=("check",))
    job = Job(engine, ONE_HOST, faults=(add_host("127.0.0.1:1", step=5),), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@fails_on_stock("lists and dictionaries are kept by reference (B5)", always=True)
def test_lists_and_dictionaries_are_rolled_back_with_the_rest(run_either, engine):
    training = Training(commit_every=5)
    job = Job(engine, faults=(broken_collective(step=8, times=2),), training=training)
    outcome = run_either(job)
    check(job, outcome)
    for report in outcome.reports:
        assert report["seen"] == list(range(1, report["step"] + 1))
        assert report["notes"] == {"last": report["step"]}


@fails_on_stock("an exception in a reset callback is not retried and costs the host (A16)")
def test_a_collective_that_fails_in_a_resize_callback_is_retried(run_either, alone, engine):
    training = Training(until_size=3)
    faults = (add_host("127.1:1", step=5), broken_collective(rank=0, at="callback", size=3))
    job = Job(engine, faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)
    assert no_worker_failed(outcome), outcome.output[-3000:]


def test_a_host_comes_and_another_goes_within_a_second(run_either, alone):
    training = Training(until_size=2, linger_s=5, leavers_gone=True)
    faults = (add_host("127.1:1", step=5), remove_host(rank=1, delay_s=0.5))
    job = Job(faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
    assert no_worker_failed(outcome), outcome.output[-3000:]


def test_a_host_that_goes_and_comes_back_is_used_though_its_worker_handled_sigterm_as_it_started(run_job, alone):
    place = "127.0.0.1:0"
    faults = (
        add_host("127.0.0.1:1", step=5),
        pass_by(at="handles", worker=place),
        remove_host("127.0.0.1", after=1),
        pass_by(at="signalled", worker=place),
        add_host("127.0.0.1:1", after=3),
    )
    training = Training(until_size=2, extra=("own_sigterm",))
    outcome = run_job(Job(hosts=ONE_HOST, faults=faults, training=training, launcher="edlrun"))
    check(Job(faults=faults, training=training), outcome, alone(training))
    assert len([line for line in outcome.lines("start") if line["worker"] == place]) == 2


def test_a_worker_dies_while_all_leave_for_a_larger_world(run_either, alone):
    faults = (add_host("127.1:1", step=5), kill(rank=1, size=2, at="leaving"))
    job = Job(faults=faults, training=Training(linger_s=1), flags=("--gloo-timeout-seconds", "600"))
    outcome = run_either(job)
    check(job, outcome, alone(job.training))


def test_a_host_goes_and_is_back_within_a_second(run_either, alone):
    training = Training(until_size=2, linger_s=4)
    faults = (remove_host("127.0.0.1", step=5), add_host("127.0.0.1:1", delay_s=0.5))
    job = Job(faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))


def test_hosts_come_and_go_many_times(run_either, alone):
    training = Training(until_size=1, leavers_gone=True)
    faults = (
        add_host("127.0.0.1:1", step=5),
        add_host("127.1:1", size=2),
        remove_host("127.0.0.1", size=3),
        remove_host("127.1", size=2),
    )
    job = Job(hosts=ONE_HOST, faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
    assert no_worker_failed(outcome), outcome.output[-3000:]


@pytest.mark.parametrize("another_thread", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_the_launcher_leaves_no_process(run_job, number, another_thread):
    interrupt = Interrupt(step=5, signal_number=number, to_another_thread=another_thread)
    outcome = run_job(Job(faults=(interrupt,), training=Training(epochs=1000)))
    assert outcome.fired == {0: 1}
    assert outcome.reports == []
    assert outcome.left == []
