"""Models of other systems on the same hosts. Where the behaviour of one is unknown, the model assumes the best.

Both write checkpoints in the foreground. ``docs/simulate.md`` explains every assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.timeline import Timeline
from edl_hvd.simulator.virtual_time import EventQueue, next_poll_s
from edl_hvd.traces.trace import HostChange, Trace


def restart_from_checkpoints(trace: Trace, costs: Costs, timeline: Timeline) -> None:
    """Stop all workers at each change, start them again, and read the newest checkpoint, as ``torchrun`` does.

    A change is known at once. A change while the workers start makes them start again.
    """
    moments = [(change.time_s, change) for change in trace.changes if change.added or change.removed]
    ends = [*(time_s for time_s, _ in moments[1:]), trace.end_s]
    count = 0
    for (from_s, change), until_s in zip(moments, ends, strict=True):
        timeline.restarted()
        count += len(change.added) - len(change.removed)
        ready_s = from_s + costs.start_s + (costs.restore_s if timeline.has_checkpoint else 0.0)
        if count:
            timeline.trained(ready_s, until_s, count)


class StockElastic:
    """Model of stock Horovod elastic, as if it survived every fault.

    - Survivors of a lost host go on from memory. In a world of three or more they wait for the Gloo timeout first.
    - The next poll finds a new host; from then on all workers wait until its worker has started.
    - A host that comes while the others wait joins the same world.
    - When no worker remains, the job starts again at once, and reads the newest checkpoint.
    - Preemption notices change nothing.

    Args:
        trace: When hosts come and go.
        costs: How long things take.
        timeline: Timeline that :meth:`run` writes.
        poll_s: Seconds between two polls of the host source.
        first_poll_s: Moment of the first poll.
        tell: Function that is given the share of the trace that is done, from 0 to 1, now and then.
    """

    def __init__(
        self, trace: Trace, costs: Costs, timeline: Timeline, poll_s: float = 1.0, first_poll_s: float = 0.0,
        tell: Callable[[float], None] = lambda done: None,
    ) -> None:  # fmt: skip
        self._trace, self._costs, self._timeline = trace, costs, timeline
        self._poll_s, self._first_poll_s = poll_s, first_poll_s
        self._tell = tell
        self._queue = EventQueue()
        self._now_s = 0.0
        self._seen: dict[str, bool] = {}
        self._world: set[str] = set()
        self._training_s: float | None = None
        self._resumes_s = math.inf
        for change in trace.changes:
            self._queue.schedule(change.time_s, lambda change=change: self._take(change))  # type: ignore[misc]

    def run(self) -> None:
        """Run the whole trace; call it once."""
        while (moment_s := min(self._queue.next_s, self._resumes_s)) < self._trace.end_s:
            self._now_s = moment_s
            self._tell(moment_s / self._trace.end_s)
            if self._resumes_s <= moment_s:
                self._resumes_s, self._training_s = math.inf, moment_s
                self._world = {host for host, seen in self._seen.items() if seen}
            else:
                self._queue.pop()()
        self._now_s = self._trace.end_s
        self._stop(lost=False)

    def _take(self, change: HostChange) -> None:
        for host in change.removed:
            del self._seen[host]
        self._seen.update(dict.fromkeys(change.added, False))
        if not self._world.isdisjoint(change.removed):
            self._lose(self._world - set(change.removed))
        if not any(self._seen.values()):
            self._resumes_s = math.inf
        if change.added:
            self._queue.schedule(next_poll_s(self._now_s, self._poll_s, self._first_poll_s), self._see)

    def _lose(self, survivors: set[str]) -> None:
        waits = self._training_s is not None and len(self._world) > 2
        if self._training_s is not None:
            self._resumes_s = self._now_s + self._costs.reset_s + (self._costs.gloo_timeout_s if waits else 0.0)
        self._stop(lost=True)
        self._world = survivors
        if not survivors:
            self._timeline.restarted()
            self._resumes_s = self._started_s()

    def _see(self) -> None:
        """Poll the host source; newcomers stop the training of all until they have started."""
        if all(self._seen.values()):
            return
        self._seen = dict.fromkeys(self._seen, True)
        self._stop(lost=False)
        earliest_s = 0.0 if math.isinf(self._resumes_s) else self._resumes_s
        self._resumes_s = max(earliest_s, self._started_s())

    def _started_s(self) -> float:
        """The moment from which workers that start now can train; without a world they read a checkpoint first."""
        reads = not self._world and self._timeline.has_checkpoint
        return self._now_s + self._costs.start_s + self._costs.reset_s + (self._costs.restore_s if reads else 0.0)

    def _stop(self, lost: bool) -> None:
        """Record the training of the present world. Every step is a commit, so only the step in flight can be lost."""
        if self._training_s is not None:
            lost_s = math.fmod(self._now_s - self._training_s, self._costs.step_s) if lost else 0.0
            self._timeline.trained(self._training_s, self._now_s, len(self._world), lost_s)
            self._training_s = None
