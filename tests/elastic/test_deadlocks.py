"""Workers that wait for each other in different collectives, and the end of a job whose workers do not move."""

from __future__ import annotations

import signal

import pytest
from faults import Interrupt
from harness import Job

SCRIPT = "deadlocked_script.py"
STEP = 3
TIMEOUT_S = 5.0
GRACE_S = 3.0
# Above what a test takes: Horovod's own timeout decides nothing here.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


def deadlocked(how: str, *faults, launcher: str = "edlrun", **environment: str) -> Job:
    environment = {"STANDSTILL": how, "EDL_HVD_COLLECTIVE_TIMEOUT": f"{TIMEOUT_S:g}s", **environment}
    return Job(script=SCRIPT, faults=faults, flags=LONG_GLOO_TIMEOUT, launcher=launcher, environment=environment)


@pytest.mark.parametrize("how", ["a rank alone", "hang", "freeze", "stop", "deaf"])
def test_sigterm_ends_a_job_within_its_grace_whatever_its_workers_do(run_job, how):
    term = Interrupt(step=STEP, signal_number=signal.SIGTERM)
    job = deadlocked(how, term, EDL_HVD_GRACE=f"{GRACE_S:g}s", EDL_HVD_COLLECTIVE_TIMEOUT="10min")
    outcome = run_job(job)
    assert outcome.exit_code == 75
    assert outcome.left == []
    assert outcome.seconds < 45.0, "the grace, and a start: what else ends such workers takes a minute, or for ever"
