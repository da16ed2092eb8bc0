"""``edlrun`` over three hosts with networks of their own, reached through ssh: a cable is pulled, a server dies."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import harness
import namespaces
import psutil
import pytest
from faults import AnyFault, Interrupt, Outside, add_host, kill, pass_by
from harness import HERE, Job, Outcome
from invariants import check, check_faults, check_no_step_lost
from ssh_hosts import SSH
from test_launchers import script
from training import Training

__all__ = ["script"]  # a fixture

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())

THREE_HOSTS = ("h1:1", "h2:1", "h3:1")
ORPHANED = 75
SHORT_S = 1.4
# From a pulled cable to the next step of the others; on two busy cores.
LOST_S = 5.0
# From it to the end of a worker behind it; the driver's silence is noticed after 8 s.
CUT_OFF_S = 20.0


@pytest.fixture
def network(tmp_path):
    folder = tmp_path / "network"
    folder.mkdir()
    with namespaces.connect(folder) as network:
        yield network


@pytest.fixture
def variables(network) -> dict[str, str]:
    """Those that a job needs whose driver is on the driver's host."""
    return {"PATH": f"{network.tools}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def job_over_ssh(network, variables, monkeypatch) -> Callable[..., Job]:
    """Describes a job whose driver is on the driver's host; its workers write down how they ended."""
    command = harness.command

    def command_there(job: Job, folder: Path, preloaded: bool) -> list[str]:
        scripts = {str(HERE / "worker_script.py"): str(Path(__file__).with_name("exit_script.py"))}
        words = [scripts.get(word, word) for word in command(job, folder)]  # as users start it
        return network.driver.words(*words, folder=folder)

    def describe(*faults: AnyFault, hosts: tuple[str, ...] = THREE_HOSTS, **fields) -> Job:
        flags = ("--gloo-timeout-seconds", "600", *fields.pop("flags", ()))
        return Job(hosts=hosts, faults=faults, flags=flags, environment=variables, launcher="edlrun", **fields)

    monkeypatch.setattr(harness, "command", command_there)
    return describe


@pytest.fixture
def run(job_over_ssh, run_job, alone) -> Callable[..., Outcome]:
    """Runs a job and checks it against the same training alone."""

    def run(*faults: AnyFault, **fields) -> Outcome:
        job = job_over_ssh(*faults, **fields)
        outcome = run_job(job)
        check(job, outcome, alone(job.training))
        return outcome

    return run


def sizes(outcome: Outcome) -> list[int]:
    return [event["size"] for event in outcome.events if event["event"] == "world_formed"]


def struck_at(outcome: Outcome) -> float:
    return float(outcome.lines("fired")[0]["t"])


def ends(tmp_path: Path, host: str = "*") -> list[dict]:
    """How the workers of a host ended, those that ended by themselves, in order."""
    found = (tmp_path / "job" / "exits").glob(f"{host}.*")
    return sorted((json.loads(path.read_text()) for path in found), key=lambda end: end["t"])


# --- hosts with several addresses ---


@pytest.mark.parametrize("flags", [(), ("--network-interfaces", "eth0")], ids=["found", "named"])
def test_a_job_on_three_hosts_runs_to_its_end(run, tmp_path, flags):
    """Their own names lead nowhere; on stock Horovod no other host gets through to them."""
    outcome = run(flags=flags)
    assert sizes(outcome) == [3]
    assert {line["worker"] for line in outcome.lines("end")} == {"h1:0", "h2:0", "h3:0"}
    assert [(end["code"], end["nccl"]) for end in ends(tmp_path)] == [(0, "eth0")] * 3


def test_a_host_joins_later(run):
    outcome = run(add_host("h3:1", step=5), hosts=("h1:1", "h2:1"), training=Training(until_size=3))
    assert sizes(outcome) == [2, 3]


def test_a_host_joins_a_job_that_began_on_the_drivers_own(run):
    """The worker there came by way of 127.0.0.1, where the other host would not find it."""
    outcome = run(add_host("h1:1", step=5), hosts=("localhost:1",), training=Training(until_size=2))
    assert sizes(outcome) == [1, 2]


def test_the_command_of_the_documents_for_several_hosts(network, variables, script):
    text = (harness.REPOSITORY / "docs" / "edlrun.md").read_text()
    [command] = re.findall(r"^\$ (edlrun .*node-1:1,node-2:1,node-3:1 .*)$", text, flags=re.MULTILINE)
    words = network.driver.words(*shlex.split(command.replace("node-", "h")), folder=script.parent)
    path = f"{variables['PATH'].partition(os.pathsep)[0]}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
    environment = {**os.environ, "PYTHONPATH": str(harness.REPOSITORY), "PATH": path + os.environ["PATH"]}
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        assert f"finished on rank {rank} of 3" in done.stdout


ASK_EVERY_PORT = """
import socket, sys
for port in sys.argv[2:]:
    with socket.create_connection((sys.argv[1], int(port)), timeout=10) as connection:
        connection.sendall(b"GET /global/0 HTTP/1.1\\r\\n\\r\\n")
        try:
            print(port, len(connection.recv(100)))
        except ConnectionResetError:
            print(port, 0)
"""


def test_the_driver_answers_nobody_but_its_workers(run, network):
    """Each host asks at every port on which the driver's host listens."""
    answered = {}

    def ask() -> None:
        listening = network.driver.run("ss", "--listening", "--tcp", "--numeric", "--no-header")
        ports = {line.split()[3].rpartition(":")[2] for line in listening.splitlines()}
        for host in namespaces.NAMES:
            words = [sys.executable, "-c", ASK_EVERY_PORT, namespaces.ADDRESSES["driver"], *sorted(ports)]
            answers = network.hosts[host].run(*words).split()
            answered[host] = {port for port, size in zip(answers[::2], answers[1::2], strict=True) if size != "0"}

    run(Outside(ask, step=5), hosts=("h1:1", "h2:1"), training=Training(linger_s=1.0))
    assert len(answered["h1"]) == 1, "the key-value store of its world"
    assert answered["h2"] == answered["h1"]
    assert answered["h3"] == set()


# --- losing a host ---


def test_a_killed_worker_comes_back(run):
    outcome = run(kill(worker="h2:0", step=7), training=Training(until_size=3))
    assert sizes(outcome) == [3, 2, 3]


@pytest.mark.parametrize("host", ["h1", "h3"])
def test_a_pulled_cable_costs_the_others_seconds_and_the_worker_behind_it_leaves(run, network, tmp_path, host):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="4 steps")
    outcome = run(Outside(lambda: network.cut(host), step=7), training=training)
    assert sizes(outcome) == [3, 2]
    assert outcome.seconds_to_next_step() < LOST_S
    [left] = ends(tmp_path, host)
    assert left["code"] == ORPHANED
    assert left["t"] - struck_at(outcome) < CUT_OFF_S


