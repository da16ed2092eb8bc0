"""The instances of an EC2 Auto Scaling group as hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, Permission, Source
from edl_hvd.discovery.sources import ec2_instances
from edl_hvd.discovery.sources.aws import Aws
from edl_hvd.discovery.sources.ec2_instances import InstanceOptions, Instances, read_options
from edl_hvd.errors import DiscoveryError


class AutoScalingGroup(Source):
    """The instances of a group that are ``InService`` and ``Healthy``, by private address.

    EC2 has to know all of them. It does not for some seconds after a change, or where an answer is cut: that is doubt,
    and no host is dropped for it.

    An instance in ``Pending:Wait`` does not count yet: its lifecycle hook has not finished. An instance in
    ``Terminating:Wait`` no longer counts.

    Args:
        name: Name of the group.
        region: AWS region; ``None`` for that of boto3's configuration.
        options: Options that hold for each instance.
    """

    def __init__(self, name: str, region: str | None, options: InstanceOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._name = name
        self._region = region
        self._aws = Aws(region)
        self._instances = Instances(self._aws, options, clock)

    def answer(self) -> Answer:
        with self._aws.asking():
            reasons = judge_members(self._members())
            left_out = {name: reason for name, reason in reasons.items() if reason}
            names = [name for name, reason in reasons.items() if not reason]
            return self._instances.judge(self._instances.find_by_ids(names), left_out)

    def _members(self) -> list[Mapping[str, str]]:
        groups = self._aws.pages(
            "autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", AutoScalingGroupNames=[self._name]
        )
        for group in groups:
            if group["AutoScalingGroupName"] == self._name:
                return list(group["Instances"])
        where = f"the region {self._region}" if self._region else "this region"
        raise DiscoveryError(
            f"{where} has no Auto Scaling group {self._name!r}; look at its name, the region and the account"
        )

    def permissions(self) -> Iterable[Permission]:
        yield self._aws.try_permission("autoscaling", "describe_auto_scaling_groups", MaxRecords=1)
        yield from self._instances.permissions()


def judge_members(members: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The reason why each instance of a group does not count, by its id; empty if it counts.

    >>> judge_members([{"InstanceId": "i-1", "LifecycleState": "Standby", "HealthStatus": "Healthy"}])
    {'i-1': 'its group has it as Standby'}
    """
    reasons = {}
    for member in members:
        reason = ""
        if member["LifecycleState"] != "InService":
            reason = f"its group has it as {member['LifecycleState']}"
        elif member["HealthStatus"].lower() != "healthy":
            reason = f"its group has it as {member['HealthStatus']}"
        reasons[member["InstanceId"]] = reason
    return reasons


FLAGS, BARE_FLAG = ("group", *ec2_instances.FLAGS, *REMOTE_FLAGS), "group"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_auto_scaling``."""
    flags.needed("group", "Auto Scaling group", "from_auto_scaling --group resnet50")
    source = AutoScalingGroup(flags.text("group", ""), flags.text("region", "") or None, read_options(flags))
    return remote_source(source, flags, needs_packages=True)
