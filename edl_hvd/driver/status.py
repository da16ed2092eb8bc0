"""How a job stands: one frozen value, which the screen, the file ``status.json`` and another terminal show."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edl_hvd.driver.measurements import WorkStatus
from edl_hvd.driver.membership.events import End
from edl_hvd.driver.membership.state import Membership, SlotState, WorldPhase, host_of
from edl_hvd.hosts import HostSlots
from edl_hvd.job_report import JobReport
from edl_hvd.json_values import former_values, formerly
from edl_hvd.protocol import Beat
from edl_hvd.teacher_counts import TeacherCounts, combine

_THROUGHPUT_WINDOW_S = 10.0
# Long enough to even out steps, short enough to show a change of the world.
_NOT_YET_S = 0.5
# The membership forgets each turn that workers are missing, as long as enough are on their way.

JobState: TypeAlias = Literal[
    "starting", "training", "changing", "regrouping", "waiting", "finishing", "stopping", "ended"
]
WorkerState: TypeAlias = Literal[SlotState, "orphaned"]
"""That of a worker's slot; "orphaned" for a process that an earlier, killed ``edlrun`` has left."""
_STATE_OF_WORLD: Mapping[WorldPhase, JobState] = {
    "forming": "regrouping", "running": "training", "changing": "changing", "broken": "regrouping",
}  # fmt: skip


@dataclass(frozen=True)
class WorkerStatus:
    """A slot that has a process, or is to get one.

    Attributes:
        worker: The slot, as ``host:slot``.
        state: State of the slot, or that it is none of this ``edlrun``'s.
        rank: In the present world, if it is a member.
        incarnation: Counts the processes of the slot.
        pid: Of its process on the driver's machine: the worker, or the ssh that leads to it.
        start_token: Names that process together with ``pid``; see ``process_identity.py``.
        step: That it said last.
        phase: What it said that it was doing.
        phase_s: For how long.
        beat_age_s: How long ago it said so.
        starts_in_s: Until its slot gets a process again.
    """

    worker: str
    state: WorkerState = field(metadata=former_values({"dismissed": "terminating"}))
    rank: int | None = None
    incarnation: int = field(default=0, metadata=formerly("life"))
    pid: int | None = None
    start_token: str = field(default="", metadata=formerly("mark"))
    step: int | None = None
    phase: str = ""
    phase_s: float = 0.0
    beat_age_s: float | None = None
    starts_in_s: float | None = None


@dataclass(frozen=True)
class Countdown:
    """Something that is so for ``remaining_s`` more seconds; ``who`` is a host or a worker, ``reason`` may be empty."""

    who: str
    remaining_s: float
    reason: str = ""


@dataclass(frozen=True)
class Shortage:
    """Why there is no world.

    Attributes:
        needed: Workers that it takes.
        ready: Workers that are ready.
        reasons: Why there are no more, for people.
        remaining_s: Until the job is given up; ``None`` while enough workers are on their way.
    """

    needed: int
    ready: int
    reasons: tuple[str, ...]
    remaining_s: float | None


@dataclass(frozen=True)
class TrainingProgress:
    """How far the training is.

    Attributes:
        step: Of its workers' present world.
        known_step: The furthest that was ever heard of; -1 for none.
        samples: Of the whole run.
        samples_per_s: Of late; ``None`` before there is anything to compare.
        saved_step: Of the newest checkpoint; -1 for none.
        saved_age_s: Since it was heard of; ``None`` if that was an earlier ``edlrun``.
    """

    step: int = 0
    known_step: int = -1
    samples: int = 0
    samples_per_s: float | None = None
    saved_step: int = -1
    saved_age_s: float | None = None


