"""A batch that is chosen while the job runs, and a learning rate that follows the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faults import add_host, kill
from harness import TWO_HOSTS, Job
from invariants import check
from training import Training

pytestmark = pytest.mark.learning

# Most of a step is a pause, whatever the batch: a larger one pays.
GROWING = Training(samples=190, epochs=10, worker_batch=4, most=16, micro_batch=None)


def test_the_batch_grows_in_mid_epoch_and_each_sample_counts_once(run_either):
    job = Job(training=GROWING)
    outcome = run_either(job)
    check(job, outcome)
    looks = [event for event in outcome.events if event["event"] == "batch"]
    assert len(looks) >= 2
    assert looks[0]["worker_batch"] == 4
    assert looks[0]["next_worker_batch"] == 8, "twice as much is tried, to learn how the time grows"
    assert looks[1]["worker_batch"] == 8
    assert looks[1]["samples_per_s"] > looks[0]["samples_per_s"]
    assert all(event["noise_samples"] is None or event["noise_samples"] > 0 for event in looks)
    assert {line["full"] for line in outcome.lines("step")} >= {8, 16}
    changed = next(line["step"] for line in outcome.lines("step") if line["full"] == 16)
    assert changed * 8 % 190 != 0, "at the end of an epoch it would be easy"


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_the_batch_grows_through_a_growth_and_a_death_of_the_world(run_either, loader_workers):
    training = replace(GROWING, loader_workers=loader_workers)
    faults = (add_host("127.1:1", step=20), kill(rank=1, size=3, visit=60))
    job = Job(hosts=TWO_HOSTS, faults=faults, training=training)
    outcome = run_either(job)
    check(job, outcome)
    assert any(event["next_worker_batch"] > event["worker_batch"] for event in outcome.events
               if event["event"] == "batch")  # fmt: skip


def test_a_choice_that_no_commit_holds_is_forgotten_by_all(run_either):
    """A worker dies in the first step after the choice: the next world goes on with the batch of the last commit."""
    job = Job(training=GROWING, faults=(kill(rank=1, step=50),))
    outcome = run_either(job)
    check(job, outcome)
    first = next(event for event in outcome.events if event["event"] == "batch")
    assert (first["step"], first["next_worker_batch"]) == (50, 8)
    divided = [(line["full"], line["size"]) for line in outcome.lines("step") if line["step"] == 50]
    assert divided[0] == (16, 2)
    assert divided[-1][0] == 4 * divided[-1][1]


def test_a_rate_by_adascale_is_the_same_on_all_ranks_through_a_death(run_either):
    training = Training(epochs=6, worker_batch=4, rule="adascale", optimizer="sgd")
    job = Job(hosts=(*TWO_HOSTS, "127.1:1"), faults=(kill(rank=2, step=8),), training=training)
    outcome = run_either(job)
    check(job, outcome)
    (steps,) = {report["scale_invariant_steps"] for report in outcome.reports}
    assert len({report["noise"] for report in outcome.reports}) == 1
    assert outcome.reports[0]["noise"] is not None
    assert outcome.reports[0]["step"] < steps < 3 * outcome.reports[0]["step"]
