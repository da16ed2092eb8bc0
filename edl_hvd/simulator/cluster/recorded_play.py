"""Recorded jobs on a cluster under one policy, in virtual time, from event to event.

Between two decisions the speed of each job is known, and so is the moment at which it would end. So time goes on to the
next arrival or end, and the policy decides at the first multiple of the period from then on; months take minutes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from edl_hvd.errors import InternalError
from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.jobs import ResizeCost
from edl_hvd.simulator.cluster.play import FinishedJob, Played, Setting, check_given, prepared
from edl_hvd.simulator.cluster.recorded import RecordedJob, RecordedWorkload
from edl_hvd.simulator.cluster.view import Allocation, ClusterView, Policy

_TURNS_WITHOUT_GPUS = 100_000
_ALMOST = 1e-6
# Seconds: less than any rounding error of an end that was found by another way.


@dataclass(frozen=True)
class RecordedPlay:
    """What came out of recorded jobs under a policy.

    Attributes:
        played: Account of each job; its history is left out.
        used: Part of the cluster's GPU-seconds that jobs held, until the last submission.
    """

    played: Played
    used: float


class RunningJob:
    """A recorded job that trains.

    Args:
        submitted: The job.
        cost: What changes cost it.
    """

    def __init__(self, submitted: RecordedJob, cost: ResizeCost) -> None:
        self.submitted, self.cost = submitted, cost
        self.name = submitted.name
        self.least = submitted.least
        self.hosts: Allocation = {}
        self.held = 0
        self.gpus = 0
        self.speed = 0.0
        self.joining = 0
        self.at_s = float(submitted.time_s)
        self.trains_s = self.at_s
        self.joins_s = math.inf
        self.left = submitted.work
        self.changed_s = -math.inf
        self.first_slots_s: float | None = None
        self.ended_s: float | None = None
        self.changes = 0
        self.served_gpu_s = 0.0

    @property
    def largest_seen(self) -> int:
        """All that it may have: its curve is known from the first."""
        return self.submitted.most_gpus

    @property
    def explored(self) -> int:
        """All that it may have: its curve is known from the first."""
        return self.submitted.most_gpus

    def curve(self, sizes: Sequence[int], host_slots: int) -> Curve | None:
        """Its speed over GPUs; the numbers of the curve are its own."""
        return self.submitted.curve

    def give(self, hosts: Allocation, now_s: float) -> None:
        """Give the job other GPUs, by host, at the moment up to which it has advanced; none takes all from it."""
        before, self.hosts = self.hosts, hosts
        self.held = sum(hosts.values())
        self.changed_s = now_s
        self.joining, self.joins_s = 0, math.inf
        if not hosts:
            self._train_on(0)
            return
        if self.first_slots_s is None:
            self.first_slots_s = now_s
        else:
            self.changes += 1
        kept = {host: min(slots, hosts[host]) for host, slots in before.items() if host in hosts}
        if self.cost.join_s and kept:
            # Those that stay train on at once; newcomers hold their GPUs until they have started.
            if kept != before:
                self.trains_s = now_s + self.cost.change_s
                self._train_on(sum(kept.values()))
            if kept != hosts:
                self.joining, self.joins_s = self.held, now_s + self.cost.join_s
            return
        self.trains_s = now_s + (self.cost.change_s if kept else self.cost.start_s)
        self._train_on(self.held)

    def _train_on(self, gpus: int) -> None:
        self.gpus = gpus
        self.speed = self.submitted.curve.at(gpus)

    def advance(self, to_s: float) -> None:
        """Let time go on to a moment, or to the job's end, if it is before."""
        while self.ended_s is None and self.at_s < to_s:
            until_s = min(to_s, self.joins_s)
            begins_s = max(self.at_s, self.trains_s)
            if self.speed and begins_s < until_s:
                ends_s = begins_s + self.left / self.speed
                if ends_s <= until_s + _ALMOST:
                    self.ended_s = until_s = min(ends_s, until_s)
                    self.left = 0.0
                else:
                    self.left -= (until_s - begins_s) * self.speed
            self.served_gpu_s += (until_s - self.at_s) * self.held
            self.at_s = until_s
            if until_s == self.joins_s and self.ended_s is None:
                self.trains_s = max(self.trains_s, until_s) + self.cost.change_s
                self._train_on(self.joining)
                self.joining, self.joins_s = 0, math.inf

    def end_s(self) -> float:
        """The moment at which it ends if nothing is changed."""
        if not self.hosts:
            return math.inf
        begins_s, left, speed = max(self.at_s, self.trains_s), self.left, self.speed
        if self.joins_s < math.inf:
            before_s = max(0.0, self.joins_s - begins_s)
            if left <= before_s * speed:
                return begins_s + left / speed
            left -= before_s * speed
            begins_s = max(begins_s, self.joins_s) + self.cost.change_s
            speed = self.submitted.curve.at(self.joining)
        return begins_s + left / speed


