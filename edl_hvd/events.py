"""What happened to a job, as typed events appended to a file of JSON lines.

Every worker of a job appends to the same file (or, on hosts without a shared disk, to one file per
host). A line is written by one ``write`` on a descriptor opened with ``O_APPEND``, so lines of several
processes do not mix. Reports are computed from this file and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import StorageError, UsageError
from edl_hvd.json_values import formerly, renamed

logger = logging.getLogger(__name__)

StopCause: TypeAlias = Literal["failure", "change", "error"]
"""Why training stops in a world: a member is lost, the members are to be others, or the script has failed."""


@dataclass(frozen=True)
class Event:
    """Base of all events; ``kind`` is the ``event`` field of the line."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class JobStarted(Event):
    """A worker entered the elastic function for the first time. Written by every worker."""

    kind: ClassVar[str] = "job_started"
    worker: str
    pid: int


@dataclass(frozen=True)
class WorldFormed(Event):
    """A world is complete and can allreduce. Written by its rank 0."""

    kind: ClassVar[str] = "world_formed"
    generation: int
    size: int
    members: list[str]
    step: int


@dataclass(frozen=True)
class WorkerLost(Event):
    """A member of the previous world is missing after a failure. Written by the new rank 0."""

    kind: ClassVar[str] = "worker_lost"
    generation: int
    worker: str


@dataclass(frozen=True)
class WorkerLeft(Event):
    """A worker left in agreement with the others, losing nothing. Written by the leaver."""

    kind: ClassVar[str] = "worker_left"
    generation: int
    worker: str
    step: int


@dataclass(frozen=True)
class Resized(Event):
    """Training goes on in a new world. Written by its rank 0.

    ``downtime_s`` runs on a survivor from the moment the old world stopped training (failure noticed or
    change agreed) to the moment the user's function runs again.
    """

    kind: ClassVar[str] = "resized"
    generation: int
    old_size: int
    new_size: int
    cause: StopCause
    downtime_s: float = field(metadata=formerly("seconds"))
    step: int


@dataclass(frozen=True)
class Committed(Event):
    """A consistent point in memory. Written by rank 0.

    ``step``, ``epoch`` and ``samples`` count the whole run; ``samples`` is the number consumed so far.
    """

    kind: ClassVar[str] = "commit"
    generation: int
    size: int
    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A checkpoint became visible in storage. Written by rank 0.

    Of its ``duration_s`` it gave way to the training for about ``held_s``.
    """

    kind: ClassVar[str] = "checkpoint"
    url: str
    step: int
    size_bytes: int
    duration_s: float = field(metadata=formerly("seconds"))
    held_s: float = 0.0


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint was given up; training goes on, the one before stays the newest."""

    kind: ClassVar[str] = "checkpoint_failed"
    url: str
    step: int
    reason: str


@dataclass(frozen=True)
class ReplicasDrifted(Event):
    """A rank holds other weights than most others at a checkpoint. Written by rank 0.

    Attributes:
        rank: Which one.
        tensors: In how many tensors it differs.
        names: Some of them.
    """

    kind: ClassVar[str] = "replicas_drifted"
    url: str
    step: int
    rank: int
    tensors: int
    names: list[str]


@dataclass(frozen=True)
class EmergencyCheckpoint(Event):
    """A worker that had to end, and knew of nobody who would go on, saved its last commit or did not.

    Attributes:
        step: Of that commit.
        written: It is in storage.
        duration_s: How long that took.
        reason: Why it was not written.
    """

    kind: ClassVar[str] = "emergency_checkpoint"
    url: str
    step: int
    written: bool
    duration_s: float = field(metadata=formerly("seconds"))
    reason: str = ""


@dataclass(frozen=True)
class CheckpointDamaged(Event):
    """A listed checkpoint did not verify and was passed over for an older one."""

    kind: ClassVar[str] = "checkpoint_damaged"
    url: str
    step: int
    reason: str


@dataclass(frozen=True)
class Restored(Event):
    """The training state came from storage. Written by the rank that read it."""

    kind: ClassVar[str] = "restore"
    url: str
    step: int
    epoch: int
    samples: int
    duration_s: float = field(metadata=formerly("seconds"))


@dataclass(frozen=True)
class Metrics(Event):
    """Numbers the user's function reported through ``state.report``. Written by rank 0."""

    kind: ClassVar[str] = "metrics"
    step: int
    epoch: int
    samples: int
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchChosen(Event):
    """``WorkerBatch("auto")`` has looked whether another batch makes more progress. Written by rank 0.

    Attributes:
        worker_batch: Samples per worker in the steps up to here.
        micro_batch: Into parts of how many they were divided.
        samples_per_s: How many samples the world has trained on in a second.
        predicted_samples_per_s: How many the model predicted, fitted to the measurements before; ``None`` without any.
        noise_samples: The gradient noise scale; ``None`` where it is not known or infinite.
        efficiency: What a sample of this batch is worth, beside one of the script's own.
        next_worker_batch: Samples per worker from the next step on.
    """

    kind: ClassVar[str] = "batch"
    step: int
    size: int
    worker_batch: int
    micro_batch: int
    samples_per_s: float
    predicted_samples_per_s: float | None
    noise_samples: float | None
    efficiency: float | None
    next_worker_batch: int


@dataclass(frozen=True)
class Straggler(Event):
    """A worker was slower than the others for 50 steps. Written by rank 0, on hearing it from the driver (``edlrun``).

    ``compute_s`` is the mean time that this worker needs for a micro-batch, ``median_s`` that of the world.
    """

    kind: ClassVar[str] = "straggler"
    generation: int
    worker: str
    step: int
    compute_s: float
    median_s: float


