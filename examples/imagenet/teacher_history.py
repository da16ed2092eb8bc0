"""Read from an event log what a job had of teachers; pure functions of the lines of ``edl_hvd.events.read_events``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
_SAME_PASS_S = 1.0
# Two looks of a worker whose passes began within this are of one pass: clocks may be set meanwhile.


@dataclass(frozen=True)
class Look:
    """How well a worker was served for a while.

    Attributes:
        worker: Worker, as ``host:local_rank``; empty in logs that do not name it.
        begin_s, end_s: Seconds from the start of the run.
        lead: Mean number of answers that lay ready when it took one ...
        window: ... of that many micro-batches.
        waited_share: Part of the time in which it waited for an answer, in [0, 1].
    """

    worker: str
    begin_s: float
    end_s: float
    lead: float
    window: float
    waited_share: float


@dataclass(frozen=True)
class TeacherHistory:
    """The teachers of a run.

    Attributes:
        ready: Number of teachers that were ready over time, as (seconds, teachers).
        joined: When a teacher became ready, as (seconds, address).
        lost: When one was gone, as (seconds, address, reason).
        shortages: Number of times that a worker waited while no teacher was ready.
        looks: How well the workers were served.
    """

    ready: list[tuple[float, int]]
    joined: list[tuple[float, str]]
    lost: list[tuple[float, str, str]]
    shortages: int
    looks: list[Look]

    @property
    def waited_share(self) -> float:
        """The part of the workers' time in which they waited for answers."""
        seconds = sum(look.end_s - look.begin_s for look in self.looks)
        return sum(look.waited_share * (look.end_s - look.begin_s) for look in self.looks) / seconds if seconds else 0.0

    @property
    def lead(self) -> tuple[float, float]:
        """The mean lead of all workers, and the mean window that it is a part of."""
        seconds = sum(look.end_s - look.begin_s for look in self.looks) or 1.0
        lead = sum(look.lead * (look.end_s - look.begin_s) for look in self.looks) / seconds
        return lead, sum(look.window * (look.end_s - look.begin_s) for look in self.looks) / seconds


def teacher_history(lines: Iterable[Line], start_s: float) -> TeacherHistory | None:
    """The teachers of a run; ``None`` if it had none.

    Every worker writes when a teacher joins it and when it loses one. A teacher is ready from the first worker's line
    on, and gone from the first line that says so.

    >>> line = lambda time, event, **fields: {"time": time, "event": event, "teacher": "a:7010", **fields}
    >>> history = teacher_history([
    ...     line(1.0, "teacher_joined"), line(1.5, "teacher_joined"),
    ...     line(4.0, "teacher_lost", reason="it left"), line(4.5, "teacher_lost", reason="it left")], start_s=0.0)
    >>> history.ready, history.lost
    ([(0.0, 0), (1.0, 1), (4.0, 0)], [(4.0, 'a:7010', 'it left')])
    """
    ready: set[str] = set()
    history = TeacherHistory([(0.0, 0)], [], [], 0, [])
    shortages, before, is_there = 0, dict[str, Line](), False
    for line in lines:
        at_s, event = line["time"] - start_s, line["event"]
        is_there = is_there or event in ("teacher_joined", "teachers_short", "answers")
        if event == "teacher_joined" and line["teacher"] not in ready:
            ready.add(line["teacher"])
            history.joined.append((at_s, line["teacher"]))
            history.ready.append((at_s, len(ready)))
        elif event == "teacher_lost" and line["teacher"] in ready:
            ready.remove(line["teacher"])
            history.lost.append((at_s, line["teacher"], line["reason"]))
            history.ready.append((at_s, len(ready)))
        elif event == "teachers_short":
            shortages += 1
        elif event == "answers":
            worker = line.get("worker", "")
            look = _look(line, before.get(worker), start_s)
            if look is not None:  # else a worker with several kinds of teachers tells of another one of them
                history.looks.append(look)
            before[worker] = line
    return TeacherHistory(history.ready, history.joined, history.lost, shortages, history.looks) if is_there else None


def _look(line: Line, before: Line | None, start_s: float) -> Look | None:
    """What is new in a line since the one before of the same worker, whose numbers are those of its pass so far."""
    seconds, waited_s, end_s = line["seconds"], line["waited_s"], line["time"] - start_s
    if before is not None and _is_same_pass(before, line):
        seconds, waited_s = seconds - before["seconds"], waited_s - before["waited_s"]
    if seconds <= 0:
        return None
    lead = line["mean_lead" if "mean_lead" in line else "lead"]  # logs before 0.2.0 have no means
    window = line["mean_window" if "mean_window" in line else "window"]
    share = min(1.0, max(0.0, waited_s / seconds))
    return Look(line.get("worker", ""), max(0.0, end_s - seconds), end_s, lead, window, share)


def _is_same_pass(before: Line, line: Line) -> bool:
    begins = [one["time"] - one["seconds"] for one in (before, line)]
    return line["seconds"] >= before["seconds"] and abs(begins[1] - begins[0]) < _SAME_PASS_S
