"""The student's end of its connections to teachers: one thread, one selector.

What the loader does and what teachers say are events of the window, see ``holding.py``; the thread carries out what
follows from them.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from edl_hvd import events, tls
from edl_hvd.body_slots import SlotWriter
from edl_hvd.distill import conversation as say
from edl_hvd.distill import same_host, window_events
from edl_hvd.distill.address_book import Fault
from edl_hvd.distill.call import Call, LastingError, check_equal
from edl_hvd.distill.conversation import Address
from edl_hvd.distill.holding import Holding, Terms
from edl_hvd.errors import ProtocolError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Frame, Limits
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

_LOOK_EVERY_S = 0.5
_OWN_PAUSE_S = 1.0
_CLOSE_S = 5.0


class Calling(Holding):
    """Connections to all teachers; any thread, and nothing blocks but ``close``.

    Args:
        terms: See ``Holding``; without a context, connections are without TLS.
        token: Gives the token at every call, so that it may be replaced; may raise ``EdlHvdError``.
    """

    def __init__(self, terms: Terms, token: Callable[[], str]) -> None:
        super().__init__(terms)
        self._token, self._context = token, terms.context
        # Of the thread alone:
        self._calls: dict[Address, Call] = {}
        self._processes: dict[str, Address] = {}
        self._not_beside: set[Address] = set()
        self._slots = SlotWriter()
        self._looked_s = self._clock.monotonic_s()
        self._due_of, self._due_s = self._window, math.inf
        self._closing = False
        self._bell, self._bell_rope = socket.socketpair()
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._begin(threading.Thread(target=self._serve, name="edl_hvd teachers", daemon=True))

    def has_room_beside(self, others: int) -> bool:
        """Whether one more task fits beside this number of others, and the one in shared memory."""
        return super().has_room_beside(others + self._slots.is_used)

    def close(self) -> None:
        """End all connections and the thread."""
        self._closing = True
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def close_in_child(self) -> None:
        """In a forked process: close the copies of the sockets."""
        for call in list(self._calls.values()):
            call.stream.close()
        self._slots.close()
        self._bell.close()
        self._bell_rope.close()
        with suppress(OSError):
            self._selector.close()

    def _ring(self) -> None:
        if threading.current_thread() is self._thread and not self._closing:
            return  # it looks at what follows before it sleeps
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
            self._slots.close()
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
        """What time brings. Most rounds of the loop are for a part of an answer, and nothing is due.

        What this round has changed counts for the next one, which then does not sleep.
        """
        now_s = self._clock.monotonic_s()
        if now_s >= self._due_s:
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
        is_beside = self._context is None and address not in self._not_beside
        beside = None if not is_beside else same_host.connect(numeric, address.port)
        stream = beside or socket.socket(same_host.family_of(numeric), socket.SOCK_STREAM)
        stream.setblocking(False)
        if beside is None:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_answers(stream)
        call = Call(address, FrameStream(stream, Limits(say.STRANGER_HEADER_BYTES)), self._slots, now_s)
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
                if self._context is not None:
                    call.stream.connection = tls.wrap(call.stream.connection, self._context, call.address.host)
                self._greet(call)
            if mask & selectors.EVENT_READ:
                while self._calls.get(call.address) is call and (frame := call.stream.receive()) is not None:
                    self._hear(call, frame)
            if self._calls.get(call.address) is call:
                self._flush(call)
        except EOFError as error:
            self._drop(call, Fault(str(error)), kindly=call.is_leaving)
        except ssl.SSLError as error:
            self._drop(call, Fault(tls.explain(error), is_lasting=call.stage in ("connecting", "nonce")))
        except OSError as error:
            self._drop(call, Fault(error.strerror or str(error)), kindly=call.is_leaving)
        except ProtocolError as error:
            self._drop(call, Fault(str(error), is_lasting=True), kindly=True)
        except LastingError as error:
            self._drop(call, Fault(str(error), is_lasting=True), kindly=True)

    def _flush(self, call: Call) -> None:
        call.stream.flush()
        needs_write = call.stream.needs_write
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
        if call.stage == "waiting":
            # Not computed from its value before, which another thread may set meanwhile.
            self._must_greet = True
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
                self._terms.met(teaching.fingerprint)
            self._book.joined(call.address)
        self._processes[teaching.process] = call.address
        self._terms.tell(events.TeacherJoined(str(call.address), teaching.model, teaching.fingerprint))
        self.handle(window_events.TeacherReady(str(call.address), teaching.process))

    # --- what follows ---

    def _carry_out(self) -> None:
        while self._outbox:  # no other thread takes anything out
            with self.changed:
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
        call.stream.close()
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
            self._terms.tell(events.TeacherLost(str(address), "it left" if call.is_leaving else fault.why, call.tasks))
        elif fault.is_lasting and (known is None or known.why != fault.why):
            self._terms.tell(events.TeacherRefused(str(address), fault.why))


def _address(action: window_events.Action) -> Address:
    host, _, port = getattr(action, "teacher", "").rpartition(":")
    return Address(host, int(port or 0))