def test_a_host_that_is_cut_off_with_two_workers_loses_both(run, network, tmp_path):
    """They hear each other, and still do not train on."""
    outcome = run(Outside(lambda: network.cut("h2"), step=7), hosts=("h1:1", "h2:2"))
    assert sizes(outcome) == [3, 1]
    assert outcome.seconds_to_next_step() < LOST_S
    assert [left["code"] for left in ends(tmp_path, "h2")] == [ORPHANED, ORPHANED]


def test_a_short_disturbance_costs_nobody_the_job(run, network):
    lasted: list[float] = []
    outcome = run(Outside(lambda: lasted.append(network.disturb("h2", 1.0)), step=7), training=Training(linger_s=5.0))
    # The system sends again what was lost in the first 1.4 s by then, and after 3 s otherwise, when the host is lost.
    if lasted[0] > SHORT_S:
        pytest.skip(f"on this busy machine the cable was out for {lasted[0]:.1f} s, which is no short disturbance")
    assert sizes(outcome) == [3]


def test_a_host_comes_back_when_its_cable_does(run, network, tmp_path):
    faults = (Outside(lambda: network.cut("h2"), step=7), Outside(lambda: network.mend("h2"), after=0, delay_s=12.0))
    outcome = run(*faults, flags=("--blacklist-cooldown-range", "2", "2"), training=Training(until_size=3))
    assert sizes(outcome) == [3, 2, 3]
    assert [left["code"] for left in ends(tmp_path, "h2")] == [ORPHANED, 0]


