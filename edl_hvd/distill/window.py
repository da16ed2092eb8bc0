"""The micro-batches of a student between reading and consuming, and which teacher answers which. Pure.

``turn(window, event, now_s)`` gives the next window and what is to be done. It accepts any event in any state,
and knows neither sockets, clocks nor tensors.

Teachers pull: a task is bound to a teacher when the teacher asks for one, and the oldest task goes first. A task whose
teacher is gone waits again, at its old place. Only the task that its consumer waits for is given to a second teacher (a
hedge), when it takes longer than

    max(s, 3 m)        s  median time of the student between two micro-batches
                       m  median time of an answer

A task that several teachers were lost with is **poisonous**: after ``k`` losses the window says so, and does not lose
the rest of the fleet to it. After the first loss a task is alone at its teacher, so that the next one is its own.
Teachers that come and go are lost with innocent tasks, too, so with f teachers lost with one other task alone, and n
tasks given out

    k = 3 for f = 0, else max(3, ceil(log(1e-6) / log(f / n)))

which an innocent task reaches once in a million. A task that a teacher itself declines counts, too: then k = 3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.distill.place import Place
from edl_hvd.distill.window_events import (
    Accept,
    Action,
    Answered,
    Asked,
    Closed,
    Consumed,
    Declined,
    GiveNothing,
    GiveTask,
    Invite,
    Left,
    Passed,
    Poisoned,
    Read,
    TeacherReady,
    Wanted,
    WindowEvent,
    Withdraw,
)

_MOST_HOLDERS = 3
# Of one task. A third teacher that is as slow says that the task is slow, not the teachers.
_HEDGE_TIMES_MEDIAN = 3.0
_UNKNOWN_ANSWER_S = 2.0
# Before the first answer: a forward pass of a large model, on a processor.
_HEDGES_IN_A_ROW = 3
_ASIDE_S = 10.0
_MOST_ASIDES = 8
# 10 s doubled eight times are 43 min.
_INVITED_S = 0.25
# A teacher that was told of a task and has not come by then works for another student.
_AGAIN_S = 2.0
# A teacher gets a task that it has failed on again after this, and only if there is no other. One that is about to join
# has joined by then.
_REMEMBERED = 31
_LEAST_LOSSES, _MOST_LOSSES = 3, 12
_ODDS = 1e-6


# --- the window ---


@dataclass(frozen=True)
class Failure:
    """Why a task is to be given again.

    Attributes:
        process: Process of the teacher.
        why: Reason in words.
        is_loss: Whether the teacher was lost, rather than said why.
        is_shared: Whether the teacher had other tasks, too.
        at_s: When that was.
    """

    process: str
    why: str
    is_loss: bool
    is_shared: bool
    at_s: float


@dataclass(frozen=True)
class Entry:
    """A task.

    Attributes:
        place: Place of the micro-batch.
        size_bytes: Memory that it takes.
        holders: Teachers that it was given to, and when; empty while it waits.
        failures: Failures so far.
        is_answered: Whether its answer is there.
        is_suspect: Whether a teacher was lost that had it, so that it is computed by itself.
    """

    place: Place
    size_bytes: int
    holders: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    is_answered: bool = False
    is_suspect: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.is_answered and not self.holders


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
        teachers: Teachers that are ready, by name.
        next_number: Number of the next task; never used twice, so that late answers of a pass are recognised.
        waiting_since_s: Since when the consumer waits for the oldest task; ``None`` if it does not.
        consumed_s: When it took the last one; ``None`` before the first.
        answers_s: Times of the last answers.
        steps_s: The last times between two micro-batches, as the consumer takes them.
        given: Number of times that a task was given out, in this pass and before.
        lost: Number of teachers lost with one task alone that another one has answered.
        again: Number of times that a task was given out after the first.
        hedges: Number of these that were hedges.
    """

    limit_bytes: int
    entries: Mapping[int, Entry] = field(default_factory=dict)
    teachers: Mapping[str, Colleague] = field(default_factory=dict)
    next_number: int = 0
    waiting_since_s: float | None = None
    consumed_s: float | None = None
    answers_s: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()
    given: int = 0
    lost: int = 0
    again: int = 0
    hedges: int = 0

    @property
    def has_room(self) -> bool:
        """Whether one more task as large as the largest fits."""
        sizes = [entry.size_bytes for entry in self.entries.values()]
        return len(sizes) < 2 or sum(sizes) + max(sizes) <= self.limit_bytes

    @property
    def head(self) -> int | None:
        """Number of the oldest task, which the consumer takes next."""
        return next(iter(self.entries), None)

    @property
    def lead(self) -> int:
        """Number of answers that lie ready for the consumer, without a gap."""
        count = 0
        for entry in self.entries.values():
            if not entry.is_answered:
                break
            count += 1
        return count

    @property
    def tasks(self) -> int:
        """Number of tasks that wait for a teacher."""
        return sum(entry.is_waiting for entry in self.entries.values())

    @property
    def hedge_after_s(self) -> float:
        """How long the consumer waits before another teacher gets the oldest task, too."""
        answer_s = statistics.median(self.answers_s) if self.answers_s else _UNKNOWN_ANSWER_S
        return max(statistics.median(self.steps_s) if self.steps_s else 0.0, _HEDGE_TIMES_MEDIAN * answer_s)

    @property
    def hedge_due_s(self) -> float | None:
        """When the oldest task is to be given to one more teacher; ``None`` if it is not."""
        head = self.head
        if self.waiting_since_s is None or head is None:
            return None
        entry = self.entries[head]
        if entry.is_answered or not 0 < len(entry.holders) < _MOST_HOLDERS:
            return None
        return max(self.waiting_since_s, *entry.holders.values()) + self.hedge_after_s

    def due_s(self, now_s: float) -> float | None:
        """When :class:`Passed` will have an effect; ``None``: without another event it has none."""
        moments = [one.invited_s + _INVITED_S for one in self.teachers.values() if one.invited_s is not None]
        moments += [one.aside_until_s for one in self.teachers.values()]
        failed = [entry.failures[-1] for entry in self.entries.values() if entry.failures and entry.is_waiting]
        moments += [failure.at_s + _AGAIN_S for failure in failed]
        if self.hedge_due_s is not None:
            moments.append(self.hedge_due_s)
        return min((moment for moment in moments if moment > now_s), default=None)


