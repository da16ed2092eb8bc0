"""What the operator does about what it sees: pure, and the same every time.

Nothing is kept from one turn to the next but in the status of the jobs: an operator that is killed has nothing to lose,
and two that overlap for a moment decide alike. Room that pods are leaving is given on once they are gone, though it
counts as free in the plan (``planned.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl_hvd.hosts import HostSlots
from edl_hvd.kubernetes.kueue import QueuedWorkers, misplacement, useless_extras
from edl_hvd.kubernetes.planned import ClusterPlanner, JobPods, ResizeGuest, pods_of
from edl_hvd.kubernetes.pods import launcher_manifest, service_manifest, worker_manifest, worker_name
from edl_hvd.kubernetes.snapshot import (
    EXTRA,
    EXTRA_CLASS,
    FLOOR,
    ClusterSnapshot,
    SeenJob,
    SeenPod,
    TrainingJobSpec,
)
from edl_hvd.kubernetes.status import JobState, RunCount, status_of
from edl_hvd.kubernetes.succession import WorkerSplit, kept_until_replaced, split_workers
from edl_hvd.planning.values import Share, WaitingJob

SAVED = 75
_FAILED_STAYS_S, _MOST_FAILED = 10.0, 3
# Workers that fail at once are replaced so often, and no more often.


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


Action = CreatePod | DeletePod | WriteStatus | ResizeGuest


def decide(seen: ClusterSnapshot, now_s: float) -> tuple[Action, ...]:
    """What is to be done about a cluster, in this order.

    Args:
        seen: The cluster.
        now_s: Seconds since the epoch.
    """
    return _Turn(seen, now_s).run()


@dataclass(frozen=True)
class _Ended:
    """How the launchers of a job have ended, with the one that has now."""

    runs: RunCount
    is_complete: bool
    has_failed: bool

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.has_failed


class _Turn:
    def __init__(self, seen: ClusterSnapshot, now_s: float) -> None:
        self.seen, self.now_s = seen, now_s
        self.nodes = {node.name: node for node in seen.nodes}
        self.pods = pods_of(seen)
        self.planner = ClusterPlanner(seen, self.pods, now_s)
        self.jobs = self.planner.jobs
        self.shares: dict[str, Share] = {}
        self.waiting: dict[str, WaitingJob] = {}
        self.splits: dict[str, WorkerSplit] = {}
        self.kept: set[str] = set()
        self.statuses: list[Action] = []
        self.resizes: list[Action] = []
        self.actions: list[Action] = []

    def run(self) -> tuple[Action, ...]:
        resources = self.planner.resources()
        for resource in resources:
            made = self.planner.plan(resource)
            self.shares.update({share.job: share for share in made.plan.shares})
            self.waiting.update({one.job: one for one in made.plan.waiting})
            self.resizes += made.resizes
        free = {resource: self._free(resource) for resource in resources}
        for resource in resources:
            self._split(resource, free[resource])
        for job in self.jobs:
            self._do(job, free)
        return (*self.statuses, *self.actions, *self.resizes)

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
            placed = self.planner.placed(job).workers
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

    def _leave(self, job: SeenJob, pods: JobPods, keep_launcher: bool) -> None:
        """The launcher first, which saves a checkpoint with its workers; then these."""
        launcher = pods.launcher
        if launcher is not None and not (keep_launcher and launcher.is_over):
            if not launcher.is_deleting:
                self.actions.append(DeletePod(job, launcher, 0 if launcher.is_over else None))
            if not launcher.is_over:
                return
        self.actions += [DeletePod(job, pod) for pod in pods.workers if not pod.is_deleting]

    def _run(self, job: SeenJob, spec: TrainingJobSpec, pods: JobPods, share: Share, free: dict[str, int]) -> None:
        if pods.launcher is None:
            launcher = launcher_manifest(job, spec, self.planner.family_timings(job, spec))
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