@dataclass(frozen=True)
class Status:
    """A job at one moment.

    Attributes:
        at_s: The moment, in seconds since the epoch.
        state: What it is doing.
        generation: Of the present or last world; 0 before the first.
        size: Its members.
        progress: How far the training is.
        workers: In the order of their hosts.
        drains: What is left, or is to be, and how much of the notice is left.
        quarantined: Hosts that get no workers for now.
        teachers: What its members get from teachers; ``None`` without distillation.
        work: What it makes of its slots, and what is left to do.
        shortage: Why there is no world, in the states "starting" and "waiting".
        end: How it ended.
    """

    at_s: float = field(metadata=formerly("at"))
    state: JobState
    generation: int = 0
    size: int = 0
    progress: TrainingProgress = field(default=TrainingProgress(), metadata=formerly("figures"))
    workers: tuple[WorkerStatus, ...] = ()
    drains: tuple[Countdown, ...] = ()
    quarantined: tuple[Countdown, ...] = field(default=(), metadata=formerly("aside"))
    teachers: TeacherCounts | None = None
    work: WorkStatus = field(default=WorkStatus())  # frozen
    shortage: Shortage | None = None
    end: End | None = None


def report_of(status: Status | None) -> JobReport:
    """What a job tells whoever shares slots out; ``None``: it has not begun."""
    if status is None:
        return JobReport()
    progress, work = status.progress, status.work
    goodput = work.curve.at(status.size) if work.curve is not None else 0.0
    return JobReport(
        status.state,
        status.size,
        max(progress.step, progress.known_step) or -1,  # a job that is restored knows none yet
        progress.samples_per_s if status.state == "training" else None,
        round(work.left / goodput, 1) if work.left is not None and goodput else None,
        () if work.curve is None else work.curve.sizes,
        () if work.curve is None else work.curve.goodput,
        work.left,
        work.change_s,
        work.timings,
    )


@dataclass(frozen=True)
class LastHeartbeat:
    """The last heartbeat of a worker, and when it came."""

    beat: Beat
    at_s: float


@dataclass(frozen=True)
class ProcessIdentity:
    """See ``WorkerStatus``."""

    pid: int
    start_token: str


def describe(
    membership: Membership,
    now_s: float,
    at_s: float,
    progress: TrainingProgress,
    heartbeats: Mapping[str, LastHeartbeat],
    processes: Mapping[str, ProcessIdentity],
) -> Status:
    """The status of a job whose membership is this. Pure.

    Args:
        membership: Of the job.
        now_s: On the membership's clock.
        at_s: The same moment since the epoch.
        progress: How far the training is.
        heartbeats: Last heartbeats, by worker.
        processes: By worker.
    """
    state = _state(membership)
    return Status(
        at_s=at_s,
        state=state,
        generation=membership.world.generation,
        size=len(membership.world.members),
        progress=progress,
        workers=tuple(_workers(membership, now_s, heartbeats, processes)),
        drains=tuple(Countdown(who, _until(moment_s, now_s)) for who, moment_s in membership.drains.items()),
        quarantined=tuple(Countdown(host, _until(s, now_s)) for host, s in membership.quarantined.items() if s > now_s),
        teachers=combine(
            [
                last.beat.teachers
                for worker in membership.world.members
                if (last := heartbeats.get(worker)) is not None and last.beat.teachers is not None
            ]
        ),
        shortage=_shortage(membership, now_s) if state in ("starting", "waiting") else None,
        end=membership.end,
    )


def _state(membership: Membership) -> JobState:
    world = membership.world
    if membership.end is not None:
        return "ended"
    if membership.finishing_s is not None:
        return "finishing"
    hosts = [entry for entry in membership.hosts if entry.host not in membership.failed_preflight]
    if hosts and all(_is_drained(entry, membership) for entry in hosts):
        return "stopping"
    if world.generation == 0:
        return "starting"
    if membership.having("member"):
        return _STATE_OF_WORLD[world.phase]
    return "waiting"


def _is_drained(entry: HostSlots, membership: Membership) -> bool:
    drains = membership.drains
    return entry.host in drains or all(f"{entry.host}:{number}" in drains for number in range(entry.slots))


