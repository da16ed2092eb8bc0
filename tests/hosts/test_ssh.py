"""Workers on hosts that are reached by ssh, started with the commands of the documents."""

from __future__ import annotations

import dataclasses
import re
import signal

import pytest
from faults import Interrupt, add_host, kill
from harness import REPOSITORY, Job
from invariants import check
from over_ssh import on_path, run_instance, sizes
from ssh_hosts import HOSTS, SSH, SSHD
from training import Training

pytestmark = pytest.mark.skipif(
    SSHD is None or SSH is None, reason="no ssh server on this machine (apt-get install openssh-server)"
)


def command_of_horovodrun(script: str) -> str:
    """The documented command with that discovery script, on the interface that reaches the hosts of this test."""
    command = command_of("docs/horovodrun.md", rf"horovodrun .*{script} .* python train\.py")
    assert command.count(" eth0 ") == 1
    return command.replace(" eth0 ", " lo ")


def command_of(document: str, pattern: str) -> str:
    """The command of a document that this pattern describes."""
    text = (REPOSITORY / document).read_text()
    (command,) = re.findall(rf"^\$ ({pattern})$", text, flags=re.MULTILINE)
    return str(command)


def test_the_command_for_real_hosts_goes_on_when_a_host_joins_and_a_worker_is_killed(run_over_ssh, ssh, alone):
    training = Training(until_size=2)
    first, second, third = (f"{host}:1" for host in HOSTS)
    job = Job(hosts=(first, second), faults=(add_host(third, step=5), kill(rank=1, size=3, visit=3)), training=training,
              environment=on_path(ssh))  # fmt: skip
    before = len(ssh.logins())
    outcome = run_over_ssh(job, command_of_horovodrun("from_file"))

    check(job, outcome, alone(training))
    assert sizes(outcome) == [2, 3, 2]
    assert [event["cause"] for event in outcome.events if event["event"] == "resized"] == ["change", "failure"]
    assert len([event for event in outcome.events if event["event"] == "worker_lost"]) == 1
    assert sorted(ssh.logins()[before:]) == sorted(HOSTS), "each worker is started once, through ssh"


def test_an_interrupted_launcher_leaves_workers_on_other_hosts_and_the_job_can_be_started_again(
    run_over_ssh, ssh, tmp_path
):
    """Both as docs/horovodrun.md says; the harness ends the workers that are left."""
    training = Training(epochs=10**6, checkpoint=str(tmp_path / "checkpoints"), checkpoint_every="2 steps")
    faults = (Interrupt(step=12, signal_number=signal.SIGINT),)
    job = Job(hosts=(f"{HOSTS[0]}:1", f"{HOSTS[1]}:1"), faults=faults, training=training, environment=on_path(ssh))
    first = run_over_ssh(job, command_of_horovodrun("from_file"), "first")
    assert first.fired == {0: 1}
    assert [line.strip() for line in first.left] == ["python train.py"] * 2

    manifests = (tmp_path / "checkpoints" / "checkpoints").glob("*/manifest.json")
    newest = max(int(manifest.parent.name) for manifest in manifests)
    steps_per_epoch = training.samples // training.global_batch
    training = dataclasses.replace(training, epochs=newest // steps_per_epoch + 2)
    job = dataclasses.replace(job, faults=(), training=training)
    again = run_over_ssh(job, command_of_horovodrun("from_file"), "again")
    check(job, again)
    assert [event["step"] for event in again.events if event["event"] == "restore"] == [newest]


def test_the_command_for_ec2_trains_on_the_tagged_instances(run_over_ssh, ssh, aws, subnet, alone, tmp_path):
    ec2 = aws.client("ec2")
    assert [run_instance(ec2, subnet, host) for host in HOSTS[:2]] == list(HOSTS[:2])
    variables = on_path(ssh, HOME=str(tmp_path), EDL_HVD_DISCOVERY_CACHE=str(tmp_path), **aws.environment)
    job = Job(environment=variables)
    outcome = run_over_ssh(job, command_of_horovodrun("from_ec2"))

    # The process that asks EC2 ends by itself half a minute after the last poll.
    left = [line for line in outcome.left if "edl_hvd/discovery/polling/poll.py" not in line]
    outcome = dataclasses.replace(outcome, left=left)
    check(job, outcome, alone(job.training))
    assert sizes(outcome) == [2]
    assert {line["worker"] for line in outcome.lines("end")} == {f"{host}:0" for host in HOSTS[:2]}


@pytest.mark.parametrize("source", ["file:hosts.txt", "ec2:tag=job=resnet50"])
def test_the_commands_of_edlrun_for_several_hosts(source, run_over_ssh, ssh, aws, subnet, alone, tmp_path):
    ec2 = aws.client("ec2")
    assert [run_instance(ec2, subnet, host) for host in HOSTS[:2]] == list(HOSTS[:2])
    variables = on_path(ssh, HOME=str(tmp_path), EDL_HVD_DISCOVERY_CACHE=str(tmp_path), **aws.environment)
    job = Job(hosts=tuple(f"{host}:1" for host in HOSTS[:2]), environment=variables, launcher="edlrun")
    outcome = run_over_ssh(job, command_of("README.md", rf"edlrun .*{source} python train\.py"))
    check(job, outcome, alone(job.training))
    assert sizes(outcome) == [2]
    assert {line["worker"] for line in outcome.lines("end")} == {f"{host}:0" for host in HOSTS[:2]}
