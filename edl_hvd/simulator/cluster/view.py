"""What a policy sees of a cluster, and the placing that the older ones share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl_hvd.simulator.cluster.jobs import SimulatedJob
from edl_hvd.simulator.cluster.workload import SubmittedJob

Allocation = dict[int, int]
"""GPUs by host, in the order in which a job was given them."""


@dataclass(frozen=True)
class JobShape:
    """What of a user's wishes a policy takes over.

    Attributes:
        gpus: GPUs of the user; ``None``: the policy chooses.
        batch: Global batch of the user; ``None``: the job chooses.
        most: Most GPUs that it may have.
    """

    gpus: int | None
    batch: int | None
    most: int


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
    jobs: Sequence[SimulatedJob]
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

    def prepare(self, job: SubmittedJob) -> JobShape:
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


def as_asked(job: SubmittedJob) -> JobShape:
    """GPUs and batch as the user asks for."""
    return JobShape(job.gpus, job.batch, job.gpus)


def as_it_chooses(job: SubmittedJob) -> JobShape:
    """A job that chooses its batch, on as many GPUs as the policy gives it; as for Pollux in its artifact."""
    app = job.application
    most = app.largest_batch // app.smallest_local_batch
    # The profile of this one says nothing of several GPUs.
    return JobShape(None, app.largest_batch, 1) if app.name == "ncf" else JobShape(None, None, most)
