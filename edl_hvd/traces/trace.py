"""A trace: the moments at which hosts came and went, and the price of a host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edl_hvd.errors import UsageError


@dataclass(frozen=True)
class HostChange:
    """Changes of one moment.

    Attributes:
        time_s: Seconds since the trace began.
        added: Names of hosts that are present from now on.
        removed: Names of hosts that are gone from now on; they go before the others come.
        price_usd_per_h: Price of a host for an hour from now on; ``None`` for no change.
    """

    time_s: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    price_usd_per_h: float | None = None


@dataclass(frozen=True)
class Trace:
    """Changes in order of time, at most one for each moment. The trace ends with the last one.

    Attributes:
        changes: Changes, at least one.
    """

    changes: tuple[HostChange, ...]

    @property
    def end_s(self) -> float:
        """The moment of the last change."""
        return self.changes[-1].time_s

    @property
    def counts(self) -> list[tuple[float, int]]:
        """The number of hosts from each moment on at which it changes.

        >>> Trace((HostChange(0, ("a", "b")), HostChange(60, removed=("a",)), HostChange(90, ("c",), ("b",)))).counts
        [(0, 2), (60, 1)]
        """
        count, found = 0, list[tuple[float, int]]()
        for change in self.changes:
            now = count + len(change.added) - len(change.removed)
            if now != count or not found:
                found.append((change.time_s, now))
            count = now
        return found

    @property
    def most_hosts(self) -> int:
        """The largest number of hosts at one moment."""
        return max(count for _, count in self.counts)

    @property
    def host_seconds(self) -> float:
        """Hosts times time, summed up to the end.

        >>> Trace((HostChange(0, ("a", "b")), HostChange(60, removed=("a",)), HostChange(100, ("c",)))).host_seconds
        160
        """
        return sum(count * (until_s - from_s) for from_s, until_s, count in self.stretches())

    @property
    def cost_usd(self) -> float | None:
        """The cost of the hosts up to the end; ``None`` if the price is not known from the beginning."""
        cost_usd, count, price, last_s = 0.0, 0, None, 0.0
        for change in self.changes:
            if count and price is None:
                return None
            cost_usd += count * (price or 0.0) * (change.time_s - last_s) / 3600
            count += len(change.added) - len(change.removed)
            price = price if change.price_usd_per_h is None else change.price_usd_per_h
            last_s = change.time_s
        return None if price is None else cost_usd

    def stretches(self) -> Iterator[tuple[float, float, int]]:
        """Spans with a constant number of hosts: beginning, end, number."""
        ends = [*(time_s for time_s, _ in self.counts[1:]), self.end_s]
        for (from_s, count), until_s in zip(self.counts, ends, strict=True):
            if until_s > from_s:
                yield from_s, until_s, count

    def hosts_at(self, time_s: float) -> tuple[str, ...]:
        """The hosts at this moment, in the order in which they came; a change at this moment counts.

        >>> Trace((HostChange(0, ("a", "b")), HostChange(60, ("c",), ("a",)))).hosts_at(60)
        ('b', 'c')
        """
        present: dict[str, None] = {}
        for change in self.changes:
            if change.time_s > time_s:
                break
            for host in change.removed:
                del present[host]
            present.update(dict.fromkeys(change.added))
        return tuple(present)

    def divided(self, by: int) -> Trace:
        """Return a trace with one host for every ``by``: rounded half up, but at least one while there is any.

        Its hosts have names of their own. The oldest host goes first, which costs a job the most, because older hosts
        hold its state.

        >>> first = HostChange(0, ("a", "b", "c", "d")), HostChange(60, removed=("a",))
        >>> crowd = *first, HostChange(90, removed=("b", "c", "d"))
        >>> [(change.added, change.removed) for change in Trace(crowd).divided(3).changes]
        [(('node1',), ()), ((), ('node1',))]

        Raises:
            UsageError: ``by`` is less than 1.
        """
        if by < 1:
            raise UsageError(f"a trace cannot be divided by {by}; expected a whole number, at least 1")
        if by == 1:
            return self
        present: list[str] = []
        made = count = 0
        changes: list[HostChange] = []
        for change in self.changes:
            count += len(change.added) - len(change.removed)
            wanted = max(1, (2 * count + by) // (2 * by)) if count else 0
            gone = tuple(present[: max(0, len(present) - wanted)])
            come = tuple(f"node{made + number + 1}" for number in range(wanted - len(present)))
            made += len(come)
            present = [*present[len(gone) :], *come]
            if gone or come or change.price_usd_per_h is not None:
                changes.append(replace(change, added=come, removed=gone))
        if changes[-1].time_s < self.end_s:
            changes.append(HostChange(self.end_s))  # the trace keeps its length
        return Trace(tuple(changes))

    def priced(self, usd_per_h: float) -> Trace:
        """Return a trace of the same hosts at one price."""
        changes = [replace(change, price_usd_per_h=None) for change in self.changes]
        return Trace((replace(changes[0], price_usd_per_h=usd_per_h), *changes[1:]))

    def faster(self, factor: float) -> Trace:
        """Return the same changes in less time."""
        return Trace(tuple(replace(change, time_s=change.time_s / factor) for change in self.changes))

    def window(self, from_s: float, until_s: float) -> Trace:
        """Return the part between two moments; its times count from the first.

        Raises:
            UsageError: The trace has no such part.
        """
        until_s = min(until_s, self.end_s)
        if not 0 <= from_s < until_s:
            raise UsageError(
                f"the trace ends after {self.end_s:g} s; there is no part from {from_s:g} s to {until_s:g} s"
            )
        before = [change for change in self.changes if change.time_s <= from_s]
        prices = [change.price_usd_per_h for change in before if change.price_usd_per_h is not None]
        first = HostChange(0.0, self.hosts_at(from_s), price_usd_per_h=prices[-1] if prices else None)
        within = [change for change in self.changes if from_s < change.time_s <= until_s]
        changes = [first, *(replace(change, time_s=change.time_s - from_s) for change in within)]
        if changes[-1].time_s < until_s - from_s:
            changes.append(HostChange(until_s - from_s))
        return Trace(tuple(changes))
