"""Models of what the same hosts give under other systems. Where it is not known how one behaves, it behaves well.

Both write checkpoints in the foreground. Every assumption is explained in ``docs/simulate.md``.
"""

from __future__ import annotations

import math

from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.timeline import Course
from edl_hvd.simulator.virtual_time import Agenda
from edl_hvd.simulator.timers import next_poll_s
from edl_hvd.traces.trace import Change, Trace


def restart_from_checkpoints(trace: Trace, costs: Costs, course: Course) -> None:
    """Everything stops at each change; all workers start again and read the newest checkpoint, as under ``torchrun``.

    A change is known at once. One that comes while the workers start makes them start again.
    """
    moments = [(change.time_s, change) for change in trace.changes if change.added or change.removed]
    ends = [*(time_s for time_s, _ in moments[1:]), trace.end_s]
    count = 0
    for (from_s, change), until_s in zip(moments, ends, strict=True):
        course.fell_back()
        count += len(change.added) - len(change.removed)
        ready_s = from_s + costs.start_s + (costs.restore_s if course.has_checkpoint else 0.0)
        if count:
            course.trained(ready_s, until_s, count)


class StockElastic:
    """Stock Horovod elastic, as if it survived everything.

    - Survivors of a lost host go on from memory. In a world of three or more they wait for the Gloo timeout first.
    - A new host is seen by the next poll; from then on everybody waits until its worker has started.
    - Whoever comes while the others wait joins the same world.
    - When no worker is left, the job is started again, at once, and reads the newest checkpoint.
    - It takes no notice of notices.

    Args:
        trace: When hosts come and go.
        costs: How long things take.
        course: Written by ``play``.
        poll_s: Time between two questions to the host source.
        first_poll_s: When the first one is put.
    """

    def __init__(
        self, trace: Trace, costs: Costs, course: Course, poll_s: float = 1.0, first_poll_s: float = 0.0
    ) -> None:
        self._trace, self._costs, self._course = trace, costs, course
        self._poll_s, self._first_poll_s = poll_s, first_poll_s
        self._agenda = Agenda()
        self._now_s = 0.0
        self._seen: dict[str, bool] = {}
        self._world: set[str] = set()
        self._training_s: float | None = None
        self._resumes_s = math.inf
        for change in trace.changes:
            self._agenda.plan(change.time_s, lambda change=change: self._take(change))  # type: ignore[misc]

    def play(self) -> None:
        """From the beginning to the end; once."""
        while (moment_s := min(self._agenda.next_s, self._resumes_s)) < self._trace.end_s:
            self._now_s = moment_s
            if self._resumes_s <= moment_s:
                self._resumes_s, self._training_s = math.inf, moment_s
                self._world = {host for host, seen in self._seen.items() if seen}
            else:
                self._agenda.take()()
        self._now_s = self._trace.end_s
        self._stop(lost=False)

    def _take(self, change: Change) -> None:
        for host in change.removed:
            del self._seen[host]
        self._seen.update(dict.fromkeys(change.added, False))
        if not self._world.isdisjoint(change.removed):
            self._lose(self._world - set(change.removed))
        if not any(self._seen.values()):
            self._resumes_s = math.inf
        if change.added:
            self._agenda.plan(next_poll_s(self._now_s, self._poll_s, self._first_poll_s), self._see)

    def _lose(self, survivors: set[str]) -> None:
        waits = self._training_s is not None and len(self._world) > 2
        if self._training_s is not None:
            self._resumes_s = self._now_s + self._costs.reset_s + (self._costs.gloo_timeout_s if waits else 0.0)
        self._stop(lost=True)
        self._world = survivors
        if not survivors:
            self._course.fell_back()
            self._resumes_s = self._started_s()

    def _see(self) -> None:
        """A poll. Newcomers end the training of all, until they have started."""
        if all(self._seen.values()):
            return
        self._seen = dict.fromkeys(self._seen, True)
        self._stop(lost=False)
        earliest_s = 0.0 if math.isinf(self._resumes_s) else self._resumes_s
        self._resumes_s = max(earliest_s, self._started_s())

    def _started_s(self) -> float:
        """When workers that are started now can train: those of a job without any read the newest checkpoint."""
        reads = not self._world and self._course.has_checkpoint
        return self._now_s + self._costs.start_s + self._costs.reset_s + (self._costs.restore_s if reads else 0.0)

    def _stop(self, lost: bool) -> None:
        """Every step is a commit: what is lost is the one in flight."""
        if self._training_s is not None:
            lost_s = math.fmod(self._now_s - self._training_s, self._costs.step_s) if lost else 0.0
            self._course.trained(self._training_s, self._now_s, len(self._world), lost_s)
            self._training_s = None
