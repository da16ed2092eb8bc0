"""What discovery has found, on its way to the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edl_hvd.driver.membership.happenings import DrainAsked, HostsFound
from edl_hvd.driver.preflight.gate import Gate, Passed
from edl_hvd.hosts import HostSlots


class Found:
    """What discovery has found, by way of the gate if there is one. Belongs to the event loop.

    Args:
        gate: Makes the gate; it is told what passes.

    Attributes:
        news: What the job is to hear.
        gate: ``None``: every host that is found is in.
    """

    def __init__(self, gate: Callable[[Passed], Gate | None]) -> None:
        self.news: asyncio.Queue[HostsFound | DrainAsked] = asyncio.Queue()
        self.gate = gate(self._pass)

    def changed(self, hosts: tuple[HostSlots, ...]) -> None:
        """Discovery lists these hosts now."""
        if self.gate is None:
            self._pass(hosts)
        else:
            self.gate.found(hosts)

    def noticed(self, host: str, left_s: float) -> None:
        """Note that a host will be gone in ``left_s`` seconds."""
        if self.gate is None or not self.gate.going(host, left_s):
            self.news.put_nowait(DrainAsked(host, left_s, stays=True))

    async def close(self) -> None:
        """Nobody passes any more."""
        if self.gate is not None:
            await self.gate.close()

    def _pass(self, hosts: tuple[HostSlots, ...], unfit: tuple[str, ...] = ()) -> None:
        self.news.put_nowait(HostsFound(hosts, unfit))