@dataclass(frozen=True)
class Turn:
    """The result of a event: the next window, and what is to be done, in order."""

    window: Window
    actions: tuple[Action, ...]


def turn(window: Window, event: WindowEvent, now_s: float) -> Turn:
    """The next window and what is to be done.

    Args:
        window: Window before.
        event: What has happened.
        now_s: When; at least the time of the turn before.
    """
    draft = _Draft(window, now_s)
    match event:
        case Read():
            draft.read(event)
        case TeacherReady(teacher, process):
            draft.join(teacher, process)
        case Left(teacher, kindly):
            draft.leave(teacher, kindly)
        case Wanted(teacher):
            draft.want(teacher)
        case Answered(teacher, number):
            draft.answer(teacher, number)
        case Declined(teacher, number, why):
            draft.decline(teacher, number, why)
        case Asked():
            draft.ask()
        case Consumed():
            draft.consume()
        case Closed():
            draft.close()
        case Passed():
            pass
    draft.offer()
    return Turn(draft.window(), tuple(draft.actions))


class _Draft:
    """A window while it is being changed."""

    def __init__(self, window: Window, now_s: float) -> None:
        self.now_s = now_s
        self.actions: list[Action] = []
        self.entries = dict(window.entries)
        self.teachers = dict(window.teachers)
        self._before = window
        self._changes: dict[str, object] = {}

    def window(self) -> Window:
        return replace(self._before, entries=self.entries, teachers=self.teachers, **self._changes)  # type: ignore[arg-type]

    def _get(self, name: str) -> object:
        return self._changes.get(name, getattr(self._before, name))

    def _count(self, name: str) -> None:
        self._changes[name] = int(self._get(name)) + 1  # type: ignore[call-overload]

    # --- reading and consuming ---

    def read(self, read: Read) -> None:
        number = self._before.next_number
        self._changes["next_number"] = number + 1
        self.entries[number] = Entry(read.place, read.size_bytes, is_answered=read.is_answered)

    def ask(self) -> None:
        if self._before.waiting_since_s is not None:
            return
        self._changes["waiting_since_s"] = self.now_s
        if self._before.consumed_s is not None:
            passed_s = self.now_s - self._before.consumed_s
            self._changes["steps_s"] = (*self._before.steps_s, passed_s)[-_REMEMBERED:]

    def consume(self) -> None:
        head = self._before.head
        if head is None or not self.entries[head].is_answered:
            return
        del self.entries[head]
        self._changes.update(waiting_since_s=None, consumed_s=self.now_s)

    def close(self) -> None:
        for number, entry in self.entries.items():
            for teacher in entry.holders:
                self._release(teacher, number)
                self.actions.append(Withdraw(teacher, number))
        self.entries.clear()
        self._changes.update(waiting_since_s=None, consumed_s=None)

    # --- teachers ---

    def _release(self, teacher: str, number: int) -> None:
        colleague = self.teachers[teacher]
        holds = tuple(held for held in colleague.holds if held != number)
        self.teachers[teacher] = replace(colleague, holds=holds)

    def _take_back(self, teacher: str, number: int) -> Entry:
        """The task of a teacher, which waits again unless another one has it."""
        self._release(teacher, number)
        entry = self.entries[number]
        holders = {name: since_s for name, since_s in entry.holders.items() if name != teacher}
        self.entries[number] = replace(entry, holders=holders)
        return self.entries[number]

    def join(self, teacher: str, process: str) -> None:
        if teacher in self.teachers and self.teachers[teacher].process != process:
            self.leave(teacher, kindly=False)  # its end was not told
        self.teachers.setdefault(teacher, Colleague(process))

    def leave(self, teacher: str, kindly: bool) -> None:
        if teacher not in self.teachers:
            return
        colleague = self.teachers[teacher]
        failure = Failure(
            colleague.process, "the connection ended", is_loss=True, is_shared=len(colleague.holds) > 1, at_s=self.now_s
        )
        for number in colleague.holds:
            entry = self._take_back(teacher, number)
            if not kindly:
                self.entries[number] = replace(entry, failures=(*entry.failures, failure), is_suspect=True)
                self._judge(number)
        del self.teachers[teacher]

    def decline(self, teacher: str, number: int, why: str) -> None:
        if teacher not in self.teachers or number not in self.teachers[teacher].holds:
            return
        entry = self._take_back(teacher, number)
        failure = Failure(self.teachers[teacher].process, why, is_loss=False, is_shared=False, at_s=self.now_s)
        self.entries[number] = replace(entry, failures=(*entry.failures, failure))
        self._strike(teacher)
        self._judge(number)

    def _judge(self, number: int) -> None:
        entry = self.entries[number]
        losses = sum(failure.is_loss for failure in entry.failures)
        # Those of tasks that are answered are counted in the window.
        waiting = [other for key, other in self.entries.items() if key != number and not other.is_answered]
        others = sum(_own_losses(other) for other in waiting)
        given = max(1, self._before.given - losses)
        if len(entry.failures) - losses >= _LEAST_LOSSES or losses >= losses_allowed(self._before.lost + others, given):
            reasons = tuple(f"{failure.process}: {failure.why}" for failure in entry.failures)
            self.actions.append(Poisoned(number, reasons))

    def answer(self, teacher: str, number: int) -> None:
        if teacher not in self.teachers or number not in self.teachers[teacher].holds:
            return  # of an earlier pass, or another teacher was faster
        entry = self.entries[number]
        took_s = self.now_s - entry.holders[teacher]
        colleague = self.teachers[teacher]
        answer_s = took_s if not colleague.answer_s else 0.8 * colleague.answer_s + 0.2 * took_s
        self.teachers[teacher] = replace(colleague, answer_s=answer_s, strikes=0, asides=max(0, colleague.asides - 1))
        self._changes["lost"] = self._before.lost + _own_losses(entry)
        self._changes["answers_s"] = (*self._before.answers_s, took_s)[-_REMEMBERED:]
        for holder in entry.holders:
            self._release(holder, number)
            if holder != teacher:
                self.actions.append(Withdraw(holder, number))
        self.entries[number] = replace(entry, holders={}, is_answered=True)
        self.actions.append(Accept(number))

    def want(self, teacher: str) -> None:
        if teacher not in self.teachers:
            return
        colleague = self.teachers[teacher] = replace(self.teachers[teacher], is_idle=False, invited_s=None)
        number = None if colleague.aside_until_s > self.now_s else self._choose(teacher)
        if number is None:
            self.teachers[teacher] = replace(colleague, is_idle=True)
            self.actions.append(GiveNothing(teacher))
            return
        entry = self.entries[number]
        self._count("given")
        if entry.holders or entry.failures:
            self._count("again")
        if entry.holders:
            self._count("hedges")
            for holder in entry.holders:
                self._strike(holder)
            entry = self.entries[number]
        self.entries[number] = replace(entry, holders={**entry.holders, teacher: self.now_s})
        # It is told how many tasks are left, and asks again by itself only if there are some.
        tasks = sum(one.is_waiting for one in self.entries.values())
        holds = (*self.teachers[teacher].holds, number)
        self.teachers[teacher] = replace(self.teachers[teacher], holds=holds, is_idle=not tasks)
        self.actions.append(GiveTask(teacher, number, entry.is_suspect, tasks, self._before.lead))

    def _choose(self, teacher: str) -> int | None:
        """The task for a teacher that asks: the oldest that waits, unless it has failed on it and others have not."""
        process = self.teachers[teacher].process
        present = {one.process for one in self.teachers.values() if one.aside_until_s <= self.now_s}
        holds = [self.entries[number] for number in self.teachers[teacher].holds]
        if any(entry.is_suspect for entry in holds):
            return None
        waiting = [
            number for number, entry in self.entries.items() if entry.is_waiting and not (holds and entry.is_suspect)
        ]
        # Several tasks at one teacher are for its batch; the others get their part first.
        if holds and len(waiting) <= self._hungry():
            waiting = []
        for number in waiting:
            failures = self.entries[number].failures
            failed = {failure.process for failure in failures}
            if process not in failed or (present <= failed and self.now_s >= failures[-1].at_s + _AGAIN_S):
                return number
        head = self._hedged()
        if head is not None and teacher not in self.entries[head].holders and not holds:
            return head
        return None

    def _hedged(self) -> int | None:
        """The oldest task, if it is to be given to one more teacher now."""
        window = self.window()
        return window.head if window.hedge_due_s is not None and window.hedge_due_s <= self.now_s else None

    def _hungry(self) -> int:
        """The number of teachers that would take a task at once."""
        return sum(one.is_idle and not one.holds and one.aside_until_s <= self.now_s for one in self.teachers.values())

    def _strike(self, teacher: str) -> None:
        """Another teacher had to help out; the third time in a row it is set aside, and its tasks wait again."""
        colleague = self.teachers[teacher]
        if colleague.strikes + 1 < _HEDGES_IN_A_ROW:
            self.teachers[teacher] = replace(colleague, strikes=colleague.strikes + 1)
            return
        aside_s = _ASIDE_S * 2 ** min(colleague.asides, _MOST_ASIDES)
        self.teachers[teacher] = replace(
            colleague, strikes=0, asides=colleague.asides + 1, aside_until_s=self.now_s + aside_s
        )
        for number in colleague.holds:
            self._take_back(teacher, number)
            self.actions.append(Withdraw(teacher, number))

    def offer(self) -> None:
        """Tell idle teachers of tasks, one for each task, and the fastest first."""
        waiting = sum(entry.is_waiting for entry in self.entries.values())
        needed = waiting or (self._before.waiting_since_s is not None and self._hedged() is not None)
        if not needed:
            return
        needed -= sum(
            one.invited_s is not None and self.now_s - one.invited_s < _INVITED_S for one in self.teachers.values()
        )
        idle = [
            (one.answer_s, name)
            for name, one in self.teachers.items()
            if one.is_idle and not one.holds and one.invited_s is None and one.aside_until_s <= self.now_s
        ]
        for _, name in sorted(idle):
            if needed <= 0:
                return
            if self._choose(name) is not None:
                needed -= 1
                self.teachers[name] = replace(self.teachers[name], is_idle=False, invited_s=self.now_s)
                self.actions.append(Invite(name))


def _own_losses(entry: Entry) -> int:
    """Number of teachers that were lost with this task alone."""
    return sum(failure.is_loss and not failure.is_shared for failure in entry.failures)


def losses_allowed(lost: int, given: int) -> int:
    """The number of teachers lost with one task that make it poisonous.

    Args:
        lost: Number of teachers that were lost with other tasks.
        given: Number of times that other tasks were given out, at least 1.

    >>> losses_allowed(0, 10), losses_allowed(1, 1000), losses_allowed(16, 100), losses_allowed(10, 10)
    (3, 3, 8, 12)
    """
    if not lost:
        return _LEAST_LOSSES
    rate = min(lost / given, 0.5)
    return min(_MOST_LOSSES, max(_LEAST_LOSSES, math.ceil(math.log(_ODDS) / math.log(rate))))
