"""What happens to a job, and what its driver does about it: the two sides of the membership.

Frozen values of plain fields, so that a job's history can be written down as JSON lines and run again.
A worker is named ``host:slot``. A slot sees several processes one after the other; each is one ``life``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

# --- what happens ---


@dataclass(frozen=True)
class HostsFound:
    """The trusted list of hosts has changed to this."""

    hosts: tuple[HostSlots, ...]


@dataclass(frozen=True)
class Ready:
    """A worker is in no world and wants to be in one; ``step`` is what it holds, -1 for nothing."""

    worker: str
    life: int
    step: int = -1


@dataclass(frozen=True)
class Formed:
    """A worker has started Horovod in the world of this generation."""

    worker: str
    life: int
    generation: int


@dataclass(frozen=True)
class Raised:
    """The training function of a worker ended in an error of its own; its process is about to end."""

    worker: str
    life: int
    step: int
    error: str


@dataclass(frozen=True)
class Done:
    """The training function of a worker returned."""

    worker: str
    life: int


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended; ``clean`` for exit code 0, ``how`` for people."""

    worker: str
    life: int
    clean: bool
    how: str


@dataclass(frozen=True)
class Lost:
    """A worker is declared dead, for a reason other than its end: it is silent, or does not move."""

    worker: str
    life: int
    reason: str


@dataclass(frozen=True)
class DrainAsked:
    """A host (``b``) or a single worker (``b:0``) is to be left at the next commit, within ``notice_s`` seconds."""

    target: str
    notice_s: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Happening: TypeAlias = HostsFound | Ready | Formed | Raised | Done | Exited | Lost | DrainAsked | Tick

# --- what the driver does ---


@dataclass(frozen=True)
class Spawn:
    """Start a process in this slot."""

    worker: str
    life: int


@dataclass(frozen=True)
class Publish:
    """Tell each member that it is in this world; rank is the place in ``members``."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class AskChange:
    """Ask the members to leave their world at the next commit."""

    generation: int


@dataclass(frozen=True)
class TellGone:
    """Tell the other members that this one is dead, so that nobody waits for it."""

    generation: int
    worker: str


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker to end with exit code 0; ``save`` the state to a checkpoint before."""

    worker: str
    life: int
    save: bool = False


@dataclass(frozen=True)
class Kill:
    """End a process at once."""

    worker: str
    life: int
    reason: str


@dataclass(frozen=True)
class SetAside:
    """For people: this host gets no workers until its cooldown is over."""

    host: str
    seconds: float


@dataclass(frozen=True)
class End:
    """The job is over. ``code`` as a process's exit code, ``reason`` for people, empty for success."""

    code: int
    reason: str = ""


Action: TypeAlias = Spawn | Publish | AskChange | TellGone | Dismiss | Kill | SetAside | End

_HAPPENINGS = {
    kind.__name__: kind for kind in (HostsFound, Ready, Formed, Raised, Done, Exited, Lost, DrainAsked, Tick)
}


def to_json(happening: Happening) -> dict[str, Any]:
    """As a JSON object: ``{"what": "Ready", "worker": …}``."""
    return {"what": type(happening).__name__, **asdict(happening)}


def from_json(line: dict[str, Any]) -> Happening:
    """The inverse of :func:`to_json`; fields that it does not know are refused.

    Raises:
        UsageError: It is no happening.
    """
    fields = dict(line)
    kind = _HAPPENINGS.get(fields.pop("what", ""))
    try:
        if kind is HostsFound:
            return HostsFound(tuple(HostSlots(**host) for host in fields["hosts"]))
        if kind is not None:
            happening: Happening = kind(**fields)
            return happening
    except (TypeError, KeyError) as error:
        raise UsageError(f"cannot read {line!r} as something that happened to a job: {error}") from error
    raise UsageError(f"cannot read {line!r}: expected 'what' to be one of {', '.join(_HAPPENINGS)}")
