"""The one interface of everything that knows hosts."""

from __future__ import annotations

from collections.abc import Mapping
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
