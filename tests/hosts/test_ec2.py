"""A job on the instances of EC2 that carry its tag, while they are started, marked for their end, and terminated."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

import pytest
from discovery_clouds import Gate
from faults import Outside
from harness import Job
from invariants import check
from over_ssh import image_of, on_path, run_instance, sizes
from ssh_hosts import HOSTS, SSH, SSHD
from training import Training

pytestmark = pytest.mark.skipif(
    SSHD is None or SSH is None, reason="no ssh server on this machine (apt-get install openssh-server)"
)

FLAGS = "-np 2 --min-np 1 --max-np 8 --network-interfaces lo"
COMMANDS = {
    "edlrun": f"edlrun {FLAGS} --drain-lead 120 --discover ec2:tag=job=resnet50,refresh=1 python train.py",
    "horovodrun": f"horovodrun {FLAGS} "
    '--host-discovery-script "discovery_scripts/from_ec2 --tag job=resnet50 --refresh 1" python train.py',
}
# What moto never says.
MARKED = (b"<code>fulfilled</code>", b"<code>marked-for-termination</code>")


def request_spot_instance(ec2: Any, subnet: str) -> str:
    """Start one with the job's tag; its address."""
    wanted = {"ImageId": image_of(ec2), "InstanceType": "g4dn.xlarge", "SubnetId": subnet}
    [request] = ec2.request_spot_instances(SpotPrice="0.5", LaunchSpecification=wanted)["SpotInstanceRequests"]
    ec2.create_tags(Resources=[request["InstanceId"]], Tags=[{"Key": "job", "Value": "resnet50"}])
    [found] = ec2.describe_instances(InstanceIds=[request["InstanceId"]])["Reservations"]
    return str(found["Instances"][0]["PrivateIpAddress"])


def terminate(ec2: Any, address: str) -> None:
    here = [{"Name": "private-ip-address", "Values": [address]}, {"Name": "instance-state-name", "Values": ["running"]}]
    [found] = ec2.describe_instances(Filters=here)["Reservations"]
    ec2.terminate_instances(InstanceIds=[found["Instances"][0]["InstanceId"]])


@pytest.mark.parametrize("launcher", COMMANDS)
def test_a_job_follows_its_instances(launcher, run_over_ssh, ssh, aws, subnet, alone, tmp_path):
    ec2 = aws.client("ec2")
    first, second, spot = HOSTS
    run_instance(ec2, subnet, first)
    assert request_spot_instance(ec2, subnet) == spot
    with closing(Gate(aws.url)) as gate:
        faults = (
            Outside(lambda: run_instance(ec2, subnet, second), step=5),
            Outside(lambda: gate.rewritten.update(DescribeSpotInstanceRequests=MARKED), size=3, after=0),
            Outside(lambda: terminate(ec2, first), size=2, after=1),
        )
        variables = on_path(ssh, HOME=str(tmp_path), EDL_HVD_DISCOVERY_CACHE=str(tmp_path),
                            **{**aws.environment, "AWS_ENDPOINT_URL": gate.url})  # fmt: skip
        job = Job(faults=faults, training=Training(until_size=1), environment=variables)
        outcome = run_over_ssh(job, COMMANDS[launcher])
    # The process that asks EC2 for the script ends by itself half a minute after the last poll.
    left = [line for line in outcome.left if "edl_hvd/discovery/polling/poll.py" not in line]
    check(job, dataclasses.replace(outcome, left=left), alone(job.training))
    assert sizes(outcome) == [2, 3, 2, 1]
    assert [event["cause"] for event in outcome.events if event["event"] == "resized"] == ["change"] * 3
    assert {line["worker"] for line in outcome.lines("end")} == {f"{second}:0"}
