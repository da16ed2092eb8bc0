"""What AWS has that is a host, and what is left out and why, asked of moto in this process; the words of all clouds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from discovery_clouds import AutoScalingScene, AwsScene, Ec2Scene, ask, granted, source_of
from servers import AwsServer

from edl_hvd.clock import SystemClock
from edl_hvd.discovery.sources.ec2 import Ec2ByTag
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

MARKED = (b"<code>fulfilled</code>", b"<code>marked-for-termination</code>")


@pytest.fixture(autouse=True)
def account(aws: AwsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is the one that may ask moto's server."""
    for name, value in {**aws.environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def ec2(aws: AwsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2Scene]:
    made = Ec2Scene(tmp_path, aws)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.gate.url)
    yield made
    made.close()


@pytest.fixture
def group(aws: AwsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AutoScalingScene]:
    made = AutoScalingScene(tmp_path, aws)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.gate.url)
    yield made
    made.close()


def asked(scene: AwsScene, action: str) -> int:
    return sum(f"Action={action}&" in question for question in scene.gate.questions)


def test_what_ec2_knows_of_an_instance(ec2: Ec2Scene) -> None:
    (instance,) = ec2.run_instances(1)
    source = source_of("ec2", f"--tag=job={ec2.job}")
    before_s = datetime.now(timezone.utc).timestamp()
    answer = source.answer()
    assert answer.hosts == (HostSlots(instance["PrivateIpAddress"], 1),)
    (known,) = answer.details.values()
    assert (known.kind, known.zone[:-1], known.price_usd_per_h) == ("g4dn.xlarge", "us-east-1", None)
    assert known.since_s is not None
    assert before_s - 3600 < known.since_s < before_s + 60


def test_why_an_instance_of_ec2_is_left_out(ec2: Ec2Scene) -> None:
    here, stopped, ended = ec2.run_instances(3)
    ec2.ec2.stop_instances(InstanceIds=[stopped["InstanceId"]])
    ec2.ec2.terminate_instances(InstanceIds=[ended["InstanceId"]])
    answer = source_of("ec2", f"--tag=job={ec2.job}", "--slots=1").answer()
    assert answer.hosts == (HostSlots(here["PrivateIpAddress"], 1),)
    assert answer.left_out == {stopped["InstanceId"]: "is stopped"}


def test_a_spot_instance_that_is_marked_for_its_end_is_left_out_at_once_and_is_a_notice(ec2: Ec2Scene) -> None:
    (stays,) = ec2.run_instances(1)
    _, goes = ec2.request_spot_instance()
    source = source_of("ec2", f"--tag=job={ec2.job}", "--slots=1")
    assert len(ask(source)) == 2
    ec2.gate.rewritten["DescribeSpotInstanceRequests"] = MARKED
    answer = source.answer()
    assert answer.hosts == (HostSlots(stays["PrivateIpAddress"], 1),)
    assert answer.left_out == {goes["InstanceId"]: "its spot request is marked-for-termination"}
    assert answer.notices == {goes["PrivateIpAddress"]: 0.0}  # moto's marks are of 2015


def test_the_notice_of_a_spot_instance_ends_two_minutes_after_its_mark(ec2: Ec2Scene) -> None:
    class Clock2015(SystemClock):
        def wall_s(self) -> float:
            return datetime(2015, 1, 1, 0, 0, 45, tzinfo=timezone.utc).timestamp()

    _, goes = ec2.request_spot_instance()
    ec2.gate.rewritten["DescribeSpotInstanceRequests"] = MARKED
    source = Ec2ByTag((("job", ec2.job),), slots=1, clock=Clock2015())
    assert source.answer().notices == {goes["PrivateIpAddress"]: 75.0}


def test_a_marked_instance_without_an_address_is_left_out_and_nothing_else(ec2: Ec2Scene) -> None:
    ec2.request_spot_instance()
    ec2.gate.rewritten["DescribeSpotInstanceRequests"] = MARKED
    ec2.gate.rewritten["DescribeInstances"] = (b"privateIpAddress>", b"noAddress>")
    answer = Ec2ByTag((("job", ec2.job),), slots=1).answer()
    assert (answer.hosts, answer.notices) == ((), {})


def test_spot_requests_are_looked_at_only_when_there_are_spot_instances(ec2: Ec2Scene) -> None:
    ec2.run_instances(2)
    ask(source_of("ec2", f"--tag=job={ec2.job}", "--slots=1"))
    assert len(ec2.gate.questions) == 1


