"""Workers die and join while a validation set is evaluated; what comes out is what one process finds, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections import Counter
from typing import Any

import pytest
from faults import add_host, kill, pass_by, save_faults
from harness import HERE, TWO_HOSTS, Job, Outcome, environment
from invariants import check_faults
from training import Training

pytestmark = pytest.mark.learning

SCRIPT = "evaluation_script.py"
THREE_HOSTS = (*TWO_HOSTS, "127.1:1")
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")
TRAINING = Training(samples=25, epochs=2, pause_s=0.01)
IN_THE_MIDDLE = pass_by(at="evaluate", rank=0, visit=8)  # fault 0: others wait for it


@pytest.fixture(scope="module")
def found_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds."""
    folder = tmp_path_factory.mktemp("alone")
    TRAINING.save(folder)
    save_faults(folder, ())
    script = [sys.executable, str(HERE / SCRIPT), str(folder)]
    variables = environment(Job(), folder, uuid.uuid4().hex)
    done = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = (folder / "reports").glob("*.json")
    found: dict[str, Any] = json.loads(report.read_text())["results"]["1"]
    assert set(found["seen"]) == set(found["trained"][: TRAINING.samples]) == {1}
    return found


def check(job: Job, outcome: Outcome, found_alone: dict[str, Any], trained_from: int = 0) -> None:
    assert outcome.exit_code == 0, outcome.output[-6000:]
    check_faults(job, outcome)
    assert [report["rank"] for report in outcome.reports] == list(range(outcome.reports[0]["size"]))
    for report in outcome.reports:
        assert len(report["results"]) == report["epoch"] >= job.training.epochs
        for epoch, found in report["results"].items():
            trained = found_alone["trained"] if int(epoch) >= trained_from else [0] * len(found["trained"])
            assert found == {**found_alone, "trained": trained}, f"epoch {epoch}"


def evaluated(outcome: Outcome, step: int) -> Counter[int]:
    """How often each sample was evaluated after this step, counting or not."""
    return Counter(i for line in outcome.lines("evaluate") if line["step"] == step for i in line["samples"])


@pytest.mark.parametrize("at", ["evaluate", "pool", "commit", "committed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_three_dies_in_the_middle_of_an_evaluation(run_either, found_alone, at, rank):
    faults = (IN_THE_MIDDLE, kill(rank=rank, at=at, after=0))
    job = Job(hosts=THREE_HOSTS, faults=faults, training=TRAINING, flags=LONG_GLOO_TIMEOUT, script=SCRIPT)
    outcome = run_either(job)
    check(job, outcome, found_alone)
    again = [line for line in outcome.lines("enter") if line["size"] == 2]
    assert {line["finished"] for line in again} == {0}
    assert all(0 < line["offset"] < 245 for line in again), "nobody began from the start"
    assert len({line["offset"] for line in again}) == 1


def test_a_worker_joins_in_the_middle_of_an_evaluation(run_either, found_alone):
    training = Training(samples=25, epochs=2, pause_s=0.01, until_size=3)
    job = Job(faults=(IN_THE_MIDDLE, add_host("127.1:1", after=0)), training=training, script=SCRIPT)
    outcome = run_either(job)
    check(job, outcome, found_alone)
    joined = [line for line in outcome.lines("enter") if line["size"] == 3]
    assert len(joined) == 3
    (offset,) = {line["offset"] for line in joined}
    assert 0 < offset < 245
    assert set(evaluated(outcome, joined[0]["step"]).values()) == {1}, "nothing is done twice"


def test_an_evaluation_that_is_complete_is_not_made_again(run_either, found_alone):
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=1, at="evaluated"),), training=TRAINING, script=SCRIPT)
    outcome = run_either(job)
    check(job, outcome, found_alone)
    step = min(line["step"] for line in outcome.lines("evaluate"))
    assert set(evaluated(outcome, step).values()) == {1}


@pytest.mark.parametrize("at", ["reduced", "update", "pool", "commit", "committed"])
def test_training_metrics_count_each_sample_once_through_a_death(run_either, found_alone, at):
    faults = (kill(rank=1, at=at, visit=3),)
    job = Job(hosts=THREE_HOSTS, faults=faults, training=TRAINING, flags=LONG_GLOO_TIMEOUT, script=SCRIPT)
    outcome = run_either(job)
    check(job, outcome, found_alone)


def test_ranks_wait_for_metrics_only_where_they_count(run_either, found_alone):
    """One that has counted nothing in an epoch is not asked for in the next, and misses nothing if it counts later."""
    training = Training(samples=25, epochs=4, pause_s=0.01, extra=("late",))
    job = Job(hosts=THREE_HOSTS, faults=(kill(rank=1, at="step", step=10),), training=training, script=SCRIPT)
    outcome = run_either(job)
    check(job, outcome, found_alone, trained_from=2)
    pid = next(line["pid"] for line in outcome.lines("step") if line["rank"] == 0)
    lines = [line for line in outcome.trace if line["pid"] == pid and line["what"] in ("pool", "step", "evaluate")]
    for first_step, pools in [(0, 5), (4, 1)]:  # of an epoch with four steps; once at the end
        first = next(i for i, line in enumerate(lines) if line["what"] == "step" and line["step"] == first_step)
        last = next(i for i, line in enumerate(lines) if i > first and line["what"] == "evaluate")
        assert [line["what"] for line in lines[first:last]].count("pool") == pools


def test_loaders_with_processes_go_on_in_the_middle_too(run_either, found_alone):
    training = Training(samples=25, epochs=2, pause_s=0.01, loader_workers=1)
    faults = (IN_THE_MIDDLE, kill(rank=2, at="evaluate", after=0))
    job = Job(hosts=THREE_HOSTS, faults=faults, training=training, flags=LONG_GLOO_TIMEOUT, script=SCRIPT)
    check(job, run_either(job), found_alone)
