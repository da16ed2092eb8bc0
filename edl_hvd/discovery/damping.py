"""Hosts that come and go again and again, and when they are left out. Pure; time is an argument.

A host that flaps costs the whole job a change of its world each time. So one that has gone and come back several
times lately is left out until it has been there for a while. Nobody who is in is thrown out by this, and where it
would leave nobody it leaves everybody: a job without hosts is worse than one whose hosts come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.hosts import HostSlots

FLAPS = 3
# Once is a reboot, twice a reboot that failed at first; the third time it is a habit.
WINDOW_S = 600.0
# A spot market that takes a host back three times within ten minutes does so again before it has paid off.
REUSE_AFTER_S = 120.0
# Longer than the pauses between the flaps that were counted, in most cases; a start of workers is lost, not a run.


@dataclass(frozen=True)
class _History:
    """One host's.

    Attributes:
        there: It was in the last answer.
        since_s: Since when that is so.
        returns_s: When it came back, the newest last; only those that still count.
        is_suppressed: It is there and left out.
    """

    there: bool
    since_s: float
    returns_s: tuple[float, ...] = ()
    is_suppressed: bool = False


@dataclass(frozen=True)
class Damping:
    """What is remembered of the hosts of one source. Times are of one clock that never goes back.

    Args:
        flaps: The number of returns ...
        window_s: ... within this time, after which a host is left out ...
        reuse_after_s: ... until it has been there for this time.
    """

    hosts: Mapping[str, _History] = field(default_factory=dict)
    flaps: int = FLAPS
    window_s: float = WINDOW_S
    reuse_after_s: float = REUSE_AFTER_S

    def observed(self, answer: Iterable[HostSlots], now_s: float) -> Damping:
        """After an answer that is believed.

        >>> a, b, damping = HostSlots("a", 1), HostSlots("b", 1), Damping(flaps=1)
        >>> for now_s, answer in enumerate([(a, b), (b,), (a, b)]):
        ...     damping = damping.observed(answer, now_s)
        >>> damping.kept((a, b)), list(damping.left_out(2.0))
        ((HostSlots(host='b', slots=1),), ['a'])
        """
        names = {entry.host for entry in answer}
        after: dict[str, _History] = {}
        for name in names | self.hosts.keys():
            before = self.hosts.get(name)
            after[name] = _History(True, now_s) if before is None else self._after(before, name in names, now_s)
        return replace(self, hosts={name: one for name, one in after.items() if not self._is_forgotten(one, now_s)})

    def _after(self, before: _History, there: bool, now_s: float) -> _History:
        returns_s = tuple(time_s for time_s in before.returns_s if now_s - time_s < self.window_s)
        if not there:
            return _History(False, now_s if before.there else before.since_s, returns_s)
        if before.there:
            is_suppressed = before.is_suppressed and now_s - before.since_s < self.reuse_after_s
            return replace(before, returns_s=returns_s, is_suppressed=is_suppressed)
        returns_s = (*returns_s, now_s)[-self.flaps :]
        return _History(True, now_s, returns_s, is_suppressed=len(returns_s) >= self.flaps)

    def _is_forgotten(self, one: _History, now_s: float) -> bool:
        """Gone for so long that its next coming is no return."""
        return not one.there and now_s - one.since_s >= self.window_s

    def kept(self, answer: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
        """The answer without the hosts that are left out."""
        suppressed = self._suppressed()
        return tuple(entry for entry in answer if entry.host not in suppressed)

    def _suppressed(self) -> set[str]:
        suppressed = {host for host, one in self.hosts.items() if one.is_suppressed}
        return suppressed if any(one.there and not one.is_suppressed for one in self.hosts.values()) else set()

    def left_out(self, now_s: float) -> dict[str, str]:
        """The hosts that are there and left out, each with the reason."""
        return {
            host: f"it has come back {_times(len(one.returns_s))} within {self.window_s / 60:g} min; it counts again "
            f"when it has stayed for {self.reuse_after_s / 60:g} min" + _so_far(now_s - one.since_s)
            for host, one in sorted(self.hosts.items())
            if host in self._suppressed()
        }

    def to_memory(self, now_s: float) -> object:
        """Plain JSON, in which times count back from ``now_s``."""
        return {
            host: [one.there, now_s - one.since_s, [now_s - time_s for time_s in one.returns_s], one.is_suppressed]
            for host, one in self.hosts.items()
        }

    def recalled(self, memory: object, now_s: float) -> Damping:
        """With what ``to_memory`` gave; without any past when that cannot be read."""
        try:
            hosts = {
                str(host): _History(
                    bool(there), now_s - float(since_s), tuple(now_s - float(s) for s in returns_s), bool(is_suppressed)
                )
                for host, (there, since_s, returns_s, is_suppressed) in memory.items()  # type: ignore[attr-defined]
            }
        except (AttributeError, TypeError, ValueError):
            hosts = {}
        return replace(self, hosts=hosts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _so_far(there_s: float) -> str:
    return f", {there_s:.0f} s so far" if there_s >= 1 else ""
