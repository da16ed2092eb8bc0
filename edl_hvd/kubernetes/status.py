"""The status of a training job, and the events that its changes are. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.job_report import JobReport
from edl_hvd.kubernetes.parsing import epoch_s
from edl_hvd.kubernetes.snapshot import (
    JOB_LABEL,
    KUEUE,
    ROLE_LABEL,
    WORKER,
    SeenGuest,
    SeenJob,
    SeenPod,
    TrainingJobSpec,
)
from edl_hvd.planning.values import Curve, WaitReason
from edl_hvd.timings import SHARED_TIMINGS, Timing, pooled, read_timings
from edl_hvd.values import count

_LONGEST_SENTENCE = 900
# Of an event's message Kubernetes takes 1024 characters.
_PROGRESS_EVERY_S = 30.0
# Of a job that trains: each time is a write, and thousands of jobs may share an API server.
_WORKLOADS = "workloads.kueue.x-k8s.io"
# By its whole name: later versions of Kubernetes have a resource "workloads" of their own.
_NEWS = 0.1
# Part by which a measurement differs from the known one before the plan is made from it.


@dataclass(frozen=True)
class RunCount:
    """Launchers of a job that have failed.

    Attributes:
        failures: Their number, those that saved and left not counted.
        last_uid: Identity of the last one that was looked at, so that none counts twice.
        words: What is known about its end.
    """

    failures: int = 0
    last_uid: str = ""
    words: str = ""

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> RunCount:
        """What a status says."""
        found = status.get("launcher") or {}
        return cls(found.get("failures") or 0, found.get("lastUid") or "", found.get("words") or "")

    def after(self, launcher: SeenPod, counts: bool) -> RunCount:
        """The count after the end of a launcher, the same however often that is seen."""
        if launcher.uid == self.last_uid:
            return self
        ended = f"exit code {launcher.exit_code}" if launcher.exit_code is not None else "it was ended"
        words = f"launcher {launcher.name}: {ended} {launcher.words}".strip()[:_LONGEST_SENTENCE]
        return replace(self, failures=self.failures + counts, last_uid=launcher.uid, words=words)


@dataclass(frozen=True)
class Placed:
    """Where a plan has the workers of a job, whether they are there yet or not.

    Attributes:
        workers: Their number on each node, by name of the node.
        since_s: When that was planned, in seconds since the epoch.
    """

    workers: tuple[HostSlots, ...]
    since_s: float

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Placed | None:
        """What a status says; ``None``: nothing, because nothing was planned yet."""
        found = status.get("placed")
        if not found:
            return None
        since = datetime.fromisoformat(found["since"].replace("Z", "+00:00"))
        return cls(tuple(HostSlots(one["node"], one["workers"]) for one in found["nodes"]), since.timestamp())


@dataclass(frozen=True)
class JobMeasurements:
    """What a job has measured of itself, as its status keeps it.

    Attributes:
        sizes: Numbers of processes, rising; empty: nothing was measured yet.
        goodput: Goodput with each of them.
        left: Work left, in units of goodput times seconds; ``None``: not known.
        change_s: Seconds that another number of workers costs; ``None``: not known.
    """

    sizes: tuple[int, ...] = ()
    goodput: tuple[float, ...] = ()
    left: float | None = None
    change_s: float | None = None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> JobMeasurements:
        """What a status says."""
        found = status.get("measured") or {}
        sizes, goodput = tuple(found.get("sizes") or ()), tuple(found.get("goodput") or ())
        return cls(sizes, goodput, found.get("left"), found.get("changeSeconds"))

    def curve(self, spec: TrainingJobSpec) -> Curve | None:
        """The curve over the planner's slots: of the sizes that whole workers make; ``None``: there is none.

        >>> from edl_hvd.kubernetes.snapshot import GPU
        >>> spec = TrainingJobSpec(1, 4, 2, "", False, "", 0, {}, GPU, 2)
        >>> JobMeasurements((1, 2, 4), (10.0, 19.0, 36.0)).curve(spec).sizes
        (2, 4)
        """
        whole = {
            size // spec.slots * spec.unit: value
            for size, value in zip(self.sizes, self.goodput, strict=True) if size % spec.slots == 0
        }  # fmt: skip
        try:
            return Curve(tuple(whole), tuple(whole.values())) if whole else None
        except UsageError:  # what a job says is its own affair: it counts as one that says nothing
            return None


def timings_of(status: Mapping[str, Any]) -> tuple[Timing, ...]:
    """How long steps took, by the status of a job that has a family."""
    try:
        return read_timings(json.dumps((status.get("measured") or {}).get("timings") or []))
    except UsageError:  # somebody has written into the status: it counts as one that says nothing
        return ()


@dataclass(frozen=True, order=True)
class Misplacement:
    """A node that lacks labels of the flavor which Kueue has chosen for a worker there.

    Attributes:
        node: Its name.
        labels: What it lacks, as ``name=value``, with commas.
    """

    node: str
    labels: str


@dataclass(frozen=True)
class JobState:
    """What the status of a job is made of.

    Attributes:
        job: The job.
        placed: Workers that it shall have on each node.
        running: Workers that run.
        held: Number of workers that each scheduling gate holds, by its name.
        launcher: Its launcher, if there is one.
        why: Why it has what it has.
        reason: Why it has nothing; ``None`` if it has something, or asks for nothing.
        is_complete: Whether training is complete.
        has_failed: Whether it has failed for good.
        runs: Launchers that have failed.
        has_workers: Whether any worker is still there.
        missing_class: PriorityClass that it needs and the cluster has not.
        report: What it has said of its work; ``None``: nothing.
        misplaced: Number of workers that Kueue keeps from their nodes, by node and labels.
    """

    job: SeenJob
    placed: tuple[HostSlots, ...]
    running: int
    held: Mapping[str, int]
    launcher: SeenPod | None
    why: str
    reason: WaitReason | None
    is_complete: bool
    has_failed: bool
    runs: RunCount
    has_workers: bool
    missing_class: str
    report: JobReport | None = None
    misplaced: Mapping[Misplacement, int] = field(default_factory=dict)

    @property
    def desired(self) -> int:
        """Workers that it shall have."""
        return sum(entry.slots for entry in self.placed)

    @property
    def trains(self) -> bool:
        """Whether its launcher and some of its workers run."""
        return self.launcher is not None and self.launcher.phase == "Running" and self.running > 0

    @property
    def is_in_kueue(self) -> bool:
        """Whether Kueue holds any worker."""
        return any(gate.startswith(KUEUE) for gate in self.held)

    @property
    def is_gone(self) -> bool:
        """Whether its launcher has ended, or is not there, and no worker is still there."""
        return (self.launcher is None or self.launcher.is_over) and not self.has_workers


def status_of(state: JobState, now_s: float) -> dict[str, Any]:
    """The status, with the times of conditions that have not changed."""
    job = state.job
    accepted = _accepted(state)
    phase = _phase(state, accepted.is_true)
    conditions = {"Accepted": accepted, **_conditions(state, phase)}
    before = {one.get("type"): one for one in job.status.get("conditions") or []}
    for kind in before:
        conditions.setdefault(kind, _Condition(False, "NoLonger", ""))
    return {
        "observedGeneration": job.generation,
        "phase": phase,
        "workers": {
            "desired": state.desired, "running": state.running, "shown": f"{state.running}/{state.desired}",
            "selector": f"{JOB_LABEL}={job.name},{ROLE_LABEL}={WORKER}",
        },
        "placed": _placed(state, now_s),
        **_said(state, now_s),
        "why": (state.why or accepted.message)[:_LONGEST_SENTENCE],
        "launched": bool(job.status.get("launched")) or state.trains,
        "launcher": {"failures": state.runs.failures, "lastUid": state.runs.last_uid, "words": state.runs.words},
        "conditions": [
            conditions[kind].as_json(kind, before.get(kind) or {}, job.generation, now_s) for kind in sorted(conditions)
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class _Condition:
    """A condition without its times: whether it holds, and why."""

    is_true: bool
    reason: str
    message: str

    def as_json(self, kind: str, before: Mapping[str, Any], generation: int, now_s: float) -> dict[str, Any]:
        """The condition in a status; its time is that of the status before if its value is the same."""
        value = "True" if self.is_true else "False"
        since = before.get("lastTransitionTime") if before.get("status") == value else None
        return {
            "type": kind, "status": value, "reason": self.reason, "message": self.message[:_LONGEST_SENTENCE],
            "lastTransitionTime": since or time_text(now_s), "observedGeneration": generation,
        }  # fmt: skip


def _accepted(state: JobState) -> _Condition:
    job = state.job
    if job.spec is None:
        return _Condition(False, job.problem_reason, job.problem)
    if state.missing_class:
        text = (
            f"there is no PriorityClass {state.missing_class!r}; create it, install the operator's manifests, or name "
            "another in priorityClassName"
        )
        return _Condition(False, "NoPriorityClass", text)
    if state.reason is WaitReason.NEVER_FITS:
        return _Condition(False, "NeverFits", state.why)
    return _Condition(True, "Valid", "the spec can be run")


def _phase(state: JobState, is_accepted: bool) -> str:
    """What the job does, in a word."""
    spec = state.job.spec
    if state.is_complete:
        return "Complete"
    if state.has_failed:
        return "Failed"
    if not is_accepted:
        return "Rejected"
    if spec is not None and spec.is_suspended:
        return "Suspended" if state.is_gone else "Suspending"
    if state.reason is not None:
        return "Waiting"
    return "Training" if state.trains else "Starting"


def _conditions(state: JobState, phase: str) -> dict[str, _Condition]:
    """The conditions of a job in this phase, by kind, without that of its acceptance."""
    spec = state.job.spec
    found = {"Running": _Condition(phase == "Training", phase, f"{count(state.running, 'worker')} running")}
    if phase == "Complete":
        found["Complete"] = _Condition(True, "TrainingComplete", "training is complete")
    if phase == "Failed":
        found["Failed"] = _Condition(True, "LauncherFailed", state.runs.words)
    if phase in ("Complete", "Failed", "Rejected"):
        return found
    if phase in ("Suspended", "Suspending"):
        reason = "ScaledToZero" if spec is not None and spec.most == 0 else "UserAsked"
        text = "the job was asked to save a checkpoint and leave"
        found["Suspended"] = _Condition(phase == "Suspended", reason, text)
    if phase == "Waiting":
        is_preempted = bool(state.job.status.get("launched"))
        reason = "Preempted" if is_preempted else "Waits"
        found["Suspended"] = _Condition(state.is_gone and is_preempted, reason, state.why)
    text = _counts_text(state)
    is_held = state.is_in_kueue and spec is not None and state.running < spec.least <= state.desired
    has_floor = spec is not None and state.desired >= spec.least and not is_held
    waits = state.reason.value if state.reason is not None else "WaitsForQuota" if is_held else "NotAsked"
    why = text if is_held else state.why or "it asks for no workers"
    found["Admitted"] = _Condition(has_floor, "Floor" if has_floor else waits, why)
    is_changing = state.desired != state.running
    change = "Growing" if state.desired > state.running else "Shrinking"
    found["Resizing"] = _Condition(is_changing, change if is_changing else "Settled", text)
    return found


def _counts_text(state: JobState) -> str:
    """How many workers run, and what keeps others from it."""
    text = f"{state.running} of {count(state.desired, 'worker')} run"
    for gate, held in sorted(state.held.items()):
        text += f"; the scheduling gate {gate} holds {held}"
    if state.is_in_kueue:
        text += f"; 'kubectl -n {state.job.namespace} describe {_WORKLOADS}' says why"
    for one, lost in sorted(state.misplaced.items()):
        text += (
            f"; {count(lost, 'worker')} cannot start on {one.node}: it has no {one.labels}, as Kueue's flavor asks for"
        )
    if state.misplaced:
        text += "; give the job a nodeSelector with the labels of one flavor"
    return text


def _placed(state: JobState, now_s: float) -> dict[str, Any]:
    last = Placed.of(state.job.status)
    since = (
        state.job.status["placed"]["since"] if last is not None and last.workers == state.placed else time_text(now_s)
    )
    return {"since": since, "nodes": [{"node": entry.host, "workers": entry.slots} for entry in state.placed]}


def _said(state: JobState, now_s: float) -> dict[str, Any]:
    """How far the job is and what it has measured, as it was said last; written anew when it is old or has changed."""
    report, status = state.report, state.job.status
    kept = {name: status[name] for name in ("progress", "measured") if name in status}
    if state.is_complete and "progress" in kept:
        return {**kept, "progress": {**kept["progress"], "left": "0s", "estimatedRemainingSeconds": 0}}
    if report is None or report.step < 0:
        return kept
    known = JobMeasurements.of(status)
    has_family = state.job.spec is not None and bool(state.job.spec.family)
    told = JobMeasurements(report.sizes, report.goodput, report.left, report.change_s)
    shared = min(len(report.timings), SHARED_TIMINGS) if has_family else 0
    is_news = _is_news(told, known) or shared > len((kept.get("measured") or {}).get("timings") or ())
    at_s = epoch_s((kept.get("progress") or {}).get("at"))
    if at_s is not None and now_s - at_s < _PROGRESS_EVERY_S and not (told.sizes and is_news):
        return kept
    # ``None`` takes a field away: the API server merges what it is given into what it has.
    progress = {
        "at": time_text(now_s),
        "step": report.step,
        "samplesPerSecond": None if report.samples_per_s is None else round(report.samples_per_s),
        "estimatedRemainingSeconds": round(report.left_s) if report.left_s is not None else None,
        "left": short_duration(report.left_s) if report.left_s is not None else None,
    }
    if not told.sizes:
        return {**kept, "progress": progress}
    measured = {"sizes": list(told.sizes), "goodput": list(told.goodput), "left": told.left,
                "changeSeconds": told.change_s}  # fmt: skip
    if has_family:
        measured["timings"] = [timing.as_list() for timing in pooled(report.timings)]
    return {"progress": progress, "measured": measured}


def _is_news(told: JobMeasurements, known: JobMeasurements) -> bool:
    return told.sizes != known.sizes or any(
        abs(new - old) > _NEWS * old for new, old in zip(told.goodput, known.goodput, strict=True)
    )


def short_duration(seconds: float) -> str:
    """A duration as kubectl shows ages: its two largest units.

    >>> short_duration(7.4), short_duration(3700), short_duration(200_000)
    ('7s', '1h1m', '2d7h')
    """
    left = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number}{unit}")
    return "".join(parts[:2])


def time_text(now_s: float) -> str:
    """A time as the API server has it.

    >>> time_text(60.0)
    '1970-01-01T00:01:00Z'
    """
    return datetime.fromtimestamp(int(now_s), timezone.utc).isoformat().replace("+00:00", "Z")


def events_of(job: SeenJob, status: Mapping[str, Any], now_s: float) -> list[dict[str, Any]]:
    """The events that a change of a status is: each has a name of its own, so that none is written twice."""
    before = {one["type"]: one for one in job.status.get("conditions") or []}
    found = []
    for one in status["conditions"]:
        old = before.get(one["type"]) or {}
        is_first = not old and one["status"] == "False" and one["type"] not in ("Accepted", "Admitted")
        if one["type"] == "Resizing" or is_first or one["reason"] == "NoLonger":
            continue
        if (old.get("status"), old.get("reason")) != (one["status"], one["reason"]):
            is_bad = (one["type"], one["status"]) in (("Accepted", "False"), ("Failed", "True"))
            found.append(_event(job, one["reason"], one["message"], is_bad, now_s))
    had = (job.status.get("workers") or {}).get("desired", 0)
    has = status["workers"]["desired"]
    if had != has:
        text = f"{had} → {count(has, 'worker')}: {status['why']}"
        found.append(_event(job, "Grown" if has > had else "Shrunk", text, False, now_s))
    return found


def resize_event(guest: SeenGuest, replicas: int, why: str, now_s: float) -> dict[str, Any]:
    """The event that an MPIJob gets another number of workers."""
    reason = "Grown" if replicas > guest.replicas else "Shrunk"
    return _event(guest, reason, f"{guest.replicas} → {count(replicas, 'worker')}: {why}", False, now_s)


def refusal_event(job: SeenJob | SeenGuest, text: str, now_s: float) -> dict[str, Any]:
    """The event that the API server has refused something that a job needs."""
    return _event(job, "Refused", text, True, now_s)


def _event(job: SeenJob | SeenGuest, reason: str, message: str, is_bad: bool, now_s: float) -> dict[str, Any]:
    mark = hashlib.sha256(f"{job.uid} {job.resource_version} {reason} {message}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": f"{job.name}.{mark}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": job.api_version, "kind": job.kind, "name": job.name, "namespace": job.namespace,
            "uid": job.uid, "resourceVersion": job.resource_version,
        },
        "reason": reason, "message": message[:_LONGEST_SENTENCE], "type": "Warning" if is_bad else "Normal",
        "firstTimestamp": time_text(now_s), "lastTimestamp": time_text(now_s), "count": 1,
        "source": {"component": "edl-hvd-operator"},
    }  # fmt: skip
