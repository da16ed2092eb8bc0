"""What follows from what happens to a student's window: the next window, and what is to be done. Pure.

``turn(window, event, now_s)`` accepts any event in any state, and knows neither sockets, clocks nor tensors.

Teachers pull: a task is bound to a teacher when the teacher asks for one, and the oldest task goes first. A task whose
teacher is gone waits again, at its old place. Only the oldest task without an answer is given to a second teacher, as a
hedge, when ``Window.hedge_due_s`` has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edl_hvd.distill import window_events as events
from edl_hvd.distill.place import Place, is_beyond
from edl_hvd.distill.poison import Failure, is_poisonous, own_losses
from edl_hvd.distill.window import (
    AGAIN_S,
    INVITED_S,
    PAST_SHARE,
    REMEMBERED,
    Colleague,
    Entry,
    Leftover,
    Window,
    changed,
    hedge_after_s,
)

_HEDGES_IN_A_ROW = 3
_ASIDE_S = 10.0
_MOST_ASIDES = 8
# 10 s doubled eight times are 43 min.


@dataclass(frozen=True)
class Turn:
    """The result of an event: the next window, and what is to be done, in order."""

    window: Window
    actions: tuple[events.Action, ...]


def turn(window: Window, event: events.WindowEvent, now_s: float) -> Turn:
    """The next window and what is to be done.

    Args:
        window: Window before.
        event: What has happened.
        now_s: When; at least the time of the turn before.
    """
    draft = _Draft(window, now_s)
    match event:
        case events.Read():
            draft.read(event)
        case events.TeacherReady(teacher, process):
            draft.join(teacher, process)
        case events.Left(teacher, kindly):
            draft.leave(teacher, kindly)
        case events.Wanted(teacher):
            draft.want(teacher)
        case events.Answered(teacher, number, answer_bytes):
            draft.answer(teacher, number, answer_bytes)
        case events.Declined(teacher, number, why):
            draft.decline(teacher, number, why)
        case events.Asked():
            draft.ask()
        case events.Consumed():
            draft.consume(event)
        case events.Closed(is_final):
            draft.close(is_final)
        case events.Passed():
            pass
    after = draft.window()
    invited = draft.offer(after)
    if invited:
        after = changed(after, teachers={**after.teachers, **invited})
    return Turn(after, tuple(draft.actions))


@dataclass(frozen=True)
class _Hedge:
    """A task that is to be given to one more teacher.

    Attributes:
        number: Number of the task; ``None``: there is none.
        holders: Teachers that have it.
        is_awaited: Whether its consumer waits for it.
    """

    number: int | None = None
    holders: frozenset[str] = frozenset()
    is_awaited: bool = False

    @classmethod
    def of(cls, window: Window, now_s: float) -> _Hedge:
        """The oldest task, if it is to be given to one more teacher now."""
        due_s, oldest = window.hedge_due_s, window.oldest
        if due_s is None or due_s > now_s or oldest is None:
            return cls()
        return cls(oldest, frozenset(window.entries[oldest].holders), window.is_head_awaited)


class _Draft:
    """A window while it is being changed."""

    def __init__(self, window: Window, now_s: float) -> None:
        self.now_s = now_s
        self.actions: list[events.Action] = []
        self.entries = dict(window.entries)
        self.left = dict(window.left)
        self.teachers = dict(window.teachers)
        self._before = window
        self._changes: dict[str, object] = {}

    def window(self) -> Window:
        return changed(self._before, entries=self.entries, left=self.left, teachers=self.teachers, **self._changes)

    def _get(self, name: str) -> object:
        return self._changes.get(name, getattr(self._before, name))

    def _count(self, name: str) -> None:
        self._changes[name] = int(self._get(name)) + 1  # type: ignore[call-overload]

    # --- reading and consuming ---

    def read(self, read: events.Read) -> None:
        number = self._before.number_of(read)
        if number == self._before.next_number:
            self._changes["next_number"] = number + 1
            self.entries[number] = Entry(read.place, read.size_bytes, is_answered=read.is_answered, checks=read.checks)
            if read.place in self.left:
                self._forget(read.place)
        else:
            self.entries[number] = changed(self.left.pop(read.place).entry, size_bytes=read.size_bytes)
        beyond = [place for place in self.left if is_beyond(read.place, place)]
        answered = [place for place in beyond if self.left[place].entry.answer_bytes]
        if answered:
            found = [self.left.pop(place) for place in answered]
            self._keep({one.number: changed(one.entry, size_bytes=one.entry.answer_bytes) for one in found})
        for place in beyond:
            if place in self.left:
                self._forget(place)

    def ask(self) -> None:
        if self._before.waiting_since_s is not None:
            return
        self._changes["waiting_since_s"] = self.now_s
        if self._before.consumed_s is not None:
            passed_s = self.now_s - self._before.consumed_s
            steps_s = (*self._before.steps_s, passed_s)[-REMEMBERED:]
            self._changes.update(steps_s=steps_s, hedge_after_s=hedge_after_s(self._before.answers_s, steps_s))

    def consume(self, event: events.Consumed) -> None:
        head = self._before.head
        if head is None or not self.entries[head].is_answered:
            return
        if event.is_asked:
            self.ask()
        self._keep({head: changed(self.entries.pop(head), size_bytes=event.answer_bytes)})
        self._changes.update(waiting_since_s=None, consumed_s=self.now_s)

    def _keep(self, found: Mapping[int, Entry]) -> None:
        """Keep answers that the pass has left behind; drop the oldest, down to their part of the window."""
        past = {**self._before.past, **found}
        total_bytes = self._before.past_bytes + sum(one.size_bytes for one in found.values())
        while total_bytes * PAST_SHARE > self._before.limit_bytes:
            oldest = next(iter(past))
            total_bytes -= past.pop(oldest).size_bytes
            self.actions.append(events.Drop(oldest))
        self._changes.update(past=past, past_bytes=total_bytes)

    def close(self, is_final: bool) -> None:
        for number, entry in self._before.past.items():
            self.left[entry.place] = Leftover(number, entry)
        for number, entry in self.entries.items():
            if not entry.is_waiting:
                self.left[entry.place] = Leftover(number, changed(entry, failures=(), is_suspect=False))
        self.entries.clear()
        if is_final:
            for place in list(self.left):
                self._forget(place)
        self._changes.update(past={}, past_bytes=0, waiting_since_s=None, consumed_s=None)

    def _forget(self, place: Place) -> None:
        """Drop a task that no micro-batch waits for."""
        leftover = self.left.pop(place)
        for teacher in leftover.entry.holders:
            self._release(teacher, leftover.number)
            self.actions.append(events.Withdraw(teacher, leftover.number))
        self.actions.append(events.Drop(leftover.number))

    # --- teachers ---

    def _release(self, teacher: str, number: int) -> None:
        colleague = self.teachers[teacher]
        holds = tuple(held for held in colleague.holds if held != number)
        self.teachers[teacher] = changed(colleague, holds=holds)

    def _place_of_left(self, number: int) -> Place | None:
        """The place of a task that no micro-batch waits for; ``None`` if one does."""
        if number in self.entries:
            return None
        return next(place for place, leftover in self.left.items() if leftover.number == number)

    def _take_back(self, teacher: str, number: int) -> Entry | None:
        """The task of a teacher, which waits again unless another one has it; ``None`` if nobody waits for it."""
        self._release(teacher, number)
        place = self._place_of_left(number)
        entry = self.entries[number] if place is None else self.left[place].entry
        holders = {name: since_s for name, since_s in entry.holders.items() if name != teacher}
        entry = changed(entry, holders=holders)
        if place is None:
            self.entries[number] = entry
            return entry
        self.left[place] = changed(self.left[place], entry=entry)
        if not holders:
            self._forget(place)
        return None

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
            if entry is not None and not kindly:
                self.entries[number] = changed(entry, failures=(*entry.failures, failure), is_suspect=True)
                self._judge(number)
        del self.teachers[teacher]

    def decline(self, teacher: str, number: int, why: str) -> None:
        if teacher not in self.teachers or number not in self.teachers[teacher].holds:
            return
        entry = self._take_back(teacher, number)
        if entry is not None:
            failure = Failure(self.teachers[teacher].process, why, is_loss=False, is_shared=False, at_s=self.now_s)
            self.entries[number] = changed(entry, failures=(*entry.failures, failure))
        self._strike(teacher)
        if entry is not None:
            self._judge(number)

    def _judge(self, number: int) -> None:
        entry = self.entries[number]
        # Those of tasks that are answered are counted in the window.
        waiting = [other for key, other in self.entries.items() if key != number and not other.is_answered]
        others = sum(own_losses(other.failures) for other in waiting)
        if is_poisonous(entry.failures, self._before.lost + others, self._before.given):
            reasons = tuple(f"{failure.process}: {failure.why}" for failure in entry.failures)
            self.actions.append(events.Poisoned(number, reasons))

    def answer(self, teacher: str, number: int, answer_bytes: int) -> None:
        if teacher not in self.teachers or number not in self.teachers[teacher].holds:
            return  # of an earlier pass, or another teacher was faster
        place = self._place_of_left(number)
        entry = self.entries[number] if place is None else self.left[place].entry
        took_s = self.now_s - entry.holders[teacher]
        colleague = self.teachers[teacher]
        answer_s = took_s if not colleague.answer_s else 0.8 * colleague.answer_s + 0.2 * took_s
        self.teachers[teacher] = changed(colleague, answer_s=answer_s, strikes=0, asides=max(0, colleague.asides - 1))
        self._changes["lost"] = self._before.lost + own_losses(entry.failures)
        answers_s = (*self._before.answers_s, took_s)[-REMEMBERED:]
        self._changes.update(answers_s=answers_s, hedge_after_s=hedge_after_s(answers_s, self._before.steps_s))
        for holder in entry.holders:
            self._release(holder, number)
            if holder != teacher:
                self.actions.append(events.Withdraw(holder, number))
        entry = changed(entry, holders={}, is_answered=True, answer_bytes=answer_bytes)
        if place is None:
            self.entries[number] = entry
        else:
            self.left[place] = changed(self.left[place], entry=entry)
        self.actions.append(events.Accept(number))

    def want(self, teacher: str) -> None:
        if teacher not in self.teachers:
            return
        colleague = self.teachers[teacher]
        hedge = _Hedge.of(self._before, self.now_s)
        number = None if colleague.aside_until_s > self.now_s else self._choose(teacher, hedge)
        if number is None:
            self.teachers[teacher] = changed(colleague, is_idle=True, invited_s=None)
            self.actions.append(events.GiveNothing(teacher))
            return
        entry = self.entries[number]
        tasks = self._before.tasks - entry.is_waiting
        self._count("given")
        if entry.holders or entry.failures:
            self._count("again")
        if entry.holders:
            self._count("hedges")
            for holder in entry.holders:
                self._strike(holder)
            entry = self.entries[number]
            tasks = sum(one.is_waiting for other, one in self.entries.items() if other != number)
        self.entries[number] = changed(entry, holders={**entry.holders, teacher: self.now_s})
        # It is told how many tasks are left, and asks again by itself only if there are some.
        holds = (*colleague.holds, number)
        self.teachers[teacher] = changed(colleague, holds=holds, is_idle=not tasks, invited_s=None)
        self.actions.append(events.GiveTask(teacher, number, entry.is_suspect, tasks, self._before.lead))

    def _choose(self, teacher: str, hedge: _Hedge) -> int | None:
        """The task for a teacher that asks: the oldest that waits, unless it has failed on it and others have not."""
        holds = self.teachers[teacher].holds
        hedged = None if holds or teacher in hedge.holders else hedge.number
        if hedged is not None and hedge.is_awaited:
            return hedged
        if any(self.entries[number].is_suspect for number in holds if number in self.entries):
            return None
        waiting: Iterable[int] = (
            number for number, entry in self.entries.items() if not entry.is_answered and not entry.holders
        )
        if holds:
            # Several tasks at one teacher are for its batch; the others get their part first.
            numbers = [number for number in waiting if not self.entries[number].is_suspect]
            waiting = numbers if len(numbers) > self._hungry() else ()
        for number in waiting:
            failures = self.entries[number].failures
            if not failures or self._may_fail_again(teacher, failures):
                return number
        return hedged

    def _may_fail_again(self, teacher: str, failures: tuple[Failure, ...]) -> bool:
        """Whether a teacher gets a task that has failed: at others, or everywhere and a while ago."""
        failed = {failure.process for failure in failures}
        if self.teachers[teacher].process not in failed:
            return True
        present = {one.process for one in self.teachers.values() if one.aside_until_s <= self.now_s}
        return present <= failed and self.now_s >= failures[-1].at_s + AGAIN_S

    def _hungry(self) -> int:
        """The number of teachers that would take a task at once."""
        return sum(one.is_idle and not one.holds and one.aside_until_s <= self.now_s for one in self.teachers.values())

    def _strike(self, teacher: str) -> None:
        """Another teacher had to help out; the third time in a row it is set aside, and its tasks wait again."""
        colleague = self.teachers[teacher]
        if colleague.strikes + 1 < _HEDGES_IN_A_ROW:
            self.teachers[teacher] = changed(colleague, strikes=colleague.strikes + 1)
            return
        aside_s = _ASIDE_S * 2 ** min(colleague.asides, _MOST_ASIDES)
        self.teachers[teacher] = changed(
            colleague, strikes=0, asides=colleague.asides + 1, aside_until_s=self.now_s + aside_s
        )
        for number in colleague.holds:
            self._take_back(teacher, number)
            self.actions.append(events.Withdraw(teacher, number))

    def offer(self, after: Window) -> dict[str, Colleague]:
        """Tell idle teachers of tasks, one for each task, and the fastest first; those teachers.

        Args:
            after: Window of this draft.
        """
        hedge = _Hedge.of(after, self.now_s)
        needed = after.tasks or int(hedge.number is not None)
        if not needed:
            return {}
        idle = [
            (one.answer_s, name)
            for name, one in after.teachers.items()
            if one.is_idle and not one.holds and one.invited_s is None and one.aside_until_s <= self.now_s
        ]
        if idle:
            invited_s = [one.invited_s for one in after.teachers.values() if one.invited_s is not None]
            needed -= sum(self.now_s - one_s < INVITED_S for one_s in invited_s)
        invited: dict[str, Colleague] = {}
        for _, name in sorted(idle):
            if len(invited) >= needed:
                break
            if self._choose(name, hedge) is not None:
                invited[name] = changed(after.teachers[name], is_idle=False, invited_s=self.now_s)
                self.actions.append(events.Invite(name))
        return invited
