"""The instances of a managed instance group of Google Cloud as hosts."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import REMOTE_FLAGS, PolledSource, remote_source
from edl_hvd.discovery.source import Answer, HostDetails, Permission, Source
from edl_hvd.discovery.sources.google_api import ENDPOINT, METADATA, GoogleCloud
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.http_client import seconds_since_epoch

PAGE_SIZE = 500
# The most that Compute Engine gives; with fewer pages fewer requests can fail.
_NAMED = 3  # instances in a message
_STAYING = ("NONE", "VERIFYING", "REFRESHING")
_FIELDS = (
    "nextPageToken,items(name,status,machineType,guestAccelerators/acceleratorCount,networkInterfaces/networkIP,"
    "creationTimestamp,lastStartTimestamp)"
)


@dataclass(frozen=True)
class GroupLocation:
    """Location of a group.

    Attributes:
        project: Project id; empty for that of this machine.
        zone: Zone of a zonal group.
        region: Region of a regional group. With neither, the zone is that of this machine.
    """

    project: str = ""
    zone: str = ""
    region: str = ""

    def __post_init__(self) -> None:
        if self.zone and self.region:
            raise UsageError(f"--zone {self.zone!r} and --region {self.region!r} are both given; a group is in one")


class GoogleGroup(Source):
    """The running instances of a managed instance group that the group is not about to change.

    The ``currentAction`` of an instance says what the group does with it. Besides ``NONE`` two actions count:
    ``VERIFYING``, because a health check that looks for the job's own worker cannot pass before the worker has started,
    and ``REFRESHING``, which changes settings of a machine that goes on.

    The list of instances has to have all of these. It has not for some seconds after a change, or where an answer is
    cut: that is doubt, and no host is dropped for it.

    Args:
        name: Name of the group.
        place: Location of the group.
        cloud: Client of Compute Engine.
        slots: Number of slots of each instance; ``None`` for its number of GPUs.
        healthy: Whether to leave out instances that fail the group's health check.
        page_size: Instances per page, 1 to 500; all pages are read.
    """

    def __init__(
        self,
        name: str,
        place: GroupLocation,
        cloud: GoogleCloud,
        slots: int | None = None,
        healthy: bool = False,
        page_size: int = PAGE_SIZE,
    ) -> None:
        if not 1 <= page_size <= PAGE_SIZE:
            raise UsageError(f"--page-size {page_size} is out of range; Compute Engine accepts 1 to {PAGE_SIZE}")
        self._name = name
        self._place = place
        self._cloud = cloud
        self._slots = slots
        self._healthy = healthy
        self._page = {"maxResults": str(page_size)}
        self._gpus: dict[tuple[str, str], int] = {}

    def answer(self) -> Answer:
        try:
            return self._find(self._settle())
        except (KeyError, TypeError, IndexError, ValueError) as error:  # a field is missing or has another type
            raise DiscoveryError(f"Compute Engine did not answer properly: {type(error).__name__}: {error}") from error

    def _settle(self) -> GroupLocation:
        """The location of the group; parts that are not given are those of this machine, requested once."""
        place = self._place
        project = place.project or self._cloud.metadata("project/project-id")
        # "projects/123456/zones/us-central1-a"
        zone = place.zone or ("" if place.region else _last(self._cloud.metadata("instance/zone")))
        self._place = GroupLocation(project, zone, place.region)
        return self._place

    def _find(self, place: GroupLocation) -> Answer:
        members = list(self._cloud.pages("POST", self._path(place), "managedInstances", self._page))
        reasons = judge_members(members, self._healthy)
        left_out = {name: reason for name, reason in reasons.items() if reason}
        taken = [name for name, reason in reasons.items() if not reason]
        details, hosts = {}, []
        instances = self._instances(place.project, taken)
        missing = [name for name in taken if name not in instances]
        if missing:
            raise DiscoveryError(
                f"the group lists {len(taken)} running instances, and Compute Engine's list of instances has only "
                f"{len(taken) - len(missing)} of them, not {', '.join(missing[:_NAMED])}"
                f"{', ...' * (len(missing) > _NAMED)}; expected both to agree, as they do some seconds after a change"
            )
        for name in taken:
            instance, zone = instances[name], name.partition("/")[0]
            if instance["status"] != "RUNNING":
                left_out[name] = f"is {instance['status']}"
                continue
            host = HostSlots(instance["networkInterfaces"][0]["networkIP"], self._count(place.project, zone, instance))
            hosts.append(host)
            details[host.host] = _describe(instance, zone)
        return Answer(tuple(hosts), details=details, left_out=left_out)

    def _instances(self, project: str, taken: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The instances as "zone/name"; one request per zone, for all names with the prefix of the group's."""
        names: dict[str, list[str]] = {}
        for name in taken:
            names.setdefault(name.partition("/")[0], []).append(_last(name))
        found = {}
        for zone, its in names.items():
            query = {**self._page, "filter": f'name eq "{_beginning(its)}.*"', "fields": _FIELDS}
            for instance in self._cloud.pages("GET", f"projects/{project}/zones/{zone}/instances", "items", query):
                found[f"{zone}/{instance['name']}"] = instance
        return found

    def _count(self, project: str, zone: str, instance: Mapping[str, Any]) -> int:
        """The slots of an instance: its GPUs, which for some types only the type names."""
        if self._slots is not None:
            return self._slots
        kind = _last(instance["machineType"])
        gpus = sum(int(entry["acceleratorCount"]) for entry in instance.get("guestAccelerators", []))
        if not gpus and (zone, kind) not in self._gpus:
            about = self._cloud.ask("GET", f"projects/{project}/zones/{zone}/machineTypes/{kind}", {})
            self._gpus[zone, kind] = sum(int(entry["guestAcceleratorCount"]) for entry in about.get("accelerators", []))
        gpus = gpus or self._gpus[zone, kind]
        if not gpus:
            raise DiscoveryError(f"instance {instance['name']} is a {kind} without a GPU; give --slots")
        return gpus

    def _path(self, place: GroupLocation) -> str:
        scope = f"zones/{place.zone}" if place.zone else f"regions/{place.region}"
        return f"projects/{place.project}/{scope}/instanceGroupManagers/{self._name}/listManagedInstances"

    def permissions(self) -> Iterable[Permission]:
        one = {"maxResults": "1"}
        try:
            place = self._settle()
            yield Permission("a project and a place", True, f"{place.project}, {place.zone or place.region}")
        except DiscoveryError as error:
            yield Permission("a project and a place", None, str(error))
            return
        yield self._cloud.try_permission("compute.instanceGroupManagers.get", "POST", self._path(place), one)
        zones = f"projects/{place.project}/zones/{place.zone or f'{place.region}-b'}"  # every region has a zone b
        yield self._cloud.try_permission("compute.instances.list", "GET", f"{zones}/instances", one)
        if self._slots is None:
            kind = f"{zones}/machineTypes/e2-micro"  # every zone has this type
            yield self._cloud.try_permission("compute.machineTypes.get", "GET", kind, {"fields": "name"})


