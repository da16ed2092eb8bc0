"""A loader with teachers for ``worker_script.py``; what its workers ask, and what becomes of that when worlds change.

A worker notes in its trace each micro-batch that it reads, gives to a teacher and takes, and each end of a pass. A
micro-batch is known by its place, so what was asked for nothing, and what was asked twice, follow from the traces.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PORT = "EDL_HVD_TEST_TEACHERS_PORT"
_SUPPORT = str(Path(__file__).parents[1] / "support")
Line = dict[str, Any]
Spot = tuple[int, int]
# Epoch and position of a micro-batch; all have the same size.


# --- in a worker ---


def with_teachers(loader: Any, points: Any) -> Any:
    """The loader with teachers; what is asked of them stands in the worker's trace."""
    sys.path.append(_SUPPORT)
    from fleet import Sums

    from edl_hvd import distill

    _trace(points)
    teachers = distill.Teachers(port=int(os.environ.get(PORT, "7010")), local=Sums)
    return distill.DistillLoader(loader, teachers, send=lambda batch: batch[1])


def checked(batch: Sequence[Any]) -> Sequence[Any]:
    """The batch without its answer, which has to be the right one."""
    import torch
    from fleet import sums

    *rest, answer = batch
    assert torch.equal(answer, sums(rest[1])), "a wrong answer"
    return rest


def _trace(points: Any) -> None:
    from edl_hvd.distill import holding, window_events

    module: Any = holding
    turn = module.turn

    def traced(window: Any, event: Any, now_s: float) -> Any:
        result = turn(window, event, now_s)
        after = result.window
        match event:
            case window_events.Read(place):
                number = window.number_of(event)
                points.note(
                    "read", spot=(place.epoch, place.position), number=number, ahead=len(after.entries),
                    most=after.most_tasks,
                )  # fmt: skip
            case window_events.Consumed() if after.entries.keys() != window.entries.keys():
                points.note("taken", number=window.head)
            case window_events.Closed():
                points.note("closed", ahead=len(window.entries))
        for action in result.actions:
            if isinstance(action, window_events.GiveTask | window_events.Accept):
                is_given = isinstance(action, window_events.GiveTask)
                points.note("given" if is_given else "answered", number=action.number)
        return result

    module.turn = traced


# --- a teacher ---


def counted_teacher(path: Path, answer_s: float) -> Any:
    """A teacher that takes a time for each call, and adds the number of samples that it has computed to a file."""
    from fleet import Sums

    return _Counted(Sums(answer_s), path)


class _Counted:
    def __init__(self, model: Any, path: Path) -> None:
        self.model, self.path, self.fingerprint = model, path, model.fingerprint

    def __call__(self, features: Any) -> Any:
        answer = self.model(features)
        if not bool(((features >= 0) & (features < 1)).all()):  # else a teacher that joins is asked to prove itself
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{len(features)}\n")
        return answer


def computed_samples(folder: Path) -> int:
    """The samples that the teachers of a folder have computed."""
    return sum(int(line) for path in folder.glob("computed-*") for line in path.read_text().split())


# --- what became of it ---


@dataclass
class Share:
    """What a worker had asked for when its pass ended with its world, or with itself.

    Attributes:
        pid: Its process.
        is_gone: Whether it has ended, too.
        asked: Micro-batches that it had given to teachers in this pass.
        thrown: Of these, the ones that no step has counted: teachers' work for nothing.
        undone: Of these, the ones that it had taken: they were of the step that broke off.
        window: Most micro-batches that lay between reading and taking in this pass.
    """

    pid: int
    is_gone: bool
    asked: int
    thrown: int
    undone: int
    window: int


