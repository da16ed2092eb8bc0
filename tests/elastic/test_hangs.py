"""Workers that hang, and workers that only look like it."""

from __future__ import annotations

import os

import pytest
from faults import freeze, hang, pause, stop
from harness import Job, Outcome
from invariants import check
from ssh_hosts import HOSTS, SSH, SSHD, serve
from training import Training

TWO_HOSTS = ("localhost:1", "127.0.0.1:1")
VICTIM = "127.0.0.1:0"
# Above what a test takes: nobody may need it to notice anything.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


@pytest.fixture
def edlrun(run_job, alone):
    """Runs a job under ``edlrun`` and checks it against the same training alone."""

    def run(*faults, hosts=TWO_HOSTS, environment=None, **training) -> Outcome:
        job = Job(hosts=hosts, faults=faults, training=Training(**training), flags=LONG_GLOO_TIMEOUT,
                  launcher="edlrun", environment=environment or {})  # fmt: skip
        outcome = run_job(job)
        check(job, outcome, alone(job.training))
        return outcome

    return run


def ended(outcome: Outcome) -> list[str]:
    """What was said when a worker was ended."""
    return [line for line in outcome.output.splitlines() if line.startswith("edlrun: ") and " is killed: " in line]


@pytest.mark.waits
@pytest.mark.parametrize(
    ("fault", "bounds_s"),
    [(hang, (30.0,)), (freeze, (60.0, 120.0))],
    ids=["in Python", "holding the lock in native code"],
)
def test_a_worker_that_hangs_is_named_with_its_place_and_ended(edlrun, fault, bounds_s):
    """Stock Horovod waits for ever: under Gloo its stall check is dead code (A4).

    A silent worker has the longer time where the last that was heard of it is that it loads or saves data.
    """
    outcome = edlrun(fault(worker=VICTIM, step=7), until_size=2)
    [line] = ended(outcome)
    assert f"{VICTIM} is killed: " in line
    assert "faults.py:" in line, "the place is named"
    assert " in _strike" in line
    assert "<stderr>:Current thread 0x" in outcome.output, "the whole stack is part of the worker's output"
    took_s = outcome.seconds_to_next_step()
    assert any(bound_s < took_s < bound_s + 30.0 for bound_s in bounds_s), took_s


def test_the_others_go_on_within_five_seconds_of_a_stop(edlrun):
    """Stock Horovod waits for ever (A3)."""
    outcome = edlrun(stop(worker=VICTIM, step=7), until_size=2)
    [line] = ended(outcome)
    assert "its process is stopped" in line
    assert outcome.seconds_to_next_step() < 5.0


@pytest.mark.skipif(SSHD is None or SSH is None, reason="no ssh server here (apt-get install openssh-server)")
def test_the_others_go_on_within_five_seconds_of_a_stop_behind_ssh(edlrun, tmp_path):
    (tmp_path / "ssh").mkdir()
    with serve(tmp_path / "ssh") as server:
        path = {"PATH": f"{server.tools}{os.pathsep}{os.environ['PATH']}"}
        remote = HOSTS[0]
        hosts = ("localhost:1", f"{remote}:1")
        outcome = edlrun(stop(worker=f"{remote}:0", step=7), hosts=hosts, environment=path, until_size=2)
    [line] = ended(outcome)
    assert f"{remote}:0 is killed: its process is stopped" in line
    assert outcome.seconds_to_next_step() < 5.0


def test_a_slow_worker_a_long_pause_and_slow_checkpoints_end_nobody_and_the_slow_one_is_reported(edlrun, tmp_path):
    """More than four times as slow for 100 steps; six seconds of something else on rank 0 while the others wait."""
    faults = (pause(0.2, worker=VICTIM, step=2, times=100), pause(6.0, rank=0, at="update", step=20))
    checkpoints = {"checkpoint": str(tmp_path / "checkpoints"), "checkpoint_every": "5 steps"}
    outcome = edlrun(*faults, epochs=18, micro_batch=None, pause_s=0.0, **checkpoints)
    assert ended(outcome) == []
    assert [event["size"] for event in outcome.events if event["event"] == "world_formed"] == [2]
    [straggler] = [event for event in outcome.events if event["event"] == "straggler"]
    assert straggler["worker"] == VICTIM
    assert straggler["compute_s"] > 1.5 * straggler["median_s"]
    assert f"edlrun: {VICTIM} is slow: " in outcome.output
