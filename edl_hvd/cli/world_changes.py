"""Describe a resize in one line: workers lost and why, workers that joined, the size, the step, and the downtime."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.cli.formatting import count, join
from edl_hvd.driver.membership.events import (
    Action,
    End,
    Exited,
    Exiting,
    Formed,
    Kill,
    MembershipEvent,
    Publish,
    Ready,
    RequestResize,
    Spawn,
)
from edl_hvd.driver.membership.state import host_of

_LOST_LINK = "ssh lost the connection to host "
_UNKNOWN = "its process ends"


@dataclass(frozen=True)
class Member:
    """One process in a slot."""

    worker: str
    incarnation: int


class WorldChanges:
    """Resizes of a job, from its events and actions.

    Attributes:
        members: Members of the last published world, by rank.
        generation: Generation of that world.
        step: Step at which it goes on, as far as its members know; 0 if they begin or restore a checkpoint.
        formed: Whether all members have started Horovod.
    """

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.generation = self.step = 0
        self.formed = False
        self._incarnations: dict[str, int] = {}
        self._now: tuple[Member, ...] = ()
        self._before: tuple[Member, ...] = ()
        self._ready: set[str] = set()
        self._held: dict[str, int] = {}
        self._ends: dict[Member, str] = {}
        self._ending: set[Member] = set()  # how is not known yet
        self._formed_s: float | None = None  # when, if the line still waits for how somebody has ended
        self._stopped_s: float | None = None

    def on_event(self, event: MembershipEvent, now_s: float) -> str:
        """A line about the resize if this event completes it, else an empty text."""
        if isinstance(event, Exiting):
            member = Member(event.worker, event.incarnation)
            self._ending.add(member)
            self._stop(member in self._now, now_s)
        elif isinstance(event, Exited):
            member = Member(event.worker, event.incarnation)
            self._ending.discard(member)
            if not event.clean:
                self._ends.setdefault(member, event.how)  # the reason for a kill says more
                self._stop(member in self._now, now_s)
            if self._formed_s is not None and self._ending.isdisjoint(self._before):
                return self._describe()
        elif isinstance(event, Ready):
            self._held[event.worker] = event.step
        elif isinstance(event, Formed) and event.generation == self.generation and not self.formed:
            self._ready.add(event.worker)
            if self._ready >= set(self.members):
                self.formed, self._formed_s = True, now_s
                if self._ending.isdisjoint(self._before):
                    return self._describe()
        return ""

    def done(self, action: Action, now_s: float) -> str:
        """A line about the resize before this action, if nobody waits any longer for how a worker has ended."""
        told = self._describe() if isinstance(action, Publish | End) and self._formed_s is not None else ""
        if isinstance(action, Spawn):
            self._incarnations[action.worker] = action.incarnation
        elif isinstance(action, Kill):
            member = Member(action.worker, action.incarnation)
            self._ends[member] = action.reason
            self._stop(member in self._now, now_s)
        elif isinstance(action, RequestResize):
            self._stop(True, now_s)
        elif isinstance(action, Publish):
            self.members, self.generation, self.formed = action.members, action.generation, False
            self._ready = set()
            self.step = max(0, *(self._held.get(worker, -1) for worker in action.members))
            self._now = tuple(Member(worker, self._incarnations.get(worker, 0)) for worker in action.members)
        return told

    def _stop(self, concerns_the_world: bool, now_s: float) -> None:
        if concerns_the_world and self._stopped_s is None:
            self._stopped_s = now_s

    def _describe(self) -> str:
        now_s, self._formed_s = self._formed_s, None
        before, self._before = self._before, self._now
        stopped_s, self._stopped_s = self._stopped_s, None
        if not before:
            self._ends.clear()
            return f"training starts with {count(len(self._now), 'worker')}"
        gone = [member for member in before if member not in self._now]
        come = [member for member in self._now if member not in before]
        back = {member.worker for member in come} & {member.worker for member in gone}
        ends = {**dict.fromkeys(self._ending, _UNKNOWN), **self._ends}
        pieces = _describe_gone(gone, before, ends)
        joined = [member for member in come if member.worker not in back]
        if joined:
            pieces.append(f"{_name(joined, self._now)} joined")
        if back:
            pieces.append(f"{', '.join(sorted(back))} came back")
        size = len(self._now)
        pieces.append(f"{count(size, 'worker')} {'goes' if size == 1 else 'go'} on")
        if self.step:
            pieces.append(f"step {self.step:,}")
        if stopped_s is not None and now_s is not None:
            pieces.append(f"{now_s - stopped_s:.2f} s")
        self._ends.clear()
        return join(pieces)


def _describe_gone(gone: list[Member], before: tuple[Member, ...], ends: dict[Member, str]) -> list[str]:
    by_reason: dict[str, list[Member]] = {}
    for member in gone:
        by_reason.setdefault(ends.get(member, ""), []).append(member)
    return [_describe_reason(members, before, reason) for reason, members in by_reason.items()]


def _describe_reason(members: list[Member], before: tuple[Member, ...], reason: str) -> str:
    if not reason:
        return f"{_name(members, before)} left"
    host = host_of(members[0].worker)
    if reason.startswith(f"{_LOST_LINK}{host}"):
        # "ssh lost the connection to host b (exit code 255): Connection reset; the worker may still run"
        reason = reason.removeprefix(f"{_LOST_LINK}{host}").partition(": ")[2].partition(";")[0] or "no connection"
        return f"host {host} lost ({reason})"
    several = len(members) > 1
    return f"{_name(members, before) if several else members[0].worker} lost ({reason})"


def _name(members: list[Member], world: tuple[Member, ...]) -> str:
    """The names of workers; the name of a host instead if they are all its workers in this world."""
    names = []
    for host in dict.fromkeys(host_of(member.worker) for member in members):
        concerned = [member.worker for member in members if host_of(member.worker) == host]
        whole = len(concerned) == sum(host_of(member.worker) == host for member in world)
        names.append(f"host {host}" if whole else ", ".join(concerned))
    return ", ".join(names)
