"""Where room for a claim or a job's least comes from: slots that are free, extras of jobs, jobs that stop for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.planning.rooms import Ledger
from edl_hvd.planning.values import JobAsk


@dataclass(frozen=True)
class Need:
    """Slots that are given whole or not at all.

    Attributes:
        slots: How many.
        unit: How many have to be on one host together.
        priority: Jobs of a lower one stop for it.
        kinds: Kinds of hosts, one of which has to hold all of them.
        takes_from: Highest priority of jobs whose extras it takes.
        owner: Number of the job that it is for, whose own slots it does not take; -1 for a claim.
    """

    slots: int
    unit: int
    priority: int
    kinds: tuple[str, ...]
    takes_from: float
    owner: int = -1

    def whole(self, slots: int) -> int:
        """As many of these slots, on one host, as are whole units."""
        return slots // self.unit * self.unit


@dataclass(frozen=True)
class _Taking:
    """Slots that a job gives on one host."""

    job: int
    host: int
    slots: int


class RoomMaker:
    """Takes slots from jobs for those who come before them, in a ledger.

    Args:
        ledger: Who holds what.
        asks: Jobs, sorted by name; a job's number is its place.

    Attributes:
        ledger: As given; a better one may take its place.
        gave: What took slots of a job: names of claims and jobs, by the job's number.
        has_changed: Whether any job's slots have changed.
    """

    def __init__(self, ledger: Ledger, asks: Sequence[JobAsk]) -> None:
        self.ledger, self.asks, self.hosts = ledger, asks, ledger.hosts
        self.gave: dict[int, list[str]] = {}
        self.has_changed = False

    def slack(self, job: int) -> int:
        """Slots that a job holds above its least."""
        return self.ledger.held[job] - self.asks[job].least

    def extra(self, job: int, host: int) -> int:
        """Slots that a job can give on a host, in whole units, and keep its least elsewhere."""
        slack = self.slack(job)
        if slack <= 0:
            return 0
        unit = self.asks[job].unit
        return min(self.ledger.by_job[job][host], slack) // unit * unit

    def take_back(self, job: int, host: int, slots: int, taker: str) -> None:
        """Take slots from a job."""
        self.ledger.release(job, host, slots)
        self._note(job, taker)

    def _note(self, job: int, taker: str) -> None:
        self.has_changed = True
        givers = self.gave.setdefault(job, [])
        if taker not in givers:
            givers.append(taker)

    # --- what there could be ---

    def stops_for(self, job: int, need: Need) -> bool:
        """Whether a job holds slots and may be stopped for a need."""
        ask = self.asks[job]
        return ask.priority < need.priority and ask.preemptible and self.ledger.held[job] > 0 and job != need.owner

    def freed_for(self, need: Need) -> dict[int, int]:
        """Slots that can be freed for a need on each host."""
        return {
            host: self.ledger.free[host]
            + sum(
                held if self.stops_for(job, need) else self.extra(job, host)
                for job, held in self.ledger.by_host[host].items()
            )
            for host in range(len(self.hosts.names))
            if self.hosts.is_open[host]
        }

    def together(self, need: Need, room: dict[int, int]) -> int:
        """Slots for a need where there are most of them, by room on hosts: on one, or on those of a kind together."""
        found: Counter[str | int] = Counter()
        for host, slots in room.items():
            kind = self.hosts.kinds[host]
            if kind in need.kinds:
                found[host if need.unit == need.slots else kind] += need.whole(slots)
        return max(found.values(), default=0)

    # --- making it ---

    def make_room(self, need: Need, taker: str) -> dict[int, int] | None:
        """Free slots for a need; the slots by host, which are then free, or ``None`` with nothing changed."""
        found = self._without_stopping(need, taker)
        return self._by_stopping(need, taker) if found is None else found

    def _without_stopping(self, need: Need, taker: str) -> dict[int, int] | None:
        for kind in need.kinds:
            found = self._free(kind, need)
            if found is not None:
                return found
        for kind in need.kinds:
            found = self._take_extras(kind, need, taker)
            if found is not None:
                return found
        return None

    def _free(self, kind: str, need: Need) -> dict[int, int] | None:
        """Slots that nobody holds: on one host, the fullest that has them, or on the emptiest ones."""
        one = self.ledger.fullest_with(kind, need.slots)
        if one is not None:
            return {one: need.slots}
        found: dict[int, int] = {}
        left = need.slots
        hosts = self._in_one_zone(kind, need) if self.hosts.has_zones else self.ledger.emptiest_first(kind)
        for host in hosts:
            slots = min(left, need.whole(self.ledger.free[host]))
            if slots:
                found[host] = slots
                left -= slots
            if not left:
                return found
        return None

    def _in_one_zone(self, kind: str, need: Need) -> list[int]:
        """Hosts with free slots, emptiest first; those of the fullest zone that has enough, if there is one."""
        ordered = list(self.ledger.emptiest_first(kind))
        room: Counter[str] = Counter()
        for host in ordered:
            room[self.hosts.zones[host]] += need.whole(self.ledger.free[host])
        enough = sorted((slots, zone) for zone, slots in room.items() if slots >= need.slots)
        return [host for host in ordered if self.hosts.zones[host] == enough[0][1]] if enough else ordered

    def _take_extras(self, kind: str, need: Need, taker: str) -> dict[int, int] | None:
        """Free slots, and those that jobs hold above their least: as few as possible are taken from jobs."""
        slack = {
            job: self.slack(job)
            for job, ask in enumerate(self.asks)
            if ask.priority <= need.takes_from and self.slack(job) >= ask.unit and job != need.owner
        }
        if not slack:
            return None
        room = self._room_with_extras(kind, slack)
        if sum(map(need.whole, room.values())) < need.slots:
            return None
        found: dict[int, int] = {}
        taken: list[_Taking] = []
        left = need.slots
        has_floors = any(self.ledger.floors[job] for job in slack)
        beside = self._room_with_extras(kind, slack, beside_floors=True) if has_floors else room
        for host in self._order(room, beside, need):
            given = self._given_on(host, min(left, need.whole(room[host])), slack)
            slots = min(left, need.whole(self.ledger.free[host] + sum(one.slots for one in given)))
            if slots:
                taken += given
                found[host] = slots
                left -= slots
            if not left:
                break
        if left:
            return None
        for one in taken:
            self.take_back(one.job, one.host, one.slots, taker)
        return found

    def _room_with_extras(self, kind: str, slack: dict[int, int], beside_floors: bool = False) -> dict[int, int]:
        """Slots by host that are free, or that jobs could give there; without those that they give away last."""
        room = {host: self.ledger.free[host] for host in self.ledger.emptiest_first(kind)}
        for job, most in slack.items():
            unit = self.asks[job].unit
            for host, held in self.ledger.by_job[job].items():
                slots = self.ledger.beyond_floor(job, host) if beside_floors else held
                if self.hosts.is_open[host] and self.hosts.kinds[host] == kind:
                    room[host] = room.get(host, 0) + min(slots, most) // unit * unit
        return room

    def _order(self, room: dict[int, int], beside: dict[int, int], need: Need) -> list[int]:
        """Hosts in which order slots are taken there: one that has enough, or those first that need give least.

        Args:
            room: Slots that are free, or that jobs could give.
            beside: The same without those that jobs give away last.
            need: What they are for.
        """
        free = self.ledger.free
        one = min(
            (host for host, slots in room.items() if slots >= need.slots),
            key=lambda host: (
                max(0, need.slots - beside.get(host, 0)), max(0, need.slots - free[host]), room[host], host
            ),
            default=None,
        )  # fmt: skip
        if one is not None:
            return [one]
        return sorted(room, key=lambda host: (-(free[host] // need.unit), -beside.get(host, 0), -room[host], host))

    def _given_on(self, host: int, goal: int, slack: dict[int, int]) -> list[_Taking]:
        """What jobs give on a host until ``goal`` slots are free there; taken from ``slack``."""
        given: list[_Taking] = []
        there = self.ledger.free[host]
        offers = [
            (self.asks[job].priority, is_floor, -slack[job], job, slots)
            for job, held in self.ledger.by_host[host].items() if job in slack
            for beside in [self.ledger.beyond_floor(job, host)]
            for is_floor, slots in ((False, beside), (True, held - beside))
        ]  # fmt: skip
        for _, _, _, job, slots in sorted(offers):
            if there >= goal:
                break
            unit = self.asks[job].unit
            can = min(slots, slack[job]) // unit * unit
            less = min(can, -(-(goal - there) // unit) * unit)
            if less > 0:
                given.append(_Taking(job, host, less))
                slack[job] -= less
                there += less
        return given

    def _by_stopping(self, need: Need, taker: str) -> dict[int, int] | None:
        """Stop preemptible jobs of a lower priority, the lowest and the newest first, until there is room."""
        lower = [job for job in range(len(self.asks)) if self.stops_for(job, need)]
        lower.sort(key=lambda job: (self.asks[job].priority, -self.asks[job].asked_s, self.asks[job].job))
        stopped: list[tuple[int, dict[int, int]]] = []
        found = None
        for job in lower:
            stopped.append((job, self.ledger.release_all(job)))
            found = self._without_stopping(need, taker)
            if found is not None:
                break
        spared = found or {}
        for job, held in reversed(stopped):  # some may have been stopped for nothing
            if all(
                self.ledger.free[host] - spared.get(host, 0) >= slots
                for host, slots in held.items()
                if self.hosts.is_open[host]
            ):
                self.ledger.take_all(job, held)
            else:
                self._note(job, taker)
        return found
