"""Which workers send heartbeats. A silent one is stopped, cut off, or holds Python's lock in native code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from edl_hvd.clock import Clock

Ask: TypeAlias = Callable[[Callable[[str], None]], None]
"""Asks for the state of a process, as ``WorkerProcess.ask_state`` does; the answer may come later, or never."""

LOOK_AFTER_S = 2.0
# Eight beats. Then the process is looked at: one that is stopped will not come back by itself.
_ASK_EVERY_S = 0.5
# A question over ssh is a few bytes; a process that is stopped while nobody asks stays stopped.
_UNKNOWN_S = 30.0
# Nobody says anything of it: its host is gone, or the network. Gloo, too, waits for half a minute.
_OWN_PAUSE_S = 1.0
# A driver that slept for this long knows nothing about its workers.
_STOPPED = frozenset("Tt")  # proc(5): stopped, traced
_ENDED = frozenset("ZX")  # zombie, dead; what waits for its end is about to hear of it


@dataclass
class _WorkerHeartbeat:
    incarnation: int
    ask: Ask
    last_s: float | None = None  # none before its first word: it may import for minutes
    known_s: float = 0.0  # when something was last known of it, from itself or its host
    asked_s: float = 0.0
    state: str = ""  # what was answered since its last word


@dataclass(frozen=True)
class SilentWorker:
    """A worker that is to be given up: its process is stopped, or nothing is known of it; ``reason`` is for people."""

    worker: str
    is_stopped: bool
    reason: str


class HeartbeatMonitor:
    """The heartbeats of all workers.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heartbeats: dict[str, _WorkerHeartbeat] = {}
        self._looked_s = clock.monotonic_s()

    def begins(self, worker: str, incarnation: int, ask: Ask) -> None:
        """A process was started."""
        self._heartbeats[worker] = _WorkerHeartbeat(incarnation, ask)

    def on_heartbeat(self, worker: str, incarnation: int) -> None:
        """It has said something."""
        heartbeat = self._heartbeats.get(worker)
        if heartbeat is not None and heartbeat.incarnation == incarnation:
            heartbeat.last_s = heartbeat.known_s = self._clock.monotonic_s()
            heartbeat.state = ""

    def ends(self, worker: str) -> None:
        """Its process has ended."""
        self._heartbeats.pop(worker, None)

    def lost(self) -> Iterator[SilentWorker]:
        """Those that are to be given up. Asks what it misses."""
        now_s = self._clock.monotonic_s()
        slept, self._looked_s = now_s - self._looked_s > _OWN_PAUSE_S, now_s
        for worker, heartbeat in list(self._heartbeats.items()):
            if heartbeat.last_s is None:
                continue
            if slept:
                heartbeat.last_s = heartbeat.known_s = now_s
                heartbeat.state = ""
            silent_s = now_s - heartbeat.last_s
            if silent_s <= LOOK_AFTER_S:
                continue
            if now_s - max(heartbeat.asked_s, heartbeat.last_s) > _ASK_EVERY_S:
                heartbeat.asked_s = now_s
                heartbeat.ask(partial(self._take_answer, heartbeat, heartbeat.last_s))
            if heartbeat.state and heartbeat.state in _STOPPED:
                reason = f"its process is stopped, and said nothing for {silent_s:.0f} s"
                yield SilentWorker(worker, True, reason)
            elif now_s - heartbeat.known_s > _UNKNOWN_S:
                reason = f"it said nothing for {silent_s:.0f} s, and its host nothing of it"
                yield SilentWorker(worker, False, reason)

    def silent(self) -> Mapping[str, float]:
        """For how many seconds those workers have said nothing whose process runs all the same."""
        now_s = self._clock.monotonic_s()
        return {
            worker: now_s - heartbeat.last_s
            for worker, heartbeat in self._heartbeats.items()
            if heartbeat.last_s is not None and heartbeat.state and heartbeat.state not in _STOPPED
        }

    def _take_answer(self, heartbeat: _WorkerHeartbeat, asked_after_s: float, state: str) -> None:
        if state and state not in _ENDED and heartbeat.last_s == asked_after_s:  # else it has said something meanwhile
            heartbeat.state, heartbeat.known_s = state, self._clock.monotonic_s()
