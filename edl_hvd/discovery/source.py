"""The one interface of everything that knows hosts."""

from __future__ import annotations

from typing import Protocol

from edl_hvd.hosts import HostSlots


class Source(Protocol):
    def hosts(self) -> tuple[HostSlots, ...]:
        """Every host there is now, each once, in any order. May block; the caller bounds the time.

        An empty answer says that there are none, which is more than "I do not know".

        Raises:
            DiscoveryError: The source did not answer, or not in a way that can be trusted.
        """
