"""From numbers to hosts.

A job that keeps its number keeps its hosts. One that shrinks leaves the hosts where it has least. One that grows gets,
as far as it can, the hosts that it has, then whole free hosts, then the fullest host that still fits. Where a small job
does not fit though the sum does, one or two smaller ones move. Where jobs may span hosts side by side, a small one is
not brought onto one host at the price of all its workers. What cannot be placed stays as it was, so that no job
loses its least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType

from edl_hvd.planning.rooms import Ledger
from edl_hvd.planning.values import JobAsk

_HOSTS_TRIED = 16
# Among which a host is looked for that is emptied by moving small jobs: more cost time and rarely give a better one.


class Placer:
    """Puts numbers of slots on hosts.

    Args:
        ledger: What is held; this is changed.
        asks: Jobs by number.
        may_span_together: As in ``PlanRules``.
        may_move: Whether a job may be moved for another one.
        kinds: Kind of hosts for each job that holds nothing.
    """

    def __init__(
        self, ledger: Ledger, asks: Sequence[JobAsk], may_span_together: bool, may_move: Callable[[int], bool],
        kinds: Mapping[int, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.ledger, self.asks, self.kinds = ledger, asks, kinds
        self.may_span_together, self.may_move = may_span_together, may_move
        self._beyond: dict[str, int] = {}

    def place(self, numbers: dict[int, int], sizes: Callable[[int], Sequence[int]]) -> None:
        """Bring jobs as near to these numbers as there is room.

        Args:
            numbers: Slots by job; jobs that are not there are left alone.
            sizes: Numbers of slots that a job may have.
        """
        held = self.ledger.held
        scattered = []
        for job, slots in numbers.items():
            if slots < held[job]:
                self.shrink(job, slots)
                if len(self.ledger.by_job[job]) > 1 and slots <= self._usual(job):
                    scattered.append(job)
        for job in scattered:
            self._gather(job)
        growing = [job for job, slots in numbers.items() if slots > held[job]]
        for job in sorted(growing, key=lambda job: (-numbers[job], job)):
            self._grow(job, numbers[job], sizes(job))

    def _kind(self, job: int) -> str:
        kind = self.ledger.kind_of(job)
        return self.kinds.get(job, "") if kind is None else kind

    def _usual(self, job: int) -> int:
        return self.ledger.hosts.usual.get(self._kind(job), 1)

    def shrink(self, job: int, slots: int) -> None:
        """Take slots from a job: whole hosts where it has least, then a part of one."""
        entries, unit = self.ledger.by_job[job], self.asks[job].unit
        if slots <= self._usual(job):
            # One host alone, if one of them has enough and its least is on no other.
            floor = [host for host in self.ledger.floors[job] if host in entries]
            enough = [host for host, own in entries.items() if own >= slots and floor in ([], [host])]
            if enough:
                kept = min(enough, key=lambda host: (entries[host], host))
                for host in [host for host in entries if host != kept]:
                    self.ledger.release(job, host, entries[host])
        while self.ledger.held[job] > slots:
            over = self.ledger.held[job] - slots
            host = self.ledger.first_to_give(job)
            self.ledger.release(job, host, min(self.ledger.can_give(job, host), over // unit * unit or unit))

    def _gather(self, job: int) -> None:
        """Bring the slots of a small job together on one host, if one has room."""
        slots, kind = self.ledger.held[job], self._kind(job)
        held = self.ledger.release_all(job)
        own = [host for host in held if self.ledger.free[host] >= slots]
        floor = self.ledger.floors[job]
        host = min(own, key=lambda host: (-floor.get(host, 0), host), default=None)
        if host is None and not self.may_span_together:
            host = self.ledger.fullest_with(kind, slots)
        if host is None:
            self.ledger.take_all(job, held)
        else:
            self.ledger.take(job, host, slots)

    def _grow(self, job: int, slots: int, sizes: Sequence[int]) -> None:
        if slots <= self._usual(job) and not (self.may_span_together and self.ledger.held[job]):
            if self._grow_on_one(job, slots):
                return
        elif self._grow_over_hosts(job, slots):
            return
        for size in reversed(sizes):
            if self.ledger.held[job] < size < slots and self.grow_in_place(job, size):
                return

    def _grow_on_one(self, job: int, slots: int) -> bool:
        """Put a job on one host: its own, the fullest that fits, or one from which others move."""
        kind = self._kind(job)
        held = self.ledger.release_all(job)
        free = self.ledger.free
        own = [host for host in held if free[host] >= slots]
        host: int | None
        if own:
            floor = self.ledger.floors[job]
            host = min(own, key=lambda host: (-floor.get(host, 0), -held[host], host))
        else:
            host = self.ledger.fullest_with(kind, slots)
            if host is None:
                host = self._make_room(kind, slots)
        if host is None:
            self.ledger.take_all(job, held)
            return False
        self.ledger.take(job, host, slots)
        return True

    def _make_room(self, kind: str, slots: int) -> int | None:
        """Move small jobs from a host, so that it has as many free slots; that host, or ``None``."""
        ledger = self.ledger
        for host in list(islice(ledger.emptiest_first(kind), _HOSTS_TRIED)):
            missing = slots - ledger.free[host]
            small = [
                (own, job) for job, own in ledger.by_host[host].items() if len(ledger.by_job[job]) == 1
                and self.may_move(job)
            ]  # fmt: skip
            one = min((entry for entry in small if entry[0] >= missing), default=None)
            chosen = [one] if one is not None else sorted(small, reverse=True)[:2]
            if sum(own for own, _ in chosen) < missing:
                continue
            moved: list[tuple[int, int, int]] = []
            for own, job in chosen:
                if ledger.free[host] >= slots:
                    break
                to = self._other_host(kind, own, host)
                if to is None:
                    break
                ledger.release(job, host, own)
                ledger.take(job, to, own)
                moved.append((job, to, own))
            if ledger.free[host] >= slots:
                return host
            for job, to, own in reversed(moved):
                ledger.release(job, to, own)
                ledger.take(job, host, own)
        return None

    def _other_host(self, kind: str, slots: int, but: int) -> int | None:
        """The fullest host with that many free slots that is not this one."""
        free = self.ledger.free[but]
        if free < slots:
            return self.ledger.fullest_with(kind, slots)
        self.ledger.reserve(but, free)
        found = self.ledger.fullest_with(kind, slots)
        self.ledger.reserve(but, -free)
        return found

    def _grow_over_hosts(self, job: int, slots: int) -> bool:
        """Put a job on whole hosts: those it has, then free ones, then parts of others; all or nothing."""
        ledger, unit = self.ledger, self.asks[job].unit
        kind = self._kind(job)
        held = ledger.release_all(job)
        own = sorted(held, key=lambda host: (-ledger.free[host], host))
        found, left = self._collect(chain(own, self._free_hosts(kind, held)), slots, unit, held)
        if left:
            ledger.take_all(job, held)
            return False
        ledger.take_all(job, found)
        return True

    def _collect(self, hosts: Iterable[int], slots: int, unit: int, held: dict[int, int]) -> tuple[dict[int, int], int]:
        """Free slots of these hosts, one after the other, and how many are missing; no other job that spans hosts."""
        found: dict[int, int] = {}
        for host in hosts:
            if host in found or (not self.may_span_together and self.ledger.spanning[host]):
                continue
            is_open = self.ledger.hosts.is_open[host]
            take = min(slots, (self.ledger.free[host] if is_open else held.get(host, 0)) // unit * unit)
            if take:
                found[host] = take
                slots -= take
            if not slots:
                break
        return found, slots

    def _free_hosts(self, kind: str, held: Iterable[int]) -> Iterable[int]:
        """Hosts with free slots, whole ones first; those in the zones where the job is before all others."""
        emptiest = self.ledger.emptiest_first(kind)
        if not self.ledger.hosts.has_zones:
            return emptiest
        zones = {self.ledger.hosts.zones[host] for host in held}
        return sorted(emptiest, key=lambda host: self.ledger.hosts.zones[host] not in zones)

    def grow_in_place(self, job: int, slots: int) -> bool:
        """Give a job more slots and leave those it has; on other hosts only where it spans hosts anyway.

        Returns:
            Whether it was given all of them; otherwise nothing has changed.
        """
        found = self.room_in_place(job, slots)
        if found is None:
            return False
        for host in found:
            if host not in self.ledger.by_job[job]:
                self._beyond[self.ledger.hosts.kinds[host]] -= found[host]
        self.ledger.take_all(job, found)
        return True

    def room_in_place(self, job: int, slots: int) -> dict[int, int] | None:
        """Free slots by host with which a job would have this number, or ``None`` if there are too few."""
        ledger, unit = self.ledger, self.asks[job].unit
        entries = ledger.by_job[job]
        left = slots - ledger.held[job]
        found: dict[int, int] = {}
        for host in sorted(entries, key=lambda host: (-ledger.free[host], host)):
            take = min(left, ledger.free[host] // unit * unit)
            if take:
                found[host] = take
                left -= take
        if not left:
            return found
        kind = self._kind(job)
        if (slots <= ledger.hosts.usual[kind] and len(entries) == 1) or left > self._room_beyond(kind):
            return None
        is_spanning = len(entries) > 1
        if not self.may_span_together and any(ledger.spanning[host] > is_spanning for host in entries):
            return None
        others = (host for host in self._free_hosts(kind, entries) if host not in entries)
        more, left = self._collect(others, left, unit, {})
        return None if left else found | more

    def _room_beyond(self, kind: str) -> int:
        """At most so much room is there for jobs that span hosts: counted once, as growing in place only lessens it."""
        if kind not in self._beyond:
            self._beyond[kind] = sum(
                slots
                for host, slots in enumerate(self.ledger.free)
                if slots
                and self.ledger.hosts.kinds[host] == kind
                and (self.may_span_together or not self.ledger.spanning[host])
            )
        return self._beyond[kind]
