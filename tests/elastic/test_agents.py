"""Jobs whose hosts call by their agents: hosts come, leave and vanish, and the driver is killed, in mid-training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faults import AnyFault, Interrupt, Outside
from harness import REPOSITORY, Job, run
from invariants import check
from training import Training

SCRIPT = Path(__file__).with_name("worker_script.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class Hosts:
    """Agents that call one driver, each for a host of its own."""

    token: Path
    stack: ExitStack
    port: int = field(default_factory=free_port)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def join(self, host: str) -> None:
        command = [sys.executable, "-m", "edl_hvd.cli.main", "join", f"127.0.0.1:{self.port}", "--host", host]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        agent = subprocess.Popen([*command, "--token-file", str(self.token)], env=environment)
        self.stack.callback(agent.kill)
        self.agents[host] = agent

    def signal(self, host: str, number: signal.Signals) -> None:
        self.agents[host].send_signal(number)

    def codes(self) -> dict[str, int]:
        return {host: agent.wait(60) for host, agent in self.agents.items()}

    def job(self, flags: tuple[str, ...], training: Training, faults: tuple[AnyFault, ...] = ()) -> Job:
        command = (sys.executable, "-m", "edl_hvd.cli.edlrun", "-np", "2", "--min-np", "1", "--max-np", "4")
        agents = ("--agents-port", str(self.port), "--token-file", str(self.token))
        words = (*command, *agents, *flags, sys.executable, str(SCRIPT))
        return Job(launcher="edlrun", own_command=words, training=training, faults=faults)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    token = tmp_path / "token"
    token.write_text("the-token-of-this-job-alone\n")
    with ExitStack() as stack:
        yield Hosts(token, stack)


def test_a_host_leaves_and_another_comes_and_no_sample_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    for host in ("127.0.0.2", "127.0.0.3"):
        hosts.join(host)
    faults = (
        Outside(step=4, act=lambda: hosts.signal("127.0.0.3", signal.SIGTERM)),
        Outside(step=6, size=1, after=0, act=lambda: hosts.join("127.0.0.4")),
    )
    job = hosts.job((), faults=faults, training=Training(until_size=2, linger_s=0.5))
    outcome = run(job, tmp_path / "job")
    assert outcome.exit_code == 0, outcome.output
    check(job, outcome)
    sizes = [line["size"] for line in outcome.lines("enter") if line["rank"] == 0]
    assert sizes == [2, 1, 2]
    left = [event for event in outcome.events if event["event"] == "worker_left"]
    assert [event["worker"] for event in left] == ["127.0.0.3:0"], "it left in agreement, at a commit"
    assert set(hosts.codes().values()) == {0}


def test_a_host_that_vanishes_is_replaced_by_one_that_calls(hosts: Hosts, tmp_path: Path) -> None:
    for host in ("127.0.0.2", "127.0.0.3"):
        hosts.join(host)
    faults = (
        Outside(step=4, act=lambda: hosts.signal("127.0.0.3", signal.SIGKILL)),
        Outside(step=6, after=0, act=lambda: hosts.join("127.0.0.4")),
    )
    job = hosts.job((), faults=faults, training=Training(until_size=2, linger_s=0.5))
    outcome = run(job, tmp_path / "job")
    assert outcome.exit_code == 0, outcome.output
    check(job, outcome)
    assert {line["worker"] for line in outcome.lines("enter")} == {"127.0.0.2:0", "127.0.0.3:0", "127.0.0.4:0"}
    codes = hosts.codes()
    assert codes.pop("127.0.0.3") == -signal.SIGKILL
    assert set(codes.values()) == {0}


def test_agents_wait_for_the_driver_that_goes_on_with_the_job(hosts: Hosts, tmp_path: Path) -> None:
    for host in ("127.0.0.2", "127.0.0.3"):
        hosts.join(host)
    folder = tmp_path / "job folder"
    training = Training(epochs=20, checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="0.2s")
    first = hosts.job(("--job-dir", str(folder)), training=training, faults=(Interrupt(6, signal.SIGKILL),))
    killed = run(first, tmp_path / "job")
    assert killed.exit_code == -signal.SIGKILL
    assert all(agent.poll() is None for agent in hosts.agents.values())
    again = hosts.job(("--job-dir", str(folder), "--resume"), training=training)
    outcome = run(again, tmp_path / "again")
    assert outcome.exit_code == 0, outcome.output
    assert min(line["step"] for line in outcome.lines("enter")) >= 5, "it went on where it was"
    assert set(hosts.codes().values()) == {0}