def test_prices_are_those_of_spot_instances_and_are_asked_for_now_and_then(ec2: Ec2Scene) -> None:
    (paid,) = ec2.run_instances(1)
    _, spot = ec2.request_spot_instance()
    source = source_of("ec2", f"--tag=job={ec2.job}", "--slots=1", "--prices=yes")
    answer = [source.answer() for _ in range(3)][-1]
    prices = {host: known.price_usd_per_h for host, known in answer.details.items()}
    assert prices == {paid["PrivateIpAddress"]: None, spot["PrivateIpAddress"]: 0.00001}
    assert asked(ec2, "DescribeSpotPriceHistory") == 1


def test_status_checks_count_when_asked_for(ec2: Ec2Scene) -> None:
    (instance,) = ec2.run_instances(1)
    ec2.gate.rewritten["DescribeInstanceStatus"] = (b"<status>ok</status>", b"<status>impaired</status>")
    words = (f"--tag=job={ec2.job}", "--slots=1")
    assert len(ask(source_of("ec2", *words))) == 1
    source = source_of("ec2", *words, "--healthy=yes")
    answer = source.answer()
    assert answer.hosts == ()
    assert answer.left_out == {instance["InstanceId"]: "fails the instance and the system status check"}
    ec2.gate.rewritten.clear()
    assert len(ask(source)) == 1


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("not allowed", "allow ec2:DescribeInstances to this role or user"),
        ("clock skew", "check this machine's clock"),
        ("wrong credentials", "credentials are not valid"),
        ("throttled", "raise --refresh"),
        ("a web page", "answered describe_instances with something that has no Reservations; .* AWS_ENDPOINT_URL"),
    ],
)
def test_what_to_do_when_ec2_refuses(ec2: Ec2Scene, behaviour: str, words: str) -> None:
    ec2.behave(behaviour)
    with pytest.raises(DiscoveryError, match=words):
        ask(source_of("ec2", f"--tag=job={ec2.job}"))


@pytest.mark.parametrize(
    ("variables", "words", "remedy"),
    [
        ({"AWS_DEFAULT_REGION": None}, (), "must specify a region; give --region, or set AWS_DEFAULT_REGION"),
        ({}, ("--region=no such",), "correct --region, or AWS_DEFAULT_REGION"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, (), "set AWS_ACCESS_KEY_ID and"),
        ({"AWS_PROFILE": "nobody"}, (), "correct AWS_PROFILE"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, (), "look at the region .* AWS_ENDPOINT_URL and the network"),
    ],
)
def test_what_to_do_where_aws_cannot_even_be_asked(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None], words: tuple[str, ...], remedy: str
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(DiscoveryError, match=f"AWS cannot be asked: .*{remedy}"):
        ask(source_of("ec2", "--tag=job=resnet50", *words))


def test_the_permissions_of_ec2_are_tried_one_by_one(ec2: Ec2Scene) -> None:
    words = (f"--tag=job={ec2.job}",)
    assert granted(source_of("ec2", *words)) == {
        "ec2:DescribeInstances": True,
        "ec2:DescribeInstanceTypes": True,
        "ec2:DescribeSpotInstanceRequests": True,
    }
    assert all("DryRun=true" in question for question in ec2.gate.questions)
    ec2.gate.forbidden = "DescribeSpotPriceHistory"
    source = source_of("ec2", *words, "--slots=1", "--healthy=yes", "--prices=yes")
    assert granted(source) == {
        "ec2:DescribeInstances": True,
        "ec2:DescribeSpotInstanceRequests": True,
        "ec2:DescribeInstanceStatus": True,
        "ec2:DescribeSpotPriceHistory": False,
    }


def test_ec2_says_that_it_would_have_answered(ec2: Ec2Scene) -> None:
    ec2.behave("dry run")
    source = source_of("ec2", f"--tag=job={ec2.job}", "--slots=1")
    assert set(granted(source).values()) == {True}
    ec2.behave("wrong credentials")
    assert set(granted(source).values()) == {None}


def test_the_permission_of_auto_scaling_comes_first(group: AutoScalingScene) -> None:
    group.gate.forbidden = "DescribeAutoScalingGroups"
    assert list(granted(source_of("auto_scaling", group.job, "--slots=1")).items()) == [
        ("autoscaling:DescribeAutoScalingGroups", False),
        ("ec2:DescribeInstances", True),
        ("ec2:DescribeSpotInstanceRequests", True),
    ]


