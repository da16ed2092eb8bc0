"""What is left on each host, beside claims and jobs: a plan in the making.

Sums over a cluster say nothing about hosts: ten hosts with half a job's room each have room for no job. So everything
is counted by host. Hosts and jobs are numbered in the order of their names; the same question gets the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import JobAsk, Room


class HostTable:
    """The hosts of one plan, numbered; this does not change while the plan is made.

    Attributes:
        names: Names, sorted.
        numbers: Number of each name.
        left: Slots for jobs and claims on each.
        total: Slots of each, those that others hold included.
        kinds: Kind of each.
        zones: Zone of each.
        has_zones: Whether there is more than one zone.
        is_open: Whether each may be given anew.
        usual: Slots that most hosts of a kind have; for the steps from a part of a host to whole hosts.
        left_on: Slots for jobs and claims on the hosts of each kind.
    """

    def __init__(self, rooms: Sequence[Room]) -> None:
        ordered = sorted(rooms, key=lambda room: room.host)
        self.names = [room.host for room in ordered]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        if len(self.numbers) < len(self.names):
            twice = next(name for name, times in Counter(self.names).items() if times > 1)
            raise UsageError(f"host {twice!r} has more than one room; expected each host once")
        self.left = [room.left for room in ordered]
        self.total = [room.slots for room in ordered]
        self.kinds = [room.kind for room in ordered]
        self.zones = [room.zone for room in ordered]
        self.is_open = [room.is_open for room in ordered]
        sizes: dict[str, Counter[int]] = {}
        for kind, slots in zip(self.kinds, self.total, strict=True):
            sizes.setdefault(kind, Counter())[slots] += 1
        self.usual = {kind: max(of, key=lambda slots: (of[slots], slots)) or 1 for kind, of in sizes.items()}
        self.left_on = dict.fromkeys(sorted(sizes), 0)
        for kind, left in zip(self.kinds, self.left, strict=True):
            self.left_on[kind] += left
        self.has_zones = len(set(self.zones)) > 1


class Ledger:
    """Who holds how many slots on which host. Numbers of hosts and jobs are those of ``HostTable`` and of the asks.

    Attributes:
        hosts: Table of the hosts.
        free: Slots that nobody holds, by host; 0 on hosts that are not open.
        by_job: Slots by host, for each job.
        by_host: Slots by job, for each host.
        held: Slots of each job.
        spanning: Number of jobs on each host that lie on other hosts, too.
        floors: Slots by host that each job gives away last; this does not change while the plan is made.
    """

    def __init__(self, hosts: HostTable, jobs: int, floors: Sequence[Mapping[int, int]] = ()) -> None:
        self.hosts = hosts
        self.floors = floors or [{}] * jobs
        self.free = [left if is_open else 0 for left, is_open in zip(hosts.left, hosts.is_open, strict=True)]
        self.by_job: list[dict[int, int]] = [{} for _ in range(jobs)]
        self.by_host: list[dict[int, int]] = [{} for _ in hosts.names]
        self.held = [0] * jobs
        self.spanning = [0] * len(hosts.names)
        self._heaps: dict[str, dict[int, list[int]]] = {}

    def copy(self) -> Ledger:
        """An independent copy."""
        other = Ledger.__new__(Ledger)
        other.hosts, other.floors = self.hosts, self.floors
        other.free, other.held = self.free.copy(), self.held.copy()
        other.by_job = [entries.copy() for entries in self.by_job]
        other.by_host = [entries.copy() for entries in self.by_host]
        other.spanning = self.spanning.copy()
        other._heaps = {}
        return other

    def beyond_floor(self, job: int, host: int) -> int:
        """Slots of a job on a host beside those that it gives away last."""
        return max(0, self.by_job[job][host] - self.floors[job].get(host, 0))

    def first_to_give(self, job: int) -> int:
        """The host on which a job gives slots first: where it has some beside its floor, and least."""
        entries = self.by_job[job]
        return min(entries, key=lambda host: (not self.beyond_floor(job, host), entries[host], host))

    def can_give(self, job: int, host: int) -> int:
        """Slots that a job gives on a host before others that it has: those beside its floor, or else all."""
        return self.beyond_floor(job, host) or self.by_job[job][host]

    def take(self, job: int, host: int, slots: int) -> None:
        """Give slots of a host to a job; the caller has seen to it that they are free."""
        entries = self.by_job[job]
        if host not in entries:
            if len(entries) == 1:
                self.spanning[next(iter(entries))] += 1
            if entries:
                self.spanning[host] += 1
        entries[host] = self.by_host[host][job] = entries.get(host, 0) + slots
        self.held[job] += slots
        if self.hosts.is_open[host]:
            self._set_free(host, self.free[host] - slots)

    def release(self, job: int, host: int, slots: int) -> None:
        """Take slots of a host from a job."""
        entries = self.by_job[job]
        entries[host] -= slots
        if entries[host]:
            self.by_host[host][job] = entries[host]
        else:
            del entries[host], self.by_host[host][job]
            if entries:
                self.spanning[host] -= 1
            if len(entries) == 1:
                self.spanning[next(iter(entries))] -= 1
        self.held[job] -= slots
        if self.hosts.is_open[host]:
            self._set_free(host, self.free[host] + slots)

    def release_all(self, job: int) -> dict[int, int]:
        """Take everything from a job; what it held."""
        held = dict(self.by_job[job])
        for host, slots in held.items():
            self.release(job, host, slots)
        return held

    def take_all(self, job: int, held: dict[int, int]) -> None:
        """Give a job what :meth:`release_all` took."""
        for host, slots in held.items():
            self.take(job, host, slots)

    def reserve(self, host: int, slots: int) -> None:
        """Take free slots of a host out of the plan."""
        self._set_free(host, self.free[host] - slots)

    def _set_free(self, host: int, slots: int) -> None:
        self.free[host] = slots
        heaps = self._heaps.get(self.hosts.kinds[host])
        if heaps is not None and slots > 0:
            heappush(heaps.setdefault(slots, []), host)

    def _heaps_of(self, kind: str) -> dict[int, list[int]]:
        """Hosts by their number of free slots; entries that are no longer true are dropped where they are met."""
        heaps = self._heaps.get(kind)
        if heaps is None:
            heaps = self._heaps[kind] = {}
            for host, slots in enumerate(self.free):
                if slots > 0 and self.hosts.kinds[host] == kind:
                    heaps.setdefault(slots, []).append(host)
            for heap in heaps.values():
                heapify(heap)
        return heaps

    def _first(self, heap: list[int], slots: int) -> int | None:
        while heap and self.free[heap[0]] != slots:
            heappop(heap)
        return heap[0] if heap else None

    def fullest_with(self, kind: str, slots: int) -> int | None:
        """The host of a kind with the fewest free slots that are as many as these, or ``None``."""
        heaps = self._heaps_of(kind)
        for free in sorted(free for free in heaps if free >= slots):
            host = self._first(heaps[free], free)
            if host is not None:
                return host
        return None

    def emptiest_first(self, kind: str) -> Iterator[int]:
        """Hosts of a kind with free slots, those with the most first. Close it before anything is taken or released."""
        heaps = self._heaps_of(kind)
        for free in sorted(heaps, reverse=True):
            heap, passed = heaps[free], list[int]()
            try:
                while heap:
                    host = heappop(heap)
                    if self.free[host] == free and (not passed or passed[-1] != host):
                        passed.append(host)
                        yield host
            finally:
                for host in passed:
                    heappush(heap, host)

    def kind_of(self, job: int) -> str | None:
        """The kind of hosts that a job lies on, or ``None`` if it holds nothing."""
        host = min(self.by_job[job], default=None)
        return None if host is None else self.hosts.kinds[host]

    def host_slots(self, entries: dict[int, int]) -> tuple[HostSlots, ...]:
        """Slots by host as values, sorted by name."""
        return tuple(HostSlots(self.hosts.names[host], entries[host]) for host in sorted(entries))


def holdings(hosts: HostTable, holds: Iterable[HostSlots], unit: int) -> dict[int, int]:
    """What is still there of the slots that somebody holds: whole units, on hosts that exist."""
    found: dict[int, int] = {}
    for entry in holds:
        number = hosts.numbers.get(entry.host)
        if number is not None:
            found[number] = found.get(number, 0) + entry.slots
    return {host: slots // unit * unit for host, slots in found.items() if slots >= unit}


def allowed_kinds(ask: JobAsk, hosts: HostTable) -> tuple[str, ...]:
    """Kinds of hosts that a job may run on, sorted; all of them if no curve names one."""
    named = {curve.kind for curve in ask.curves} - {""}
    if not named or len(named) < len({curve.kind for curve in ask.curves}):
        return tuple(sorted(hosts.usual))
    return tuple(sorted(named & hosts.usual.keys()))
