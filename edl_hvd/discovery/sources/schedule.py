"""Hosts that come and go by a plan, for demos and tests."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import LOCAL_FLAGS, PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.sources.hostfile import read_whole_file
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host, shown
from edl_hvd.values import Interval

_LINE_FORM = "expected 'TIME add HOST[:SLOTS]', 'TIME remove HOST' or 'TIME notice HOST TIME', e.g. '20 add node-2:4'"


@dataclass(frozen=True)
class PlannedChange:
    """A change: from ``at_s`` after the start ``host`` has ``slots``; with 0 slots it is gone ``notice_s`` later."""

    at_s: float
    host: str
    slots: int
    notice_s: float = 0.0


@dataclass(frozen=True)
class Schedule(Source):
    """The hosts that a plan has at this moment.

    One change per line, in order of time: ``TIME add HOST[:SLOTS]``, ``TIME remove HOST``, or ``TIME notice HOST
    DURATION`` for a host with a preemption notice at TIME that is gone after DURATION. TIME counts from the start in
    seconds (``20``, ``1.5``, ``2min``), with a plus sign from the line before. Adding a present host gives it a new
    number of slots. ``#`` starts a comment.

    Args:
        path: Path of the plan, which is read each time.
        start_file: File with the start in seconds since the epoch; the first call creates it.
        start_s: Start in seconds since the epoch; then there is no start file.
    """

    path: str
    start_file: str
    start_s: float | None = None
    clock: Clock = field(default=SYSTEM_CLOCK, repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.start_s is not None else (self.path, self.start_file)

    def answer(self) -> Answer:
        changes = parse_plan(read_whole_file(self.path, "schedule"), self.path)
        now_s = self.clock.wall_s()
        elapsed_s = now_s - (stamp(self.start_file, now_s) if self.start_s is None else self.start_s)
        if self.start_s is None:
            elapsed_s = max(0.0, elapsed_s)  # the start of another caller may be later
        ahead_s = [change.at_s + change.notice_s for change in changes if change.at_s + change.notice_s > elapsed_s]
        holds_s = min(ahead_s, default=math.inf) - elapsed_s
        return Answer(hosts_at(changes, elapsed_s), notices_at(changes, elapsed_s), holds_s=holds_s)


def hosts_at(changes: tuple[PlannedChange, ...], elapsed_s: float) -> tuple[HostSlots, ...]:
    """The hosts after all changes up to ``elapsed_s``, with a change at ``elapsed_s`` itself.

    >>> hosts_at((PlannedChange(0, "a", 1), PlannedChange(20, "b", 2), PlannedChange(45, "a", 0)), 20)
    (HostSlots(host='a', slots=1), HostSlots(host='b', slots=2))
    """
    slots = {change.host: change.slots for change in changes if change.at_s + change.notice_s <= elapsed_s}
    return tuple(HostSlots(host, count) for host, count in slots.items() if count)


def notices_at(changes: tuple[PlannedChange, ...], elapsed_s: float) -> dict[str, float]:
    """The hosts with a preemption notice, and the seconds until each is gone.

    >>> notices_at((PlannedChange(0, "a", 1), PlannedChange(20, "a", 0, notice_s=30)), 40)
    {'a': 10}
    """
    newest = {change.host: change for change in changes if change.at_s <= elapsed_s}
    left = {host: change.at_s + change.notice_s - elapsed_s for host, change in newest.items() if not change.slots}
    return {host: seconds for host, seconds in left.items() if seconds > 0}


def parse_plan(text: str, path: str) -> tuple[PlannedChange, ...]:
    """Read a plan; ``path`` is for messages.

    Raises:
        DiscoveryError: A line is wrong; the message has its number, its text and what is accepted.
    """
    changes: list[PlannedChange] = []
    present: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            change = _parse_change(words, previous_s=changes[-1].at_s if changes else 0.0)
            if change.slots:
                present.add(change.host)
            elif change.host in present:
                present.remove(change.host)
            else:
                raise UsageError(f"{change.host} is removed but is not there; expected a line that adds it before")
        except UsageError as error:
            raise DiscoveryError(f"{path} line {number}: {error}") from error
        changes.append(change)
    if not changes:
        raise DiscoveryError(f"{path} plans nothing; expected a line such as '0 add localhost:1'")
    return tuple(changes)


def _parse_change(words: list[str], previous_s: float) -> PlannedChange:
    if len(words) < 3 or len(words) != {"add": 3, "remove": 3, "notice": 4}.get(words[1]):
        raise UsageError(f"{shown(' '.join(words))} is not understood; {_LINE_FORM}")
    time, verb, name = words[:3]
    at_s = _parse_time(time.removeprefix("+")) + (previous_s if time.startswith("+") else 0.0)
    if at_s < previous_s:
        raise UsageError(f"time {time} is before that of the line above ({previous_s:g}); expected order of time")
    host = parse_host(name)
    if verb != "add" and ":" in name:
        raise UsageError(f"'{verb} {name}' names slots; expected '{verb} {host.host}'")
    notice_s = _parse_time(words[3]) if verb == "notice" else 0.0
    return PlannedChange(at_s, host.host, host.slots if verb == "add" else 0, notice_s)


def _parse_time(text: str) -> float:
    if text.strip("0.") == "" and text[:1] == "0":
        return 0.0  # an interval has to be positive, a time may be 0
    interval = Interval.parse(text)
    if interval.unit != "seconds":
        raise UsageError(f"time {shown(text)} is not a time; {_LINE_FORM}")
    return interval.count


def stamp(path: str, now_s: float) -> float:
    """Read the time in the file at ``path``; the first of several callers writes ``now_s`` there.

    Raises:
        DiscoveryError: The file cannot be written or does not hold a time.
    """
    draft = f"{path}.{os.getpid()}"
    try:
        if not os.path.exists(path):
            with open(draft, "w", encoding="ascii") as file:
                file.write(f"{now_s!r}\n")
            try:
                os.link(draft, path)  # fails if another caller was first; no caller reads half a number
            except FileExistsError:
                pass
            finally:
                os.unlink(draft)
        with open(path, encoding="ascii") as file:
            return float(file.read())
    except OSError as error:
        raise DiscoveryError(f"cannot keep the schedule's start in {path}: {error.strerror}") from error
    except ValueError as error:
        raise DiscoveryError(
            f"{path} does not hold the start of the schedule in seconds since the epoch; delete it to start from zero"
        ) from error


FLAGS, BARE_FLAG = ("plan", "start", "start-file", *LOCAL_FLAGS), "plan"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_schedule``."""
    flags.needed("plan", "plan", "from_schedule plan.txt")
    plan = flags.text("plan", "")
    start = flags.seconds("start", 0.0) or None
    return local_source(Schedule(plan, flags.text("start-file", f"{plan}.started"), start), flags)
