"""What must hold after every job, whatever went wrong in it."""

from __future__ import annotations

import math

import pytest
from harness import Job, Outcome
from reference import Reference
from training import Training


def check(job: Job, outcome: Outcome, reference: Reference | None = None) -> None:
    """Every sample accounted for, identical weights on all ranks, no step lost that was committed, no process left.

    Args:
        job: What was run.
        outcome: What came of it.
        reference: The same training alone; the weights must be those, up to rounding.
    """
    assert outcome.exit_code == 0, f"exit code {outcome.exit_code}:\n{outcome.output[-6000:]}"
    check_faults(job, outcome)
    check_replicas(outcome)
    check_no_step_lost(job, outcome)
    if job.training.keeps_ledger:
        check_ledger(job, outcome)
    if job.engine == "edl_hvd":
        check_counters(job.training, outcome)
    if reference is not None:
        check_same_learning(outcome, reference)


def check_faults(job: Job, outcome: Outcome) -> None:
    planned = {number: getattr(fault, "times", 1) for number, fault in enumerate(job.faults)}
    assert outcome.fired == planned, f"faults struck {outcome.fired}, planned were {planned}"
    assert outcome.left == [], "processes left behind"


def check_replicas(outcome: Outcome) -> None:
    """The final world reports completely, and all its ranks hold the same."""
    assert outcome.reports, f"no worker reported:\n{outcome.output[-6000:]}"
    ranks = [report["rank"] for report in outcome.reports]
    assert ranks == list(range(outcome.reports[0]["size"]))
    for name in ("sha256", "step", "epoch", "lr"):
        assert len({report[name] for report in outcome.reports}) == 1, (
            f"{name} differs: {[report[name] for report in outcome.reports]}"
        )


def check_ledger(job: Job, outcome: Outcome) -> None:
    """Every sample counted exactly once per epoch.

    A batch at an epoch's end may be smaller than a full one. It is a mean as well, so its samples weigh more:
    what an entry has fallen beyond one per epoch must be explained by such batches, and all of them by the entries.
    """
    report = outcome.reports[0]
    surplus = [-entry - report["epoch"] for entry in report["ledger"]]
    rest = _small_batches(job, outcome, report["epoch"])
    explained = {0.0}
    for samples, full in rest:
        explained |= {value + full / samples - 1 for value in explained}
    wrong = {
        index: report["ledger"][index]
        for index, value in enumerate(surplus)
        if not any(math.isclose(value, sum_, abs_tol=1e-3) for sum_ in explained)
    }
    assert not wrong, f"samples that did not count {report['epoch']} times (sample: entry): {wrong}"
    assert sum(surplus) == pytest.approx(sum(full - samples for samples, full in rest), abs=1e-2)


def _small_batches(job: Job, outcome: Outcome, epochs: int) -> list[tuple[int, int]]:
    """Samples of each batch that was smaller than a full one, and of the full one."""
    training = job.training
    if training.worker_batch is None:
        rest = training.samples % training.global_batch
        return [(rest, training.global_batch)] * epochs if rest else []
    # Here the size of a batch depends on the world it was trained in, which the commits tell. A world also commits
    # the step that it starts from, which was trained in the world before.
    start = {event["generation"]: event["step"] for event in outcome.events if event["event"] == "world_formed"}
    commits = {
        event["step"]: event
        for event in outcome.events
        if event["event"] == "commit" and event["step"] > start[event["generation"]]
    }
    chosen = {line["step"] + 1: line["full"] for line in outcome.lines("step") if "full" in line}
    before = 0
    small = []
    for step, commit in sorted(commits.items()):
        full = chosen[step] if training.most else training.worker_batch * commit["size"]
        samples = commit["samples"] - before
        before = commit["samples"]
        if samples < full:
            small.append((samples, full))
    return small


def check_no_step_lost(job: Job, outcome: Outcome) -> None:
    """All of one generation enter the training function at one step, and not before the commit that all had reached.

    One that is ahead of another makes its last step again: it may have summed garbage where the other has failed.
    """
    committed: dict[tuple[str, int], int] = {}
    entered: dict[object, list[int]] = {}
    reached: dict[object, list[int]] = {}
    for line in outcome.trace:
        worker = (line["worker"], line["pid"])
        if line["what"] == "enter":
            world = line.get("generation", worker)
            entered.setdefault(world, []).append(line["step"])
            if worker in committed:
                reached.setdefault(world, []).append(committed[worker])
        elif line["what"] == "step":
            committed[worker] = line["step"] // job.training.commit_every * job.training.commit_every
    for world, steps in entered.items():
        least = min(reached.get(world, [0]))
        assert min(steps) >= least, f"generation {world} entered at step {min(steps)}, and all had reached {least}"
        if isinstance(world, int):
            assert len(set(steps)) == 1, f"workers of generation {world} entered at different steps: {steps}"


def check_counters(training: Training, outcome: Outcome) -> None:
    """``state.samples`` and the events tell the same story as the ledger."""
    report = outcome.reports[0]
    assert report["samples"] == report["epoch"] * training.samples
    ended = [event for event in outcome.events if event["event"] == "job_ended"]
    assert [(event["step"], event["epoch"], event["samples"]) for event in ended] == [
        (report["step"], report["epoch"], report["samples"])
    ]


def check_same_learning(outcome: Outcome, reference: Reference) -> None:
    """The weights are those of the same number of epochs alone, up to rounding."""
    report = outcome.reports[0]
    expected = reference.weights_after(report["epoch"])
    assert expected, "the network is too large for a list of its weights"
    for name, values in expected.items():
        assert report["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def no_worker_failed(outcome: Outcome) -> bool:
    """Whether every worker that the test did not kill ended with exit code 0."""
    return "exit with status code" not in outcome.output and "terminate called" not in outcome.output
