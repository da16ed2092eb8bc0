"""EC2 instances: which of them are usable, their GPUs, prices and preemption notices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.source import Answer, HostDetails, Permission
from edl_hvd.discovery.sources.aws import Aws
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

ADDRESS_FIELDS = {"private-ip": "PrivateIpAddress", "private-dns": "PrivateDnsName"}
SPOT_NOTICE_S = 120.0
# EC2 marks a spot instance two minutes before it stops or ends it (User Guide, "Spot Instance interruption notices").
PRICE_S = 300.0
# Seconds. Spot prices change a few times a day; a request every ten seconds would find the same ones.
_NAMED = 3  # instances in a message
FILTER_VALUES = 200
# The most values that a filter of EC2 takes.
_STATES = ("pending", "running", "stopping", "stopped", "shutting-down")
# Of those that a filter finds. A terminated instance, which EC2 lists for another hour, is left out.
_ANY_TYPE = "t3.micro"
# Every region has this type.
_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")


@dataclass(frozen=True)
class InstanceOptions:
    """Options for the instances of any group.

    Attributes:
        slots: Number of slots of each instance; ``None`` for the number of GPUs of its type.
        address: Address that a host has: "private-ip" or "private-dns".
        page_size: Instances per page of the service, 5 to 1000; all pages are read.
        healthy: Whether to leave out instances that fail a status check of EC2.
        prices: Whether to request the present prices of spot instances.
    """

    slots: int | None = None
    address: str = "private-ip"
    page_size: int = 1000
    healthy: bool = False
    prices: bool = False

    def __post_init__(self) -> None:
        if self.address not in ADDRESS_FIELDS:
            raise UsageError(f"--address {self.address!r} is not known; accepted: {', '.join(ADDRESS_FIELDS)}")
        if not 5 <= self.page_size <= 1000:
            raise UsageError(f"--page-size {self.page_size} is out of range; EC2 accepts 5 to 1000")


FLAGS = ("region", "slots", "address", "page-size", "healthy", "prices")


def read_options(flags: Flags) -> InstanceOptions:
    """Read the options from ``FLAGS``."""
    return InstanceOptions(
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        address=flags.text("address", "private-ip"),
        page_size=flags.count("page-size", 1000),
        healthy=flags.yes_no("healthy"),
        prices=flags.yes_no("prices"),
    )


class Instances:
    """Requests to EC2 about instances, for one thread at a time, and inside of ``Aws.asking``."""

    def __init__(self, aws: Aws, options: InstanceOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._aws = aws
        self._options = options
        self._clock = clock
        self._gpus: dict[str, int] = {}
        self._prices = _Prices(aws, clock)

    def find(self, *filters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Find the instances that pass the filters, by their ids; terminated ones are left out."""
        states = {"Name": "instance-state-name", "Values": list(_STATES)}
        found = self._ask("describe_instances", "Reservations", [*filters, states])
        return {instance["InstanceId"]: instance for reservation in found for instance in reservation["Instances"]}

    def find_by_ids(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Find instances of which another service says that they are there, terminated ones included.

        Raises:
            DiscoveryError: EC2 does not list all of them: two services contradict each other, and one of them is wrong.
        """
        found: dict[str, dict[str, Any]] = {}
        for some in _in_parts(names):
            for reservation in self._ask("describe_instances", "Reservations", [some]):
                found |= {instance["InstanceId"]: instance for instance in reservation["Instances"]}
        missing = [name for name in names if name not in found]
        if missing:
            raise DiscoveryError(
                f"the group lists {len(names)} instances in service, and EC2 knows only {len(names) - len(missing)} of "
                f"them, not {', '.join(missing[:_NAMED])}{', ...' * (len(missing) > _NAMED)}; expected both to agree, "
                "as they do some seconds after a change; if this goes on, look at the region and the permissions"
            )
        return found

    def judge(self, instances: Mapping[str, dict[str, Any]], left_out: Mapping[str, str]) -> Answer:
        """Judge which instances are hosts, and add their details.

        Args:
            instances: Instances by their ids.
            left_out: Instances that do not count, each with a reason that EC2 does not know.
        """
        reasons = {name: f"is {_state(instance)}" for name, instance in instances.items()}
        reasons = {name: reason for name, reason in reasons.items() if reason != "is running"} | dict(left_out)
        running = {name: instance for name, instance in instances.items() if name not in reasons}
        marks = self._marks([name for name, instance in running.items() if _is_spot(instance)])
        reasons |= {name: f"its spot request is {code}" for name, (code, _) in marks.items()}
        if self._options.healthy:
            reasons |= self._failed_checks(sorted(running.keys() - marks.keys()))
        taken = {name: instance for name, instance in running.items() if name not in reasons}
        self._learn_gpus({instance["InstanceType"] for instance in taken.values()})
        prices = self._prices.of([i for i in taken.values() if _is_spot(i)]) if self._options.prices else {}
        hosts = {name: self._host(instance) for name, instance in taken.items()}
        return Answer(
            tuple(hosts.values()),
            notices=self._notices({name: running[name] for name in marks}, marks),
            details={hosts[name].host: _details(instance, prices) for name, instance in taken.items()},
            left_out=reasons,
        )

    def permissions(self) -> Iterator[Permission]:
        """Try each permission that the options need; requests are small, for servers without ``DryRun``."""
        few = {"MaxResults": 5, "DryRun": True}
        kind = {"Filters": [{"Name": "instance-type", "Values": [_ANY_TYPE]}]}
        yield self._aws.try_permission("ec2", "describe_instances", **few, **kind)
        if self._options.slots is None:
            yield self._aws.try_permission("ec2", "describe_instance_types", **few, **kind)
        # Needed if there are spot instances.
        yield self._aws.try_permission("ec2", "describe_spot_instance_requests", **few)
        if self._options.healthy:
            yield self._aws.try_permission("ec2", "describe_instance_status", **few)
        if self._options.prices:
            yield self._aws.try_permission("ec2", "describe_spot_price_history", InstanceTypes=[_ANY_TYPE], **few)

    def _ask(self, operation: str, items: str, filters: Sequence[Mapping[str, Any]], **more: Any) -> Iterator[Any]:
        return self._aws.pages(
            "ec2", operation, items, Filters=list(filters), MaxResults=self._options.page_size, **more
        )

    def _marks(self, names: Sequence[str]) -> dict[str, tuple[str, datetime]]:
        """The spot instances that EC2 is about to take back, each with the code of that and its time."""
        marks = {}
        for some in _in_parts(names):
            for request in self._ask("describe_spot_instance_requests", "SpotInstanceRequests", [some]):
                status = request.get("Status", {})
                if status.get("Code", "").startswith("marked-for-"):
                    marks[request["InstanceId"]] = (status["Code"], status["UpdateTime"])
        return marks

    def _notices(
        self, instances: Mapping[str, Mapping[str, Any]], marks: Mapping[str, tuple[str, datetime]]
    ) -> dict[str, float]:
        """Seconds until each marked instance is gone, by address; one without an address is no host."""
        now_s = self._clock.wall_s()
        addresses = {name: instance.get(ADDRESS_FIELDS[self._options.address]) for name, instance in instances.items()}
        return {address: _left_s(marks[name][1], now_s) for name, address in addresses.items() if address}

    def _failed_checks(self, names: Sequence[str]) -> dict[str, str]:
        reasons = {}
        for some in _in_parts(names):
            for status in self._ask("describe_instance_status", "InstanceStatuses", [some]):
                checks = {"instance": status["InstanceStatus"], "system": status["SystemStatus"]}
                failed = [name for name, check in checks.items() if check["Status"] == "impaired"]
                if failed:
                    reasons[status["InstanceId"]] = f"fails the {' and the '.join(failed)} status check"
        return reasons

    def _learn_gpus(self, types: set[str]) -> None:
        """Request the number of GPUs once for each type; not if the slots are given."""
        unknown = sorted(types - self._gpus.keys())
        if self._options.slots is not None or not unknown:
            return
        kinds = self._aws.pages(
            "ec2",
            "describe_instance_types",
            "InstanceTypes",
            Filters=[{"Name": "instance-type", "Values": unknown}],
            MaxResults=min(100, self._options.page_size),  # the most that EC2 accepts here
        )
        for kind in kinds:
            self._gpus[kind["InstanceType"]] = sum(gpu["Count"] for gpu in kind.get("GpuInfo", {}).get("Gpus", []))

    def _host(self, instance: Mapping[str, Any]) -> HostSlots:
        name, kind, field = instance["InstanceId"], instance["InstanceType"], ADDRESS_FIELDS[self._options.address]
        address = instance.get(field)
        if not address:
            raise DiscoveryError(f"instance {name} has no {field}; try the other --address")
        slots = self._options.slots if self._options.slots is not None else self._gpus.get(kind, 0)
        if not slots:
            raise DiscoveryError(f"instance {name} is a {kind}, for which EC2 lists no GPU; give --slots")
        return HostSlots(address, slots)


class _Prices:
    """Prices of spot instances, requested at most every ``PRICE_S`` seconds, and for a new type."""

    def __init__(self, aws: Aws, clock: Clock) -> None:
        self._aws = aws
        self._clock = clock
        self._asked_s = 0.0
        self._types: frozenset[str] = frozenset()
        self._prices: dict[tuple[str, str], float] = {}

    def of(self, instances: Iterable[Mapping[str, Any]]) -> Mapping[tuple[str, str], float]:
        """US dollars per hour by type and zone."""
        types = frozenset(instance["InstanceType"] for instance in instances)
        now_s = self._clock.monotonic_s()
        if not types or (types <= self._types and now_s - self._asked_s < PRICE_S):
            return self._prices
        newest: dict[tuple[str, str], Any] = {}
        # With a start of now, EC2 gives the present price of each type and zone.
        start = datetime.fromtimestamp(self._clock.wall_s(), timezone.utc)
        parameters = {"InstanceTypes": sorted(types), "ProductDescriptions": list(_LINUX), "StartTime": start}
        for price in self._aws.pages("ec2", "describe_spot_price_history", "SpotPriceHistory", **parameters):
            place = (price["InstanceType"], price["AvailabilityZone"])
            if place not in newest or price["Timestamp"] > newest[place]["Timestamp"]:
                newest[place] = price
        self._asked_s, self._types = now_s, types
        self._prices = {place: float(price["SpotPrice"]) for place, price in newest.items()}
        return self._prices


def _in_parts(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(names), FILTER_VALUES):
        yield {"Name": "instance-id", "Values": list(names[start : start + FILTER_VALUES])}


def _state(instance: Mapping[str, Any]) -> str:
    return str(instance["State"]["Name"])


def _is_spot(instance: Mapping[str, Any]) -> bool:
    return instance.get("InstanceLifecycle") == "spot"


def _details(instance: Mapping[str, Any], prices: Mapping[tuple[str, str], float]) -> HostDetails:
    kind, zone = instance["InstanceType"], instance.get("Placement", {}).get("AvailabilityZone", "")
    price = prices.get((kind, zone)) if _is_spot(instance) else None
    since = instance.get("LaunchTime")
    return HostDetails(kind, zone, price, since.timestamp() if since else None)


def _left_s(marked: datetime, now_s: float) -> float:
    """Seconds until a spot instance is gone, within 0 and ``SPOT_NOTICE_S`` also if a clock is wrong.

    >>> _left_s(datetime.fromtimestamp(1000, timezone.utc), 1015)
    105.0
    """
    return min(max(marked.timestamp() + SPOT_NOTICE_S - now_s, 0.0), SPOT_NOTICE_S)
