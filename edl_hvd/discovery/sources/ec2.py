"""Hosts that are running EC2 instances with given tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.question import REMOTE_FLAGS, Question, ask_remotely
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

if TYPE_CHECKING:
    from botocore.client import BaseClient

_ADDRESS_FIELDS = {"private-ip": "PrivateIpAddress", "private-dns": "PrivateDnsName"}

_NEXT_STEPS = {
    "UnauthorizedOperation": "allow ec2:DescribeInstances and ec2:DescribeInstanceTypes to this role or user",
    "AuthFailure": "the credentials are not valid for this account and region",
    "InvalidClientTokenId": "the credentials are not valid for this account and region",
    "ExpiredToken": "renew the credentials",
    "RequestExpired": "renew the credentials and check this machine's clock",
    "RequestLimitExceeded": "the account asks too often; raise --refresh",
    "Throttling": "the account asks too often; raise --refresh",
}


class Ec2ByTag:
    """The running instances that carry every one of ``tags``, by private address.

    Credentials and region are found as boto3 finds them: environment, ``~/.aws``, instance profile.

    Args:
        tags: Pairs of key and value; at least one.
        region: AWS region; ``None`` leaves it to boto3.
        slots: Slots of every instance; ``None`` counts the GPUs of its type.
        address: "private-ip" or "private-dns".
        page_size: Instances per answer of the service, 5 to 1000; the whole answer is read in any case.
    """

    def __init__(
        self,
        tags: tuple[tuple[str, str], ...],
        region: str | None = None,
        slots: int | None = None,
        address: str = "private-ip",
        page_size: int = 1000,
    ) -> None:
        if address not in _ADDRESS_FIELDS:
            raise UsageError(f"--address {address!r} is not known; accepted: {', '.join(_ADDRESS_FIELDS)}")
        if not 5 <= page_size <= 1000:
            raise UsageError(f"--page-size {page_size} is out of range; EC2 accepts 5 to 1000")
        self._tags = tags
        self._region = region
        self._slots = slots
        self._address = _ADDRESS_FIELDS[address]
        self._page_size = page_size
        self._client: BaseClient | None = None
        self._gpus: dict[str, int] = {}

    def hosts(self) -> tuple[HostSlots, ...]:
        try:
            from botocore.exceptions import BotoCoreError, ClientError
            from botocore.parsers import ResponseParserError
        except ImportError as error:
            raise DiscoveryError(
                "asking EC2 needs boto3, which this Python does not have; "
                "install it, or set EDL_HVD_PYTHON to a Python that has it"
            ) from error
        try:
            client = self._client = self._client or self._connect()
            instances = {instance["InstanceId"]: instance for instance in self._instances(client)}
            self._learn_gpus(client, {instance["InstanceType"] for instance in instances.values()})
        except ClientError as error:
            self._client = None  # credentials from files are read once per client; they may be renewed by now
            raise DiscoveryError(_explain(error)) from error
        except (BotoCoreError, ResponseParserError, KeyError, ValueError) as error:  # as boto3 raises them
            self._client = None
            raise DiscoveryError(f"EC2 did not answer properly: {type(error).__name__}: {error}") from error
        return tuple(self._host(instance) for instance in instances.values())

    def _connect(self) -> BaseClient:
        import boto3
        from botocore.config import Config

        config = Config(connect_timeout=3, read_timeout=8, retries={"mode": "standard", "total_max_attempts": 3})
        return boto3.session.Session(region_name=self._region).client("ec2", config=config)

    def _instances(self, client: Any) -> Iterator[dict[str, Any]]:
        filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in self._tags]
        filters.append({"Name": "instance-state-name", "Values": ["running"]})
        pages = client.get_paginator("describe_instances").paginate(
            Filters=filters, PaginationConfig={"PageSize": self._page_size}
        )
        for page in pages:
            for reservation in page["Reservations"]:
                yield from reservation["Instances"]

    def _learn_gpus(self, client: Any, types: set[str]) -> None:
        """Ask once for each type how many GPUs it has; not at all when the slots are given."""
        unknown = sorted(types - self._gpus.keys())
        if self._slots is not None or not unknown:
            return
        pages = client.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": unknown}]
        )
        for page in pages:
            for kind in page["InstanceTypes"]:
                gpus = kind.get("GpuInfo", {}).get("Gpus", [])
                self._gpus[kind["InstanceType"]] = sum(gpu["Count"] for gpu in gpus)

    def _host(self, instance: dict[str, Any]) -> HostSlots:
        name, kind = instance["InstanceId"], instance["InstanceType"]
        address = instance.get(self._address)
        if not address:
            raise DiscoveryError(f"instance {name} has no {self._address}; try the other --address")
        slots = self._slots if self._slots is not None else self._gpus.get(kind, 0)
        if not slots:
            raise DiscoveryError(f"instance {name} is a {kind}, for which EC2 lists no GPU; give --slots")
        return HostSlots(address, slots)


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


def _explain(error: Any) -> str:
    """One line for a refusal: what was asked, the service's code and words, what to do."""
    code = error.response.get("Error", {}).get("Code", "unknown")
    words = error.response.get("Error", {}).get("Message", "")
    return f"EC2 refused {error.operation_name}: {code}: {words}; {_NEXT_STEPS.get(code, 'see the message of EC2')}"


FLAGS, BARE_FLAG = ("tag", "region", "slots", "address", "page-size", *REMOTE_FLAGS), ""


def question(flags: Flags) -> Question:
    """What ``from_ec2`` asks."""
    source = Ec2ByTag(
        tags=tuple(read_tag(tag) for tag in flags.needed("tag", "tag", "from_ec2 --tag job=resnet50")),
        region=flags.text("region", "") or None,
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        address=flags.text("address", "private-ip"),
        page_size=flags.count("page-size", 1000),
    )
    return ask_remotely(source, flags, needs_packages=True)
