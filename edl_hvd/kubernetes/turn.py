"""What the operator does about what it sees: pure, and the same every time.

Nothing is kept from one turn to the next but in the status of the jobs: an operator that is killed has nothing to lose,
and two that overlap for a moment decide alike. A job holds what the last plan gave it, which its status says, whether
its pods are there yet or not: a plan that is made from one that is carried out in part could take that back, and the
next one this, without end. Room that pods are leaving counts as free in the plan, and is given on once they are gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edl_hvd.hosts import HostSlots
from edl_hvd.kubernetes.kueue import QueuedWorkers, misplacement, useless_extras
from edl_hvd.kubernetes.pods import launcher_manifest, service_manifest, worker_manifest, worker_name
from edl_hvd.kubernetes.snapshot import (
    CPU,
    EXTRA,
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
from edl_hvd.kubernetes.status import JobMeasurements, JobState, Placed, RunCount, status_of, timings_of
from edl_hvd.kubernetes.succession import WorkerSplit, kept_until_replaced, split_workers
from edl_hvd.planning.family import FamilyMember, first_curve, shared_timings
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, Plan, PlanRules, Room, Share, WaitingJob
from edl_hvd.timings import Timing

SAVED = 75
_CHANGE_S, _START_S = 1.0, 10.0
# As the fleet assumes before a job has measured its own.
_GUEST_CHANGE_S = 30.0
# Stock Horovod under an MPIJob: a ConfigMap that a kubelet brings, and a new start of all workers.
_CLAIM_S = 120.0
# A pod that finds no place within this time though room was made needs something else than room.
_FAILED_STAYS_S, _MOST_FAILED = 10.0, 3
# Workers that fail at once are replaced so often, and no more often.
_ZONE = "topology.kubernetes.io/zone"


@dataclass(frozen=True)
class CreatePod:
    """Create a pod of a job; for a launcher, what it needs comes first."""

    job: SeenJob
    manifest: Mapping[str, Any]
    needs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod, and no other one of its name, with the grace period that it has; 0: it has ended already."""

    job: SeenJob
    pod: SeenPod
    grace_s: int | None = None


@dataclass(frozen=True)
class WriteStatus:
    """Write the status of a job, if nobody has written it since; before anything else is done about the job."""

    job: SeenJob
    status: Mapping[str, Any]


@dataclass(frozen=True)
class ResizeGuest:
    """Give an MPIJob another number of workers, if nobody has written it since."""

    job: SeenGuest
    replicas: int
    why: str


Action = CreatePod | DeletePod | WriteStatus | ResizeGuest


def decide(seen: ClusterSnapshot, now_s: float) -> tuple[Action, ...]:
    """What is to be done about a cluster, in this order.

    Args:
        seen: The cluster.
        now_s: Seconds since the epoch.
    """
    return _Turn(seen, now_s).run()


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


@dataclass(frozen=True)
class _Ended:
    """How the launchers of a job have ended, with the one that has now."""

    runs: RunCount
    is_complete: bool
    has_failed: bool

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.has_failed


@dataclass
class _Pods:
    """The pods of one job."""

    workers: list[SeenPod] = field(default_factory=list)
    launcher: SeenPod | None = None
    names: set[str] = field(default_factory=set)

    @property
    def alive(self) -> list[SeenPod]:
        return [pod for pod in self.workers if not pod.is_deleting and not pod.is_over]


