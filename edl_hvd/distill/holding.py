"""The micro-batches of a student: what is sent, what is answered, and the window that decides about them.

What the loader does, and what teachers say, are events of the window. ``calling.py`` carries out what follows for
teachers of this package, and ``requesting.py`` for servers of the Open Inference Protocol. Here are bytes and numbers,
neither tensors nor what a place means.
"""

from __future__ import annotations

import os
import ssl
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from edl_hvd import events
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.distill import conversation as say
from edl_hvd.distill import window_events
from edl_hvd.distill.address_book import AddressBook, Fault
from edl_hvd.distill.call import Wishes
from edl_hvd.distill.conversation import Address
from edl_hvd.distill.place import Place
from edl_hvd.distill.stages import Stages
from edl_hvd.distill.turns import turn
from edl_hvd.distill.window import Window
from edl_hvd.frames import Array, ArrayType
from edl_hvd.stage_times import StageTimes


@dataclass(frozen=True)
class Terms:
    """What a student's connections are made with; the same for teachers of this package and for other servers.

    Attributes:
        wishes: What every teacher is asked for.
        limit_bytes: Memory for tasks.
        context: How teachers are verified by TLS; ``None`` where they are not.
        check: Tells why an answer is none; empty if it is one.
        tell: Gets events.
        met: Gets the fingerprint of the first teacher.
        changed: Condition that is notified of whatever changes; several connections may share one.
        clock: Clock of all times.
    """

    wishes: Wishes
    limit_bytes: int
    context: ssl.SSLContext | None
    check: Callable[[tuple[Array, ...]], str]
    tell: Callable[[events.Event], None]
    met: Callable[[str], None]
    changed: threading.Condition
    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True)
class Outlook:
    """How many teachers there are, and why not more.

    Attributes:
        ready: Number of teachers that are ready.
        short_s: Seconds since there was one.
        faults: Reason for each address without one.
        window: Window as it is now.
        poisoned: Task that several teachers were lost with, or ``None``.
        times: Where the time of a micro-batch of this pass goes; ``None`` before its first answer.
    """

    ready: int
    short_s: float
    faults: Mapping[Address, Fault]
    window: Window
    poisoned: window_events.Poisoned | None
    times: StageTimes | None


_UNAWAITED = (window_events.Wanted, window_events.Asked, window_events.Passed)
# They bring neither an answer nor room, nor anything else that a thread waits for.

_all: weakref.WeakSet[Holding] = weakref.WeakSet()


def _close_in_child() -> None:
    # A loader's process that holds them open would keep a dead student alive for its teachers.
    for holding in list(_all):
        holding.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


