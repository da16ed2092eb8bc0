"""A host that is really slow: its processes share one core with others that never rest."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import Job
from invariants import check
from over_ssh import on_path, sizes
from ssh_hosts import HOSTS, SSH, SSHD, serve
from training import Training

pytestmark = pytest.mark.skipif(
    SSHD is None or SSH is None, reason="no ssh server on this machine (apt-get install openssh-server)"
)
FAST, SLOW = HOSTS[:2], HOSTS[2]
CORE = min(os.sched_getaffinity(0))
# Its kernels may share out a core by process or by session; either way little is left.
CROWD = 4
CONFIGURATION = f"""
Match LocalAddress {SLOW}
ForceCommand exec taskset -c {CORE} nice -n 15 sh -c "$SSH_ORIGINAL_COMMAND"
"""


@pytest.fixture
def ssh(tmp_path):
    folder = tmp_path / "ssh"
    folder.mkdir()
    with serve(folder, CONFIGURATION) as server:
        yield server


@contextlib.contextmanager
def crowd() -> Iterator[None]:
    """Processes that keep the slow host's core busy, and leave the others' work alone."""
    words = ["taskset", "-c", str(CORE), "nice", "-n", "10", sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(words, start_new_session=True) for _ in range(CROWD)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_slow_host_gets_no_workers_and_the_job_starts_on_the_others(run_over_ssh, ssh, alone):
    training = Training()
    job = Job(hosts=tuple(f"{host}:1" for host in HOSTS), environment=on_path(ssh, OMP_NUM_THREADS="1"),
              training=training)  # fmt: skip
    with crowd():
        outcome = run_over_ssh(
            job, "edlrun -np 3 --min-np 2 --preflight-bound 3 --discover file:hosts.txt python train.py"
        )
    check(job, outcome, alone(training))
    assert sizes(outcome) == [2]
    assert {line["worker"] for line in outcome.lines("end")} == {f"{host}:0" for host in FAST}
    [measured] = re.findall(
        rf"edlrun: {SLOW} gets no workers: (\S+) GFLOP/s in a matrix product on its cpu, the others (\S+); at least "
        r"(\S+) is asked for; it is looked at again in 600 s", outcome.output)  # fmt: skip
    own, others, least = map(float, measured)
    assert own < least < others
    passed = re.findall(r"edlrun: (\S+) passed the preflight: cpu, \S+ GFLOP/s, allreduce of 1 MiB in", outcome.output)
    assert sorted(passed) == list(FAST)
