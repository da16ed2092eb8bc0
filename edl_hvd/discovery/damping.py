"""Leave out hosts that come and go repeatedly (flapping; the terms are those of RFC 2439). Pure; time is an argument.

A flapping host costs the job a resize each time. So a host that has come back several times is left out until it has
been present for a while. Damping removes no host that counts, and applies only while other hosts remain: a job without
hosts is worse than one with flapping hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.hosts import HostSlots

FLAPS = 3
# Returns: one is a reboot, two are a reboot that failed at first, three are flapping.
WINDOW_S = 600.0
# A spot market that takes a host three times within ten minutes does so again before the host pays off.
REUSE_AFTER_S = 120.0
# Longer than most pauses between the returns that count; an error here costs a start of workers, not a job.


@dataclass(frozen=True)
class _History:
    """History of one host.

    Attributes:
        there: Whether the last answer had it.
        since_s: Time since which that holds.
        returns_s: Times at which it came back within the window, the newest last.
        is_suppressed: Whether it is present and left out.
    """

    there: bool
    since_s: float
    returns_s: tuple[float, ...] = ()
    is_suppressed: bool = False


@dataclass(frozen=True)
class Damping:
    """Histories of the hosts of one source. Times are of one monotonic clock.

    Args:
        flaps: Number of returns within ``window_s`` after which a host is left out.
        window_s: Seconds for which a return counts.
        reuse_after_s: Seconds for which a host has to be present before it counts again.
    """

    hosts: Mapping[str, _History] = field(default_factory=dict)
    flaps: int = FLAPS
    window_s: float = WINDOW_S
    reuse_after_s: float = REUSE_AFTER_S

    def observed(self, answer: Iterable[HostSlots], now_s: float) -> Damping:
        """Return the damping after an answer that is trusted.

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
        """Whether the host is absent for longer than the window, so that it is new when it comes."""
        return not one.there and now_s - one.since_s >= self.window_s

    def kept(self, answer: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
        """The answer without the hosts that are left out."""
        suppressed = self._suppressed()
        return tuple(entry for entry in answer if entry.host not in suppressed)

    def _suppressed(self) -> set[str]:
        suppressed = {host for host, one in self.hosts.items() if one.is_suppressed}
        return suppressed if any(one.there and not one.is_suppressed for one in self.hosts.values()) else set()

    def left_out(self, now_s: float) -> dict[str, str]:
        """The present hosts that are left out, each with the reason."""
        return {
            host: f"it has come back {_times(len(one.returns_s))} within {self.window_s / 60:g} min; it counts again "
            f"when it has stayed for {self.reuse_after_s / 60:g} min" + _so_far(now_s - one.since_s)
            for host, one in sorted(self.hosts.items())
            if host in self._suppressed()
        }

    def to_memory(self, now_s: float) -> object:
        """Histories as plain JSON, in which times count back from ``now_s``."""
        return {
            host: [one.there, now_s - one.since_s, [now_s - time_s for time_s in one.returns_s], one.is_suppressed]
            for host, one in self.hosts.items()
        }

    def recalled(self, memory: object, now_s: float) -> Damping:
        """Return the damping with histories from ``to_memory``; without any if they cannot be read."""
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
