"""What stands in for processes and hosts in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Puppet:
    """A worker's process.

    Attributes:
        life: Counts the processes of its slot.
        step: Number of the last world in which it trained; -1 for none: it holds nothing.
        follows: Generation of the world whose state it is taking over; 0 for none.
        warm: Generation of the world whose state it holds but for the last bit; 0 for none.
        member: It is in the world.
    """

    life: int
    step: int = -1
    follows: int = 0
    warm: int = 0
    member: bool = False


@dataclass
class Agenda:
    """What is to happen when; at the same moment in the order in which it was planned."""

    _entries: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _planned: int = 0

    def plan(self, at_s: float, act: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._entries, (round(at_s, 6), self._planned, act))

    @property
    def next_s(self) -> float:
        """The moment of what comes next; infinity when there is nothing."""
        return self._entries[0][0] if self._entries else float("inf")

    def take(self) -> Callable[[], None]:
        """What comes next, which is not on the agenda any more."""
        return heapq.heappop(self._entries)[2]


class Names:
    """Names for the membership, which keeps a slot for every host that it has ever seen: old ones are used again.

    Args:
        rest_s: A name rests for so long. With what the membership holds against a host forgotten by then, nothing of
            one host touches the next.
    """

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._free: deque[tuple[float, str]] = deque()
        self._made = 0
        self._names: dict[str, str] = {}

    def give(self, host: str, now_s: float) -> str:
        """A name for a host that has come."""
        if self._free and now_s - self._free[0][0] > self._rest_s:
            name = self._free.popleft()[1]
        else:
            self._made += 1
            name = f"host{self._made}"
        self._names[host] = name
        return name

    def take_back(self, host: str, now_s: float) -> str:
        """The name of a host that is gone."""
        name = self._names.pop(host)
        self._free.append((now_s, name))
        return name

    def of(self, host: str) -> str | None:
        """The name of a host that is there."""
        return self._names.get(host)

    @property
    def given(self) -> tuple[str, ...]:
        """Those of the hosts that are there, in the order in which they came."""
        return tuple(self._names.values())