class _Turn:
    def __init__(self, seen: ClusterSnapshot, now_s: float) -> None:
        self.seen, self.now_s = seen, now_s
        self.jobs = sorted((job for job in seen.jobs if not job.is_deleting), key=lambda job: job.key)
        self.nodes = {node.name: node for node in seen.nodes}
        self.pods = {job.uid: _Pods() for job in seen.jobs}
        for pod in sorted(seen.pods, key=lambda pod: (pod.namespace, pod.name)):
            mine = self.pods.get(pod.job)
            if mine is not None:
                mine.names.add(pod.name)
                if pod.role == WORKER:
                    mine.workers.append(pod)
                elif pod.role == LAUNCHER:
                    mine.launcher = pod
        self.family_curves: dict[tuple[str, str, int, int], Curve | None] = {}
        self.families: defaultdict[tuple[str, str], list[SeenJob]] = defaultdict(list)
        for job in sorted(self.jobs, key=lambda job: job.created_s):
            if job.spec is not None and job.spec.family:
                self.families[job.namespace, job.spec.family].append(job)
        self.guests = sorted((one for one in seen.guests if not one.problem), key=lambda one: one.key)
        self.shares: dict[str, Share] = {}
        self.waiting: dict[str, WaitingJob] = {}
        self.splits: dict[str, WorkerSplit] = {}
        self.kept: set[str] = set()
        self.statuses: list[Action] = []
        self.resizes: list[Action] = []
        self.actions: list[Action] = []

    def run(self) -> tuple[Action, ...]:
        asked = {job.spec.resource for job in self.jobs if job.spec is not None}
        resources = sorted(asked | {guest.resource for guest in self.guests})
        for resource in resources:
            made = self._plan(resource)
            self.shares.update({share.job: share for share in made.shares})
            self.waiting.update({one.job: one for one in made.waiting})
        free = {resource: self._free(resource) for resource in resources}
        for resource in resources:
            self._split(resource, free[resource])
        for job in self.jobs:
            self._do(job, free)
        return (*self.statuses, *self.actions, *self.resizes)

    # --- the plan ---

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

    def _staying(self, guest: SeenGuest, workers: int) -> list[SeenPod]:
        """The pods of an MPIJob with N workers: the mpi-operator deletes those of higher numbers."""
        return [
            pod for pod in self.seen.pods
            if pod.guest == guest.uid and pod.is_bound and not (pod.is_over or pod.is_deleting)
            and _number(pod.name) < workers
        ]  # fmt: skip

    def _plan(self, resource: str) -> Plan:
        """The plan; with MPIJobs in two steps, as nobody can say where their workers are to be.

        First each MPIJob gets a number of workers, as one of the jobs. Then the others are placed beside its pods where
        these are, and beside a claim for each worker that has none yet. An MPIJob that runs with fewer than
        its least, and does not get that, keeps what it has; so the plan is made again beside its pods.
        """
        guests = [guest for guest in self.guests if guest.resource == resource]
        others, claims = self._others(resource), self._claims(resource)
        if not guests:
            return self._planned(resource, others, claims, ())
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
        for guest in guests:
            share = counts.get(guest.key)
            workers = guest.replicas if share is None else share.slots // guest.unit
            if share is not None and workers != guest.replicas:
                self.resizes.append(ResizeGuest(guest, workers, share.why))
            staying = self._staying(guest, workers)
            for pod in staying:
                others[pod.node] = others.get(pod.node, 0) + guest.unit
            missing = 0 if share is None else workers - len(staying)
            priority = self.seen.priorities.get(guest.priority_class, 0)
            claims += [
                Claim(f"{guest.key} {number}", guest.unit, guest.unit, priority, guest.created_s)
                for number in range(missing)
            ]  # fmt: skip
        return self._planned(resource, others, claims, ())

    def _planned(
        self, resource: str, others: Mapping[str, int], claims: Sequence[Claim], guests: Sequence[SeenGuest]
    ) -> Plan:
        wanted = [
            (job, job.spec) for job in self.jobs
            if job.spec is not None and job.spec.resource == resource and self._wants(job)
        ]  # fmt: skip
        placements = {spec.placement for _, spec in wanted} | {guest.placement for guest in guests}
        admitted = _admitted(self.seen.nodes, resource, placements)
        kinds = _kinds(admitted)
        kind_of = {node: kinds[who] for node, who in admitted.items()}
        rooms = [
            Room(
                node.name, node.room(resource), others.get(node.name, 0), kind=kind_of[node.name],
                zone=node.labels.get(_ZONE, ""), is_open=node.is_open and bool(admitted[node.name]),
            )
            for node in self.seen.nodes if node.name in admitted
        ]  # fmt: skip
        gone = self._preempted(resource, others)
        asks = [self._ask(job, spec, kinds, gone.get(job.uid, {})) for job, spec in wanted]
        asks += [self._ask_for_guest(guest, kinds, kind_of) for guest in guests]
        # Two jobs of which each spans nodes slow each other down on one that they share, where the network is what they
        # wait for: those on GPUs. Jobs on processors would be kept small by nodes that each holds a few workers of.
        rules = PlanRules(may_span_together=resource == CPU)
        return plan(rooms, claims, asks, rules, self.now_s)

    def _ask(
        self, job: SeenJob, spec: TrainingJobSpec, kinds: Mapping[frozenset[Placement], str], gone: Mapping[str, int]
    ) -> JobAsk:
        last, known = self._placed(job), JobMeasurements.of(job.status)
        curve = known.curve(spec)
        shape = curve or self._family_curve(job, spec) or pod_curve(spec.most, spec.unit)
        on = _kinds_of(spec.placement, kinds)
        return JobAsk(
            job.key, queue=job.namespace, priority=self.seen.priorities.get(spec.priority_class, 0),
            least=spec.least * spec.unit, most=spec.most * spec.unit, unit=spec.unit,
            curves=tuple(replace(shape, kind=kind) for kind in on),
            left=known.left if curve is not None else None, asked_s=job.created_s, changed_s=last.since_s,
            holds=self._holds(job, spec, last, gone), floor=self._floor(job, spec),
            change_s=_CHANGE_S if known.change_s is None else known.change_s, start_s=_START_S,
        )  # fmt: skip

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

    def _floor(self, job: SeenJob, spec: TrainingJobSpec) -> tuple[HostSlots, ...]:
        """Where the pods of its least are, which the scheduler leaves alone longer than its extras."""
        count = Counter(pod.node for pod in self.pods[job.uid].alive if pod.tier == FLOOR)
        return tuple(HostSlots(node, workers * spec.unit) for node, workers in sorted(count.items()))

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

    def _family_curve(self, job: SeenJob, spec: TrainingJobSpec) -> Curve | None:
        """The curve of another job that is like this one, over this one's workers."""
        key = (job.namespace, spec.family, spec.slots, spec.unit)
        if key not in self.family_curves:
            members = self.families.get(key[:2], ())
            self.family_curves[key] = first_curve(
                FamilyMember(one.created_s, JobMeasurements.of(one.status).curve(spec)) for one in members
            )
        return self.family_curves[key]

    def _family_timings(self, job: SeenJob, spec: TrainingJobSpec) -> tuple[Timing, ...]:
        members = self.families.get((job.namespace, spec.family), ())
        return shared_timings([FamilyMember(one.created_s, None, timings_of(one.status)) for one in members])

    def _ask_for_guest(
        self, guest: SeenGuest, kinds: Mapping[frozenset[Placement], str], kind_of: Mapping[str, str]
    ) -> JobAsk:
        """An MPIJob holds what its pods hold, which the scheduler has placed; no plan can move them to other nodes."""
        count = Counter(pod.node for pod in self._staying(guest, guest.replicas))
        shape = pod_curve(guest.most, guest.unit)
        on = sorted({kind_of[node] for node in count if node in kind_of}) or _kinds_of(guest.placement, kinds)
        return JobAsk(
            guest.key, queue=guest.namespace, priority=self.seen.priorities.get(guest.priority_class, 0),
            preemptible=False, least=guest.least * guest.unit, most=guest.most * guest.unit, unit=guest.unit,
            curves=tuple(replace(shape, kind=kind) for kind in on),
            asked_s=guest.created_s, changed_s=guest.resized_s,
            holds=tuple(HostSlots(node, workers * guest.unit) for node, workers in sorted(count.items())),
            change_s=_GUEST_CHANGE_S, start_s=_GUEST_CHANGE_S,
        )  # fmt: skip

    def _placed(self, job: SeenJob) -> Placed:
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

    def _free(self, resource: str) -> dict[str, int]:
        """Slots of each node that nothing holds, neither pods that are leaving nor those that are on their way."""
        free = {node.name: node.room(resource) for node in self.seen.nodes if node.is_open}  # the plan heeds taints
        for pod in self.seen.pods:
            node = pod.node or pod.nominated
            if node in free and not pod.is_over:
                free[node] -= pod.slots(resource)
        return free

    # --- one job ---

    def _do(self, job: SeenJob, free: dict[str, dict[str, int]]) -> None:
        pods, spec = self.pods[job.uid], job.spec
        launcher = pods.launcher
        share, waits = self.shares.get(job.key), self.waiting.get(job.key)
        ended = self._ended(job)
        placed: tuple[HostSlots, ...] = ()
        if spec is None or self._missing_class(spec):
            placed = self._placed(job).workers
        elif share is not None and not ended.is_over:
            placed = tuple(HostSlots(entry.host, entry.slots // spec.unit) for entry in share.hosts)
        found = (misplacement(job, pod, self.nodes.get(pod.node)) for pod in pods.alive)
        self._write(
            JobState(
                job,
                placed=placed,
                running=sum(pod.phase == "Running" for pod in pods.alive),
                held=Counter(gate for pod in pods.alive for gate in pod.gates),
                launcher=launcher,
                why=share.why if share is not None else waits.why if waits is not None else "",
                reason=waits.reason if waits is not None else None,
                is_complete=ended.is_complete,
                has_failed=ended.has_failed,
                runs=ended.runs,
                has_workers=bool(pods.workers),
                missing_class=self._missing_class(spec),
                report=self.seen.reports.get(job.uid),
                misplaced=Counter(filter(None, found)),
            )
        )
        if spec is None or self._missing_class(spec):
            return  # what runs goes on, as it was asked for when it could be read
        if ended.is_over:
            self._leave(job, pods, keep_launcher=True)
        elif share is None:
            self._leave(job, pods, keep_launcher=False)
        else:
            self._run(job, spec, pods, share, free[spec.resource])

    def _ended(self, job: SeenJob) -> _Ended:
        launcher, runs = self.pods[job.uid].launcher, RunCount.of(job.status)
        if launcher is not None and launcher.phase == "Failed" and not job.is_over:
            runs = runs.after(launcher, counts=launcher.exit_code != SAVED)
        retries = 0 if job.spec is None else job.spec.retries
        is_complete = job.is_true("Complete") or (launcher is not None and launcher.phase == "Succeeded")
        return _Ended(runs, is_complete, job.is_true("Failed") or runs.failures > retries)

    def _split(self, resource: str, free: Mapping[str, int]) -> None:
        """Who stays and who leaves, of all jobs on a resource."""
        coming = Counter(free)
        for pod in self.seen.pods:
            if pod.node in free and pod.is_deleting and not pod.is_over:
                coming[pod.node] += pod.slots(resource)
        found: dict[str, WorkerSplit] = {}
        for job in self.jobs:
            spec, share, alive = job.spec, self.shares.get(job.key), self.pods[job.uid].alive
            if spec is None or spec.resource != resource or self._missing_class(spec):
                continue
            if share is None or self._ended(job).is_over:
                coming.update({node: count * spec.unit for node, count in Counter(pod.node for pod in alive).items()})
            else:
                wanted = {entry.host: entry.slots // spec.unit for entry in share.hosts}
                found[job.uid] = split_workers(spec.unit, spec.least, alive, wanted, bool(job.queue))
        self.splits.update(found)
        self.kept |= kept_until_replaced(list(found.values()), coming)

    def _missing_class(self, spec: TrainingJobSpec | None) -> str:
        """A PriorityClass that the job names and the cluster has not."""
        if spec is None:
            return ""
        needed = (spec.priority_class, EXTRA_CLASS)
        return next((name for name in needed if name not in self.seen.priorities), "")

    def _write(self, state: JobState) -> None:
        status = status_of(state, self.now_s)
        if status != state.job.status:
            self.statuses.append(WriteStatus(state.job, status))

    def _leave(self, job: SeenJob, pods: _Pods, keep_launcher: bool) -> None:
        """The launcher first, which saves a checkpoint with its workers; then these."""
        launcher = pods.launcher
        if launcher is not None and not (keep_launcher and launcher.is_over):
            if not launcher.is_deleting:
                self.actions.append(DeletePod(job, launcher, 0 if launcher.is_over else None))
            if not launcher.is_over:
                return
        self.actions += [DeletePod(job, pod) for pod in pods.workers if not pod.is_deleting]

    def _run(self, job: SeenJob, spec: TrainingJobSpec, pods: _Pods, share: Share, free: dict[str, int]) -> None:
        if pods.launcher is None:
            launcher = launcher_manifest(job, spec, self._family_timings(job, spec))
            self.actions.append(CreatePod(job, launcher, needs=(service_manifest(job),)))
        elif pods.launcher.phase == "Failed" and not pods.launcher.is_deleting:
            self.actions.append(DeletePod(job, pods.launcher, 0))
        split = self.splits[job.uid]
        staying, leaving = split.staying, split.leaving
        useless = useless_extras(job, spec.least, pods.alive, self.now_s)
        self.actions += [DeletePod(job, pod) for pod in leaving if pod.uid not in self.kept and pod not in useless]
        self.actions += [DeletePod(job, pod) for pod in useless]
        failed = [pod for pod in pods.workers if pod.is_over and not pod.is_deleting]
        for pod in failed:
            if pod.finished_s is None or self.now_s - pod.finished_s >= _FAILED_STAYS_S:
                self.actions.append(DeletePod(job, pod, 0))
        if len(failed) >= _MOST_FAILED:
            return
        floors = sum(pod.tier == FLOOR for pod in staying)
        if (
            floors < spec.least
            and not job.queue
            and split.is_settled
            and not any(pod.is_deleting for pod in pods.workers)
        ):
            # One of the minimum takes its place: the scheduler could preempt all that runs.
            self.actions += [DeletePod(job, pod) for pod in split.spare(spec.least)]
        number = 0
        queued = QueuedWorkers(job, spec.least, pods.workers, staying, leaving, self.now_s)
        least_on = {entry.host: entry.slots for entry in share.floor}
        # Pods of the least where the plan has the least: there they stay, when the job gives the rest away.
        for node, count in sorted(split.missing.items(), key=lambda entry: (-least_on.get(entry[0], 0), entry[0])):
            for _ in range(count):
                if free.get(node, 0) < spec.unit:
                    break
                free[node] -= spec.unit
                while worker_name(job, number) in pods.names:
                    number += 1
                tier = FLOOR if floors < spec.least else EXTRA
                floors += tier == FLOOR
                member = queued.admit(tier)
                if member is None:
                    continue
                self.actions.append(CreatePod(job, worker_manifest(job, spec, number, node, tier, member.group)))
                number += 1


def _admitted(nodes: Iterable[SeenNode], resource: str, placements: set[Placement]) -> dict[str, frozenset[Placement]]:
    """Which of the jobs' workers each node with the resource admits."""
    return {
        node.name: frozenset(one for one in placements if one.admits(node)) for node in nodes if node.room(resource)
    }


def _number(name: str) -> int:
    """The number at the end of the name of an MPIJob's worker."""
    found = name.rpartition("-")[2]
    return int(found) if found.isascii() and found.isdecimal() else 0


def _kinds_of(placement: Placement, kinds: Mapping[frozenset[Placement], str]) -> list[str]:
    """The kinds of hosts on which a job may be; one that no host has, where none admits it."""
    return sorted({kind for who, kind in kinds.items() if placement in who}) or [str(placement)]


def _kinds(admitted: Mapping[str, frozenset[Placement]]) -> dict[frozenset[Placement], str]:
    """A kind of hosts for the nodes that admit the same jobs: for the planner a job is on one kind at a time.

    Nodes that admit nobody are as the others; they are closed. Where all that are open admit the same, all are alike.
    """
    found = set(admitted.values())
    is_alike = len(found - {frozenset()}) < 2
    return {one: "" if is_alike or not one else " or ".join(sorted(map(str, one))) for one in found}
