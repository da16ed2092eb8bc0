"""What other terminals ask a fleet's daemon, and what it answers: one frozen value per message, one JSON line each way.

    {"what": "scalerequest", "job": "resnet50", "most": 2}
        → {"what": "agreed", "text": "resnet50 gets at most 2 slots"}
        → {"what": "refused", "problem": "…"}

The socket lies in the fleet's folder and is for its user alone. A line that holds no message is refused, and changes
nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from edl_hvd.discovery.watch import SourceTrouble
from edl_hvd.driver.job_folder.requests import ask
from edl_hvd.driver.status import JobState
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.fleet.state import FleetJob, HeldClaim, JobSpec
from edl_hvd.hosts import HostSlots
from edl_hvd.json_values import read_fields, show
from edl_hvd.protocol import Message, Vocabulary, encode, vocabulary

LONGEST_LINE_BYTES = 1 << 20
# A command line of Linux has at most 2 MiB with its environment; nobody types one.
_HINT = "expected the --state folder of a fleet whose daemon runs; start it with 'edl-hvd fleet serve'"

# --- asked ---


@dataclass(frozen=True)
class SubmitRequest(Message):
    """Run this job."""

    spec: JobSpec


@dataclass(frozen=True)
class ScaleRequest(Message):
    """Let a job have at most this number of slots."""

    job: str
    most: int


@dataclass(frozen=True)
class StopRequest(Message):
    """Let a job save and stop."""

    job: str


@dataclass(frozen=True)
class ResumeRequest(Message):
    """Let a job that was stopped, or has failed, go on."""

    job: str


@dataclass(frozen=True)
class DeleteRequest(Message):
    """Forget a job that has ended or was stopped, and remove its folder."""

    job: str


@dataclass(frozen=True)
class ClaimRequest(Message):
    """Make room for somebody else; for ``for_s`` seconds, or until it is released."""

    claim: str
    slots: int
    priority: int
    for_s: float | None


@dataclass(frozen=True)
class ReleaseRequest(Message):
    """End a claim."""

    claim: str


@dataclass(frozen=True)
class ViewRequest(Message):
    """Say how the fleet stands."""


@dataclass(frozen=True)
class PlanRequest(Message):
    """Say what the planner would do now, with these jobs and claims besides and on these hosts; nothing is done.

    Attributes:
        hosts: Hosts instead of the fleet's; empty for the fleet's own.
        jobs: Jobs that are not there yet.
        claims: Claims that are not there yet.
    """

    hosts: tuple[HostSlots, ...] = ()
    jobs: tuple[JobSpec, ...] = ()
    claims: tuple[ClaimRequest, ...] = ()


FleetRequest: TypeAlias = (
    SubmitRequest
    | ScaleRequest
    | StopRequest
    | ResumeRequest
    | DeleteRequest
    | ClaimRequest
    | ReleaseRequest
    | ViewRequest
    | PlanRequest
)

# --- answered ---


@dataclass(frozen=True)
class Agreed(Message):
    """It is so from now on; ``text`` is for people."""

    text: str


@dataclass(frozen=True)
class Refused(Message):
    """It cannot be, and nothing has changed.

    Attributes:
        problem: Why, for people.
        may_be_later: Whether the same request may be granted later, as when the disk of the daemon was full.
    """

    problem: str
    may_be_later: bool = False


@dataclass(frozen=True)
class JobProgress:
    """What a job's folder says of its training.

    Attributes:
        state: As in ``status.json``; empty if there is none.
        workers: Members of its world.
        step: The furthest step that it has reached; -1 for none.
        samples_per_s: Of late; ``None`` if that is not known.
        saved_step: Step of the newest checkpoint; -1 for none.
        left_s: Seconds until its end at the present pace; ``None`` if that is not known.
    """

    state: Literal[JobState, ""] = ""
    workers: int = 0
    step: int = -1
    samples_per_s: float | None = None
    saved_step: int = -1
    left_s: float | None = None


@dataclass(frozen=True)
class JobRow:
    """One job of a :class:`FleetView`.

    Attributes:
        job: The job as the daemon knows it.
        progress: What its folder says of its training.
        waited_s: Seconds without a run that it wanted.
        served_slot_s: Slots times seconds that it was given.
    """

    job: FleetJob
    progress: JobProgress
    waited_s: float
    served_slot_s: float


@dataclass(frozen=True)
class FleetView(Message):
    """How a fleet stands.

    Attributes:
        now_s: The moment on the fleet's clock.
        hosts: Hosts of the source.
        jobs: All jobs, in the order in which they were submitted.
        claims: All claims.
        free: Slots that nothing has.
        lacking: Slots that more hosts would be used for.
        trouble: Why the hosts are those known before, and since when; ``None`` while their source answers.
    """

    now_s: float
    hosts: tuple[HostSlots, ...]
    jobs: tuple[JobRow, ...]
    claims: tuple[HeldClaim, ...]
    free: int
    lacking: int
    trouble: SourceTrouble | None = None


@dataclass(frozen=True)
class PlannedShare:
    """What one job or claim has, would get, and why.

    Attributes:
        name: Name of the job or claim.
        kind: Which of both it is.
        has: Slots that it has.
        gets: Slots that it would get.
        hosts: Where.
        why: A sentence.
    """

    name: str
    kind: Literal["job", "claim"]
    has: int
    gets: int
    hosts: tuple[HostSlots, ...]
    why: str


@dataclass(frozen=True)
class PlanView(Message):
    """What the planner would do."""

    shares: tuple[PlannedShare, ...]
    lacking: int


FleetReply: TypeAlias = Agreed | Refused | FleetView | PlanView

# --- as lines ---

REQUESTS: Vocabulary[FleetRequest] = vocabulary(*get_args(FleetRequest))
REPLIES: Vocabulary[FleetReply] = vocabulary(*get_args(FleetReply))


def word_of(message: Message) -> str:
    """Its ``what``."""
    return type(message).__name__.lower()


def is_served(folder: Path) -> bool:
    """Whether a daemon serves the fleet in this folder.

    Raises:
        PlatformError: One is there, and does not answer.
        UsageError: This user cannot find out.
    """
    if not _is_there(folder):
        return False
    try:
        call(folder, ViewRequest())
    except PlatformError as error:
        if isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            return False  # nobody listens
        raise
    return True


def call(folder: Path, request: FleetRequest) -> FleetReply:
    """Ask the daemon of the fleet in this folder. Blocks until it answers, ten seconds at most.

    Raises:
        PlatformError: Nobody answers, or with something that is no answer.
        UsageError: There is no such folder, or none that this user can look into.
    """
    if not _is_there(folder):
        raise UsageError(f"there is no folder {folder}; {_HINT}")
    said = ask(folder, json.loads(encode(request)), "the daemon", _HINT)
    what = said.pop("what", None)
    if not isinstance(what, str) or what not in REPLIES:
        raise UsageError(f"the daemon of {folder} answered {show(what)}; expected one of this version")
    return read_fields(REPLIES[what], said)


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError as error:  # as where another user's folder is above it
        raise UsageError(f"the folder {folder} cannot be used: {error.strerror}; expected one of this user") from error
