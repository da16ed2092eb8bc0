"""The one interface of everything that knows hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edl_hvd.hosts import HostSlots


class Source(Protocol):
    def hosts(self) -> tuple[HostSlots, ...]:
        """Every host there is now, each once, in any order. May block; the caller bounds the time.

        An empty answer says that there are none, which is more than "I do not know".

        Raises:
            DiscoveryError: The source did not answer, or not in a way that can be trusted.
        """


@runtime_checkable
class Foresighted(Protocol):
    """A source that also knows which hosts are about to go, as clouds announce it for spot instances."""

    def notices(self) -> Mapping[str, float]:
        """Hosts that will be gone, as of the last answer of ``hosts``, and in how many seconds. Does not block."""


@dataclass(frozen=True)
class HostDetails:
    """What a source knows of a host besides its name and slots; only people and ``prefer`` want to know it.

    Attributes:
        kind: As the cloud calls its type of machine, e.g. "p3.2xlarge"; empty when not known.
        zone: As the cloud calls where it stands; empty when not known.
        price_usd_per_h: What it costs, or ``None``.
        since_s: Since when it is there, in seconds since the epoch, or ``None``.
    """

    kind: str = ""
    zone: str = ""
    price_usd_per_h: float | None = None
    since_s: float | None = None


@runtime_checkable
class Described(Protocol):
    """A source that knows more of its hosts than how many slots they have. Neither method blocks."""

    def details(self) -> Mapping[str, HostDetails]:
        """Of each host in the last answer of ``hosts``."""

    def left_out(self) -> Mapping[str, str]:
        """Why what belongs to the group was not in the last answer, by the source's name for it."""


@dataclass(frozen=True)
class Permission:
    """Something that a source has to be allowed, and whether it is.

    Attributes:
        name: As the platform calls it, e.g. "list pods in namespace training".
        granted: Whether it is; ``None`` when that could not be found out.
        words: What was answered, or how to grant it.
    """

    name: str
    granted: bool | None
    words: str


@runtime_checkable
class Permitted(Protocol):
    """A source that somebody has to permit something; for people who want to know what is missing."""

    def permissions(self) -> Iterable[Permission]:
        """Each one that it needs, tried now, the first ones first. Blocks; never raises for one that is missing."""


@runtime_checkable
class Remembering(Protocol):
    """A source whose next answer depends on the ones before. A process that is asked once takes them from a file."""

    def memory(self, now_s: float) -> object:
        """What it has to know again, as plain JSON; times in it count back from ``now_s`` (monotonic)."""

    def recall(self, memory: object, now_s: float) -> None:
        """Take over what ``memory`` gave, which counted from ``now_s``. What cannot be read is forgotten."""


@runtime_checkable
class Bridging(Protocol):
    """A source that may give an older answer of a part of it for a newer one."""

    def bridged(self) -> tuple[float, str]:
        """How much older than the last answer's question its oldest part is, and why; ``(0.0, "")`` if none is old."""


@runtime_checkable
class Closable(Protocol):
    """A source with something that runs."""

    def close(self) -> None:
        """End it, from any thread; does not block. The source is asked no more."""


def notices_of(source: Source) -> Mapping[str, float]:
    """What a source knows of hosts that will go, if it knows such things."""
    return source.notices() if isinstance(source, Foresighted) else {}


def details_of(source: Source) -> Mapping[str, HostDetails]:
    """What a source knows of its hosts, if it knows such things."""
    return source.details() if isinstance(source, Described) else {}


def left_out_of(source: Source) -> Mapping[str, str]:
    """What a source leaves out, if it knows such things."""
    return source.left_out() if isinstance(source, Described) else {}


def permissions_of(source: Source) -> Iterable[Permission]:
    """What a source has to be allowed, if it can say so."""
    return source.permissions() if isinstance(source, Permitted) else ()
