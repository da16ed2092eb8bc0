"""The one interface of everything that knows hosts."""

from __future__ import annotations

from collections.abc import Mapping
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
