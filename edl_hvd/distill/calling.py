"""The student's end of its connections to teachers: one thread, one selector.

``Calling`` holds the window. What the loader does and what teachers say are events of it; the thread carries out
what follows from them. It knows bytes and numbers, neither tensors nor what a place means.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from edl_hvd import events
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.distill import conversation as say
from edl_hvd.distill import same_host, window_events
from edl_hvd.distill.address_book import AddressBook, Fault
from edl_hvd.distill.call import Call, LastingError, Wishes, check_equal
from edl_hvd.distill.conversation import Address
from edl_hvd.distill.place import Place
from edl_hvd.distill.stages import Stages, StageTimes
from edl_hvd.distill.turns import turn
from edl_hvd.distill.window import Window
from edl_hvd.errors import ProtocolError
from edl_hvd.frames import Array, ArrayType, Frame, FrameStream, Limits
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

_LOOK_EVERY_S = 0.5
_OWN_PAUSE_S = 1.0
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Outlook:
    """How many teachers there are, and why not more.

    Attributes:
        ready: Number of teachers that are ready.
        short_s: Seconds since there was one.
        faults: Reason for each address without one.
        window: Window as it is now.
        poisoned: Task that several teachers were lost with, or ``None``.
        times: Where the time of a micro-batch of this pass goes.
    """

    ready: int
    short_s: float
    faults: Mapping[Address, Fault]
    window: Window
    poisoned: window_events.Poisoned | None
    times: StageTimes


_all: weakref.WeakSet[Calling] = weakref.WeakSet()


def _close_in_child() -> None:
    # A loader's process that holds them open would keep a dead student alive for its teachers.
    for calling in list(_all):
        calling.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


class Calling:
    """Connections to all teachers, and the window of tasks. Any thread; methods do not block but ``close``.

    Args:
        wishes: What every teacher is asked for.
        token: Gives the token at every call, so that it may be replaced; may raise ``EdlHvdError``.
        limit_bytes: Memory for tasks.
        check: Tells why an answer is none; empty if it is one.
        tell: Gets events.
        changed: Condition that is notified of whatever changes; several may share one.
        met: Gets the fingerprint of the first teacher.
    """

    def __init__(
        self,
        wishes: Wishes,
        token: Callable[[], str],
        limit_bytes: int,
        check: Callable[[tuple[Array, ...]], str],
        tell: Callable[[events.Event], None],
        changed: threading.Condition | None = None,
        clock: Clock = SYSTEM_CLOCK,
        met: Callable[[str], None] = lambda fingerprint: None,
    ) -> None:
        self.changed, self._met = changed or threading.Condition(), met
        self._wishes, self._token, self._check, self._tell, self._clock = wishes, token, check, tell, clock
        self._window = Window(limit_bytes)
        self._arrays: dict[int, tuple[tuple[Array, ...], int]] = {}
        self._answers: dict[int, tuple[Array, ...]] = {}
        self._poisoned: window_events.Poisoned | None = None
        self._stages = Stages()
        self._outbox: deque[window_events.Action] = deque()
        self._hello: say.Hello | None = None
        self._teaching: say.Teaching | None = None
        self._must_renew = self._must_greet = False
        self._book = AddressBook()
        self._ready_s = clock.monotonic_s()
        # Of the thread alone:
        self._calls: dict[Address, Call] = {}
        self._processes: dict[str, Address] = {}
        self._not_beside: set[Address] = set()
        self._looked_s = self._turned_s = clock.monotonic_s()
        self._dial_s = 0.0
        self._due_of, self._due_s = self._window, math.inf
        self._closing = False
        self._bell, self._bell_rope = socket.socketpair()
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        _all.add(self)
        self._thread = threading.Thread(target=self._serve, name="edl_hvd teachers", daemon=True)
        self._thread.start()

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
        self, place: Place, size_bytes: int, arrays: tuple[Array, ...], known: tuple[Array, ...] | None = None
    ) -> int:
        """Add a task; returns its number.

        Args:
            place: Place of the micro-batch.
            size_bytes: Memory that it takes until it is consumed.
            arrays: What to send.
            known: Its answer, if it is known.
        """
        with self.changed:
            event = window_events.Read(place, size_bytes, is_answered=known is not None)
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
                self._handle(window_events.Consumed(self._window.limit_bytes if is_final else size_bytes))
            return answer

    @property
    def window(self) -> Window:
        """Window as it is now."""
        return self._window

    @property
    def has_room(self) -> bool:
        """Whether one more task fits."""
        return self._window.has_room

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

    def close(self) -> None:
        """End all connections and the thread."""
        self._closing = True
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def close_in_child(self) -> None:
        """In a forked process: close the copies of the sockets."""
        for call in list(self._calls.values()):
            call.stream.connection.close()
        self._bell.close()
        self._bell_rope.close()
        with suppress(OSError):
            self._selector.close()

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
        if self._outbox and threading.current_thread() is not self._thread:
            self._ring()
        self.changed.notify_all()

    def _ring(self) -> None:
        with suppress(OSError):  # full, so it rings already; or closed
            self._bell_rope.send(b"!")

    # --- the thread ---

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._renew()
                self._dial()
                self._carry_out()
                for key, mask in self._selector.select(self._patience_s()):
                    call: Call | None = key.data
                    if call is None:
                        with suppress(OSError):
                            self._bell.recv(1 << 12)
                    elif self._calls.get(call.address) is call:
                        self._go_on(call, mask)
                self._look()
        finally:
            for call in list(self._calls.values()):
                self._drop(call, Fault("the student ended"), kindly=True)
            self._selector.close()
            self._bell.close()
            self._bell_rope.close()

    def _patience_s(self) -> float:
        now_s = self._clock.monotonic_s()
        if self._outbox:
            return 0.0
        return max(0.0, min(self._looked_s + _LOOK_EVERY_S, self._dial_s, self._window_due_s()) - now_s)

    def _window_due_s(self) -> float:
        """When time alone changes the window; counted from its last turn, so that no moment is missed."""
        with self.changed:
            if self._due_of is not self._window:
                due_s = self._window.due_s(self._turned_s)
                self._due_of, self._due_s = self._window, math.inf if due_s is None else due_s
            return self._due_s

    def _look(self) -> None:
        """What time brings. Most rounds of the loop are for a part of an answer, and nothing is due."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._window_due_s():
            self.handle(window_events.Passed())
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return
        slept = now_s - self._looked_s > _LOOK_EVERY_S + _OWN_PAUSE_S
        self._looked_s = now_s
        self.handle(window_events.Passed())
        for call in list(self._calls.values()):
            if call.deadline_s is not None and now_s > call.deadline_s:
                self._drop(call, Fault(f"it did not answer ({call.stage}) for a long time"))
            elif not slept and call.stage == "ready" and unanswered_s(call.stream.connection) > UNANSWERED_S:
                self._drop(call, Fault(f"its host has not answered for {UNANSWERED_S:g} s"))

    def _renew(self) -> None:
        if not self._must_renew:
            return
        with self.changed:
            self._must_renew, self._teaching = False, None
        for call in list(self._calls.values()):
            self._drop(call, Fault("the inputs have changed"), kindly=True)
        with self.changed:
            self._book.call_at_once()
            self._dial_s = 0.0

    def _dial(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._dial_s:
            return
        with self.changed:
            due = self._book.due(self._calls, now_s)
        for address, numeric in due.items():
            self._call(address, numeric, now_s)
        with self.changed:
            next_s = self._book.next_due_s(self._calls)
            self._dial_s = math.inf if next_s is None else next_s

    def _call(self, address: Address, numeric: str, now_s: float) -> None:
        # One that could not be used may belong to somebody else.
        beside = None if address in self._not_beside else same_host.connect(numeric, address.port)
        stream = beside or socket.socket(same_host.family_of(numeric), socket.SOCK_STREAM)
        stream.setblocking(False)
        if beside is None:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_answers(stream)
        call = Call(address, FrameStream(stream, Limits(say.STRANGER_HEADER_BYTES)), now_s)
        self._calls[address] = call
        problem = stream.connect_ex((numeric, address.port)) if beside is None else 0
        self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, call)
        if problem not in (0, errno.EINPROGRESS):
            self._drop(call, Fault(os.strerror(problem)))

    def _go_on(self, call: Call, mask: int) -> None:
        try:
            if call.stage == "connecting":
                problem = call.stream.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                self._greet(call)
            if mask & selectors.EVENT_READ:
                while self._calls.get(call.address) is call and (frame := call.stream.receive()) is not None:
                    self._hear(call, frame)
            if self._calls.get(call.address) is call:
                self._flush(call)
        except EOFError as error:
            self._drop(call, Fault(str(error)), kindly=call.is_leaving)
        except OSError as error:
            self._drop(call, Fault(error.strerror or str(error)), kindly=call.is_leaving)
        except ProtocolError as error:
            self._drop(call, Fault(str(error), is_lasting=True), kindly=True)
        except LastingError as error:
            self._drop(call, Fault(str(error), is_lasting=True), kindly=True)

    def _flush(self, call: Call) -> None:
        needs_write = not call.stream.flush()
        if needs_write != call.needs_write:
            call.needs_write = needs_write
            self._selector.modify(
                call.stream.connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if needs_write else 0), call
            )

    def _greet(self, call: Call) -> None:
        try:
            token = self._token()
        except Exception as error:  # a file that does not read, a token that is none
            raise LastingError(f"there is no token to prove: {error}") from error
        call.greet(token)

    # --- what teachers say ---

    def _hear(self, call: Call, frame: Frame) -> None:
        message, name = call.hear(frame), str(call.address)
        self._must_greet = self._must_greet or call.stage == "waiting"
        match message:
            case say.Teaching():
                self._welcome(call, message)
            case say.Want():
                self.handle(window_events.Wanted(name))
            case say.Cannot(number, why):
                self.handle(window_events.Declined(name, number, say.shorten(why)))
            case say.Answer():
                self._take_answer(name, message, frame.arrays)
        self._carry_out()

    def _welcome(self, call: Call, teaching: say.Teaching) -> None:
        twin = self._processes.get(teaching.process)
        if twin is not None:
            raise LastingError(f"it is the same process as the teacher at {twin}; list it once")
        check_equal(teaching, self._teaching, self._wishes)
        with self.changed:
            if self._teaching is None:
                self._teaching = teaching
                self._met(teaching.fingerprint)
            self._book.joined(call.address)
        self._processes[teaching.process] = call.address
        self._tell(events.TeacherJoined(str(call.address), teaching.model, teaching.fingerprint))
        self.handle(window_events.TeacherReady(str(call.address), teaching.process))

    def _take_answer(self, name: str, answer: say.Answer, arrays: tuple[Array, ...]) -> None:
        why, number = self._check(arrays), answer.number
        if why:
            self._tell(events.TeacherRefused(name, why))
            self.handle(window_events.Declined(name, number, why))
            return
        with self.changed:
            teacher = self._window.teachers.get(name)
            if teacher is not None and number in teacher.holds:
                self._answers[number] = arrays
                self._stages.answered(number, answer.waited_s, answer.compute_s, self._clock.monotonic_s())
                self._handle(window_events.Answered(name, number))

    # --- what follows ---

    def _carry_out(self) -> None:
        while True:
            with self.changed:
                if not self._outbox:
                    break
                action = self._outbox.popleft()
                call = self._calls.get(_address(action))
                if call is None or call.stage != "ready":
                    continue
                self._do(call, action)
            self._send(call)
        if self._must_greet and self._hello is not None:
            self._must_greet = False
            for call in list(self._calls.values()):
                if call.stage == "waiting":
                    call.say_hello(self._hello, self._clock.monotonic_s())
                    self._send(call)

    def _do(self, call: Call, action: window_events.Action) -> None:
        window = self._window
        match action:
            case window_events.GiveTask(_, number, is_alone, tasks, lead):
                if number in self._arrays:  # else the pass is over
                    arrays, samples = self._arrays[number]
                    self._stages.given(number, self._clock.monotonic_s())
                    call.give(say.Give(number, samples, is_alone, tasks, lead), arrays)
            case window_events.GiveNothing():
                call.put(say.Nothing())
            case window_events.Invite():
                call.put(say.Have(max(1, window.tasks), window.lead))
            case window_events.Withdraw(_, number):
                call.put(say.Forget(number))

    def _send(self, call: Call) -> None:
        try:
            self._flush(call)
        except OSError as error:
            self._drop(call, Fault(error.strerror or str(error)))

    def _drop(self, call: Call, fault: Fault, kindly: bool = False) -> None:
        """End a connection; its tasks wait again."""
        address, now_s = call.address, self._clock.monotonic_s()
        with suppress(KeyError, ValueError):
            self._selector.unregister(call.stream.connection)
        call.stream.connection.close()
        del self._calls[address]
        for process in [name for name, where in self._processes.items() if where == address]:
            del self._processes[process]
        with self.changed:
            known = self._book.faults.get(address)
            self._book.ended(address, fault, len(self._book.listed) - len(self._calls), now_s)
            self._dial_s = 0.0
            was_ready = str(address) in self._window.teachers
            self._handle(window_events.Left(str(address), kindly))
            if call.stage == "ready":
                self._not_beside.discard(address)
            elif call.stream.connection.family == socket.AF_UNIX and not self._closing:
                self._not_beside.add(address)
                self._book.call_at_once(address)
            if was_ready and not self._window.teachers:
                self._ready_s = now_s
        if self._closing:
            return
        if was_ready:
            self._tell(events.TeacherLost(str(address), "it left" if call.is_leaving else fault.why, call.tasks))
        elif fault.is_lasting and (known is None or known.why != fault.why):
            self._tell(events.TeacherRefused(str(address), fault.why))


def _address(action: window_events.Action) -> Address:
    host, _, port = getattr(action, "teacher", "").rpartition(":")
    return Address(host, int(port or 0))