def _workers(
    membership: Membership,
    now_s: float,
    heartbeats: Mapping[str, LastHeartbeat],
    processes: Mapping[str, ProcessIdentity],
) -> list[WorkerStatus]:
    wanted = set(membership.wanted(now_s))
    found = []
    for worker, slot in sorted(membership.slots.items(), key=lambda entry: _by_host(entry[0])):
        last, process = heartbeats.get(worker), processes.get(worker)
        pause_s = _until(slot.not_before_s, now_s) if slot.state == "empty" else None
        if slot.state == "empty" and (worker not in wanted or not pause_s):
            continue
        members = membership.world.members
        is_member = slot.state == "member" and worker in members
        found.append(
            WorkerStatus(
                worker=worker,
                state=slot.state,
                rank=members.index(worker) if is_member else None,
                incarnation=slot.incarnation,
                pid=process.pid if process else None,
                start_token=process.start_token if process else "",
                step=last.beat.step if last else None,
                phase=last.beat.phase if last else "",
                phase_s=round(last.beat.phase_s, 3) if last else 0.0,
                beat_age_s=round(now_s - last.at_s, 3) if last else None,
                starts_in_s=pause_s,
            )
        )
    return found


def _by_host(worker: str) -> tuple[str, int]:
    return host_of(worker), int(worker.rpartition(":")[2])


def _shortage(membership: Membership, now_s: float) -> Shortage:
    rules, wanted = membership.rules, membership.wanted(now_s)
    needed = rules.min_np if membership.world.generation else rules.num_proc
    slots = sum(entry.slots for entry in membership.hosts if entry.host not in membership.failed_preflight)
    starting = len(membership.having("starting"))
    reasons = []
    if slots < needed:
        fit = " on hosts that are good enough" if membership.failed_preflight else ""
        reasons.append(f"discovery lists {slots or 'no'} slot{'s' * (slots != 1)}{fit}")
    reasons += [f"{who} is drained" for who in membership.drains if _is_listed(who, membership)]
    for host, until_s in membership.quarantined.items():
        if until_s > now_s:
            reasons.append(f"host {host} is quarantined for {math.ceil(until_s - now_s)} s")
    for worker, slot in membership.slots.items():
        if slot.state == "empty" and slot.not_before_s > now_s and worker in wanted:
            reasons.append(f"{worker} starts again in {math.ceil(slot.not_before_s - now_s)} s")
    if starting:
        reasons.append(f"{starting} {'is' if starting == 1 else 'are'} starting")
    below_min_since_s = 0.0 if membership.below_min_since_s is None else now_s - membership.below_min_since_s
    remaining_s = max(0.0, rules.elastic_timeout_s - below_min_since_s) if below_min_since_s >= _NOT_YET_S else None
    ready = [worker for worker in membership.having("ready") if worker in wanted]
    return Shortage(needed, len(ready), tuple(reasons), remaining_s)


def _is_listed(target: str, membership: Membership) -> bool:
    return any(target == entry.host or host_of(target) == entry.host for entry in membership.hosts)


def _until(moment_s: float, now_s: float) -> float:
    return round(max(0.0, moment_s - now_s), 3)


class Throughput:
    """Samples per second over the last ten seconds, or over the last two steps where these take longer."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, samples: int) -> None:
        """Note the number of samples trained by now; 0 for an unknown number. A smaller one than before starts anew."""
        points = self._points
        if points and samples < points[-1][1]:
            points.clear()
        if samples and (not points or samples > points[-1][1]):
            points.append((now_s, samples))
        while len(points) > 2 and points[0][0] < now_s - _THROUGHPUT_WINDOW_S:
            points.popleft()

    def forget(self) -> None:
        """What comes next is not to be compared with what was."""
        self._points.clear()

    def per_s(self, now_s: float) -> float | None:
        """
        >>> throughput = Throughput()
        >>> for second in range(5):
        ...     throughput.update(second, 100 + 64 * second)
        >>> throughput.per_s(4), throughput.per_s(12)
        (64.0, 32.0)
        """
        if len(self._points) < 2:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        # Who has not moved for as long as all of that took is standing still.
        until_s = max(last_s, now_s - (last_s - first_s))
        return (last - first) / (until_s - first_s)
