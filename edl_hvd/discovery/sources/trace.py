"""Hosts that come and go as in a recorded trace, at any speed, to test a job on a spot market."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import LOCAL_FLAGS, PolledSource, local_source
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.sources.hostfile import read_whole_file
from edl_hvd.discovery.sources.schedule import stamp
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, parse_host
from edl_hvd.traces.text import parse_trace
from edl_hvd.traces.trace import Trace


@dataclass(frozen=True)
class TraceReplay(Source):
    """The hosts that a trace has at this moment; after its end they stay.

    Args:
        path: Path of the trace (``edl_hvd.traces.text``), which is read each time.
        start_file: File with the start in seconds since the epoch; the first call creates it.
        start_s: Start in seconds since the epoch; then there is no start file.
        speed: Seconds of the trace per second.
        divide: Number of hosts of the trace that one host stands for.
        skip_s: Time in the trace at the start, in seconds.
        notice_s: Seconds of the trace between a preemption notice and the end of a host; 0 for no notices.
        slots: Number of slots of a host of the trace, without ``stand_ins``.
        stand_ins: Real hosts. Each host of the trace has one of them while it is present, the one that has been free
            for longest; while none is free, it is left out.
    """

    path: str
    start_file: str
    start_s: float | None = None
    speed: float = 1.0
    divide: int = 1
    skip_s: float = 0.0
    notice_s: float = 0.0
    slots: int = 1
    stand_ins: tuple[HostSlots, ...] = ()
    clock: Clock = field(default=SYSTEM_CLOCK, repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.start_s is not None else (self.path, self.start_file)

    def answer(self) -> Answer:
        text = read_whole_file(self.path, "trace")
        try:
            trace = parse_trace(text, self.path).divided(self.divide)
        except UsageError as error:
            raise DiscoveryError(str(error)) from error
        now_s = self.clock.wall_s()
        start_s = stamp(self.start_file, now_s) if self.start_s is None else self.start_s
        time_s = self.skip_s + max(0.0, now_s - start_s) * self.speed
        cast = self.cast(trace, time_s)
        notices = {cast[host].host: (gone_s - time_s) / self.speed
                   for host, gone_s in _removals(trace, time_s, time_s + self.notice_s).items()
                   if host in cast}  # fmt: skip
        ahead_s = next((change.time_s for change in trace.changes if change.time_s > time_s), math.inf)
        return Answer(tuple(cast.values()), notices, holds_s=start_s + (ahead_s - self.skip_s) / self.speed - now_s)

    def cast(self, trace: Trace, time_s: float) -> Mapping[str, HostSlots]:
        """The hosts of the trace at this moment, each with the real host that stands for it.

        >>> from edl_hvd.traces.trace import HostChange
        >>> trace = Trace((HostChange(0, ("x", "y", "z")), HostChange(9, ("w",), ("x",))))
        >>> replay = TraceReplay("t.csv", "", stand_ins=(HostSlots("a", 1), HostSlots("b", 2)))
        >>> [str(host) for host in replay.cast(trace, 0).values()]
        ['a:1', 'b:2']
        >>> replay.cast(trace, 9)
        {'y': HostSlots(host='b', slots=2), 'z': HostSlots(host='a', slots=1)}
        """
        if not self.stand_ins:
            return {host: HostSlots(host, self.slots) for host in trace.hosts_at(time_s)}
        free, waiting = list(self.stand_ins), list[str]()
        cast: dict[str, HostSlots] = {}
        for change in trace.changes:
            if change.time_s > time_s:
                break
            for host in change.removed:
                if host in cast:
                    free.append(cast.pop(host))
                else:
                    waiting.remove(host)
            waiting += change.added
            while waiting and free:
                cast[waiting.pop(0)] = free.pop(0)
        return cast


def _removals(trace: Trace, after_s: float, until_s: float) -> dict[str, float]:
    """The hosts that go between two moments, and when."""
    return {host: change.time_s for change in trace.changes if after_s < change.time_s <= until_s
            for host in change.removed}  # fmt: skip


FLAGS = ("trace", "start", "start-file", "speed", "divide", "skip", "notice", "slots", "hosts", *LOCAL_FLAGS)
BARE_FLAG = "trace"


def from_flags(flags: Flags) -> PolledSource:
    """The source of ``from_trace``."""
    flags.needed("trace", "trace", "from_trace trace.csv")
    path = flags.text("trace", "")
    replay = TraceReplay(
        path,
        flags.text("start-file", f"{path}.started"),
        flags.seconds("start", 0.0) or None,
        _speed(flags.text("speed", "1")),
        flags.count("divide", 1),
        flags.seconds("skip", 0.0),
        flags.seconds("notice", 0.0),
        flags.count("slots", 1),
        _stand_ins(flags.text("hosts", "")),
    )
    return local_source(replay, flags)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise UsageError(f"--speed {text!r} is not usable; expected a number greater than 0, e.g. '20'")
    return speed


def _stand_ins(text: str) -> tuple[HostSlots, ...]:
    hosts = tuple(parse_host(word) for word in text.split(",")) if text else ()
    names = [host.host for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--hosts names {', '.join(twice)} more than once; expected each host once")
    return hosts
