"""How the workers of a job fare: which are stopped, silent, hung or slow, and what follows from it.

The judgements are those of ``heartbeats.py``, ``hangs.py`` and ``stragglers.py``; here they meet the processes. A
worker that is to be given up shows its stack first, which puts its end off by a second at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from edl_hvd.clock import Clock
from edl_hvd.deadlock import describe_deadlock, describe_standstill, is_deadlock
from edl_hvd.driver.membership.events import Deadlocked, Lost
from edl_hvd.driver.membership.intake import HOW_TO_TRAIN
from edl_hvd.driver.membership.state import Membership
from edl_hvd.driver.watch.hangs import HangDetector, Hung
from edl_hvd.driver.watch.heartbeats import HeartbeatMonitor
from edl_hvd.driver.watch.standstill import Inquiry, Standstill
from edl_hvd.driver.watch.stragglers import Stragglers
from edl_hvd.driver.workers.stacks import place_in
from edl_hvd.protocol import Beat, StragglerFound, Waits

_JUDGE_EVERY_S = 0.25
# As often as a worker says something new.
_LATE_START_S = 60.0
# Most scripts are at their training function within seconds; one that never calls it would go on in silence.
_ASK_AGAIN_S = 5.0
# Whoever beats also answers, in milliseconds; some have moved meanwhile, or their connection was replaced.


class ObservedProcess(Protocol):
    """What is needed of a worker's process; see ``workers.process.WorkerProcess``."""

    def ask_state(self, pid: int, answer: Callable[[str], None]) -> None: ...

    async def stack(self, pid: int, stopped: bool = False) -> list[str]: ...


@dataclass
class _MonitoredWorker:
    incarnation: int
    process: ObservedProcess
    pid: int = 0  # as the worker says itself
    confirmation: asyncio.Task[None] | None = None  # one that is through is the last


@dataclass(frozen=True)
class _Verdict:
    """What is wrong with a worker, and the reason for people."""

    what: Literal["stopped", "unheard", "hung"]
    reason: str


