"""A change of the world in one line: who is gone and why, who came, how many go on, at which step, how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.cli.formatting import count, join
from edl_hvd.driver.membership.events import (
    Action,
    AskChange,
    Exited,
    Formed,
    Kill,
    MembershipEvent,
    Publish,
    Ready,
    Spawn,
)
from edl_hvd.driver.membership.state import host_of

_LOST_LINK = "ssh lost the connection to host "


@dataclass(frozen=True)
class Member:
    """One process in a slot."""

    worker: str
    life: int


class WorldChanges:
    """Follows a job.

    Attributes:
        members: Of the last world published, by rank.
        generation: Of that world.
        step: From which it goes on, as far as its members know; 0 if they begin or restore a checkpoint.
        formed: All of them have started Horovod.
    """

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.generation = self.step = 0
        self.formed = False
        self._lives: dict[str, int] = {}
        self._now: tuple[Member, ...] = ()
        self._before: tuple[Member, ...] = ()
        self._ready: set[str] = set()
        self._held: dict[str, int] = {}
        self._ends: dict[Member, str] = {}
        self._stopped_s: float | None = None

    def on_event(self, event: MembershipEvent, now_s: float) -> str:
        """A line, if this completes a world; else nothing."""
        if isinstance(event, Exited) and not event.clean:
            member = Member(event.worker, event.life)
            self._ends.setdefault(member, event.how)  # the reason for killing it says more
            self._stop(member in self._now, now_s)
        elif isinstance(event, Ready):
            self._held[event.worker] = event.step
        elif isinstance(event, Formed) and event.generation == self.generation and not self.formed:
            self._ready.add(event.worker)
            if self._ready >= set(self.members):
                self.formed = True
                return self._tell(now_s)
        return ""

    def done(self, action: Action, now_s: float) -> None:
        if isinstance(action, Spawn):
            self._lives[action.worker] = action.life
        elif isinstance(action, Kill):
            member = Member(action.worker, action.life)
            self._ends[member] = action.reason
            self._stop(member in self._now, now_s)
        elif isinstance(action, AskChange):
            self._stop(True, now_s)
        elif isinstance(action, Publish):
            self.members, self.generation, self.formed = action.members, action.generation, False
            self._ready = set()
            self.step = max(0, *(self._held.get(worker, -1) for worker in action.members))
            self._now = tuple(Member(worker, self._lives.get(worker, 0)) for worker in action.members)

    def _stop(self, concerns_the_world: bool, now_s: float) -> None:
        if concerns_the_world and self._stopped_s is None:
            self._stopped_s = now_s

    def _tell(self, now_s: float) -> str:
        before, self._before = self._before, self._now
        stopped_s, self._stopped_s = self._stopped_s, None
        if not before:
            self._ends.clear()
            return f"training starts with {count(len(self._now), 'worker')}"
        gone = [member for member in before if member not in self._now]
        come = [member for member in self._now if member not in before]
        back = {member.worker for member in come} & {member.worker for member in gone}
        pieces = _say_gone(gone, before, self._ends)
        joined = [member for member in come if member.worker not in back]
        if joined:
            pieces.append(f"{_name(joined, self._now)} joined")
        if back:
            pieces.append(f"{', '.join(sorted(back))} came back")
        size = len(self._now)
        pieces.append(f"{count(size, 'worker')} {'goes' if size == 1 else 'go'} on")
        if self.step:
            pieces.append(f"step {self.step:,}")
        if stopped_s is not None:
            pieces.append(f"{now_s - stopped_s:.2f} s")
        self._ends.clear()
        return join(pieces)


def _say_gone(gone: list[Member], before: tuple[Member, ...], ends: dict[Member, str]) -> list[str]:
    by_reason: dict[str, list[Member]] = {}
    for member in gone:
        by_reason.setdefault(ends.get(member, ""), []).append(member)
    return [_say_why(members, before, reason) for reason, members in by_reason.items()]


def _say_why(members: list[Member], before: tuple[Member, ...], reason: str) -> str:
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
    """Workers by name, or by their hosts where they are all of a host's in this world."""
    names = []
    for host in dict.fromkeys(host_of(member.worker) for member in members):
        concerned = [member.worker for member in members if host_of(member.worker) == host]
        whole = len(concerned) == sum(host_of(member.worker) == host for member in world)
        names.append(f"host {host}" if whole else ", ".join(concerned))
    return ", ".join(names)
