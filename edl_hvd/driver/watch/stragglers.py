"""Which workers compute more slowly than the others, told from what all of them say of themselves.

Compared is the time for a micro-batch, because workers may be dealt different numbers of them. It is averaged over
windows of 10 steps; a straggler is a worker that took more than 1.5 times the median of the world in 5 windows in a
row: a single pause, however long, spoils one window only.
"""

from __future__ import annotations

from statistics import median_low

from edl_hvd.protocol import Beat, StragglerFound

FACTOR = 1.5
WINDOW_STEPS = 10
# Enough to average out the noise of a batch or two.
WINDOWS = 5
# 50 steps altogether: a slow disk or a neighbour's burst may pass meanwhile.
_LEAST_S = 0.001
# What a worker is slower by, per micro-batch. Below that it is noise of the clock and of Python.


class Stragglers:
    """Over the members of one world after the other. Pure."""

    def __init__(self) -> None:
        self._generation = 0
        self._began: dict[str, Beat] = {}  # the first beat of each worker's window
        self._latest: dict[str, Beat] = {}
        self._complete: set[str] = set()  # whose window is
        self._in_a_row: dict[str, int] = {}

    def heard(self, worker: str, beat: Beat, generation: int, size: int) -> list[StragglerFound]:
        """Take in a beat; the stragglers, if it completes the fifth window of all.

        Args:
            worker: Whose beat it is.
            beat: Its beat.
            generation: Of the present world.
            size: Its number of members.
        """
        if generation != self._generation:
            self._generation = generation
            self._began, self._latest, self._complete, self._in_a_row = {}, {}, set(), {}
        if beat.generation != generation:
            return []
        first = self._began.setdefault(worker, beat)
        if beat.pid != first.pid or beat.steps < first.steps:
            first = self._began[worker] = beat  # the same worker in a new process
        self._latest[worker] = beat
        if beat.steps - first.steps >= WINDOW_STEPS:
            self._complete.add(worker)
        return self._judge() if len(self._complete) >= size > 1 else []

    def _judge(self) -> list[StragglerFound]:
        """All windows are complete: compare them and begin new ones."""
        times_s = {}
        for name, first in self._began.items():
            last = self._latest[name]
            if last.batches > first.batches:  # else it was dealt nothing
                times_s[name] = (last.compute_s - first.compute_s) / (last.batches - first.batches)
        self._began, self._complete = dict(self._latest), set()
        if len(times_s) < 2:
            return []
        median_s = median_low(times_s.values())
        slow = []
        for name, time_s in times_s.items():
            over = time_s > FACTOR * median_s and time_s - median_s > _LEAST_S
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if over else 0
            if self._in_a_row[name] == WINDOWS:
                self._in_a_row[name] = 0  # told again after as many more
                step = self._latest[name].step
                slow.append(StragglerFound(name, self._generation, step, round(time_s, 6), round(median_s, 6)))
        return slow