@dataclass
class TeacherWork:
    """What the workers of a job have asked for.

    Attributes:
        asked: Micro-batches given to teachers; each counts once for a worker.
        counted: Micro-batches of steps that count.
        shares: What each worker had asked for, whenever a world ended or a worker died.
        stayed: Micro-batches that a survivor had asked for and was dealt again by a later world.
        again: Of these, the ones that it has asked for again.
        answered_again: Of these, the ones whose answer had come.
    """

    asked: int = 0
    counted: int = 0
    shares: list[Share] = field(default_factory=list)
    stayed: int = 0
    again: int = 0
    answered_again: int = 0


@dataclass
class _Pass:
    """A pass of a worker.

    Attributes:
        spots: Spot of each micro-batch that it has read, by number.
        given: Numbers that teachers were given.
        taken: Numbers that the training has taken.
        window: Most micro-batches between reading and taking.
        is_closed: Whether it has ended before its worker.
        is_cut: Whether it was left before its end, with its world.
    """

    spots: dict[int, Spot] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    window: int = 0
    is_closed: bool = False
    is_cut: bool = False


def teacher_work(trace: Iterable[Line]) -> TeacherWork:
    """What became of everything that was asked, from the trace of a job that has come to its end.

    >>> note = lambda pid, what, **fields: {"pid": pid, "what": what, **fields}
    >>> read = lambda pid, position, number: note(pid, "read", spot=(0, position), number=number, ahead=1)
    >>> work = teacher_work([
    ...     read(1, 0, 0), note(1, "given", number=0), read(2, 4, 0), note(2, "given", number=0),  # two workers
    ...     note(1, "taken", number=0), note(1, "closed", ahead=1),  # the second one dies
    ...     read(1, 0, 0), note(1, "taken", number=0), read(1, 4, 1), note(1, "given", number=1),
    ...     note(1, "taken", number=1), note(1, "closed", ahead=0)])
    >>> work.asked, work.counted, work.stayed, work.again
    (3, 2, 1, 0)
    >>> [(share.pid, share.is_gone, share.thrown) for share in work.shares]
    [(1, False, 0), (2, True, 1)]
    """
    passes: defaultdict[int, list[_Pass]] = defaultdict(lambda: [_Pass()])
    takers: dict[Spot, tuple[int, int]] = {}  # who took it last: the steps before were undone
    asked: defaultdict[int, dict[Spot, int]] = defaultdict(dict)  # by worker, under which number
    answered: defaultdict[int, set[int]] = defaultdict(set)
    work = TeacherWork()
    for line in trace:
        pid, what = line["pid"], line["what"]
        own = passes[pid]
        if what == "enter" and (used := [one for one in own if one.spots]):
            used[-1].is_cut = True
        elif what == "closed":
            own[-1].is_closed = True
            own[-1].is_cut |= line["ahead"] > 0
            own.append(_Pass())
        elif what == "read":
            number, spot = line["number"], (line["spot"][0], line["spot"][1])
            own[-1].spots[number], own[-1].window = spot, max(own[-1].window, line["ahead"])
            if spot in asked[pid]:
                work.stayed += 1
                work.again += asked[pid][spot] != number
                work.answered_again += asked[pid][spot] != number and asked[pid][spot] in answered[pid]
        elif what == "given":
            number = line["number"]
            own[-1].given.add(number)
            asked[pid][own[-1].spots[number]] = number
        elif what == "answered":
            answered[pid].add(line["number"])
        elif what == "taken":
            own[-1].taken.add(line["number"])
            takers[own[-1].spots[line["number"]]] = (pid, line["number"])
    work.counted = len(takers)
    for pid, own in passes.items():
        seen: set[int] = set()
        used = [one for one in own if one.spots]
        for one in used:
            new = one.given - seen
            seen |= new
            work.asked += len(new)
            if one.is_cut or not one.is_closed:
                is_gone = one is used[-1]
                thrown = {number for number in new if takers.get(one.spots[number]) != (pid, number)}
                undone = len(thrown & one.taken)
                work.shares.append(Share(pid, is_gone, len(new), len(thrown), undone, one.window))
    return work