class Health:
    """The health of all workers. Belongs to the event loop.

    Args:
        clock: Tells the time.
        lost: Called when a worker is given up.
        notice: Gets a sentence for people.
        slow: Gets what is known of a straggler.
        deadlocked: Called when the members wait for each other in different collectives.
        ask: Asks a worker of the world of this generation how often it has started each of these collectives; the
            answer goes to :meth:`answered`.
        collective_timeout_s: How long all members may wait for each other.
    """

    def __init__(
        self,
        clock: Clock,
        lost: Callable[[Lost], None],
        notice: Callable[[str], None],
        slow: Callable[[StragglerFound], None],
        deadlocked: Callable[[Deadlocked], None],
        ask: Callable[[str, int, Sequence[str]], None],
        collective_timeout_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._lost = lost
        self._notice = notice
        self._slow = slow
        self._heartbeats = HeartbeatMonitor(clock)
        self._deadlocked = deadlocked
        self._ask = ask
        self._inquiry: Inquiry | None = None
        self._explained: Standstill | None = None  # people have been told
        self._watch = HangDetector(clock.monotonic_s(), collective_timeout_s)
        self._stragglers = Stragglers()
        self._monitored: dict[str, _MonitoredWorker] = {}
        self._hung: tuple[Hung, ...] = ()
        self._judged_s = clock.monotonic_s()
        self._found: dict[str, _Verdict] = {}  # at the last look
        self._began_s: float | None = None  # the first process
        self._has_trained = False  # or people have been told that nobody does

    def begins(self, worker: str, incarnation: int, process: ObservedProcess) -> None:
        """A process was started."""
        if self._began_s is None:
            self._began_s = self._clock.monotonic_s()
        monitored = self._monitored[worker] = _MonitoredWorker(incarnation, process)
        self._heartbeats.begins(worker, incarnation, lambda answer: process.ask_state(monitored.pid, answer))

    def heard(self, worker: str, incarnation: int) -> None:
        """It has said something."""
        self._heartbeats.on_heartbeat(worker, incarnation)

    def beat(self, worker: str, incarnation: int, beat: Beat, membership: Membership) -> None:
        """It has said what it is doing."""
        monitored = self._monitored.get(worker)
        if monitored is None or monitored.incarnation != incarnation:
            return
        monitored.pid = beat.pid
        if monitored.confirmation is not None:
            self._judged_s = float("-inf")  # at once: it may save its life
        self._watch.heard(worker, incarnation, beat, self._clock.monotonic_s())
        world = membership.world
        for slow in self._stragglers.heard(worker, beat, world.generation, len(world.members)):
            times = slow.compute_s / slow.median_s if slow.median_s else float("inf")
            self._notice(
                f"{slow.worker} is slow: {slow.compute_s:.3g} s for a micro-batch at step {slow.step}, {times:.1f} "
                "times as long as the others"
            )
            self._slow(slow)

    def ends(self, worker: str) -> None:
        """Its process has ended."""
        self._heartbeats.ends(worker)
        self._watch.ends(worker)
        self._monitored.pop(worker, None)

    def _note_late_start(self, membership: Membership, now_s: float) -> None:
        if self._has_trained or self._began_s is None or now_s - self._began_s < _LATE_START_S:
            return
        self._has_trained = True
        if membership.world.generation == 0 and not membership.having("ready"):
            self._notice(
                f"no worker has called its training function in the first {_LATE_START_S:.0f} s; if none is to come, "
                f"end the job: {HOW_TO_TRAIN}"
            )

    def look(self, membership: Membership) -> None:
        """Judge everybody; called every moment. An error of a confirmation is raised here."""
        for monitored in self._monitored.values():
            if monitored.confirmation is not None and monitored.confirmation.done():
                monitored.confirmation.result()
        now_s = self._clock.monotonic_s()
        self._note_late_start(membership, now_s)
        if now_s - self._judged_s >= _JUDGE_EVERY_S:
            self._judged_s, self._hung = now_s, self._judge(membership)
        found: dict[str, _Verdict] = {}
        for hung in self._hung:
            if hung.worker in self._monitored and self._monitored[hung.worker].incarnation == hung.incarnation:
                found[hung.worker] = _Verdict("hung", hung.reason)
        for silent in self._heartbeats.lost():
            found[silent.worker] = _Verdict("stopped" if silent.is_stopped else "unheard", silent.reason)
        self._found = found
        for worker in found:
            monitored = self._monitored[worker]
            if monitored.confirmation is None:
                monitored.confirmation = asyncio.get_running_loop().create_task(
                    self._confirm_and_kill(worker, monitored)
                )

    def _judge(self, membership: Membership) -> tuple[Hung, ...]:
        world = membership.world
        if world.phase not in ("running", "changing"):
            return ()  # the membership has bounds of its own for forming and leaving a world
        members = [worker for worker in world.members if membership.slots[worker].state == "member"]
        findings = self._watch.look(world.generation, members, self._heartbeats.silent(), self._clock.monotonic_s())
        for warning in findings.warnings:
            self._notice(warning)
        # Once one has left, the membership sees to it that the others follow.
        self._inquire(findings.standstill if len(members) == len(world.members) else None)
        return findings.hung

    def _inquire(self, standstill: Standstill | None) -> None:
        """Ask all who stand still what they wait for, once, or again where not all have answered."""
        if standstill is None:
            self._inquiry = None
            return
        if self._explained is not None and standstill.is_still(self._explained):
            return
        now_s, inquiry = self._clock.monotonic_s(), self._inquiry
        if inquiry is not None and standstill.is_still(inquiry.standstill) and now_s - inquiry.asked_s < _ASK_AGAIN_S:
            return
        self._inquiry = Inquiry(standstill, now_s)
        for worker in standstill.places:
            self._ask(worker, standstill.generation, standstill.collectives)

    def answered(self, worker: str, incarnation: int, answer: Waits) -> None:
        """A worker has said what it waits for, and where."""
        inquiry = self._inquiry
        if inquiry is None:
            return  # too late: somebody has moved
        inquiry.take(worker, incarnation, answer)
        if not inquiry.is_complete:
            return
        still, self._inquiry, self._explained = inquiry.standstill, None, inquiry.standstill
        if is_deadlock(inquiry.waiting):
            self._notice(inquiry.stacks)
            self._deadlocked(Deadlocked(still.generation, describe_deadlock(inquiry.waiting, still.duration_s)))
        else:
            self._notice(describe_standstill(inquiry.waiting, still.duration_s, still.step))

    async def _confirm_and_kill(self, worker: str, monitored: _MonitoredWorker) -> None:
        """Give a worker up, unless it moves again while its stack is looked at."""
        before = self._found[worker]
        lines: list[str] = []
        if before.what != "unheard":
            with suppress(OSError):
                lines = await monitored.process.stack(monitored.pid, stopped=before.what == "stopped")
        if self._monitored.get(worker) is not monitored:
            return  # it has ended meanwhile
        found = self._found.get(worker)
        if found is None:
            monitored.confirmation = None
            self._notice(f"{worker} was about to be ended ({before.reason}), but it moves again")
            return
        if found.what == "hung":
            self._watch.gave_up(self._clock.monotonic_s())
        place = place_in(lines)
        self._lost(Lost(worker, monitored.incarnation, f"{found.reason}; at {place}" if place else found.reason))
