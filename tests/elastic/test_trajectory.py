"""Resizing does not change what is learned: 1 → 3 → 2 → 4 → 1 workers against one process, two changes by SIGKILL."""

from __future__ import annotations

import pytest
from harness import Job
from invariants import check_faults
from training import Training
from trajectory import FAULTS, SCRIPT, Step, run_alone, steps_of

pytestmark = pytest.mark.learning

# Six micro-batches per step: with three workers each holds a whole node of the tree of sums, with two and four not all.
TRAINING = Training(
    samples=480, epochs=20, global_batch=48, micro_batch=8, until_size=1, pause_s=0.05, loader_workers=1
)


def elastic_and_alone(run_job, tmp_path, training: Training) -> tuple[list[Step], list[Step], set[str]]:
    job = Job(hosts=("localhost:1",), np=1, faults=FAULTS, training=training, launcher="edlrun", script=SCRIPT)
    outcome = run_job(job)
    assert outcome.exit_code == 0, outcome.output[-6000:]
    check_faults(job, outcome)
    sizes = iter([line["size"] for line in outcome.lines("enter") if line["rank"] == 0])
    assert all(size in sizes for size in (1, 3, 2, 4, 1)), "in this order; newcomers may have come one by one"
    report = outcome.reports[0]
    single = run_alone(training, report["epoch"], tmp_path / "alone")
    assert (single.reports[0]["step"], report["size"]) == (report["step"], 1)
    return steps_of(outcome), steps_of(single), {report["sha256"], single.reports[0]["sha256"]}


def check_same_samples(elastic: list[Step], alone: list[Step]) -> None:
    assert len(elastic) == len(alone) >= 200
    for number, (one, other) in enumerate(zip(elastic, alone, strict=True)):
        assert (sorted(one.samples), sorted(one.pixels)) == (sorted(other.samples), sorted(other.pixels)), number


def test_the_losses_are_those_of_one_process(run_job, tmp_path):
    elastic, alone, _ = elastic_and_alone(run_job, tmp_path, TRAINING)
    check_same_samples(elastic, alone)
    for number in range(200):
        assert elastic[number].loss == pytest.approx(alone[number].loss, rel=1e-5), number


@pytest.mark.parametrize(
    ("optimizer", "half"), [("sgd", False), ("adamw", True)], ids=["sgd-float32", "adamw-bfloat16"]
)
def test_exact_weights_are_those_of_one_process(run_job, tmp_path, optimizer, half):
    extra = ("exact", "half") if half else ("exact",)
    training = Training(**{**TRAINING.__dict__, "optimizer": optimizer, "extra": extra})
    elastic, alone, digests = elastic_and_alone(run_job, tmp_path, training)
    check_same_samples(elastic, alone)
    assert [step.loss for step in elastic] == [step.loss for step in alone]
    assert len(digests) == 1
