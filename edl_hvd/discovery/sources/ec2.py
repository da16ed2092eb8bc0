"""Running EC2 instances with given tags as hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, Permission, Source
from edl_hvd.discovery.sources import ec2_instances
from edl_hvd.discovery.sources.aws import Aws
from edl_hvd.discovery.sources.ec2_instances import InstanceOptions, Instances, read_options
from edl_hvd.errors import UsageError


class Ec2ByTag(Source):
    """The running instances that have all of ``tags``, by private address.

    A spot instance that EC2 has marked to be ended or stopped is left out at once, two minutes before that, and is in
    ``notices`` instead.

    Args:
        tags: Pairs of key and value; at least one.
        region: AWS region; ``None`` for that of boto3's configuration.
        slots, address, page_size, healthy, prices: See ``InstanceOptions``.
    """

    def __init__(
        self,
        tags: tuple[tuple[str, str], ...],
        region: str | None = None,
        slots: int | None = None,
        address: str = "private-ip",
        page_size: int = 1000,
        healthy: bool = False,
        prices: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags]
        self._aws = Aws(region)
        self._instances = Instances(self._aws, InstanceOptions(slots, address, page_size, healthy, prices), clock)

    def answer(self) -> Answer:
        with self._aws.asking():
            return self._instances.judge(self._instances.find(*self._filters), left_out={})

    def permissions(self) -> Iterable[Permission]:
        return self._instances.permissions()


def read_tag(text: str) -> tuple[str, str]:
    """Read ``KEY=VALUE``; the key may hold ':' and '/', the value may be empty or hold '='.

    >>> read_tag("job=resnet50")
    ('job', 'resnet50')

    Raises:
        UsageError: There is no '=' or no key.
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--tag {text!r} is not understood; expected KEY=VALUE, e.g. job=resnet50")
    return key, value


FLAGS, BARE_FLAG = ("tag", *ec2_instances.FLAGS, *REMOTE_FLAGS), ""


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_ec2``."""
    tags = tuple(read_tag(tag) for tag in flags.needed("tag", "tag", "from_ec2 --tag job=resnet50"))
    source = Ec2ByTag(tags, flags.text("region", "") or None, **asdict(read_options(flags)))
    return remote_source(source, flags, needs_packages=True)
