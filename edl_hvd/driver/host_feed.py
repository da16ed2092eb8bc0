"""The hosts of a job as they come and go: from discovery, by way of the preflight if there is one, to the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.source import Source
from edl_hvd.discovery.watch import HostWatch
from edl_hvd.driver.membership.events import DrainRequested, HostsFound
from edl_hvd.driver.preflight.gate import Gate, Look
from edl_hvd.hosts import HostSlots


class HostFeed:
    """Watches a source of hosts and queues what the job is to hear. Belongs to the event loop.

    Args:
        source, every_s, damping: See ``HostWatch``.
        look: Measures hosts before they get workers, see ``Gate``; ``None``: every host that is found is in.
        problem: Told what is wrong with the source.
        note: Told what comes of the measurements.

    Attributes:
        news: What the job is to hear.
        gate: ``None``: every host that is found is in.
    """

    def __init__(
        self,
        source: Source,
        look: Look | None,
        problem: Callable[[str], None],
        note: Callable[[str], None],
        every_s: float = 1.0,
        damping: Damping | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.news: asyncio.Queue[HostsFound | DrainRequested] = asyncio.Queue()
        self.gate = None if look is None else Gate(look, self._pass, note, clock)
        self._problem = problem
        self._loop = asyncio.get_running_loop()
        self._watch = HostWatch(
            source, self._hear_hosts, self._hear_problem, self._hear_notice, every_s, clock=clock, damping=damping
        )

    def start(self) -> None:
        """Begin to ask the source, at once."""
        self._watch.start()

    async def close(self) -> None:
        """Nothing is watched, measured or queued any more."""
        await asyncio.to_thread(self._watch.close)
        if self.gate is not None:
            await self.gate.close()

    def changed(self, hosts: tuple[HostSlots, ...]) -> None:
        """Discovery lists these hosts now."""
        if self.gate is None:
            self._pass(hosts)
        else:
            self.gate.found(hosts)

    def noticed(self, host: str, left_s: float) -> None:
        """A host will be gone in this number of seconds."""
        if self.gate is None or not self.gate.on_preemption_notice(host, left_s):
            self.news.put_nowait(DrainRequested(host, left_s, deferred=True))

    def _pass(self, hosts: tuple[HostSlots, ...], failed_preflight: tuple[str, ...] = ()) -> None:
        self.news.put_nowait(HostsFound(hosts, failed_preflight))

    # --- called from the thread of the watch ---

    def _hear_hosts(self, hosts: tuple[HostSlots, ...]) -> None:
        self._loop.call_soon_threadsafe(self.changed, hosts)

    def _hear_problem(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._problem, text)

    def _hear_notice(self, host: str, left_s: float) -> None:
        self._loop.call_soon_threadsafe(self.noticed, host, left_s)
