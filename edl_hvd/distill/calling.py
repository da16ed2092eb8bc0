"""The student's end of its connections to teachers: one thread, one selector.

``Calling`` holds the window. What the loader does and what teachers say are window_events of it; the thread carries out
what follows from them. It knows bytes and numbers, neither tensors nor what a place means.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from edl_hvd import events
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.distill import conversation as say
from edl_hvd.distill import proof
from edl_hvd.distill.conversation import Address, Message, decode, encode
from edl_hvd.distill.place import Place
from edl_hvd.distill.window import Window, turn
from edl_hvd.distill.window_events import (
    Accept,
    Action,
    Answered,
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
from edl_hvd.errors import ProtocolError
from edl_hvd.frames import Array, ArrayType, Frame, FrameStream, Limits
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

_TEACHING_S = 120.0
# A teacher that computes for others answers a hello after that.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0
# Between two calls. A teacher that is back is found within a second.
_CALLS_PER_S = 50.0
# Of addresses without a teacher; a connection that is refused costs 0.1 ms.
_FAULT_PAUSE_S, _LONGEST_FAULT_PAUSE_S = 10.0, 160.0
# After what does not heal by itself, such as another token.
_LOOK_EVERY_S = 0.5
_OWN_PAUSE_S = 1.0
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Wishes:
    """What a student asks of every teacher.

    Attributes:
        job, student, outputs, exact: See :class:`~edl_hvd.distill.conversation.Hello`.
        fingerprint: Fingerprint that a teacher must have; empty for that of the first teacher.
    """

    job: str
    student: str
    outputs: str
    exact: bool
    fingerprint: str = ""


@dataclass(frozen=True)
class Fault:
    """Why there is no teacher at an address.

    Attributes:
        why: Reason in words.
        is_lasting: Whether it stays until a person changes something, such as a wrong token.
    """

    why: str
    is_lasting: bool = False


@dataclass(frozen=True)
class Outlook:
    """How many teachers there are, and why not more.

    Attributes:
        ready: Number of teachers that are ready.
        short_s: Seconds since there was one.
        faults: Reason for each address without one.
        window: Window as it is now.
        poisoned: Task that several teachers were lost with, or ``None``.
    """

    ready: int
    short_s: float
    faults: Mapping[Address, Fault]
    window: Window
    poisoned: Poisoned | None


@dataclass
class _Call:
    """A connection to a teacher.

    Attributes:
        stage: "connecting", "nonce", "proof", "waiting" (no hello was said yet), "teaching" or "ready".
        deadline_s: When the present stage has taken too long; ``None``: never.
        given: Tasks that it has not answered.
        needs_write: Whether the selector watches for room to write.
    """

    address: Address
    stream: FrameStream
    stage: str
    deadline_s: float | None
    nonce: str = ""
    token: str = ""
    given: dict[int, int] | None = None
    is_leaving: bool = False
    needs_write: bool = True


class _Lasting(Exception):
    """A teacher cannot be used until a person changes something."""


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
    """

    def __init__(
        self,
        wishes: Wishes,
        token: Callable[[], str],
        limit_bytes: int,
        check: Callable[[tuple[Array, ...]], str],
        tell: Callable[[events.Event], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.changed = threading.Condition()
        self._wishes, self._token, self._check, self._tell, self._clock = wishes, token, check, tell, clock
        self._window = Window(limit_bytes)
        self._arrays: dict[int, tuple[tuple[Array, ...], int]] = {}
        self._answers: dict[int, tuple[Array, ...]] = {}
        self._poisoned: Poisoned | None = None
        self._outbox: deque[Action] = deque()
        self._hello: say.Hello | None = None
        self._teaching: say.Teaching | None = None
        self._must_renew = False
        self._addresses: dict[Address, str] = {}
        self._faults: dict[Address, Fault] = {}
        self._ready_s = clock.monotonic_s()
        # Of the thread alone:
        self._calls: dict[Address, _Call] = {}
        self._due_s: dict[Address, float] = {}
        self._pauses_s: dict[Address, float] = {}
        self._processes: dict[str, Address] = {}
        self._looked_s = clock.monotonic_s()
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
            self._addresses = dict(addresses)
            for gone in set(self._faults) - set(addresses):
                del self._faults[gone]
        self._ring()

    def blame(self, address: Address, why: str) -> None:
        """Note why an address cannot be called."""
        with self.changed:
            self._faults[address] = Fault(why)

    def expect(self, send: tuple[ArrayType, ...], micro_batch: int) -> None:
        """Say what will be sent; needed before the first task. Said again, it begins the conversations anew."""
        with self.changed:
            known = self._hello
            if known is not None and known.send == send and known.micro_batch >= micro_batch:
                return
            wishes = self._wishes
            self._hello = say.Hello(wishes.job, wishes.student, send, micro_batch, wishes.outputs, wishes.exact)
            self._must_renew = known is not None
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
            number = self._window.next_number
            self._arrays[number] = (arrays, place.samples)
            if known is not None:
                self._answers[number] = known
            self._handle(Read(place, size_bytes, is_answered=known is not None))
            return number

    def handle(self, event: WindowEvent) -> None:
        """Let the window know."""
        with self.changed:
            self._handle(event)

    def take(self, number: int) -> tuple[Array, ...] | None:
        """The answer to the oldest task, which is consumed by this; ``None`` if it is not there."""
        with self.changed:
            answer = self._answers.pop(number, None)
            if answer is not None:
                self._arrays.pop(number, None)
                self._handle(Consumed())
            return answer

    def end_pass(self) -> dict[Place, tuple[Array, ...]]:
        """Drop all tasks. Returns the answers that were not consumed."""
        with self.changed:
            entries = self._window.entries
            left = {entries[number].place: answer for number, answer in self._answers.items() if number in entries}
            self._handle(Closed())
            self._arrays.clear()
            self._answers.clear()
            self._poisoned = None
            return left

    def outlook(self) -> Outlook:
        """How things stand."""
        with self.changed:
            ready = len(self._window.teachers)
            short_s = 0.0 if ready else self._clock.monotonic_s() - self._ready_s
            return Outlook(ready, short_s, dict(self._faults), self._window, self._poisoned)

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

    def _handle(self, event: WindowEvent) -> None:
        result = turn(self._window, event, self._clock.monotonic_s())
        self._window = result.window
        for action in result.actions:
            if isinstance(action, Poisoned):
                self._poisoned = action
            elif not isinstance(action, Accept):
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
                    call: _Call | None = key.data
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
        with self.changed:
            if self._outbox:
                return 0.0
            moments = [self._window.due_s(now_s)]
        moments += [due_s for address, due_s in self._due_s.items() if address not in self._calls]
        return max(0.0, min([now_s + _LOOK_EVERY_S, *(moment for moment in moments if moment is not None)]) - now_s)

    def _look(self) -> None:
        """What time brings."""
        now_s = self._clock.monotonic_s()
        slept = now_s - self._looked_s > _LOOK_EVERY_S + _OWN_PAUSE_S
        self._looked_s = now_s
        self.handle(Passed())
        for call in list(self._calls.values()):
            if call.deadline_s is not None and now_s > call.deadline_s:
                self._drop(call, Fault(f"it did not answer ({call.stage}) for a long time"))
            elif not slept and call.stage == "ready" and unanswered_s(call.stream.connection) > UNANSWERED_S:
                self._drop(call, Fault(f"its host has not answered for {UNANSWERED_S:g} s"))

    def _renew(self) -> None:
        with self.changed:
            must, self._must_renew = self._must_renew, False
            if must:
                self._teaching = None
        if must:
            for call in list(self._calls.values()):
                self._drop(call, Fault("the inputs have changed"), kindly=True)
                self._due_s[call.address] = 0.0

    def _dial(self) -> None:
        now_s = self._clock.monotonic_s()
        with self.changed:
            addresses = dict(self._addresses)
        for gone in set(self._due_s) - set(addresses) - set(self._calls):
            del self._due_s[gone]
        for address, numeric in addresses.items():
            if address not in self._calls and self._due_s.get(address, 0.0) <= now_s:
                self._call(address, numeric, now_s)

    def _call(self, address: Address, numeric: str, now_s: float) -> None:
        stream = socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM)
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ask_for_answers(stream)
        limits = Limits(say.STRANGER_HEADER_BYTES)
        call = _Call(address, FrameStream(stream, limits), "connecting", now_s + say.PROOF_S, given={})
        self._calls[address] = call
        problem = stream.connect_ex((numeric, address.port))
        self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, call)
        if problem not in (0, errno.EINPROGRESS):
            self._drop(call, Fault(os.strerror(problem)))

    def _go_on(self, call: _Call, mask: int) -> None:
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
        except _Lasting as error:
            self._drop(call, Fault(str(error), is_lasting=True), kindly=True)

    def _flush(self, call: _Call) -> None:
        needs_write = not call.stream.flush()
        if needs_write != call.needs_write:
            call.needs_write = needs_write
            self._selector.modify(
                call.stream.connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if needs_write else 0), call
            )

    def _greet(self, call: _Call) -> None:
        try:
            call.token = self._token()
        except Exception as error:  # a file that does not read, a token that is none
            raise _Lasting(f"there is no token to prove: {error}") from error
        call.nonce, call.stage = proof.new_nonce(), "nonce"
        call.stream.put(encode(say.Nonce(say.PROTOCOL, call.nonce)))

    # --- what teachers say ---

    def _hear(self, call: _Call, frame: Frame) -> None:
        match call.stage:
            case "nonce":
                self._take_nonce(call, decode(frame, say.NONCE))
            case "proof":
                self._take_proof(call, decode(frame, say.PROOF))
            case "waiting":
                decode(frame, say.vocabulary(say.Leaving))
                raise EOFError("it is leaving")
            case "teaching":
                self._take_teaching(call, decode(frame, say.FROM_NEW_TEACHER))
            case "ready":
                self._take_ready(call, frame)

    def _take_nonce(self, call: _Call, message: Message) -> None:
        assert isinstance(message, say.Nonce)
        if message.protocol != say.PROTOCOL or not proof.is_nonce(message.nonce):
            raise ProtocolError(
                f"it speaks protocol {message.protocol}; expected {say.PROTOCOL}: install the same version of edl_hvd"
            )
        call.stream.put(encode(say.Proof(proof.prove(call.token, proof.STUDENT, call.nonce, message.nonce))))
        # Needed once more, for the other's proof.
        call.nonce, call.stage = f"{message.nonce} {call.nonce}", "proof"

    def _take_proof(self, call: _Call, message: Message) -> None:
        if isinstance(message, say.Refuse):
            raise _Lasting(f"it refused: {say.shorten(message.why)}")
        assert isinstance(message, say.Proof)
        theirs, ours = call.nonce.split()
        if not proof.is_proof(message.proof, call.token, proof.TEACHER, theirs, ours):
            raise _Lasting("it holds another token; give both sides the same EDL_HVD_TEACHERS_TOKEN")
        call.stage, call.deadline_s = "waiting", None
        self._say_hello(call)

    def _say_hello(self, call: _Call) -> None:
        if self._hello is not None and call.stage == "waiting":
            call.stage, call.deadline_s = "teaching", self._clock.monotonic_s() + _TEACHING_S
            call.stream.limits = Limits(say.HEADER_BYTES)
            call.stream.put(encode(self._hello))

    def _take_teaching(self, call: _Call, message: Message) -> None:
        if isinstance(message, say.Refuse):
            raise _Lasting(f"it refused: {say.shorten(message.why)}")
        if isinstance(message, say.Leaving):
            raise EOFError("it is leaving")
        assert isinstance(message, say.Teaching)
        assert self._hello is not None
        twin = self._processes.get(message.process)
        if twin is not None:
            raise _Lasting(f"it is the same process as the teacher at {twin}; list it once")
        self._compare(message)
        with self.changed:
            if self._teaching is None:
                self._teaching = message
            self._faults.pop(call.address, None)
        call.stage, call.deadline_s = "ready", None
        call.stream.limits = Limits(say.HEADER_BYTES, say.row_bytes(message.answer) * self._hello.micro_batch)
        self._processes[message.process] = call.address
        self._pauses_s.pop(call.address, None)
        self._tell(events.TeacherJoined(str(call.address), message.model, message.fingerprint))
        self.handle(TeacherReady(str(call.address), message.process))

    def _compare(self, teaching: say.Teaching) -> None:
        """Raise ``_Lasting`` where answers of this teacher are not those of the first one."""
        first = self._teaching
        wanted = self._wishes.fingerprint or (first.fingerprint if first else "")
        if wanted and teaching.fingerprint != wanted:
            raise _Lasting(
                f"its model has fingerprint {teaching.fingerprint or 'none'}, the answers here come from {wanted}; "
                "serve the same weights everywhere, or start the student anew"
            )
        if first is not None and teaching.answer != first.answer:
            raise _Lasting(
                f"it answers {_show(teaching.answer)} per sample, the first teacher {_show(first.answer)}; serve the "
                "same model everywhere"
            )
        if first is not None and self._wishes.exact and teaching.probe != first.probe:
            raise _Lasting(
                "its answer to the same input has other bits than that of the first teacher; with exact=True use equal "
                "devices, versions of torch and numbers of threads"
            )

    def _take_ready(self, call: _Call, frame: Frame) -> None:
        message, name = decode(frame, say.FROM_TEACHER), str(call.address)
        if isinstance(message, say.Want):
            if call.is_leaving:
                call.stream.put(encode(say.Nothing()))
            else:
                self.handle(Wanted(name))
        elif isinstance(message, say.Leaving):
            call.is_leaving = True
        elif isinstance(message, say.Cannot):
            self._take_number(call, message.number)
            self.handle(Declined(name, message.number, say.shorten(message.why)))
        elif isinstance(message, say.Answer):
            samples = self._take_number(call, message.number)
            assert self._teaching is not None
            say.check_arrays(frame.arrays, self._teaching.answer, samples)
            why = self._check(frame.arrays)
            if why:
                self._tell(events.TeacherRefused(name, why))
                self.handle(Declined(name, message.number, why))
            else:
                self._accept(name, message.number, frame.arrays)
        self._carry_out()

    def _take_number(self, call: _Call, number: int) -> int:
        assert call.given is not None
        if number not in call.given:
            raise ProtocolError(f"it answered task {number}, which it was not given")
        return call.given.pop(number)

    def _accept(self, name: str, number: int, arrays: tuple[Array, ...]) -> None:
        with self.changed:
            entry = self._window.entries.get(number)
            if entry is not None and name in entry.holders:
                self._answers[number] = arrays
                self._handle(Answered(name, number))

    # --- what follows ---

    def _carry_out(self) -> None:
        while True:
            with self.changed:
                if not self._outbox:
                    break
                action = self._outbox.popleft()
                frame = self._frame_of(action)
            call = self._call_of(action)
            if call is None or frame is None or call.stage != "ready":
                continue
            if isinstance(action, GiveTask):
                assert call.given is not None
                call.given[action.number] = frame.fields["samples"]
            call.stream.put(frame)
            try:
                self._flush(call)
            except OSError as error:
                self._drop(call, Fault(error.strerror or str(error)))
        for call in list(self._calls.values()):
            if call.stage == "waiting" and self._hello is not None:
                self._say_hello(call)
                try:
                    self._flush(call)
                except OSError as error:
                    self._drop(call, Fault(error.strerror or str(error)))

    def _call_of(self, action: Action) -> _Call | None:
        name = getattr(action, "teacher", "")
        host, _, port = name.rpartition(":")
        return self._calls.get(Address(host, int(port))) if host else None

    def _frame_of(self, action: Action) -> Frame | None:
        window = self._window
        match action:
            case GiveTask(_, number, is_alone, tasks, lead):
                if number not in self._arrays:
                    return None  # the pass is over
                arrays, samples = self._arrays[number]
                return encode(say.Give(number, samples, is_alone, tasks, lead), arrays)
            case GiveNothing():
                return encode(say.Nothing())
            case Invite():
                return encode(say.Have(max(1, window.tasks), window.lead))
            case Withdraw(_, number):
                return encode(say.Forget(number))
        return None

    def _drop(self, call: _Call, fault: Fault, kindly: bool = False) -> None:
        """End a connection; its tasks wait again."""
        address, now_s = call.address, self._clock.monotonic_s()
        with suppress(KeyError, ValueError):
            self._selector.unregister(call.stream.connection)
        call.stream.connection.close()
        del self._calls[address]
        for process in [name for name, where in self._processes.items() if where == address]:
            del self._processes[process]
        with self.changed:
            is_listed = address in self._addresses
            known = self._faults.get(address)
            if is_listed:
                self._faults[address] = fault
            missing = len(self._addresses) - len(self._calls)
            was_ready, tasks = str(address) in self._window.teachers, len(call.given or ())
            self._handle(Left(str(address), kindly))
            if was_ready and not self._window.teachers:
                self._ready_s = now_s
        self._due_s[address] = now_s + self._next_pause_s(address, fault.is_lasting, missing)
        if self._closing:
            return
        if was_ready:
            self._tell(events.TeacherLost(str(address), "it left" if call.is_leaving else fault.why, tasks))
        elif fault.is_lasting and (known is None or known.why != fault.why):
            self._tell(events.TeacherRefused(str(address), fault.why))

    def _next_pause_s(self, address: Address, is_lasting: bool, missing: int) -> float:
        first_s = _FAULT_PAUSE_S if is_lasting else _FIRST_PAUSE_S
        longest_s = _LONGEST_FAULT_PAUSE_S if is_lasting else max(_LONGEST_PAUSE_S, missing / _CALLS_PER_S)
        pause_s = self._pauses_s.get(address, first_s)
        self._pauses_s[address] = min(longest_s, 2 * pause_s)
        return max(first_s, min(longest_s, pause_s))


def _show(types: tuple[ArrayType, ...]) -> str:
    return ", ".join(str(one) for one in types)