def test_members_of_a_group_count_while_they_are_in_service(group: AutoScalingScene) -> None:
    here, standby, ill, stopped = group.attach_instances(4)
    name = {"AutoScalingGroupName": group.job}
    group.groups.enter_standby(**name, InstanceIds=[standby["InstanceId"]], ShouldDecrementDesiredCapacity=True)
    group.groups.set_instance_health(InstanceId=ill["InstanceId"], HealthStatus="Unhealthy")
    group.ec2.stop_instances(InstanceIds=[stopped["InstanceId"]])
    answer = source_of("auto_scaling", group.job).answer()
    assert answer.hosts == (HostSlots(here["PrivateIpAddress"], 1),)
    assert answer.left_out == {
        standby["InstanceId"]: "its group has it as Standby",
        ill["InstanceId"]: "its group has it as Unhealthy",
        stopped["InstanceId"]: "is stopped",
    }


@pytest.mark.parametrize("state", ["Pending:Wait", "Terminating", "Terminating:Wait", "Detaching"])
def test_a_member_that_comes_or_goes_is_left_out(group: AutoScalingScene, state: str) -> None:
    group.attach_instances(1)
    group.gate.rewritten["DescribeAutoScalingGroups"] = (b">InService<", f">{state}<".encode())
    answer = source_of("auto_scaling", group.job, "--slots=1").answer()
    assert answer.hosts == ()
    assert list(answer.left_out.values()) == [f"its group has it as {state}"]


def test_members_that_ec2_does_not_know_are_doubt_and_drop_no_host(group: AutoScalingScene) -> None:
    _, gone = group.attach_instances(2)
    group.gate.rewritten["DescribeAutoScalingGroups"] = (gone["InstanceId"].encode(), b"i-0123456789abcdef0")
    with pytest.raises(DiscoveryError, match=r"lists 2 instances .* EC2 knows only 1 .*i-0123456789abcdef0"):
        source_of("auto_scaling", group.job, "--slots=1").answer()
    group.gate.rewritten["DescribeInstances"] = (b"<instanceId>", b"<instanceId>i-9")  # EC2 answers for others
    with pytest.raises(DiscoveryError, match="EC2 knows only 0 of them"):
        source_of("auto_scaling", group.job, "--slots=1").answer()


def test_a_member_that_has_been_terminated_is_known_and_left_out(group: AutoScalingScene) -> None:
    here, gone = group.attach_instances(2)
    group.ec2.stop_instances(InstanceIds=[gone["InstanceId"]])
    group.gate.rewritten["DescribeInstances"] = (b"<name>stopped</name>", b"<name>terminated</name>")
    answer = source_of("auto_scaling", group.job, "--slots=1").answer()
    assert answer.hosts == (HostSlots(here["PrivateIpAddress"], 1),)
    assert answer.left_out == {gone["InstanceId"]: "is terminated"}


def test_all_of_a_large_group_is_found(group: AutoScalingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl_hvd.discovery.sources.ec2_instances.FILTER_VALUES", 3)
    assert ask(source_of("auto_scaling", group.job, "--slots=2")) == {}
    members = group.attach_instances(7)
    found = ask(source_of("auto_scaling", group.job, "--slots=2"))
    assert found == {member["PrivateIpAddress"]: 2 for member in members}
    assert asked(group, "DescribeInstances") == 3


def test_a_group_that_is_not_there_is_named(group: AutoScalingScene) -> None:
    with pytest.raises(DiscoveryError, match="the region us-east-1 has no Auto Scaling group 'resnet'"):
        ask(source_of("auto_scaling", "resnet", "--region=us-east-1"))


def test_the_action_of_auto_scaling_that_is_not_allowed_is_named(group: AutoScalingScene) -> None:
    group.behave("not allowed")
    with pytest.raises(DiscoveryError, match="allow autoscaling:DescribeAutoScalingGroups"):
        ask(source_of("auto_scaling", group.job))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["google"], "no managed instance group is given"),
        (["google", "g", "--zone=a", "--region=b"], "both given"),
        (["google", "g", "--page-size=501"], "accepts 1 to 500"),
        (["google", "g", "--healthy=maybe"], "expected yes or no"),
        (["google", "g", "--endpoint=compute"], "--endpoint 'compute/' is not usable"),
        (["google", "g", "--metadata-host=a b"], "--metadata-host .* is not usable"),
        (["auto_scaling"], "no Auto Scaling group is given"),
        (["auto_scaling", "g", "--address=public-ip"], "accepted: private-ip, private-dns"),
        (["ec2", "--tag=a=b", "--prices=1"], "expected yes or no"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        source_of(*words)