class Holding(ABC):
    """The window of tasks, with their inputs and answers. Any thread; methods do not block but ``close``.

    Args:
        terms: What it is made with.
    """

    _thread: threading.Thread

    def __init__(self, terms: Terms) -> None:
        self._terms, self._clock, self.changed = terms, terms.clock, terms.changed
        # ``require`` replaces them.
        self._wishes = terms.wishes
        self._window = Window(terms.limit_bytes)
        self._arrays: dict[int, tuple[tuple[Array, ...], int]] = {}
        self._answers: dict[int, tuple[Array, ...]] = {}
        self._poisoned: window_events.Poisoned | None = None
        self._stages = Stages()
        self._outbox: deque[window_events.Action] = deque()
        self._hello: say.Hello | None = None
        self._teaching: say.Teaching | None = None
        self._must_renew = self._must_greet = False
        self._book = AddressBook()
        self._ready_s = self._turned_s = self._clock.monotonic_s()
        self._dial_s = 0.0

    def _begin(self, thread: threading.Thread) -> None:
        _all.add(self)
        self._thread = thread
        thread.start()

    @abstractmethod
    def _ring(self) -> None:
        """Wake the thread that carries out what follows."""

    @abstractmethod
    def close(self) -> None:
        """End all connections and threads."""

    @abstractmethod
    def close_in_child(self) -> None:
        """In a forked process: close the copies of the sockets."""

    # --- for the loader, from any thread ---

    def set_addresses(self, addresses: Mapping[Address, str]) -> None:
        """Call these from now on. A teacher that is listed no more stays until its connection ends.

        Args:
            addresses: IPv4 or IPv6 address of each.
        """
        with self.changed:
            self._book.list(addresses)
            self._dial_s = 0.0
        self._ring()

    def blame(self, address: Address, why: str) -> None:
        """Note why an address cannot be called."""
        with self.changed:
            self._book.faults[address] = Fault(why)

    def expect(self, send: tuple[ArrayType, ...], micro_batch: int) -> None:
        """Say what will be sent; needed before the first task. Said again, it begins the conversations anew."""
        with self.changed:
            known = self._hello
            if known is not None and known.send == send and known.micro_batch >= micro_batch:
                return
            wishes = self._wishes
            if known is not None and known.send != send:
                self._handle(window_events.Closed(is_final=True))
            self._hello = say.Hello(wishes.job, wishes.student, send, micro_batch, wishes.outputs, wishes.exact)
            self._must_renew, self._must_greet = known is not None, True
        self._ring()

    def require(self, fingerprint: str) -> None:
        """Use only teachers with this fingerprint from now on; empty for those of the first one.

        Args:
            fingerprint: Fingerprint, as a script or a checkpoint names it.
        """
        with self.changed:
            if not fingerprint or fingerprint == self._wishes.fingerprint:
                return
            self._wishes = replace(self._wishes, fingerprint=fingerprint)
            if self._teaching is not None and self._teaching.fingerprint != fingerprint:
                self._handle(window_events.Closed(is_final=True))
                self._must_renew = self._must_greet = True
        self._ring()

    def read(
        self, place: Place, size_bytes: int, arrays: tuple[Array, ...], known: tuple[Array, ...] | None = None,
        checks: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """Add a task; returns its number.

        Args:
            place: Place of the micro-batch.
            size_bytes: Memory that it takes until it is consumed.
            arrays: What to send.
            known: Its answer, if it is known.
            checks: Checks of its inputs, for places that may be read again.
        """
        with self.changed:
            event = window_events.Read(place, size_bytes, is_answered=known is not None, checks=checks)
            number = self._window.number_of(event)
            self._arrays[number] = (arrays, place.samples)
            if known is not None:
                self._answers[number] = known
            self._stages.read(number, self._clock.monotonic_s())
            self._handle(event)
            return number

    def handle(self, event: window_events.WindowEvent) -> None:
        """Let the window know."""
        with self.changed:
            self._handle(event)

    def take(self, number: int, is_final: bool = False) -> tuple[Array, ...] | None:
        """The answer to the oldest task, which is consumed by this; ``None`` if it is not there.

        Args:
            number: Number of the oldest task.
            is_final: Whether the answer is not kept for a pass that begins at an earlier place.
        """
        with self.changed:
            answer = self._answers.get(number)
            if answer is not None:
                self._arrays.pop(number, None)
                self._stages.consumed(number, self._clock.monotonic_s())
                size_bytes = sum(one.type.size_bytes for one in answer)
                kept_bytes = self._window.limit_bytes if is_final else size_bytes
                self._handle(window_events.Consumed(kept_bytes, is_asked=not is_final))
            return answer

    @property
    def window(self) -> Window:
        """Window as it is now."""
        return self._window

    @property
    def has_room(self) -> bool:
        """Whether one more task fits."""
        return self.has_room_beside(0)

    def has_room_beside(self, others: int) -> bool:
        """Whether one more task fits beside this number of others, all as large as the largest."""
        return self._window.has_room_beside(others)

    def answer_to(self, number: int) -> tuple[Array, ...] | None:
        """The answer to any task; ``None`` if it is not there."""
        return self._answers.get(number)

    def end_pass(self, is_final: bool = False) -> None:
        """Drop all tasks that no teacher has; the next pass takes the others over, unless this is the last one."""
        with self.changed:
            self._handle(window_events.Closed(is_final))
            at_teachers = {one.number for one in self._window.left.values() if one.entry.holders}
            # A task may not have been sent yet.
            self._arrays = {number: sent for number, sent in self._arrays.items() if number in at_teachers}
            self._poisoned = None
            self._stages = Stages()

    def outlook(self) -> Outlook:
        """How things stand."""
        with self.changed:
            ready = len(self._window.teachers)
            short_s = 0.0 if ready else self._clock.monotonic_s() - self._ready_s
            return Outlook(ready, short_s, dict(self._book.faults), self._window, self._poisoned, self._stages.times)

    @property
    def times(self) -> StageTimes | None:
        """Where the time of a micro-batch of this pass goes, from reading to consuming; ``None`` before an answer."""
        with self.changed:
            return self._stages.times

    @property
    def is_expecting(self) -> bool:
        """Whether it is known what will be sent, so that teachers are greeted."""
        return self._hello is not None

    @property
    def teaching(self) -> say.Teaching | None:
        """What the first teacher has said of itself; ``None`` before."""
        return self._teaching

    @property
    def answer_row_bytes(self) -> int:
        """Bytes of the answer to one sample; 0 before the first teacher."""
        with self.changed:
            return say.row_bytes(self._teaching.answer) if self._teaching else 0

    # --- for whoever talks with teachers ---

    def _handle(self, event: window_events.WindowEvent) -> None:
        self._turned_s = self._clock.monotonic_s()
        result = turn(self._window, event, self._turned_s)
        self._window = result.window
        for action in result.actions:
            match action:
                case window_events.Poisoned():
                    self._poisoned = action
                case window_events.Accept(number):
                    self._arrays.pop(number, None)
                case window_events.Drop(number):
                    self._arrays.pop(number, None)
                    self._answers.pop(number, None)
                case _:
                    self._outbox.append(action)
        if self._outbox:
            self._ring()
        if not isinstance(event, _UNAWAITED):
            self.changed.notify_all()

    def _take_answer(self, name: str, answer: say.Answer, arrays: tuple[Array, ...]) -> None:
        why, number = self._terms.check(arrays), answer.number
        if why:
            self._terms.tell(events.TeacherRefused(name, why))
            self.handle(window_events.Declined(name, number, why))
            return
        with self.changed:
            teacher = self._window.teachers.get(name)
            if teacher is not None and number in teacher.holds:
                self._answers[number] = arrays
                self._stages.answered(number, answer.waited_s, answer.compute_s, self._clock.monotonic_s())
                size_bytes = sum(one.type.size_bytes for one in arrays)
                self._handle(window_events.Answered(name, number, size_bytes))
