"""What the planner is asked about a cluster, and its answer. Pure.

A job holds what the last plan gave it, which its status says, whether its pods are there yet or not: a plan that is
made from one that is carried out in part could take that back, and the next one this, without end. Room that pods are
leaving counts as free in the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edl_hvd.hosts import HostSlots
from edl_hvd.kubernetes.snapshot import (
    CPU,
    EXTRA_CLASS,
    FLOOR,
    LAUNCHER,
    WORKER,
    ClusterSnapshot,
    Placement,
    SeenGuest,
    SeenJob,
    SeenNode,
    SeenPod,
    TrainingJobSpec,
)
from edl_hvd.kubernetes.status import JobMeasurements, Placed, timings_of
from edl_hvd.planning.family import FamilyMember, first_curve, shared_timings
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, Plan, PlanRules, Room
from edl_hvd.timings import Timing

_CHANGE_S, _START_S = 1.0, 10.0
# As the fleet assumes before a job has measured its own.
_GUEST_CHANGE_S = 30.0
# Stock Horovod under an MPIJob: a ConfigMap that a kubelet brings, and a new start of all workers.
_CLAIM_S = 120.0
# A pod that finds no place within this time though room was made needs something else than room.
_ZONE = "topology.kubernetes.io/zone"


def pod_curve(most: int, unit: int) -> Curve:
    """The curve of a job that nothing is known of: n workers make n^0.8 of what one makes.

    >>> pod_curve(3, 5).sizes
    (5, 10, 15)
    """
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count += max(1, count // 16)
    return Curve(
        tuple(unit * one for one in (*counts, most)), tuple(one**PlanRules.elasticity for one in (*counts, most))
    )


@dataclass
class JobPods:
    """The pods of one job."""

    workers: list[SeenPod] = field(default_factory=list)
    launcher: SeenPod | None = None
    names: set[str] = field(default_factory=set)

    @property
    def alive(self) -> list[SeenPod]:
        return [pod for pod in self.workers if not pod.is_deleting and not pod.is_over]


def pods_of(seen: ClusterSnapshot) -> dict[str, JobPods]:
    """The pods of each job, by its identity."""
    found = {job.uid: JobPods() for job in seen.jobs}
    for pod in sorted(seen.pods, key=lambda pod: (pod.namespace, pod.name)):
        mine = found.get(pod.job)
        if mine is not None:
            mine.names.add(pod.name)
            if pod.role == WORKER:
                mine.workers.append(pod)
            elif pod.role == LAUNCHER:
                mine.launcher = pod
    return found


@dataclass(frozen=True)
class ResizeGuest:
    """Give an MPIJob another number of workers, if nobody has written it since."""

    job: SeenGuest
    replicas: int
    why: str


@dataclass(frozen=True)
class ClusterPlan:
    """The plan for one resource.

    Attributes:
        plan: What jobs get; MPIJobs are not among them.
        resizes: MPIJobs that get another number of workers.
    """

    plan: Plan
    resizes: tuple[ResizeGuest, ...] = ()


@dataclass(frozen=True)
class _NodeKinds:
    """The kinds of nodes in a plan: those that admit the same jobs are alike, and a job is on one kind at a time.

    Attributes:
        admitted: Which workers each node with the resource admits.
        names: Name of the kind, by these.
    """

    admitted: Mapping[str, frozenset[Placement]]
    names: Mapping[frozenset[Placement], str]

    @classmethod
    def of(cls, nodes: Iterable[SeenNode], resource: str, placements: set[Placement]) -> _NodeKinds:
        """The kinds of these nodes.

        Nodes that admit nobody are as the others; they are closed. Where all that are open admit the same, all are
        alike.
        """
        with_it = [node for node in nodes if node.room(resource)]
        admitted = {node.name: frozenset(one for one in placements if one.admits(node)) for node in with_it}
        found = set(admitted.values())
        is_alike = len(found - {frozenset()}) < 2
        return cls(admitted, {one: "" if is_alike or not one else " or ".join(sorted(map(str, one))) for one in found})

    def name(self, node: str) -> str:
        """The kind of a node."""
        return self.names[self.admitted[node]]

    def for_workers(self, placement: Placement) -> list[str]:
        """The kinds on which these workers may be; one that no node has, where none admits them."""
        return sorted({kind for who, kind in self.names.items() if placement in who}) or [str(placement)]

    def staying(self, nodes: Iterable[str], placement: Placement) -> list[str]:
        """The kinds of the nodes where workers are that no plan can move; where they are on none, as for others."""
        return sorted({self.name(node) for node in nodes if node in self.admitted}) or self.for_workers(placement)


class ClusterPlanner:
    """Plans for the jobs of a cluster, one resource after the other.

    Args:
        seen: The cluster.
        pods: Pods of each job, by its identity.
        now_s: Seconds since the epoch.
    """

    def __init__(self, seen: ClusterSnapshot, pods: Mapping[str, JobPods], now_s: float) -> None:
        self.seen, self.pods, self.now_s = seen, pods, now_s
        self.jobs = sorted((job for job in seen.jobs if not job.is_deleting), key=lambda job: job.key)
        self.nodes = {node.name: node for node in seen.nodes}
        self.guests = sorted((one for one in seen.guests if not one.problem), key=lambda one: one.key)
        self.family_curves: dict[tuple[str, str, int, int], Curve | None] = {}
        self.families: defaultdict[tuple[str, str], list[SeenJob]] = defaultdict(list)
        for job in sorted(self.jobs, key=lambda job: job.created_s):
            if job.spec is not None and job.spec.family:
                self.families[job.namespace, job.spec.family].append(job)

    def resources(self) -> list[str]:
        """The resources that jobs are planned by."""
        asked = {job.spec.resource for job in self.jobs if job.spec is not None}
        return sorted(asked | {guest.resource for guest in self.guests})

    def plan(self, resource: str) -> ClusterPlan:
        """The plan; with MPIJobs in two steps, as nobody can say where their workers are to be.

        First each MPIJob gets a number of workers, as one of the jobs. Then the others are placed beside its pods where
        these are, and beside a claim for each worker that has none yet. An MPIJob that runs with fewer than
        its least, and does not get that, keeps what it has; so the plan is made again beside its pods.
        """
        guests = [guest for guest in self.guests if guest.resource == resource]
        others, claims = self._others(resource), self._claims(resource)
        if not guests:
            return ClusterPlan(self._planned(resource, others, claims, ()))
        while True:
            made = self._planned(resource, others, claims, guests)
            counts = {share.job: share for share in made.shares}
            short = [one for one in guests if one.key not in counts and self._staying(one, one.replicas)]
            if not short:
                break
            for guest in short:
                for pod in self._staying(guest, guest.replicas):
                    others[pod.node] = others.get(pod.node, 0) + guest.unit
            guests = [guest for guest in guests if guest not in short]
        resizes = []
        for guest in guests:
            share = counts.get(guest.key)
            workers = guest.replicas if share is None else share.slots // guest.unit
            if share is not None and workers != guest.replicas:
                resizes.append(ResizeGuest(guest, workers, share.why))
            staying = self._staying(guest, workers)
            for pod in staying:
                others[pod.node] = others.get(pod.node, 0) + guest.unit
            missing = 0 if share is None else workers - len(staying)
            priority = self.seen.priorities.get(guest.priority_class, 0)
            claims += [
                Claim(f"{guest.key} {number}", guest.unit, guest.unit, priority, guest.created_s)
                for number in range(missing)
            ]  # fmt: skip
        return ClusterPlan(self._planned(resource, others, claims, ()), tuple(resizes))

    def placed(self, job: SeenJob) -> Placed:
        """Where the last plan has the workers of a job; without one, where they are."""
        last = Placed.of(job.status)
        if last is not None:
            return last
        alive = self.pods[job.uid].alive
        count = Counter(pod.node for pod in alive if pod.node)
        return Placed(
            tuple(HostSlots(node, workers) for node, workers in sorted(count.items())),
            max((pod.created_s for pod in alive), default=0.0),
        )

    def family_timings(self, job: SeenJob, spec: TrainingJobSpec) -> tuple[Timing, ...]:
        """How long steps took in jobs like this one."""
        members = self.families.get((job.namespace, spec.family), ())
        return shared_timings([FamilyMember(one.created_s, None, timings_of(one.status)) for one in members])

    # ------------------------------------------------------------------------------------------ what is asked

    def _planned(
        self, resource: str, others: Mapping[str, int], claims: Sequence[Claim], guests: Sequence[SeenGuest]
    ) -> Plan:
        wanted = [
            (job, job.spec) for job in self.jobs
            if job.spec is not None and job.spec.resource == resource and self._wants(job)
        ]  # fmt: skip
        placements = {spec.placement for _, spec in wanted} | {guest.placement for guest in guests}
        kinds = _NodeKinds.of(self.seen.nodes, resource, placements)
        rooms = [
            Room(
                node.name, node.room(resource), others.get(node.name, 0), kind=kinds.name(node.name),
                zone=node.labels.get(_ZONE, ""), is_open=node.is_open and bool(kinds.admitted[node.name]),
            )
            for node in self.seen.nodes if node.name in kinds.admitted
        ]  # fmt: skip
        gone = self._preempted(resource, others)
        asks = [self._ask(job, spec, kinds, gone.get(job.uid, {})) for job, spec in wanted]
        asks += [self._ask_for_guest(guest, kinds) for guest in guests]
        # Two jobs of which each spans nodes slow each other down on one that they share, where the network is what they
        # wait for: those on GPUs. Jobs on processors would be kept small by nodes that each holds a few workers of.
        rules = PlanRules(may_span_together=resource == CPU)
        return plan(rooms, claims, asks, rules, self.now_s)

    def _wants(self, job: SeenJob) -> bool:
        launcher = self.pods[job.uid].launcher
        is_done = launcher is not None and launcher.phase == "Succeeded"
        return job.spec is not None and not job.spec.is_suspended and not job.is_over and not is_done

    def _others(self, resource: str) -> dict[str, int]:
        """Slots that are taken on each node beside the plan: by other pods, and set aside for them by the scheduler."""
        taken: dict[str, int] = {}
        own = {job.uid for job in self.jobs if job.spec is not None and job.spec.resource == resource}
        guests = {guest.uid for guest in self.guests if guest.resource == resource}
        for pod in self.seen.pods:
            node = pod.node if pod.is_bound else pod.nominated
            is_planned = (pod.job in own and pod.role == WORKER) or pod.guest in guests
            if node and not pod.is_over and not is_planned:
                taken[node] = taken.get(node, 0) + pod.slots(resource)
        return taken

    def _claims(self, resource: str) -> list[Claim]:
        """Pods of others that wait for room which less urgent workers have."""
        lowest = self.seen.priorities.get(EXTRA_CLASS, -10)
        most = max((node.room(resource) for node in self.seen.nodes), default=0)
        guests = {guest.uid for guest in self.guests}
        found = []
        for pod in self.seen.pods:
            slots, since_s = pod.slots(resource), pod.unschedulable_s
            is_fit = 0 < slots <= most and any(node.is_open and pod.placement.admits(node) for node in self.seen.nodes)
            if (
                is_fit and since_s is not None and self.now_s - since_s < _CLAIM_S and not pod.job and not pod.node
                and pod.guest not in guests
                and not pod.nominated and not pod.is_deleting and not pod.is_choosy and pod.priority > lowest
            ):  # fmt: skip
                found.append(Claim(f"{pod.namespace}/{pod.name}", slots, slots, pod.priority, pod.created_s))
        return found

    def _ask(self, job: SeenJob, spec: TrainingJobSpec, kinds: _NodeKinds, gone: Mapping[str, int]) -> JobAsk:
        last, known = self.placed(job), JobMeasurements.of(job.status)
        curve = known.curve(spec)
        shape = curve or self._family_curve(job, spec) or pod_curve(spec.most, spec.unit)
        holds = self._holds(job, spec, last, gone)
        on = kinds.for_workers(spec.placement)
        if job.queue:
            # Its old workers have to leave before Kueue admits new ones: a move would stop it.
            on = kinds.staying([entry.host for entry in holds], spec.placement)
        return JobAsk(
            job.key, queue=job.namespace, priority=self.seen.priorities.get(spec.priority_class, 0),
            least=spec.least * spec.unit, most=spec.most * spec.unit, unit=spec.unit,
            curves=tuple(replace(shape, kind=kind) for kind in on),
            left=known.left if curve is not None else None, asked_s=job.created_s, changed_s=last.since_s,
            holds=holds, floor=self._floor(job, spec),
            change_s=_CHANGE_S if known.change_s is None else known.change_s, start_s=_START_S,
        )  # fmt: skip

    def _family_curve(self, job: SeenJob, spec: TrainingJobSpec) -> Curve | None:
        """The curve of another job that is like this one, over this one's workers."""
        key = (job.namespace, spec.family, spec.slots, spec.unit)
        if key not in self.family_curves:
            members = self.families.get(key[:2], ())
            self.family_curves[key] = first_curve(
                FamilyMember(one.created_s, JobMeasurements.of(one.status).curve(spec)) for one in members
            )
        return self.family_curves[key]

    def _holds(
        self, job: SeenJob, spec: TrainingJobSpec, last: Placed, gone: Mapping[str, int]
    ) -> tuple[HostSlots, ...]:
        """What the last plan gave it; of a node that takes no pods any more, as many slots as its workers there."""
        there = Counter(pod.node for pod in self.pods[job.uid].alive)
        closed = {node.name for node in self.seen.nodes if not node.is_open}
        count = {
            entry.host: min(entry.slots, there[entry.host])
            if entry.host in closed
            else entry.slots - gone.get(entry.host, 0)
            for entry in last.workers
        }
        return tuple(HostSlots(node, workers * spec.unit) for node, workers in count.items() if workers)

    def _floor(self, job: SeenJob, spec: TrainingJobSpec) -> tuple[HostSlots, ...]:
        """Where the pods of its least are, which the scheduler leaves alone longer than its extras."""
        count = Counter(pod.node for pod in self.pods[job.uid].alive if pod.tier == FLOOR)
        return tuple(HostSlots(node, workers * spec.unit) for node, workers in sorted(count.items()))

    def _preempted(self, resource: str, others: Mapping[str, int]) -> dict[str, Counter[str]]:
        """Workers that leave their nodes for others, which no plan has told to: their number, by job and node.

        Where others come to a node, the planner would take their room from the job that has most to give. The scheduler
        has taken it already, from the job whose workers leave.
        """
        over = {node: slots - self.nodes[node].room(resource) for node, slots in others.items() if node in self.nodes}
        found: dict[str, Counter[str]] = {}
        leaving: list[tuple[str, str, int, int]] = []
        for job in self.jobs:
            spec, last = job.spec, Placed.of(job.status)
            if spec is None or spec.resource != resource or last is None:
                continue
            alive, all_there = Counter(pod.node for pod in self.pods[job.uid].alive), self.pods[job.uid].workers
            going = Counter(pod.node for pod in all_there if pod.is_deleting and not pod.is_over)
            for entry in last.workers:
                if entry.host in over:
                    over[entry.host] += entry.slots * spec.unit
                    count = min(going[entry.host], entry.slots - alive[entry.host])
                    leaving.append((job.uid, entry.host, count, spec.unit))
        for uid, node, count, unit in leaving:
            less = min(count, -(-over[node] // unit))
            if less > 0:
                found.setdefault(uid, Counter())[node] = less
                over[node] -= less * unit
        return found

    def _ask_for_guest(self, guest: SeenGuest, kinds: _NodeKinds) -> JobAsk:
        """An MPIJob holds what its pods hold, which the scheduler has placed; no plan can move them to other nodes."""
        count = Counter(pod.node for pod in self._staying(guest, guest.replicas))
        shape = pod_curve(guest.most, guest.unit)
        on = kinds.staying(count, guest.placement)
        return JobAsk(
            guest.key, queue=guest.namespace, priority=self.seen.priorities.get(guest.priority_class, 0),
            preemptible=False, least=guest.least * guest.unit, most=guest.most * guest.unit, unit=guest.unit,
            curves=tuple(replace(shape, kind=kind) for kind in on),
            asked_s=guest.created_s, changed_s=guest.resized_s,
            holds=tuple(HostSlots(node, workers * guest.unit) for node, workers in sorted(count.items())),
            change_s=_GUEST_CHANGE_S, start_s=_GUEST_CHANGE_S,
        )  # fmt: skip

    def _staying(self, guest: SeenGuest, workers: int) -> list[SeenPod]:
        """The pods of an MPIJob with N workers: the mpi-operator deletes those of higher numbers."""
        return [
            pod for pod in self.seen.pods
            if pod.guest == guest.uid and pod.is_bound and not (pod.is_over or pod.is_deleting)
            and _number(pod.name) < workers
        ]  # fmt: skip


def _number(name: str) -> int:
    """The number at the end of the name of an MPIJob's worker."""
    found = name.rpartition("-")[2]
    return int(found) if found.isascii() and found.isdecimal() else 0
