"""The timeline of a job: when it trained, with how many hosts, and the goodput of it.

All work is counted in host-seconds: the work of one host in a second of undisturbed training. How well training scales
is left out: the same factor would stand on both sides of every comparison.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edl_hvd.traces.trace import Trace


@dataclass
class TrainingSpan:
    """Training of one world, from its first step to its end.

    Attributes:
        start_s: Moment of its beginning.
        end_s: Moment of its end.
        size: Number of hosts that trained.
        stalls_s: Seconds of that time that checkpoints took.
        kept_s: Moment up to which its work counts; later work was lost.
    """

    start_s: float
    end_s: float
    size: int
    stalls_s: float
    kept_s: float

    @property
    def pace(self) -> float:
        """Host-seconds of training per second."""
        duration_s = self.end_s - self.start_s
        return self.size * (1.0 - self.stalls_s / duration_s) if duration_s else 0.0

    def useful(self, from_s: float, until_s: float) -> float:
        """Host-seconds of useful work in a part of the time."""
        return self.pace * max(0.0, min(until_s, self.kept_s) - max(from_s, self.start_s))


@dataclass(frozen=True)
class Result:
    """Account of the hosts of a trace, in host-seconds; the five parts add up to ``possible``.

    Attributes:
        possible: Work that the hosts could have done, had each trained while it was present.
        useful: Work that counts.
        lost: Work that was lost, or done twice.
        stalled: Time of members that checkpoints took.
        still: Time of hosts while no host trained.
        waiting: Time of hosts that did not train while others did.
        still_s: Seconds, not host-seconds, in which hosts were present and none trained.
        checkpoints: Number of checkpoints begun.
        changes: Number of worlds after the first.
        cost_usd: Cost of the hosts; ``None`` if it is unknown.
        curve: Moments, each with the goodput of the window that ends there (``None`` if no host was present).
    """

    possible: float
    useful: float
    lost: float
    stalled: float
    still: float
    waiting: float
    still_s: float
    checkpoints: int
    changes: int
    cost_usd: float | None = None
    curve: tuple[tuple[float, float | None], ...] = ()

    @property
    def goodput(self) -> float:
        """Useful work divided by possible work; 0 where none was possible."""
        return self.useful / self.possible if self.possible else 0.0

    @property
    def usd_per_useful_hour(self) -> float | None:
        """Cost of an hour of one host's useful work."""
        return None if self.cost_usd is None or not self.useful else self.cost_usd / (self.useful / 3600)


@dataclass
class Timeline:
    """Record of a simulated job; each moment is at or after the one before.

    Attributes:
        every_s: Seconds from the beginning of a checkpoint to that of the next.
        stall_s: Seconds for which training stands still for a checkpoint.
        until_safe_s: Seconds from the beginning of a checkpoint until it can be restored.
        interval: Function of the seconds trained so far and the number of losses that sets ``every_s`` anew for each
            span; ``None`` for an interval that stays.
        losses: Number of times that work was lost with all who held it.
    """

    every_s: float
    stall_s: float
    until_safe_s: float
    interval: Callable[[float, int], float] | None = None
    spans: list[TrainingSpan] = field(default_factory=list)
    losses: int = 0
    checkpoints: int = 0
    safe_s: float = 0.0
    _begun_s: float | None = None
    _trained_s: float = 0.0
    _settled: int = 0  # spans before the last restart: no later one takes more of them

    def trained(self, start_s: float, end_s: float, size: int, lost_s: float = 0.0) -> None:
        """Record the training of a world; its last ``lost_s`` seconds are lost."""
        if end_s <= start_s:
            return
        if self.interval is not None:
            self.every_s = self.interval(self._trained_s, self.losses)
        self._trained_s += end_s - start_s
        begun_s = start_s if self._begun_s is None else self._begun_s
        due_s = max(start_s, begun_s + self.every_s)
        count = math.ceil((end_s - due_s) / self.every_s) if due_s < end_s else 0
        stalls_s = 0.0
        if count:
            last_s = due_s + (count - 1) * self.every_s
            stalls_s = min((count - 1) * self.stall_s + min(self.stall_s, end_s - last_s), end_s - start_s)
            begun_s = last_s
            complete = math.floor((end_s - self.until_safe_s - due_s) / self.every_s)
            if complete >= 0:
                self.safe_s = due_s + min(complete, count - 1) * self.every_s
        self._begun_s = begun_s
        self.checkpoints += count
        self.spans.append(TrainingSpan(start_s, end_s, size, stalls_s, max(start_s, end_s - lost_s)))

    def saved(self, now_s: float) -> None:
        """Record a checkpoint that holds all work up to now."""
        self.safe_s = self._begun_s = now_s
        self.checkpoints += 1

    def restarted(self) -> None:
        """Record a restart: work since the newest checkpoint is lost, and the time to the next one begins again."""
        self._begun_s = None
        fresh, self._settled = self.spans[self._settled :], len(self.spans)
        undone = [span for span in fresh if span.kept_s > self.safe_s]
        self.losses += bool(undone)
        for span in undone:
            span.kept_s = max(span.start_s, self.safe_s)

    @property
    def has_checkpoint(self) -> bool:
        return self.safe_s > 0.0


