"""The same job in every batch mode, and at the ends of epochs."""

from __future__ import annotations

import pytest
from engines import fails_on_stock
from faults import add_host, kill
from harness import TWO_HOSTS, Job
from invariants import check
from training import Training

THREE_HOSTS = (*TWO_HOSTS, "127.1:1")
MODES = {
    "micro-batches": Training(),
    "worker-batch": Training(worker_batch=4),
    "loader-processes": Training(loader_workers=1),
    "pinning-thread": Training(loader_workers=1, extra=("pinned",)),
}


@pytest.mark.parametrize("mode", sorted(MODES))
def test_each_sample_counts_once_through_a_growth_and_a_death(run_either, alone, mode):
    training = MODES[mode]
    faults = (add_host("127.1:1", step=5), kill(rank=1, size=3, visit=3))
    job = Job(faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if training.worker_batch is None else None)
    assert all(bool(report["pinned"]) == ("pinned" in training.extra) for report in outcome.reports)


def test_more_workers_than_micro_batches_are_told_of_once(run_either, alone):
    """Three workers, two micro-batches per step: one worker is idle in every step, and rank 0 says so, once."""
    training = Training(global_batch=4, micro_batch=2)
    job = Job(hosts=THREE_HOSTS, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
    told = "3 workers share 2 micro-batches per step, so 1 of them compute nothing; give ElasticBatchSampler(…) a "
    assert len(outcome.lines("step")) > 3 * 12, "every step of each worker goes through the loop"
    assert outcome.output.count(told + "smaller micro_batch, or a larger global batch") == 1, outcome.output


@fails_on_stock("samples are counted twice to make the epoch divisible (B8)")
def test_fewer_samples_left_than_workers(run_either, alone, engine):
    """25 samples in batches of 8: the last batch of each epoch has one, for three workers."""
    training = Training(samples=25, micro_batch=None)
    job = Job(engine, THREE_HOSTS, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@fails_on_stock("every worker fails an assertion in the sampler (B8)")
def test_fewer_samples_in_the_data_set_than_workers(run_either, alone, engine):
    training = Training(samples=1, micro_batch=1)
    job = Job(engine, THREE_HOSTS, training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training) if engine == "edl_hvd" else None)


@pytest.mark.parametrize("most", [None, 16])
def test_a_step_made_before_the_world_broke_keeps_its_samples_in_a_smaller_one(run_either, most):
    """Three workers make a step of 12 samples, then a collective of the script's own fails: two go on."""
    training = Training(worker_batch=4, most=most, extra=("metric",), epochs=4)
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=1, size=3, at="update", step=5),), training=training)
    outcome = run_either(job)
    check(job, outcome)


def test_a_worker_dies_when_fewer_samples_are_left_than_workers(run_either, alone):
    training = Training(samples=25)
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=0, step=7),), training=training)
    outcome = run_either(job)
    check(job, outcome, alone(training))
