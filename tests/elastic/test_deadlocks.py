"""Workers that wait for each other in different collectives, and the end of a job whose workers do not move."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import replace

import pytest
from faults import Interrupt
from harness import HERE, Job, Outcome
from ssh_hosts import HOSTS, SSH, SSHD, serve

SCRIPT = "deadlocked_script.py"
STEP = 3
TIMEOUT_S = 5.0
GRACE_S = 3.0
# Above what a test takes: Horovod's own timeout decides nothing here.
LONG_GLOO_TIMEOUT = ("--gloo-timeout-seconds", "600")


def deadlocked(how: str, *faults, launcher: str = "edlrun", **environment: str) -> Job:
    environment = {"STANDSTILL": how, "EDL_HVD_COLLECTIVE_TIMEOUT": f"{TIMEOUT_S:g}s", **environment}
    return Job(script=SCRIPT, faults=faults, flags=LONG_GLOO_TIMEOUT, launcher=launcher, environment=environment)


def check_error(outcome: Outcome) -> None:
    """The job failed, once, and one line says why: who waits for what, at which line of the script."""
    assert outcome.exit_code == 1
    assert outcome.left == []
    [error] = [line for line in outcome.output.splitlines() if "in different collectives" in line]
    for rank in range(2):
        assert re.search(rf"rank {rank} \(\S+:0\) in [^;]+ at deadlocked_script\.py:\d+ in \w+;", error), error
    assert error.endswith("; correct the script, then start the job again")
    assert len(outcome.lines("start")) == 2, "nobody was started again"


@pytest.mark.parametrize("how", ["a rank alone", "another shape", "another order", "in the micro-batches"])
def test_workers_in_different_collectives_end_in_one_error_that_names_them(run_job, how):
    """Without the bound: for ever."""
    outcome = run_job(deadlocked(how))
    check_error(outcome)
    assert "where each worker waits:\nrank 0 (localhost:0), innermost frame first:\n" in outcome.output
    assert "edlrun: the job failed: the workers wait for each other" in outcome.output


@pytest.mark.parametrize("how", ["a rank alone", "in the micro-batches"])
def test_without_a_driver_every_worker_ends_in_that_error(run_job, how):
    """Horovod's own stall check does nothing here: without the bound this is for ever, too."""
    outcome = run_job(deadlocked(how, launcher="horovodrun"))
    errors = re.findall(r"UsageError: the workers wait for each other in different collectives, .*", outcome.output)
    assert len(set(errors)) == 1
    assert len(errors) == 2
    outcome = replace(outcome, output=errors[0])
    check_error(outcome)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI on this machine (apt-get install openmpi-bin)")
def test_under_mpirun_the_job_ends_in_that_error(run_job):
    mpirun = ("mpirun", "-np", "2", "--oversubscribe", "--allow-run-as-root", sys.executable, str(HERE / SCRIPT))
    outcome = run_job(replace(deadlocked("a rank alone"), own_command=mpirun))
    assert outcome.exit_code != 0
    assert "UsageError: the workers wait for each other in different collectives, " in outcome.output
    assert outcome.left == []


@pytest.mark.parametrize("launcher", ["edlrun", "horovodrun"])
def test_a_collective_that_takes_long_ends_nobody_and_is_told_once(run_job, tmp_path, launcher):
    """Rank 1 still waits for what rank 0 has, which waits for the next one: the names differ, and it is no deadlock."""
    output, over = tmp_path / "job" / "output.txt", threading.Event()

    def let_go_when_told() -> None:
        while not (output.exists() and "check the network" in output.read_text(errors="replace")):
            if over.wait(0.1):
                return
        (tmp_path / "job" / "go").touch()

    watching = threading.Thread(target=let_go_when_told)
    watching.start()
    try:
        outcome = run_job(deadlocked("a slow network", launcher=launcher))
    finally:
        over.set()
        watching.join()
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.count("check the network") == 1
    assert "different collectives" not in outcome.output
    assert len(outcome.lines("start")) == 2


@pytest.mark.parametrize("how", ["a rank alone", "hang", "freeze", "stop", "deaf"])
def test_sigterm_ends_a_job_within_its_grace_whatever_its_workers_do(run_job, how):
    term = Interrupt(step=STEP, signal_number=signal.SIGTERM)
    job = deadlocked(how, term, EDL_HVD_TERMINATION_GRACE=f"{GRACE_S:g}s", EDL_HVD_COLLECTIVE_TIMEOUT="10min")
    outcome = run_job(job)
    assert outcome.exit_code == 75
    assert outcome.left == []
    assert outcome.seconds < 45.0, "the grace, and a start: what else ends such workers takes a minute, or for ever"


@pytest.mark.skipif(SSHD is None or SSH is None, reason="no ssh server here (apt-get install openssh-server)")
def test_sigterm_ends_a_job_behind_ssh_within_its_grace(run_job, tmp_path):
    (tmp_path / "ssh").mkdir()
    with serve(tmp_path / "ssh") as server:
        path = f"{server.tools}{os.pathsep}{os.environ['PATH']}"
        term = Interrupt(step=STEP, signal_number=signal.SIGTERM)
        job = deadlocked("deaf", term, EDL_HVD_TERMINATION_GRACE=f"{GRACE_S:g}s", PATH=path)
        outcome = run_job(replace(job, hosts=("localhost:1", f"{HOSTS[0]}:1")))
    assert outcome.exit_code == 75
    assert f"(EDL_HVD_TERMINATION_GRACE), but {HOSTS[0]}:0, localhost:0 did not and were killed" in outcome.output
    assert outcome.left == []
    assert outcome.seconds < 45.0
