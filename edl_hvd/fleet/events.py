"""What happens to a fleet, and what its daemon does about it: the two sides of :func:`~edl_hvd.fleet.turn.turn`.

Frozen values of plain fields, so that the history of a fleet can be kept as JSON and decided again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar, get_args

from edl_hvd.errors import UsageError
from edl_hvd.fleet.state import FleetRules, JobSpec
from edl_hvd.hosts import HostSlots
from edl_hvd.json_values import read_fields, show
from edl_hvd.planning.values import Curve
from edl_hvd.timings import Timing

# --- what happens ---


@dataclass(frozen=True)
class RulesGiven:
    """A daemon has begun with these rules."""

    rules: FleetRules


@dataclass(frozen=True)
class HostsListed:
    """The source lists these hosts now."""

    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class JobSubmitted:
    """A user wants this job to be run."""

    spec: JobSpec


@dataclass(frozen=True)
class JobScaled:
    """A user wants this job to have at most ``most`` workers."""

    job: str
    most: int


@dataclass(frozen=True)
class JobStopAsked:
    """A user wants this job to save and stop."""

    job: str


@dataclass(frozen=True)
class JobResumeAsked:
    """A user wants this job, which was stopped or has failed, to go on."""

    job: str


@dataclass(frozen=True)
class JobDeleted:
    """A user wants this job, which has ended or was stopped, to be gone, with its folder."""

    job: str


@dataclass(frozen=True)
class FolderRemoved:
    """The folder of a deleted job is gone."""

    job: str


@dataclass(frozen=True)
class SlotsClaimed:
    """Somebody else than a job needs slots; for ``for_s`` seconds, or until the claim is released."""

    claim: str
    slots: int
    priority: int
    for_s: float | None = None


@dataclass(frozen=True)
class ClaimReleased:
    """A claim has ended."""

    claim: str


@dataclass(frozen=True)
class RunStarted:
    """The ``edlrun`` of a job is this process."""

    job: str
    pid: int
    start_token: str


@dataclass(frozen=True)
class RunObserved:
    """How a job's run stands, as its folder shows it.

    Attributes:
        job: Name of the job.
        occupied: Where its processes are; after the end of its ``edlrun``, those that are still there.
        known_step: The furthest step that it has reached; -1 for none.
        has_trained: Whether this run has made a step.
        curve: What it makes of a number of slots.
        left: Work left, in units of the curve's goodput times seconds.
        change_s: Seconds that a resize costs.
        timings: How long its steps took, if it has a family.
    """

    job: str
    occupied: tuple[HostSlots, ...]
    known_step: int = -1
    has_trained: bool = False
    curve: Curve | None = None
    left: float | None = None
    change_s: float | None = None
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class RunEnded:
    """The ``edlrun`` of a job has ended.

    Attributes:
        job: Name of the job.
        code: Its exit code; ``None`` if it was killed, or nobody knows.
        how: A sentence for people.
        known_step: The furthest step that the job has reached; -1 for none.
    """

    job: str
    code: int | None
    how: str
    known_step: int = -1


@dataclass(frozen=True)
class TimePassed:
    """Time has passed, and the plan is to be looked at again."""


FleetEvent: TypeAlias = (
    RulesGiven
    | HostsListed
    | JobSubmitted
    | JobScaled
    | JobStopAsked
    | JobResumeAsked
    | JobDeleted
    | FolderRemoved
    | SlotsClaimed
    | ClaimReleased
    | RunStarted
    | RunObserved
    | RunEnded
    | TimePassed
)

# --- what the daemon does ---


@dataclass(frozen=True)
class StartRun:
    """Start the ``edlrun`` of a job on these hosts, or go on with it."""

    job: str
    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class GiveHosts:
    """Let the hosts file of a job, which runs, list these."""

    job: str
    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class EndRun:
    """Tell the ``edlrun`` of a job to save and end, which it does with exit code 75."""

    job: str


@dataclass(frozen=True)
class KillRun:
    """Kill the ``edlrun`` of a job, which did not end when it was told to."""

    job: str


@dataclass(frozen=True)
class RemoveFolder:
    """Remove the folder of a deleted job."""

    job: str


@dataclass(frozen=True)
class Tell:
    """For people: something happened to a job, a claim or the fleet (``about`` is empty)."""

    about: str
    text: str


FleetAction: TypeAlias = StartRun | GiveHosts | EndRun | KillRun | RemoveFolder | Tell

# --- written down ---

Kind = TypeVar("Kind")
_EVENTS: Mapping[str, type[FleetEvent]] = {kind.__name__: kind for kind in get_args(FleetEvent)}
_ACTIONS: Mapping[str, type[FleetAction]] = {kind.__name__: kind for kind in get_args(FleetAction)}


def event_as_json(event: FleetEvent | FleetAction) -> dict[str, Any]:
    """As a JSON object: ``{"what": "RunEnded", "job": …}``."""
    return {"what": type(event).__name__, **asdict(event)}


def read_event(line: object) -> FleetEvent:
    """The inverse of :func:`event_as_json`.

    Raises:
        UsageError: It is no event, lacks a field, or has one that is unknown or of another type.
    """
    return _read(_EVENTS, line)


def read_action(line: object) -> FleetAction:
    """The same for an action."""
    return _read(_ACTIONS, line)


def _read(kinds: Mapping[str, type[Kind]], line: object) -> Kind:
    fields = dict(line) if isinstance(line, Mapping) else {}
    name = fields.pop("what", None)
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"cannot read {show(line)}: expected an object with 'what' one of {', '.join(kinds)}")
    return read_fields(kinds[name], fields)
