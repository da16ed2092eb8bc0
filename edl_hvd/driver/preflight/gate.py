"""Lets hosts into the job after a look at them, and keeps those out that failed it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.driver.preflight.preflight import PreflightResult
from edl_hvd.driver.status import Countdown
from edl_hvd.hosts import HostSlots
from edl_hvd.preflight.measured import HostFindings

AGAIN_S = 600.0
# What is slow now is slow in a minute; a neighbour on the same machine may be gone after ten.
RETRY_S = 15.0
# A host that did not answer is starting up, more often than not.
_NAMED = 5

Look: TypeAlias = Callable[[Sequence[HostSlots], Sequence[HostFindings]], Awaitable[Sequence[PreflightResult]]]
Passed: TypeAlias = Callable[[tuple[HostSlots, ...], tuple[str, ...]], None]


@dataclass(frozen=True)
class Rejection:
    """Why a host is left out, and until when on the gate's clock."""

    fault: str
    until_s: float


class Gate:
    """Stands between discovery and the job. Belongs to the event loop.

    Hosts are looked at together, when there is nothing to look at already; meanwhile the others train. Who has passed
    is in until discovery lists it no more; it is looked at anew should it come back.

    Args:
        look: Looks at hosts, given what is known of those that are in; see ``Preflight.look``.
        passed: Told the hosts that were looked at, and which of these are left out, whenever that changes.
        note: Gets a sentence for people.
        clock: Tells the time.
    """

    def __init__(
        self,
        look: Look,
        passed: Passed,
        note: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._look = look
        self._passed = passed
        self._note = note
        self._clock = clock
        self._listed: tuple[HostSlots, ...] = ()
        self._known: dict[str, HostFindings] = {}
        self._rejected: dict[str, Rejection] = {}
        self._looking: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._told: tuple[tuple[HostSlots, ...], tuple[str, ...]] = ((), ())

    @property
    def rejected(self) -> tuple[Countdown, ...]:
        """Hosts that are left out."""
        now_s = self._clock.monotonic_s()
        return tuple(
            Countdown(host, round(max(0.0, one.until_s - now_s), 3), one.fault) for host, one in self._rejected.items()
        )

    def found(self, hosts: tuple[HostSlots, ...]) -> None:
        """These are the hosts that discovery lists now."""
        self._listed = hosts
        here = {entry.host for entry in hosts}
        self._known = {host: findings for host, findings in self._known.items() if host in here}
        self._rejected = {host: one for host, one in self._rejected.items() if host in here}
        self._tell()
        self._begin()

    def on_preemption_notice(self, host: str, left_s: float) -> bool:
        """Note that a host will be gone in ``left_s`` seconds; false if it has passed: the job deals with it."""
        if host in self._known:
            return False
        self._rejected[host] = Rejection(
            f"it is to go in {left_s:.0f} s", self._clock.monotonic_s() + max(left_s, AGAIN_S)
        )
        return True

    async def close(self) -> None:
        """End what is under way."""
        if self._again is not None:
            self._again.cancel()
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    def _tell(self) -> None:
        looked_at = tuple(entry for entry in self._listed if entry.host in self._known or entry.host in self._rejected)
        told = looked_at, tuple(entry.host for entry in looked_at if entry.host not in self._known)
        if told != self._told:
            self._told = told
            self._passed(*told)

    def _begin(self) -> None:
        """Look at whoever is to be looked at now, or later."""
        if self._looking is not None:
            return
        now_s = self._clock.monotonic_s()
        new = [entry for entry in self._listed if entry.host not in self._known and not self._waits(entry.host, now_s)]
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if new:
            self._looking = asyncio.get_running_loop().create_task(self._let_in(new))
        elif self._rejected:
            next_s = min(one.until_s for one in self._rejected.values()) - now_s
            self._again = asyncio.get_running_loop().call_later(next_s + 0.01, self._begin)

    def _waits(self, host: str, now_s: float) -> bool:
        return host in self._rejected and now_s < self._rejected[host].until_s

    async def _let_in(self, new: Sequence[HostSlots]) -> None:
        names = ", ".join(entry.host for entry in new[:_NAMED]) + (", ..." if len(new) > _NAMED else "")
        self._note(f"measuring {len(new)} new host{'s' * (len(new) > 1)}: {names}")
        try:
            results = await self._look(new, tuple(self._known.values()))
        except Exception as error:  # whatever it is, the hosts are looked at again, and nobody waits for ever
            fault = f"it could not be measured: {type(error).__name__}: {error}"
            results = [PreflightResult(HostFindings(entry.host, entry.slots), fault) for entry in new]
        now_s = self._clock.monotonic_s()
        here = {entry.host for entry in self._listed}
        for result in results:
            host = result.findings.host
            if host not in here or self._waits(host, now_s):  # it has got its notice meanwhile
                continue
            before = self._rejected.pop(host, None)
            if not result.fault:
                self._known[host] = result.findings
                self._note(f"{host} passed the preflight: {describe(result.findings)}")
                continue
            pause_s = AGAIN_S if result.answered else RETRY_S
            self._rejected[host] = Rejection(result.fault, now_s + pause_s)
            if before is None or before.fault != result.fault:
                self._note(f"{host} gets no workers: {result.fault}; it is looked at again in {pause_s:.0f} s")
        self._looking = None
        self._tell()
        self._begin()


def describe(findings: HostFindings) -> str:
    """What was measured, for people.

    >>> from edl_hvd.preflight.measured import Measured
    >>> describe(HostFindings("a", 4, Measured("cuda", 4, 13210.0), 0.0021))
    '4 GPUs, 1.32e+04 GFLOP/s, allreduce of 1 MiB in 2.1 ms'
    """
    measured = findings.measured
    assert measured is not None
    device = f"{measured.count} GPU{'s' * (measured.count > 1)}" if measured.device == "cuda" else "cpu"
    exchange_s = findings.exchange_s
    allreduce = f", allreduce of 1 MiB in {1000 * exchange_s:.2g} ms" if exchange_s is not None else ""
    return f"{device}, {measured.gflop_s:.3g} GFLOP/s{allreduce}"