def test_a_cable_that_is_pulled_while_a_world_forms_costs_only_a_retry(run, network, tmp_path):
    faults = (
        add_host("h3:1", step=5),
        pass_by(worker="h3:0", at="forming"),
        Outside(lambda: network.cut("h2"), after=1),
    )
    # Horovod may abort the worker behind the cable, as it does when it starts and cannot; if not, that leaves later.
    outcome = run(*faults, hosts=("h1:1", "h2:1"), training=Training(until_size=2, linger_s=15.0))
    assert sizes(outcome)[-1] == 2
    assert [left["code"] for left in ends(tmp_path, "h2")] in ([], [ORPHANED])


def test_a_worker_whose_ssh_server_dies_is_replaced_at_once(run, network, tmp_path):
    training = Training(until_size=3, checkpoint=str(tmp_path / "checkpoints"))
    outcome = run(Outside(network.hosts["h2"].kill_sessions, step=7), training=training)
    assert sizes(outcome) == [3, 2, 3]
    assert [event for event in outcome.events if event["event"] == "emergency_checkpoint"] == [], "the job goes on"
    old, new = ends(tmp_path, "h2")
    assert (old["code"], new["code"]) == (ORPHANED, 0)
    [started] = [
        line["t"] for line in outcome.lines("start") if line["worker"] == "h2:0" and line["t"] > struck_at(outcome)
    ]
    assert old["t"] < started + 1.0, "it is gone when the next one needs its GPU"


# --- losing the driver ---


def test_a_killed_driver_leaves_no_orphan_on_any_host(job_over_ssh, run_job, alone, tmp_path):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), epochs=30, pause_s=0.05)
    job = job_over_ssh(Interrupt(step=10, signal_number=signal.SIGKILL), training=training)
    outcome = run_job(job)
    check_faults(job, outcome)  # nobody is left after ten seconds
    check_no_step_lost(job, outcome)
    assert [left["code"] for left in ends(tmp_path)] == [ORPHANED] * 3
    last = max(line["step"] for line in outcome.lines("step"))
    again = job_over_ssh(training=Training(checkpoint=training.checkpoint))
    outcome = run_job(again, "again")
    check(again, outcome, alone(again.training))
    [restored] = [event["step"] for event in outcome.events if event["event"] == "restore"]
    assert restored in (last, last + 1)


def test_a_driver_that_dies_while_a_world_forms_costs_no_more_than_the_step_in_flight(job_over_ssh, run_job, tmp_path):
    """The workers leave Horovod while it starts."""
    training = Training(checkpoint=str(tmp_path / "checkpoints"), epochs=10**6)

    def kill_driver() -> None:
        children = psutil.Process().children()
        [driver] = [child for child in children if any(word.endswith("/edlrun") for word in child.cmdline())]
        driver.kill()

    faults = (add_host("h3:1", step=5), pass_by(worker="h1:0", at="forming", visit=2), Outside(kill_driver, after=1))
    job = job_over_ssh(*faults, hosts=("h1:1", "h2:1"), training=training)
    outcome = run_job(job)
    check_faults(job, outcome)
    assert {left["code"] for left in ends(tmp_path)} == {ORPHANED}
    last = max(line["step"] for line in outcome.lines("step"))
    newest = max(int(path.parent.name) for path in (tmp_path / "checkpoints").glob("*/*/manifest.json"))
    assert newest in (last, last + 1)