@dataclass(frozen=True)
class JobEnded(Event):
    """The user's function returned. Written by rank 0, after the last checkpoint is visible."""

    kind: ClassVar[str] = "job_ended"
    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class TeacherJoined(Event):
    """A teacher is ready for this worker. Written by every worker."""

    kind: ClassVar[str] = "teacher_joined"
    teacher: str
    model: str
    fingerprint: str


@dataclass(frozen=True)
class TeacherLost(Event):
    """A teacher is gone, or left; it held ``tasks`` tasks, which go to others. Written by every worker."""

    kind: ClassVar[str] = "teacher_lost"
    teacher: str
    reason: str
    tasks: int


@dataclass(frozen=True)
class TeacherRefused(Event):
    """A teacher, or an answer of one, cannot be used. Written by every worker."""

    kind: ClassVar[str] = "teacher_refused"
    teacher: str
    reason: str


@dataclass(frozen=True)
class TeachersShort(Event):
    """A worker waits for an answer, and there is no teacher. Written by that worker, once for each wait."""

    kind: ClassVar[str] = "teachers_short"
    seconds: float
    reasons: str


@dataclass(frozen=True)
class Answers(Event):
    """What teachers have answered in this pass over the data. Written by every worker, every 30 s and at its end.

    Attributes:
        worker: Worker that writes it.
        samples: Samples that the training has got answers for.
        seconds: Since the pass began.
        waited_s: Time of these in which the training waited for an answer.
        teachers: Number of teachers that are ready.
        lead: Number of answers that lie ready.
        window: Number of micro-batches that were read and not consumed.
        mean_lead: Mean of the lead, whenever the training had taken an answer since the event before.
        mean_window: Mean of the window at these moments.
        given: Number of tasks given to teachers since the worker's start ...
        again: ... of these, given again after a teacher was lost or slow ...
        hedged: ... and of these, while the first teacher still had it.
        kept: Samples whose answers were found on a storage.
        read_s: Mean time of a micro-batch in the loader itself ...
        queued_s: ... until a teacher has asked for it ...
        wire_s: ... on the way to the teacher and back ...
        waiting_s: ... waiting at the teacher ...
        compute_s: ... in the model, with the others of its batch ...
        ready_s: ... from its answer to the training ...
        decode_s: ... and until the answer was made a tensor.
    """

    kind: ClassVar[str] = "answers"
    worker: str
    samples: int
    seconds: float
    waited_s: float
    teachers: int
    lead: int
    window: int
    mean_lead: float
    mean_window: float
    given: int
    again: int
    hedged: int
    kept: int
    read_s: float
    queued_s: float
    wire_s: float
    waiting_s: float
    compute_s: float
    ready_s: float
    decode_s: float


class EventLog:
    """Appends events to a file; does nothing when there is no file. Any thread.

    A file that cannot be written any more, for instance on a full disk, costs events and not the job: that is logged
    once, each event that fails is left out, and each later one is tried.

    Args:
        path: File to append to; parent folders are made. ``None`` drops every event.
        clock: Stamps each line with ``time``, seconds since the epoch.

    Attributes:
        is_open: Whether there is a file.

    Raises:
        StorageError: The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str] | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._has_failed = self._is_cut_off = False
        self.is_open = path is not None
        if path is None:
            return
        self._path = os.fspath(path)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot open the event log {self._path!r}: {error.strerror}") from error

    def emit(self, event: Event) -> None:
        """Append an event; an error of the file is logged, and not raised."""
        with self._lock:
            if self._descriptor is None:
                return
            line = json.dumps({"time": round(self._clock.wall_s(), 6), "event": event.kind, **asdict(event)})
            try:
                self._write(self._descriptor, line.encode() + b"\n")
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning(
                        "cannot append to the event log %r: %s; the job goes on, and events are missing there until "
                        "the file can be written: make room on its disk, or name another file in EDL_HVD_EVENTS",
                        self._path,
                        error.strerror,
                    )

    def _write(self, descriptor: int, line: bytes) -> None:
        # Behind a line that was cut off, the next one would be lost as well.
        unwritten = b"\n" + line if self._is_cut_off else line
        while unwritten:
            written = os.write(descriptor, unwritten)
            unwritten = unwritten[written:]
            self._is_cut_off = len(unwritten) not in (0, len(line))

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._descriptor is not None:
                with suppress(OSError):  # of events that a network disk has not taken; the job goes on
                    os.close(self._descriptor)
                self._descriptor, self.is_open = None, False


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of an event log, oldest first, as dictionaries with ``time`` and ``event``.

    A last line without its newline (its writer was killed in the middle) is left out. So are lines that are no
    event, as where a disk was full; their number is logged. Fields of the version before have their present names.

    Raises:
        OSError: The file cannot be read.
        UsageError: The file has lines, and none of them is an event.
    """
    with open(path, "rb") as file:
        lines = [line for line in file if line.endswith(b"\n")]
    events = [event for event in map(_parse, lines) if event is not None]
    damaged = len(lines) - len(events)
    if damaged and not events:
        raise UsageError(
            f"{os.fspath(path)} is no event log: none of its {damaged} lines is a JSON object with 'event'; expected "
            "the file that EDL_HVD_EVENTS names"
        )
    if damaged:
        logger.warning(
            "%s: %d of %d lines are no events and are left out; such a line is cut off where the disk is full, or a "
            "writer is killed",
            os.fspath(path),
            damaged,
            len(lines),
        )
    kinds = {kind.kind: kind for kind in Event.__subclasses__()}
    return [dict(renamed(kinds.get(event["event"], Event), event)) for event in events]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The event in a line; ``None`` if there is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
