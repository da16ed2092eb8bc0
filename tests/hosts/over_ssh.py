"""Jobs on hosts that are reached by ssh, and the cloud that has started them."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import HERE, REPOSITORY, Job, Outcome
from ssh_hosts import serve

TRAIN = f"""\
import sys
from pathlib import Path

sys.path.insert(0, {str(HERE)!r})
from worker_script import main

main(Path.cwd())
"""


@pytest.fixture
def ssh(tmp_path):
    folder = tmp_path / "ssh"
    folder.mkdir()
    with serve(folder) as server:
        yield server


@pytest.fixture
def run_over_ssh(ssh, tmp_path, monkeypatch):
    """Runs a job in a folder of the test's own with a command of the documents: programs are found by ``PATH``."""

    def run(job: Job, command: str, name: str = "job") -> Outcome:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "discovery_scripts").symlink_to(REPOSITORY / "discovery_scripts")
        (folder / "hosts.txt").symlink_to("hosts")
        (folder / "train.py").write_text(TRAIN)
        monkeypatch.setattr(harness, "command", lambda job, folder, preloaded: shlex.split(command))
        return harness.run(job, folder)

    return run


def on_path(ssh: Any, **more: str) -> dict[str, str]:
    """Variables under which the documents' words mean the programs under test."""
    path = os.pathsep.join([str(ssh.tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "EDL_HVD_PYTHON": sys.executable, **more}


def sizes(outcome: Outcome) -> list[int]:
    """Size of each world, repetitions left out."""
    formed = (event["size"] for event in outcome.events if event["event"] == "world_formed")
    return [size for size, _ in itertools.groupby(formed)]


@pytest.fixture
def aws():
    from servers import AwsServer

    with AwsServer() as server:
        yield server


@pytest.fixture
def subnet(aws: Any) -> Iterator[str]:
    """Its addresses are names of this machine; the first that EC2 gives out by itself is the last of ``HOSTS``."""
    ec2 = aws.client("ec2")
    network = ec2.create_vpc(CidrBlock="127.0.0.0/24")["Vpc"]["VpcId"]
    yield str(ec2.create_subnet(VpcId=network, CidrBlock="127.0.0.0/28")["Subnet"]["SubnetId"])
    reservations = ec2.describe_instances()["Reservations"]  # moto's memory is one for all its servers
    ec2.terminate_instances(InstanceIds=[reservation["Instances"][0]["InstanceId"] for reservation in reservations])


def image_of(ec2: Any) -> str:
    return str(ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"])


def run_instance(ec2: Any, subnet: str, address: str) -> str:
    """Start an instance with that private address and the documents' tag; its type has one GPU, hence one slot."""
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "job", "Value": "resnet50"}]}]
    started = ec2.run_instances(ImageId=image_of(ec2), MinCount=1, MaxCount=1, InstanceType="g4dn.xlarge",
                                SubnetId=subnet, PrivateIpAddress=address, TagSpecifications=tags)  # fmt: skip
    return str(started["Instances"][0]["PrivateIpAddress"])
