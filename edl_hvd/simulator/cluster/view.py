"""What a policy sees of a cluster, and the placing that the older ones share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.jobs import ResizeCost

Allocation = dict[int, int]
"""GPUs by host, in the order in which a job was given them."""


class AskedJob(Protocol):
    """A job as it was submitted."""

    @property
    def name(self) -> str:
        """Name, unique in its workload."""

    @property
    def time_s(self) -> int:
        """Moment of its submission."""

    @property
    def gpus(self) -> int:
        """GPUs that its user asks for."""

    @property
    def batch(self) -> int | None:
        """Global batch that its user asks for; ``None``: none is known."""

    @property
    def family(self) -> str:
        """Name of the jobs that are alike; empty: it is like no other."""

    @property
    def chosen_batch(self) -> int | None:
        """Global batch that it keeps where a policy chooses its GPUs; ``None``: it chooses its own."""

    @property
    def most_gpus(self) -> int:
        """Most GPUs that it makes use of."""


class ViewedJob(Protocol):
    """A job that was submitted and has not ended, as a policy sees it."""

    cost: ResizeCost
    changed_s: float

    @property
    def name(self) -> str:
        """Name, unique in its workload."""

    @property
    def submitted(self) -> AskedJob:
        """What was submitted."""

    @property
    def least(self) -> int:
        """Fewest GPUs that it runs with."""

    @property
    def left(self) -> float:
        """Rest of its work, in goodput times seconds."""

    @property
    def largest_seen(self) -> int:
        """Most GPUs that it has trained with."""

    @property
    def explored(self) -> int:
        """Most GPUs that it may have by what is known of its speed."""

    def curve(self, sizes: Sequence[int], host_slots: int) -> Curve | None:
        """Its goodput over GPUs; ``None``: not known yet."""


@dataclass(frozen=True)
class JobShape:
    """What of a user's wishes a policy takes over.

    Attributes:
        gpus: GPUs of the user; ``None``: the policy chooses.
        batch: Global batch of the user; ``None``: the job chooses.
        most: Most GPUs that it may have.
        family: Name of the jobs with which it shares what they measure; empty: with none.
    """

    gpus: int | None
    batch: int | None
    most: int
    family: str = ""


@dataclass(frozen=True)
class ClusterView:
    """A cluster at a moment.

    Attributes:
        now_s: The moment.
        hosts: Number of hosts.
        host_slots: GPUs of each.
        jobs: Jobs that were submitted and have not ended, in the order of the workload.
        shapes: What each was prepared with, by name.
        holds: GPUs of each that has any, by name.
    """

    now_s: float
    hosts: int
    host_slots: int
    jobs: Sequence[ViewedJob]
    shapes: Mapping[str, JobShape]
    holds: Mapping[str, Allocation]

    @property
    def slots(self) -> int:
        """All GPUs."""
        return self.hosts * self.host_slots

    def free(self, allocations: Iterable[Allocation]) -> list[int]:
        """Free GPUs of each host beside these allocations."""
        found = [self.host_slots] * self.hosts
        for allocation in allocations:
            for host, slots in allocation.items():
                found[host] -= slots
        return found


class Policy(Protocol):
    """Who gets which GPUs."""

    name: str

    def prepare(self, job: AskedJob) -> JobShape:
        """What of its user's wishes holds for a job."""

    def decide(self, view: ClusterView) -> dict[str, Allocation]:
        """The GPUs of each job that has any from now on."""


def spread(free: list[int], gpus: int) -> Allocation:
    """Take GPUs from the emptiest hosts, one after the other; ``free`` is changed.

    As in the simulator of Pollux's artifact, for Tiresias and Optimus.

    >>> spread([1, 4, 3], 6)
    {1: 4, 2: 2}
    """
    found: Allocation = {}
    while gpus:
        host = max(range(len(free)), key=lambda host: free[host])
        slots = min(free[host], gpus)
        found[host] = found.get(host, 0) + slots
        free[host] -= slots
        gpus -= slots
    return found


def as_asked(job: AskedJob) -> JobShape:
    """GPUs and batch as the user asks for."""
    return JobShape(job.gpus, job.batch, job.gpus)


def as_it_chooses(job: AskedJob) -> JobShape:
    """A job that chooses its batch, on as many GPUs as the policy gives it; as for Pollux in its artifact."""
    return JobShape(None, job.chosen_batch, job.most_gpus)