@dataclass
class RecordedRun(Timeline):
    """A timeline that remembers what it was told, so that the same can be asked for with another interval."""

    _calls: list[tuple[float, float, int, float] | None] = field(default_factory=list)  # ``None`` for a restart

    def trained(self, start_s: float, end_s: float, size: int, lost_s: float = 0.0) -> None:
        self._calls.append((start_s, end_s, size, lost_s))
        super().trained(start_s, end_s, size, lost_s)

    def restarted(self) -> None:
        self._calls.append(None)
        super().restarted()

    def useful_with(self, every_s: float) -> float:
        """Host-seconds of useful work, had a checkpoint begun every ``every_s`` seconds."""
        timeline = Timeline(every_s, self.stall_s, self.until_safe_s)
        for call in self._calls:
            if call is None:
                timeline.restarted()
            else:
                timeline.trained(*call)
        return sum(span.pace * (span.kept_s - span.start_s) for span in timeline.spans)


def sum_up(timeline: Timeline, trace: Trace, points: int = 0) -> Result:
    """Account for the hosts of a trace.

    Args:
        timeline: Timeline of a job that has ended.
        trace: Trace on which it ran.
        points: Number of windows of the curve; 0 for no curve.
    """
    hosts = Hosts(trace)
    spans = timeline.spans
    trained = sum(span.size * (span.end_s - span.start_s) for span in spans)
    stalled = sum(span.size * span.stalls_s for span in spans)
    useful = sum(span.useful(span.start_s, span.end_s) for span in spans)
    with_spans = sum(hosts.seconds(span.start_s, span.end_s) for span in spans)
    with_spans_s = sum(hosts.present_s(span.start_s, span.end_s) for span in spans)
    possible = hosts.seconds(0.0, trace.end_s)
    return Result(
        possible=possible,
        useful=useful,
        lost=trained - stalled - useful,
        stalled=stalled,
        still=possible - with_spans,
        waiting=max(0.0, with_spans - trained),  # both are sums in floating point
        still_s=hosts.present_s(0.0, trace.end_s) - with_spans_s,
        checkpoints=timeline.checkpoints,
        changes=max(0, len(spans) - 1),
        cost_usd=trace.cost_usd,
        curve=_curve(spans, hosts, trace.end_s, points) if points else (),
    )


def _curve(
    spans: list[TrainingSpan], hosts: Hosts, end_s: float, points: int
) -> tuple[tuple[float, float | None], ...]:
    edges = [end_s * number / points for number in range(points + 1)]
    useful = [0.0] * points
    for span in spans:
        first = bisect.bisect_right(edges, span.start_s) - 1
        for number in range(max(first, 0), points):
            if edges[number] >= span.end_s:
                break
            useful[number] += span.useful(edges[number], edges[number + 1])
    possible = [hosts.seconds(edges[number], edges[number + 1]) for number in range(points)]
    return tuple(
        (edge, done / most if most else None) for edge, done, most in zip(edges[1:], useful, possible, strict=True)
    )


class Hosts:
    """Integrals of the number of hosts over time."""

    def __init__(self, trace: Trace) -> None:
        self._edges, self._counts = [0.0], [0]
        self._seconds, self._present = [0.0], [0.0]
        for time_s, count in [*trace.counts, (trace.end_s, trace.counts[-1][1])]:
            duration_s = time_s - self._edges[-1]
            self._seconds.append(self._seconds[-1] + duration_s * self._counts[-1])
            self._present.append(self._present[-1] + duration_s * bool(self._counts[-1]))
            self._edges.append(time_s)
            self._counts.append(count)

    def seconds(self, from_s: float, until_s: float) -> float:
        """Host-seconds between two moments."""
        return self._until(self._seconds, until_s, 1.0) - self._until(self._seconds, from_s, 1.0)

    def present_s(self, from_s: float, until_s: float) -> float:
        """Seconds between two moments in which any host was present."""
        return self._until(self._present, until_s, 0.0) - self._until(self._present, from_s, 0.0)

    def _until(self, sums: list[float], time_s: float, weight: float) -> float:
        place = bisect.bisect_right(self._edges, time_s) - 1
        count = self._counts[place]
        return sums[place] + (time_s - self._edges[place]) * (count if weight else bool(count))
