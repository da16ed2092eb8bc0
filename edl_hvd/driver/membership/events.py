"""What happens to a job, and what its driver does about it: the two sides of the membership.

Frozen values of plain fields, so that a job's history can be written down as JSON lines and run again.
A worker is named ``host:slot``. A slot sees several processes one after the other; each is one ``incarnation``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar, get_args

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.json_values import formerly, read_fields, show

# --- what happens ---


@dataclass(frozen=True)
class HostsFound:
    """The trusted list of hosts has changed to this; those of it that are ``failed_preflight`` get no workers."""

    hosts: tuple[HostSlots, ...]
    failed_preflight: tuple[str, ...] = field(default=(), metadata=formerly("unfit"))


@dataclass(frozen=True)
class Ready:
    """A worker is in no world and wants to be in one; ``step`` is what it holds, -1 for nothing."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    step: int = -1


@dataclass(frozen=True)
class CaughtUp:
    """A newcomer has caught up with the world of this generation, which trains on; or it cannot, and would wait."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    generation: int


@dataclass(frozen=True)
class Formed:
    """A worker has started Horovod in the world of this generation."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    generation: int


@dataclass(frozen=True)
class Raised:
    """A worker's script ended in an error of its own; its process is about to end.

    ``hopeless`` if the worker says that the script is wrong, and this was found before its first step; ``ends_job`` if
    it says that another try would come to the same, whatever the others do.
    """

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    step: int
    error: str
    hopeless: bool = False
    ends_job: bool = False


@dataclass(frozen=True)
class Done:
    """The training function of a worker returned."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))


@dataclass(frozen=True)
class Exiting:
    """A worker's process has begun to end, and not in order; ``Exited`` follows once its memory has been freed."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended; ``clean`` for exit code 0, ``how`` for people.

    ``began`` is false if there never was one, because its host or the program could not be reached.
    """

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    clean: bool
    how: str
    began: bool = True


@dataclass(frozen=True)
class Lost:
    """A worker is declared dead, for a reason other than its end: it is silent, or does not move."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    reason: str


@dataclass(frozen=True)
class DrainRequested:
    """A host (``b``) or a single worker (``b:0``) is to be left at the next commit, within ``notice_s`` seconds.

    Or only when these are nearly over, if it is ``deferred``: nobody else wants it before.
    """

    target: str
    notice_s: float
    deferred: bool = field(default=False, metadata=formerly("stays"))


@dataclass(frozen=True)
class Deadlocked:
    """The members of the world of this generation wait for each other in different collectives, as the script asks."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


# What one worker says, or what is seen of it.
News: TypeAlias = Ready | CaughtUp | Formed | Raised | Done | Exiting | Exited | Lost
MembershipEvent: TypeAlias = HostsFound | News | DrainRequested | Deadlocked | Tick

# --- what the driver does ---


@dataclass(frozen=True)
class Spawn:
    """Start a process in this slot."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))


@dataclass(frozen=True)
class Publish:
    """Tell each member that it is in this world; rank is the place in ``members``."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class ReceiveState:
    """Have a new worker receive the state of a world that trains on; ``donor`` is the member that sends it."""

    worker: str
    generation: int
    donor: str = field(metadata=formerly("guide"))


@dataclass(frozen=True)
class RequestResize:
    """Ask the members to leave their world at the next commit."""

    generation: int


@dataclass(frozen=True)
class NotifyPeerLost:
    """Tell the other members that this one is dead, so that nobody waits for it."""

    generation: int
    worker: str


@dataclass(frozen=True)
class ShutDownWorker:
    """Tell a worker to end with exit code 0; ``save`` the state to a checkpoint before, if ``left_s`` allows it.

    ``left_s`` is ``None`` where nobody knows how long its host stays.
    """

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    save: bool = False
    left_s: float | None = None


@dataclass(frozen=True)
class Kill:
    """End a process at once."""

    worker: str
    incarnation: int = field(metadata=formerly("life"))
    reason: str


@dataclass(frozen=True)
class QuarantineHost:
    """For people: this host gets no workers until its cooldown is over."""

    host: str
    cooldown_s: float = field(metadata=formerly("seconds"))
    reason: str = ""


@dataclass(frozen=True)
class End:
    """The job is over. ``code`` as a process's exit code, ``reason`` for people, empty for success."""

    code: int
    reason: str = ""


Action: TypeAlias = (
    Spawn | ReceiveState | Publish | RequestResize | NotifyPeerLost | ShutDownWorker | Kill | QuarantineHost | End
)

# --- written down ---

Kind = TypeVar("Kind")
_EVENTS: Mapping[str, type[MembershipEvent]] = {kind.__name__: kind for kind in get_args(MembershipEvent)}
_ACTIONS: Mapping[str, type[Action]] = {kind.__name__: kind for kind in get_args(Action)}
_PRESENT_NAMES = {
    "Warm": "CaughtUp",
    "Follow": "ReceiveState",
    "DrainAsked": "DrainRequested",
    "AskChange": "RequestResize",
    "TellGone": "NotifyPeerLost",
    "Dismiss": "ShutDownWorker",
    "SetAside": "QuarantineHost",
}
# By the names that earlier versions wrote.


def to_json(what: MembershipEvent | Action) -> dict[str, Any]:
    """As a JSON object: ``{"what": "Ready", "worker": …}``."""
    return {"what": type(what).__name__, **asdict(what)}


def event_from_json(line: object) -> MembershipEvent:
    """The inverse of :func:`to_json`.

    Raises:
        UsageError: It is no event, lacks a field, or has one that is unknown or of another type.
    """
    return _from_json(_EVENTS, line)


def action_from_json(line: object) -> Action:
    """The same for an action."""
    return _from_json(_ACTIONS, line)


def _from_json(kinds: Mapping[str, type[Kind]], line: object) -> Kind:
    fields = dict(line) if isinstance(line, Mapping) else {}
    name = fields.pop("what", None)
    name = _PRESENT_NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"cannot read {show(line)}: expected an object with 'what' one of {', '.join(kinds)}")
    try:
        return read_fields(kinds[name], fields)
    except UsageError as error:
        raise UsageError(f"cannot read {show(line)}: {error}") from error
