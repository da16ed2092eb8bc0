"""A workload on a cluster under one policy, in virtual time, and what comes out.

Every ``period_s`` the jobs advance, and the policy decides anew. After the simulator of Pollux's artifact: with its
costs, period and cluster the completion times of Tiresias and Optimus are those that it published, to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edl_hvd.errors import InternalError, UsageError
from edl_hvd.simulator.cluster.jobs import FamilySteps, Models, ResizeCost, SimulatedJob
from edl_hvd.simulator.cluster.view import Allocation, AskedJob, ClusterView, JobShape, Policy
from edl_hvd.simulator.cluster.workload import SubmittedJob, Workload


@dataclass(frozen=True)
class Setting:
    """The cluster, and what changes cost there.

    Attributes:
        hosts: Number of hosts.
        host_slots: GPUs of each.
        period_s: Seconds between two decisions.
        cost: What changes cost a job.
    """

    hosts: int = 16
    host_slots: int = 4
    period_s: float = 60.0
    cost: ResizeCost = field(default_factory=ResizeCost)


EQUAL_COSTS = Setting()
"""Those of Pollux's artifact: 64 GPUs, a decision per minute, 30 s without progress after each change."""

OWN_COSTS = Setting(period_s=10.0, cost=ResizeCost(change_s=1.0, start_s=30.0, join_s=30.0))
"""Those of this package: a resize of 1 s, while newcomers start for 30 s and hold their slots; decisions every 10 s."""


@dataclass(frozen=True)
class FinishedJob:
    """One job's account.

    Attributes:
        name: Name.
        application: What it trained.
        submitted_s: Moment of its submission.
        waited_s: Seconds until its first slots.
        completion_s: Seconds from its submission to its end.
        changes: Times that its slots were changed after that.
        gpu_s: GPU-seconds that it had.
    """

    name: str
    application: str
    submitted_s: float
    waited_s: float
    completion_s: float
    changes: int
    gpu_s: float


@dataclass(frozen=True)
class SlotsAt:
    """The slots of each job from one moment on, by name; those that wait have none and are listed."""

    time_s: float
    slots: dict[str, int]


@dataclass(frozen=True)
class Played:
    """What came out of a workload under a policy.

    Attributes:
        workload: Name.
        policy: Name.
        setting: Cluster and costs.
        jobs: Account of each job, in the order of the workload.
        history: Slots of the jobs, one entry for each decision that changed any.
        decisions: Number of decisions with at least one job.
    """

    workload: str
    policy: str
    setting: Setting
    jobs: tuple[FinishedJob, ...]
    history: tuple[SlotsAt, ...]
    decisions: int

    @property
    def average_s(self) -> float:
        """Mean completion time."""
        return sum(job.completion_s for job in self.jobs) / len(self.jobs)

    @property
    def p99_s(self) -> float:
        """The 99th percentile of completion times: that of place 0.99 n, counted from 0, rounded down."""
        return sorted(job.completion_s for job in self.jobs)[int(0.99 * len(self.jobs))]

    @property
    def makespan_s(self) -> float:
        """Moment at which the last job ended."""
        return max(job.submitted_s + job.completion_s for job in self.jobs)

    @property
    def waited_s(self) -> float:
        """Mean seconds until the first slots."""
        return sum(job.waited_s for job in self.jobs) / len(self.jobs)

    @property
    def changes(self) -> float:
        """Mean number of changes per job."""
        return sum(job.changes for job in self.jobs) / len(self.jobs)


def prepared(policy: Policy, jobs: Iterable[AskedJob], setting: Setting) -> dict[str, JobShape]:
    """What a policy makes of each job before the play, by name.

    Raises:
        UsageError: A job of the user's size does not fit into the cluster.
    """
    shapes = {job.name: policy.prepare(job) for job in jobs}
    slots = setting.hosts * setting.host_slots
    for name, shape in shapes.items():
        if shape.gpus is not None and shape.gpus > slots:
            raise UsageError(
                f"job {name!r} asks for {shape.gpus} GPUs, and the cluster has {slots}; expected at most that"
            )
    return shapes


def play(
    workload: Workload, policy: Policy, setting: Setting = EQUAL_COSTS,
    tell: Callable[[int, int], None] = lambda done, of: None, models: Models | None = None,
) -> Played:  # fmt: skip
    """Play a workload to its end.

    Args:
        workload: The jobs.
        policy: Who decides; a new one for each call.
        setting: Cluster and costs.
        tell: Function that is given the number of jobs that have ended, and of all.
        models: Models of steps that were fitted before, which takes most of the time; new ones are added.

    Raises:
        UsageError: A job of the user's size does not fit into the cluster.
        InternalError: The policy gave more than there is, or starves a job.
    """
    shapes = prepared(policy, workload.jobs, setting)
    known: Models = {} if models is None else models
    families = {shape.family: FamilySteps() for shape in shapes.values() if shape.family}
    jobs = [_simulated(job, shapes[job.name], setting, known, families) for job in workload.jobs]
    holds: dict[str, Allocation] = {}
    history: list[SlotsAt] = []
    now_s, decisions, idle = 0.0, 0, 0
    while any(job.ended_s is None for job in jobs):
        for job in jobs:
            if job.ended_s is None:
                job.advance(setting.period_s)
        now_s += setting.period_s
        active = [job for job in jobs if job.ended_s is None and job.submitted.time_s <= now_s]
        holds = {job.name: holds[job.name] for job in active if job.name in holds}
        if not active:
            continue
        decisions += 1
        given = policy.decide(ClusterView(now_s, setting.hosts, setting.host_slots, active, shapes, holds))
        check_given(given, setting)
        idle = 0 if given else idle + 1
        if idle > 1000:
            raise InternalError(f"policy {policy.name} gives nothing to {len(active)} jobs")
        for job in active:
            if list(given.get(job.name, {}).items()) != list(holds.get(job.name, {}).items()):
                job.give(given.get(job.name, {}), now_s)
        if given != holds:
            history.append(SlotsAt(now_s, {job.name: sum(given.get(job.name, {}).values()) for job in active}))
        holds = given
        tell(sum(job.ended_s is not None for job in jobs), len(jobs))
    accounts = tuple(_account(job) for job in jobs)
    return Played(workload.name, policy.name, setting, accounts, tuple(history), decisions)


def _simulated(
    job: SubmittedJob, shape: JobShape, setting: Setting, models: Models, families: dict[str, FamilySteps]
) -> SimulatedJob:
    return SimulatedJob(job, shape.gpus, shape.batch, setting.cost, models, families.get(shape.family))


def check_given(given: dict[str, Allocation], setting: Setting) -> None:
    """Refuse what a policy gave, if it is more than a host has.

    Raises:
        InternalError: It is.
    """
    used = [0] * setting.hosts
    for allocation in given.values():
        for host, slots in allocation.items():
            used[host] += slots
    if max(used) > setting.host_slots:
        raise InternalError(f"a policy gave {max(used)} GPUs of a host with {setting.host_slots}")


def _account(job: SimulatedJob) -> FinishedJob:
    if job.ended_s is None or job.first_slots_s is None:
        raise InternalError(f"job {job.name} has no account before its end")
    submitted_s = job.submitted.time_s
    return FinishedJob(
        job.name, job.application.name, submitted_s, job.first_slots_s - submitted_s, job.ended_s - submitted_s,
        job.changes, job.served_gpu_s,
    )  # fmt: skip
