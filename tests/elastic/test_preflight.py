"""Hosts that are measured before they get workers: real processes, real allreduces, real jobs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
from faults import add_host
from harness import REPOSITORY, Job
from invariants import check
from training import Training

from edl_hvd.driver.network import choose_network
from edl_hvd.driver.preflight import preflight
from edl_hvd.driver.preflight.preflight import Preflight, PreflightResult
from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.process import WorkerProcess
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.hosts import HostSlots
from edl_hvd.preflight.measured import HostFindings, Measured
from edl_hvd.settings import own_environment

HONEST = "from edl_hvd.preflight.__main__ import main; main()"
# Answers as the program does, but for what is put in between.
ALTERED = """
import os
import edl_hvd.preflight.__main__ as program
from edl_hvd.errors import PlatformError
from edl_hvd.preflight.measured import Measured
{change}
program.main()
"""
SLOW = ALTERED.format(change="program.measure = lambda environ: Measured('cpu', 1, 1e-3)")
UNREACHABLE = ALTERED.format(change="""
def refuse(*arguments):
    raise PlatformError("no allreduce with 10.0.0.1: timed out")
program.exchange = refuse
""")  # fmt: skip
DYING = ALTERED.format(change="program.exchange = lambda *arguments: os.kill(os.getpid(), 9)")


class Hosts:
    """Starts what each host would run, all on this machine; the names of hosts are those of this test.

    Attributes:
        processes: That were started, by host.
    """

    def __init__(self, scripts: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self.processes: dict[str, WorkerProcess] = {}
        environment = {**own_environment(), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._launchers = {
            host: Launcher(Program((sys.executable, "-c", script), environment, os.getcwd()), Ssh(None, None),
                           lambda host: True, lambda worker, stream, line: self.lines.append(line.decode()))
            for host, script in scripts.items()
        }  # fmt: skip

    async def start(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess:
        host = worker.partition(":")[0]
        self.processes[host] = await self._launchers[host].start(worker, variables)
        return self.processes[host]

    def look(self, *new: str, known: tuple[HostFindings, ...] = (), act=None) -> dict[str, PreflightResult]:
        """What comes of a look; ``act`` is run beside it."""

        async def both() -> list[PreflightResult]:
            acting = asyncio.create_task(act(self)) if act else None
            network = choose_network((), Ssh(None, None), lambda host: True)
            results = await Preflight(self, network, bound=4.0).look([HostSlots(host, 1) for host in new], known)
            if acting is not None:
                await acting
            return results

        results = asyncio.run(both())
        for process in self.processes.values():
            with pytest.raises(ProcessLookupError):
                os.kill(process.pid, 0)
        return {result.findings.host: result for result in results}


def test_hosts_that_are_alike_pass_with_their_numbers():
    results = Hosts({"a": HONEST, "b": HONEST}).look("a", "b")
    for result in results.values():
        assert result.fault == ""
        assert result.findings.measured.device == "cpu"
        assert result.findings.measured.gflop_s > 0.1
        assert 0 < result.findings.exchange_s < 10
    assert results["a"].findings.exchange_s == results["b"].findings.exchange_s, "they met each other"


def test_a_host_that_comes_later_meets_one_that_is_in_and_is_held_against_it():
    known = HostFindings("a", 1, Measured("cpu", 1, 1e6), 0.001)
    results = Hosts({"a": HONEST, "b": HONEST}).look("b", known=(known,))
    assert list(results) == ["b"]
    assert "GFLOP/s in a matrix product on its cpu, the others 1e+06; at least 2.5e+05" in results["b"].fault
    assert results["b"].findings.exchange_s is None, "who is out already need not trouble the others"


def test_the_slow_one_of_three_is_found():
    results = Hosts({"a": HONEST, "b": SLOW, "c": HONEST}).look("a", "b", "c")
    assert {host for host, result in results.items() if result.fault} == {"b"}
    assert results["b"].fault.startswith("0.001 GFLOP/s in a matrix product on its cpu, the others ")


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("import sys; sys.exit('no module named torch')", "no module named torch"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        (ALTERED.format(change="program.measure = lambda environ: 1 / 0"), "ZeroDivisionError: division by zero"),
    ],
)
def test_a_host_that_cannot_measure_itself_is_out_with_its_last_words_and_the_others_are_in(script, fault):
    results = Hosts({"a": HONEST, "b": script, "c": HONEST}).look("a", "b", "c")
    assert {host for host, result in results.items() if result.fault} == {"b"}
    assert fault in results["b"].fault
    assert not results["b"].answered


def test_who_reaches_nobody_is_out_and_does_not_take_its_partners_with_it():
    results = Hosts({"a": HONEST, "b": UNREACHABLE, "c": HONEST}).look("a", "b", "c")
    assert {host for host, result in results.items() if result.fault} == {"b"}
    assert "timed out" in results["b"].fault
    assert results["b"].answered


def test_of_two_that_do_not_reach_each_other_the_first_stays():
    results = Hosts({"a": UNREACHABLE, "b": HONEST}).look("a", "b")
    assert results["a"].fault == ""
    assert "timed out" in results["b"].fault


def test_a_host_that_dies_in_the_middle_of_its_allreduces_is_out():
    results = Hosts({"a": HONEST, "b": DYING, "c": HONEST}).look("a", "b", "c")
    assert {host for host, result in results.items() if result.fault} == {"b"}
    assert "SIGKILL" in results["b"].fault


def test_a_newcomer_is_not_blamed_for_the_end_of_the_only_host_that_it_could_meet():
    known = HostFindings("a", 1, Measured("cpu", 1, 1.0), 0.001)
    results = Hosts({"a": DYING, "b": HONEST}).look("b", known=(known,))
    assert results["b"].fault == ""
    assert results["b"].findings.exchange_s is None


def test_a_host_that_says_nothing_is_waited_for_and_ended(monkeypatch):
    monkeypatch.setattr(preflight, "_LATE_S", 0.5)
    monkeypatch.setattr(preflight, "_END_S", 0.1)
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    results = Hosts({"a": HONEST, "b": stopped}).look("a", "b")
    assert results["a"].fault == ""
    assert results["b"].fault == "it does not answer"


def test_a_look_that_is_cancelled_leaves_no_process():
    hosts = Hosts({"a": HONEST, "b": HONEST})

    async def play() -> None:
        network = choose_network((), Ssh(None, None), lambda host: True)
        looking = asyncio.create_task(Preflight(hosts, network, 4.0).look([HostSlots("a", 1), HostSlots("b", 1)], ()))
        while len(hosts.processes) < 2:
            await asyncio.sleep(0.01)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking

    asyncio.run(play())
    for process in hosts.processes.values():
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


# --- jobs ---


def test_a_job_lets_hosts_in_after_a_look_at_them_also_those_that_come_later(run_job, alone):
    training = Training(until_size=2)
    job = Job(hosts=("localhost:1",), np=1, faults=(add_host("127.0.0.1:1", step=5),), training=training,
              launcher="edlrun", flags=("--preflight-bound", "20"))  # fmt: skip
    outcome = run_job(job)
    check(job, outcome, alone(training))
    first, second = re.findall(r"edlrun: (\S+) passed the preflight: cpu, \S+ GFLOP/s(.*)", outcome.output)
    assert first == ("localhost", ""), "there was nobody to meet"
    assert second[0] == "127.0.0.1"
    assert second[1].startswith(", allreduce of 1 MiB in ")


def test_a_job_none_of_whose_hosts_is_good_enough_says_why_and_gives_up(run_job, tmp_path):
    broken = tmp_path / "python3"
    broken.write_text(
        f"#!/bin/sh\ncase $* in *preflight*) echo no GPU driver >&2; exit 3;; esac\nexec {sys.executable} $*\n"
    )
    broken.chmod(0o755)
    words = ("edlrun", "-np", "1", "--preflight", "--elastic-timeout", "3", str(broken), "-c", "print('trained')")
    done = subprocess.run([sys.executable, "-m", "edl_hvd.cli.edlrun", *words[1:]], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False)  # fmt: skip
    assert done.returncode == 1
    assert "edlrun: localhost gets no workers: exit code 3; no GPU driver; it is looked at again in 15 s" in done.stderr
    assert "trained" not in done.stdout
