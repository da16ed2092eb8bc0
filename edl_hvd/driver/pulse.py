"""Whose heart still beats. A worker that says nothing is stopped, cut off, or holds Python's lock in native code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edl_hvd.clock import Clock

_LOOK_AFTER_S = 2.0
# Eight beats. Then a local process is looked at: one that is stopped will not come back by itself.
_SILENT_S = 30.0
# What is not stopped may be in native code that holds Python's lock; half a minute is long for that.
_OWN_PAUSE_S = 1.0
# A driver that slept so long knows nothing about its workers.
_STOPPED = frozenset("TtZX")  # proc(5): stopped, traced, zombie, dead


@dataclass
class _Heart:
    life: int
    pid: int
    last_s: float | None = None  # none before its first word: it may import for minutes


class Pulse:
    """Of all workers.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hearts: dict[str, _Heart] = {}
        self._looked_s = clock.monotonic_s()

    def begins(self, worker: str, life: int, pid: int) -> None:
        """A process was started; ``pid`` is on this host, also for a worker behind ssh."""
        self._hearts[worker] = _Heart(life, pid)

    def felt(self, worker: str, life: int) -> None:
        """It has said something."""
        heart = self._hearts.get(worker)
        if heart is not None and heart.life == life:
            heart.last_s = self._clock.monotonic_s()

    def ends(self, worker: str) -> None:
        """Its process has ended."""
        self._hearts.pop(worker, None)

    def stopped(self) -> Iterator[tuple[str, int, str]]:
        """Worker, life and reason of those to be given up."""
        now_s = self._clock.monotonic_s()
        slept, self._looked_s = now_s - self._looked_s > _OWN_PAUSE_S, now_s
        for worker, heart in list(self._hearts.items()):
            if heart.last_s is None:
                continue
            if slept:
                heart.last_s = now_s
            silent_s = now_s - heart.last_s
            if silent_s > _LOOK_AFTER_S and _state_of(heart.pid) in _STOPPED:
                yield worker, heart.life, f"its process is stopped, and said nothing for {silent_s:.0f} s"
            elif silent_s > _SILENT_S:
                yield worker, heart.life, f"it said nothing for {silent_s:.0f} s"


def _state_of(pid: int) -> str:
    """The process's state as one letter; empty where it cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