def judge_members(members: Iterable[Mapping[str, Any]], healthy: bool) -> dict[str, str]:
    """The reason why each instance of a group does not count, by zone and name; empty if it counts.

    >>> member = {"instance": "projects/p/zones/z/instances/a-1", "instanceStatus": "RUNNING"}
    >>> judge_members([{**member, "currentAction": "DELETING"}], healthy=False)
    {'z/a-1': 'its group is DELETING it'}
    """
    reasons = {}
    for member in members:
        action, status = member["currentAction"], member.get("instanceStatus", "not there yet")
        states = [entry.get("detailedHealthState", "") for entry in member.get("instanceHealth", [])]
        reason = ""
        if action not in _STAYING:
            reason = f"its group is {action} it"
        elif status != "RUNNING":
            reason = f"is {status}"
        elif healthy and ("UNHEALTHY" in states or "TIMEOUT" in states):
            reason = "fails its group's health check"
        reasons[f"{_zone(member['instance'])}/{_last(member['instance'])}"] = reason
    return reasons


def _beginning(names: Sequence[str]) -> str:
    """The longest common prefix of names.

    >>> _beginning(["resnet-x1q", "resnet-x7", "resnet-a"])
    'resnet-'
    """
    return os.path.commonprefix(names)  # noqa: RUF071 (characters are meant, not folders)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _zone(instance: str) -> str:
    """
    >>> _zone("https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a/instances/a-1")
    'us-central1-a'
    """
    return instance.partition("/zones/")[2].partition("/")[0]


def _describe(instance: Mapping[str, Any], zone: str) -> HostDetails:
    started = instance.get("lastStartTimestamp") or instance.get("creationTimestamp")
    since_s = seconds_since_epoch(started) if started else None
    return HostDetails(_last(instance["machineType"]), zone, None, since_s)


FLAGS = (
    "group",
    "zone",
    "region",
    "project",
    "slots",
    "healthy",
    "token-file",
    "page-size",
    "metadata-host",
    "endpoint",
    *REMOTE_FLAGS,
)
BARE_FLAG = "group"
VARIABLES = {"metadata-host": "GCE_METADATA_HOST", "endpoint": "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"}
# Those of Google's own tools.


def from_flags(flags: Flags, clock: Clock = SYSTEM_CLOCK) -> PolledSource:
    """The source of ``from_google``."""
    flags.needed("group", "managed instance group", "from_google --group resnet50 --zone us-central1-a")
    cloud = GoogleCloud(
        flags.text("metadata-host", METADATA), flags.text("endpoint", ENDPOINT), flags.text("token-file", ""), clock
    )
    source = GoogleGroup(
        flags.text("group", ""),
        GroupLocation(flags.text("project", ""), flags.text("zone", ""), flags.text("region", "")),
        cloud,
        slots=flags.count("slots", 1) if flags.all("slots") else None,
        healthy=flags.yes_no("healthy"),
        page_size=flags.count("page-size", PAGE_SIZE),
    )
    return remote_source(source, flags)
