"""Virtual time: a queue of events, the moments of ticks and polls, and what stands for processes and hosts."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

TICK_S = 0.05
# As in ``driver/job.py``.


@dataclass
class SimulatedWorker:
    """State of a worker's process.

    Attributes:
        incarnation: Number of this process among those of its slot, from 1.
        step: Number of the last world in which it trained; -1 for none: it holds no state.
        learning_generation: Generation of the world whose state it takes over; 0 for none.
        caught_up_generation: Generation of the world that it has caught up with; 0 for none.
        member: Whether it is in the world.
    """

    incarnation: int
    step: int = -1
    learning_generation: int = 0
    caught_up_generation: int = 0
    member: bool = False


@dataclass
class EventQueue:
    """Future events by their moment; those of one moment in the order in which they were scheduled."""

    _entries: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _scheduled: int = 0

    def schedule(self, at_s: float, act: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._entries, (round(at_s, 6), self._scheduled, act))

    @property
    def next_s(self) -> float:
        """The moment of the next event; infinity if there is none."""
        return self._entries[0][0] if self._entries else float("inf")

    def pop(self) -> Callable[[], None]:
        """Remove and return the next event."""
        return heapq.heappop(self._entries)[2]


class HostNames:
    """Names of hosts for the membership, which keeps a slot for every name that it has seen: names are reused.

    Args:
        rest_s: Seconds for which a name is not reused. By then the membership has forgotten failures of its last
            host, so nothing of one host touches the next.
    """

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._free: deque[tuple[float, str]] = deque()
        self._made = 0
        self._names: dict[str, str] = {}

    def give(self, host: str, now_s: float) -> str:
        """Name a host that has come."""
        if self._free and now_s - self._free[0][0] > self._rest_s:
            name = self._free.popleft()[1]
        else:
            self._made += 1
            name = f"host{self._made}"
        self._names[host] = name
        return name

    def take_back(self, host: str, now_s: float) -> str:
        """Release and return the name of a host that is gone."""
        name = self._names.pop(host)
        self._free.append((now_s, name))
        return name

    def of(self, host: str) -> str | None:
        """The name of a present host; ``None`` for an absent one."""
        return self._names.get(host)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the present hosts, in the order in which they came."""
        return tuple(self._names.values())


def next_poll_s(now_s: float, every_s: float, first_s: float) -> float:
    """The moment of the next poll of the host source, at ``now_s`` or later.

    >>> next_poll_s(60.0, 1.0, 0.5), next_poll_s(60.5, 1.0, 0.5)
    (60.5, 60.5)
    """
    return round(first_s + math.ceil((now_s - first_s) / every_s - 1e-6) * every_s, 6)


def tick_after(moment_s: float) -> float:
    """The first tick after a moment.

    >>> tick_after(0.5), tick_after(0.52)
    (0.55, 0.55)
    """
    return round((math.floor(moment_s / TICK_S + 1e-6) + 1) * TICK_S, 6)


def tick_before(moment_s: float) -> float:
    """The last tick before a moment.

    >>> tick_before(0.5), tick_before(0.52)
    (0.45, 0.5)
    """
    return round((math.ceil(moment_s / TICK_S - 1e-6) - 1) * TICK_S, 6)