def test_workers_whose_driver_is_cut_off_save_and_leave(job_over_ssh, run_job, network, tmp_path):
    training = Training(checkpoint=str(tmp_path / "checkpoints"), epochs=10**6)
    cut = Outside(lambda: network.cut("driver"), step=10)
    job = job_over_ssh(cut, training=training, flags=("--elastic-timeout", "15"))
    outcome = run_job(job)
    assert outcome.exit_code == 1
    assert "its host does not answer" in outcome.output
    assert "fewer than 1 workers were ready for 15 s" in outcome.output
    check_faults(job, outcome)
    check_no_step_lost(job, outcome)
    assert [left["code"] for left in ends(tmp_path)] == [ORPHANED] * 3
    assert ends(tmp_path)[-1]["t"] - struck_at(outcome) < CUT_OFF_S
    last = max(line["step"] for line in outcome.lines("step"))
    newest = max(int(path.parent.name) for path in (tmp_path / "checkpoints").glob("*/*/manifest.json"))
    assert newest in (last, last + 1)


# --- hosts that cannot be reached ---


def test_a_job_starts_without_a_host_that_nobody_reaches(run):
    """Stock Horovod ends the job (A7)."""
    outcome = run(hosts=("h1:1", "h2:1", f"{namespaces.NOBODY}:1"), np=2, training=Training(linger_s=0.0))
    assert sizes(outcome) == [2]


def test_a_host_that_nobody_reaches_is_set_aside_with_the_reason_and_the_fewest_are_enough(run):
    hosts = ("h1:1", "h2:1", "no-such-host.invalid:1")
    outcome = run(hosts=hosts, np=3, min_np=2)
    assert sizes(outcome) == [2]
    assert re.search(
        r"host no-such-host\.invalid keeps failing \(.*no-such-host.*\) and gets no workers", outcome.output
    )


@pytest.fixture
def edlrun_fails(network, variables, tmp_path) -> Callable[..., list[str]]:
    """Runs ``edlrun`` where it has to end with exit code 2; what it says."""

    def run(*words: str, **more: str) -> list[str]:
        edlrun = str(Path(sys.executable).with_name("edlrun"))
        command = network.driver.words(edlrun, "-np", "2", "-H", "h1:1,h2:1", *words, folder=tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(harness.REPOSITORY), **variables, **more}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        assert network.driver.run("ss", "--tcp", "--no-header") == "", "nothing is left running"
        return [line for line in done.stderr.splitlines() if line.startswith("edlrun: ")]

    return run


def test_hosts_that_refuse_ssh_end_the_job_in_one_line(edlrun_fails):
    lines = edlrun_fails("--ssh-port", "2222", "python", "train.py")
    assert re.fullmatch(
        r"edlrun: no worker could be started, h[12]:0 because ssh could not connect to host h[12] \(exit code 255\): "
        r"ssh: connect to host h[12] port 2222: Connection refused",
        lines[-1],
    )


def test_a_key_that_the_hosts_do_not_know_ends_the_job_in_one_line(edlrun_fails, network, tmp_path):
    text = (network.folder / "ssh_config").read_text()
    (tmp_path / "ssh_config").write_text(re.sub("IdentityFile.*\n", "", text))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {tmp_path}/ssh_config "$@"\n')
    (tmp_path / "tools" / "ssh").chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    lines = edlrun_fails("--ssh-identity-file", str(tmp_path / "key"), "python", "train.py", PATH=path)
    assert "ssh could not connect to host h" in lines[-1]
    assert "Permission denied (publickey)" in lines[-1]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("python", "nowhere/train.py"), "h[12]:0 because host h[12] has no file 'nowhere/train.py', looked for in"),
        (("pyhton", "train.py"), "h[12]:0 because host h[12] finds no program 'pyhton'"),
    ],
)
def test_a_program_that_the_hosts_do_not_have_ends_the_job_in_one_line(edlrun_fails, command, reason):
    assert re.match(f"edlrun: no worker could be started, {reason}", edlrun_fails(*command)[-1])
