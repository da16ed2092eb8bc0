"""Inspect a source: its hosts with all details, for ``edl-hvd discover`` and ``edl-hvd doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.damping import Damping
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.source import Answer, HostDetails
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots, format_hosts


@dataclass(frozen=True)
class ListedHost:
    """One host; what is unknown is empty or ``None``.

    Attributes:
        kind, zone, price_usd_per_h: See ``HostDetails``.
        since_s: Time since which it is present, in seconds since the epoch: from the source, else of the first sight.
        notice_s: Seconds until it will be gone.
    """

    host: str
    slots: int
    kind: str = ""
    zone: str = ""
    price_usd_per_h: float | None = None
    since_s: float | None = None
    notice_s: float | None = None


@dataclass(frozen=True)
class HostListing:
    """Result of one inspection of a source.

    Attributes:
        hosts: Hosts, sorted by name.
        left_out: Names of what is no host now, each with the reason.
        remark: Reason why a part of the answer is old; empty if none is.
    """

    hosts: tuple[ListedHost, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""

    @property
    def slots(self) -> int:
        return sum(one.slots for one in self.hosts)


class Inspector:
    """Repeated inspection of a source, which leaves out flapping hosts as a job does.

    Args:
        polled: Source to ask.
    """

    def __init__(self, polled: PolledSource, clock: Clock = SYSTEM_CLOCK) -> None:
        self._polled = polled
        self._clock = clock
        self._damping = Damping()
        self._seen_s: dict[str, float] = {}
        self._inspections = 0

    def inspect(self) -> HostListing:
        """Ask the source; blocks until it answers.

        Raises:
            DiscoveryError: The source does not answer, or its answer cannot be trusted.
        """
        answer = self._polled.source.answer()
        hosts, left_out = answer.hosts, dict(answer.left_out)
        try:
            format_hosts(hosts)  # raises when a host is listed twice
        except ValueError as error:
            raise DiscoveryError(str(error)) from error
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        # A host that is present at the first inspection may be older.
        self._seen_s = {one.host: self._seen_s.get(one.host, wall_s if self._inspections else 0.0) for one in hosts}
        self._inspections += 1
        if self._polled.is_damped:
            self._damping = self._damping.observed(hosts, now_s)
            hosts = self._damping.kept(hosts)
            left_out |= self._damping.left_out(now_s)
        seen = tuple(self._describe(one, answer) for one in sorted(hosts))
        return HostListing(seen, dict(sorted(left_out.items())), answer.warning)

    def _describe(self, one: HostSlots, answer: Answer) -> ListedHost:
        known = answer.details.get(one.host, HostDetails())
        since_s = known.since_s if known.since_s is not None else self._seen_s[one.host] or None
        notice_s = answer.notices.get(one.host)
        return ListedHost(one.host, one.slots, known.kind, known.zone, known.price_usd_per_h, since_s, notice_s)


def changes(before: HostListing | None, after: HostListing) -> list[str]:
    """Describe each change from one listing to the next, one line for each.

    >>> one, two = HostListing((ListedHost("a", 1),)), HostListing((ListedHost("b", 2),), {"a": "it is stopped"})
    >>> changes(None, one), changes(one, two)
    (['+ a:1'], ['+ b:2', '- a:1 (it is stopped)', '  a is left out: it is stopped'])
    """
    old = {one.host: one for one in before.hosts} if before else {}
    new = {one.host: one for one in after.hosts}
    lines = [f"+ {one.host}:{one.slots}" for host, one in new.items() if host not in old]
    lines += [
        f"- {one.host}:{one.slots}" + (f" ({after.left_out[host]})" if host in after.left_out else "")
        for host, one in old.items()
        if host not in new
    ]
    both = [(old[host], one) for host, one in new.items() if host in old]
    lines += [
        f"  {now.host} has {now.slots} instead of {was.slots} slots" for was, now in both if was.slots != now.slots
    ]
    lines += [
        f"  {now.host} will be gone in {now.notice_s:.0f} s"
        for now in after.hosts
        if now.notice_s is not None and (now.host not in old or old[now.host].notice_s is None)
    ]
    known = before.left_out if before else {}
    lines += [f"  {name} is left out: {why}" for name, why in after.left_out.items() if name not in known]
    lines += [f"  {name} is no longer left out" for name in known if name not in after.left_out and name not in new]
    return lines
