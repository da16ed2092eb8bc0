"""The micro-batches of a student between reading and consuming, and what can be told of them. Pure.

Only the oldest task without an answer is given to a second teacher (a hedge), when it takes longer than

    max(s, 3 m)        s  median time of the student between two micro-batches
                       m  median time of an answer

If its consumer waits for it, it goes before all others. If not, only a teacher gets it for which there is no other, and
only if it takes three times as long as usual at the teacher that has it, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from edl_hvd.distill.place import Place
from edl_hvd.distill.poison import Failure
from edl_hvd.distill.window_events import Read

_MOST_HOLDERS = 3
# Of one task. A third teacher that is as slow says that the task is slow, not the teachers.
HEDGE_TIMES_MEDIAN = 3.0
_UNKNOWN_ANSWER_S = 2.0
# Before the first answer: a forward pass of a large model, on a processor.
INVITED_S = 0.25
# A teacher that was told of a task and has not come by then works for another student.
AGAIN_S = 2.0
# A teacher gets a task that it has failed on again after this, and only if there is no other. One that is about to join
# has joined by then.
_MEASURED = 8
_UNMEASURED_TASKS = 8
_MOST_TASKS = 1 << 20
PAST_SHARE = 16
# Answers that were consumed, or that the pass has read past, take up to this part of the window: for steps that a new
# world rolls back.
REMEMBERED = 31
# Times of answers and steps, for their medians.


Value = TypeVar("Value")
Computed = TypeVar("Computed")


def changed(value: Value, **fields: Any) -> Value:
    """The same dataclass with other values of these fields: ``dataclasses.replace`` in a third to half of its time.

    A student makes some fifteen for each micro-batch. ``__init__`` and ``__post_init__`` are not run.
    """
    before, after = vars(value), object.__new__(type(value))
    vars(after).update({name: before[name] for name in value.__dataclass_fields__}, **fields)  # type: ignore[attr-defined]
    return after


class _Once(Generic[Computed]):
    """What is computed once for each window; ``functools.cached_property`` takes a lock for it before Python 3.12."""

    def __init__(self, compute: Callable[[Any], Computed]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, window: None, owner: Any) -> _Once[Computed]: ...

    @overload
    def __get__(self, window: Any, owner: Any) -> Computed: ...

    def __get__(self, window: Any, owner: Any) -> Any:
        if window is None:
            return self
        found = vars(window)[self._name] = self._compute(window)
        return found


@dataclass(frozen=True)
class Entry:
    """A task.

    Attributes:
        place: Place of the micro-batch.
        size_bytes: Memory that it takes.
        holders: Teachers that it was given to, and when; empty while it waits.
        failures: Failures so far.
        is_answered: Whether its answer is there.
        answer_bytes: Bytes of the answer, if a teacher has given it.
        is_suspect: Whether a teacher was lost that had it, so that it is computed by itself.
        checks: Checks of its inputs.
    """

    place: Place
    size_bytes: int
    holders: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    is_answered: bool = False
    answer_bytes: int = 0
    is_suspect: bool = False
    checks: tuple[int, ...] = ()

    @property
    def is_waiting(self) -> bool:
        return not self.is_answered and not self.holders


@dataclass(frozen=True)
class Leftover:
    """A task that no micro-batch waits for, and whose answer a pass may ask for that begins at an earlier place.

    Attributes:
        number: Number of the task.
        entry: Task; its answer is there, or a teacher has it.
    """

    number: int
    entry: Entry


@dataclass(frozen=True)
class Colleague:
    """A teacher as its student sees it.

    Attributes:
        process: Name of its process.
        is_idle: Whether it has been told that there is nothing, and holds nothing.
        invited_s: When it was told of a task since then; ``None`` if it was not.
        holds: Tasks that it has, in the order in which they were given.
        answer_s: Typical time of its answers; 0 before the first.
        strikes: Number of times in a row that another teacher had to help out.
        asides: Number of times that it was set aside, less one for each good answer since.
        aside_until_s: Until when it gets no task.
    """

    process: str
    is_idle: bool = True
    invited_s: float | None = None
    holds: tuple[int, ...] = ()
    answer_s: float = 0.0
    strikes: int = 0
    asides: int = 0
    aside_until_s: float = -math.inf


@dataclass(frozen=True)
class Window:
    """Where things stand.

    Attributes:
        limit_bytes: Memory that tasks may take; two tasks are always allowed.
        entries: Tasks read and not consumed, by number, oldest first.
        left: Tasks of earlier passes that no micro-batch waits for.
        past: Tasks that this pass has consumed, or read past, and whose answers are still there, by number, oldest
            first; an answer is all that they take.
        past_bytes: Memory that these take.
        teachers: Teachers that are ready, by name.
        next_number: Number of the next task; never used twice, so that late answers of a pass are recognised.
        waiting_since_s: Since when the consumer waits for the oldest task; ``None`` if it does not.
        consumed_s: When it took the last one; ``None`` before the first.
        answers_s: Times of the last answers.
        steps_s: The last times between two micro-batches, as the consumer takes them.
        hedge_after_s: Age of the task that the consumer waits for, at which another teacher gets it, too.
        given: Number of times that a task was given out, in this pass and before.
        lost: Number of teachers lost with one task alone that another one has answered.
        again: Number of times that a task was given out after the first.
        hedges: Number of these that were hedges.
    """

    limit_bytes: int
    entries: Mapping[int, Entry] = field(default_factory=dict)
    left: Mapping[Place, Leftover] = field(default_factory=dict)
    past: Mapping[int, Entry] = field(default_factory=dict)
    past_bytes: int = 0
    teachers: Mapping[str, Colleague] = field(default_factory=dict)
    next_number: int = 0
    waiting_since_s: float | None = None
    consumed_s: float | None = None
    answers_s: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()
    hedge_after_s: float = HEDGE_TIMES_MEDIAN * _UNKNOWN_ANSWER_S
    given: int = 0
    lost: int = 0
    again: int = 0
    hedges: int = 0

    @property
    def has_room(self) -> bool:
        """Whether one more task as large as the largest fits."""
        return self.has_room_beside(0)

    def has_room_beside(self, others: int) -> bool:
        """Whether one more task fits beside this number of others, all as large as the largest."""
        if len(self.entries) < 2:
            return True
        total_bytes, largest_bytes = self._sizes
        return len(self.entries) < self.most_tasks and total_bytes + (1 + others) * largest_bytes <= self.limit_bytes

    # What follows is asked several times of the same window, and takes a look at all its tasks.

    @_Once
    def _sizes(self) -> tuple[int, int]:
        sizes = [entry.size_bytes for entry in self.entries.values()]
        return sum(sizes), max(sizes)

    @_Once
    def most_tasks(self) -> int:
        """The number of tasks beyond which reading ahead gains nothing.

        It is ceil((h + l) / s) + 2: while the slowest of the last answers l, or a hedge after h, is waited for, the
        consumer takes a task every s seconds. Before enough is measured it is 8, and 2 for each teacher.
        """
        if min(len(self.answers_s), len(self.steps_s)) < _MEASURED:
            return _UNMEASURED_TASKS + 2 * len(self.teachers)
        ahead_s, step_s = self.hedge_after_s + max(self.answers_s), statistics.median(self.steps_s)
        return math.ceil(ahead_s / step_s) + 2 if step_s * _MOST_TASKS > ahead_s else _MOST_TASKS

    @property
    def head(self) -> int | None:
        """Number of the oldest task, which the consumer takes next."""
        return next(iter(self.entries), None)

    @_Once
    def lead(self) -> int:
        """Number of answers that lie ready for the consumer, without a gap."""
        count = 0
        for entry in self.entries.values():
            if not entry.is_answered:
                break
            count += 1
        return count

    @_Once
    def tasks(self) -> int:
        """Number of tasks that wait for a teacher."""
        return sum([not entry.is_answered and not entry.holders for entry in self.entries.values()])

    @_Once
    def oldest(self) -> int | None:
        """Number of the oldest task without an answer."""
        return next((number for number, entry in self.entries.items() if not entry.is_answered), None)

    @property
    def is_head_awaited(self) -> bool:
        """Whether the consumer waits for the oldest task, which has no answer."""
        return self.waiting_since_s is not None and self.head is not None and not self.entries[self.head].is_answered

    @_Once
    def hedge_due_s(self) -> float | None:
        """When the oldest task is to be given to one more teacher; ``None`` if it is not.

        Ahead of its consumer it is given to one more only if it takes long for the teacher that has it, and only one
        task is at two teachers at a time.
        """
        oldest = self.oldest
        if oldest is None:
            return None
        holders = self.entries[oldest].holders
        if not 0 < len(holders) < _MOST_HOLDERS:
            return None
        overdue_s = max(holders.values()) + self.hedge_after_s
        if self.is_head_awaited:
            return overdue_s
        if len(holders) > 1:
            return None
        usual_s = max(self.teachers[name].answer_s for name in holders)
        return max(overdue_s, max(holders.values()) + HEDGE_TIMES_MEDIAN * usual_s)

    def number_of(self, read: Read) -> int:
        """The number that a micro-batch will have when it is read."""
        leftover = None if read.is_answered else self.left.get(read.place)
        # Random augmentation that is not seeded gives another input at the same place.
        is_same = leftover is not None and leftover.entry.checks == read.checks
        return leftover.number if leftover is not None and is_same else self.next_number

    def due_s(self, now_s: float) -> float | None:
        """When ``Passed`` will have an effect; ``None``: without another event it has none."""
        moments = []
        for one in self.teachers.values():
            if one.invited_s is not None:
                moments.append(one.invited_s + INVITED_S)
            if one.aside_until_s > now_s:
                moments.append(one.aside_until_s)
        if self.tasks:
            failed = [entry.failures[-1] for entry in self.entries.values() if entry.failures and entry.is_waiting]
            moments += [failure.at_s + AGAIN_S for failure in failed]
        hedge_due_s = self.hedge_due_s
        if hedge_due_s is not None:
            moments.append(hedge_due_s)
        return min((moment for moment in moments if moment > now_s), default=None)


def hedge_after_s(answers_s: tuple[float, ...], steps_s: tuple[float, ...]) -> float:
    """The age at which a task is given to a second teacher.

    Args:
        answers_s: Times of the last answers.
        steps_s: Last times between two micro-batches.
    """
    answer_s = statistics.median(answers_s) if answers_s else _UNKNOWN_ANSWER_S
    return max(statistics.median(steps_s) if steps_s else 0.0, HEDGE_TIMES_MEDIAN * answer_s)