def play_recorded(
    workload: RecordedWorkload, policy: Policy, setting: Setting, longest_s: float = math.inf,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> RecordedPlay:  # fmt: skip
    """Play recorded jobs to the end of the last one.

    Args:
        workload: The jobs, in the order of their submission.
        policy: Who decides; a new one for each call.
        setting: Cluster and costs. Its period is the least time between two decisions.
        longest_s: Most seconds between two decisions while there are jobs, also if none has come or ended.
        tell: Function that is given the number of jobs that have ended, and of all.

    Raises:
        UsageError: A job of the user's size does not fit into the cluster.
        InternalError: The policy gave more than there is, or starves the jobs.
    """
    shapes = prepared(policy, workload.jobs, setting)
    jobs = [RunningJob(job, setting.cost) for job in workload.jobs]
    coming, last_s = deque(jobs), float(workload.jobs[-1].time_s)
    active: dict[str, RunningJob] = {}
    holds: dict[str, Allocation] = {}
    ends = _Ends()
    decisions, idle, now_s, used_gpu_s = 0, 0, 0.0, 0.0
    while coming or active:
        comes_s = coming[0].submitted.time_s if coming else math.inf
        due_s = min(comes_s, ends.first_s(), now_s + longest_s if active else math.inf)
        if due_s == math.inf:
            raise InternalError(f"policy {policy.name} gives nothing to {len(active)} jobs")
        before_s, now_s = now_s, max(now_s + setting.period_s, math.ceil(due_s / setting.period_s) * setting.period_s)
        seconds = max(0.0, min(now_s, last_s) - before_s)
        used_gpu_s += seconds * sum(job.held for job in active.values())
        while coming and coming[0].submitted.time_s <= now_s:
            newcomer = coming.popleft()
            active[newcomer.name] = newcomer
        for job in active.values():
            job.advance(now_s)
        for name in [name for name, job in active.items() if job.ended_s is not None]:
            del active[name], holds[name]
            ends.forget(name)
        if not active:
            continue
        decisions += 1
        given = policy.decide(
            ClusterView(now_s, setting.hosts, setting.host_slots, list(active.values()), shapes, holds)
        )
        check_given(given, setting)
        idle = 0 if given else idle + 1
        if idle > _TURNS_WITHOUT_GPUS:
            raise InternalError(f"policy {policy.name} gives nothing to {len(active)} jobs")
        _give(given, active, now_s, ends)
        holds = {name: given[name] for name in active if name in given}
        tell(len(jobs) - len(coming) - len(active), len(jobs))
    accounts = tuple(_account(job) for job in jobs)
    slots = setting.hosts * setting.host_slots
    used = used_gpu_s / (slots * last_s) if last_s else 0.0
    return RecordedPlay(Played(workload.name, policy.name, setting, accounts, (), decisions), used)


def _give(given: dict[str, Allocation], active: dict[str, RunningJob], now_s: float, ends: _Ends) -> None:
    """Change the GPUs of the jobs that a policy gave others than they have."""
    for name, job in active.items():
        hosts = given.get(name, {})
        if hosts is not job.hosts and hosts != job.hosts:
            job.give(hosts, now_s)
            ends.expect(job)


class _Ends:
    """When each job would end if nothing is changed. What was expected before a change stays queued, and is skipped."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._queue: list[tuple[float, str]] = []

    def expect(self, job: RunningJob) -> None:
        """Take the end of a job that was given other GPUs."""
        self._of[job.name] = end_s = job.end_s()
        if end_s < math.inf:
            heappush(self._queue, (end_s, job.name))

    def forget(self, name: str) -> None:
        """Leave out a job that has ended."""
        del self._of[name]

    def first_s(self) -> float:
        """The earliest end; infinity without any."""
        while self._queue and self._of.get(self._queue[0][1]) != self._queue[0][0]:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf


def _account(job: RunningJob) -> FinishedJob:
    if job.ended_s is None or job.first_slots_s is None:
        raise InternalError(f"job {job.name} has no account before its end")
    submitted_s = job.submitted.time_s
    return FinishedJob(
        job.name, job.submitted.law, submitted_s, job.first_slots_s - submitted_s, job.ended_s - submitted_s,
        job.changes, job.served_gpu_s,
    )  # fmt: skip
