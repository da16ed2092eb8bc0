"""A teacher's process: it pulls tasks from students, computes, and answers.

One thread talks with all students; the thread that calls ``Serving.serve`` computes. Nobody sends a task that was not
asked for, so a student cannot fill the memory of a teacher.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from edl_hvd import tls
from edl_hvd.body_buffers import BodyBuffers
from edl_hvd.distill import conversation as say
from edl_hvd.distill import same_host
from edl_hvd.distill.computing import Computing, Introduction, StudentReply, StudentTask
from edl_hvd.distill.conversation import encode
from edl_hvd.distill.sharing import Sharing, asks_ahead
from edl_hvd.distill.student import Student
from edl_hvd.distill.teacher import Teacher
from edl_hvd.errors import PlatformError, ProtocolError, UsageError
from edl_hvd.frame_stream import FrameStream
from edl_hvd.frames import Array, Frame, Limits
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

_MOST_STRANGERS = 64
_MOST_BUFFERS = 4
# One is computed, one waits and one arrives.
_LOOK_EVERY_S = 0.5
_OWN_PAUSE_S = 1.0
_LEAVE_S = 30.0
_RATE_S = 10.0
_CLOSE_S = 5.0
_FLUSH_S = 2.0


class Serving:
    """A teacher that listens.

    Args:
        teacher: Model.
        max_batch: Largest number of samples in a forward pass, unless a single task has more.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token: Gives the token at every call; an empty one is accepted on the loopback interface alone.
        context: What it proves itself with by TLS; ``None`` for connections without it.

    Attributes:
        port: Port that it listens on.

    Raises:
        UsageError: There is no token, and others could reach the port.
        PlatformError: The port cannot be had.
    """

    def __init__(
        self, teacher: Teacher, max_batch: int, host: str = "127.0.0.1", port: int = 0,
        token: Callable[[], str] = lambda: "", context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        if not token() and not _is_loopback(host):
            raise UsageError(
                f"a teacher on {host} without a token would answer anybody; set EDL_HVD_TEACHERS_TOKEN, or listen on "
                "127.0.0.1"
            )
        self._teacher, self._max_batch, self._token, self._context = teacher, max_batch, token, context
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise PlatformError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        beside = None if context is not None else same_host.listen(self._listener)
        self._listeners = [self._listener] if beside is None else [self._listener, beside]
        self._bell, self._bell_rope = socket.socketpair()
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        self._computing = Computing(teacher, self._process, max_batch, self._ring)
        self._is_leaving = False
        self._leave_s = 0.0
        # Of the talking thread:
        self._buffers = BodyBuffers(_MOST_BUFFERS)
        self._students: dict[int, Student] = {}
        # An answer and the next question travel together.
        self._to_flush: dict[int, Student] = {}
        self._sharing = Sharing()
        self._next_number = 0
        self._left_told = self._has_news = False
        self._started_s = self._looked_s = time.monotonic()
        self._compute_s = self._round_trip_s = 0.0
        self._answered_tasks = self._answered_samples = 0
        self._total_compute_s = 0.0
        self._answered: deque[tuple[float, int]] = deque()
        self._last_fault = ""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._talk, name="edl_hvd students", daemon=True)

    def serve(self) -> None:
        """Answer until :meth:`leave` is called and all that was taken is answered. Blocks."""
        self._thread.start()
        try:
            self._computing.run()
        finally:
            self._is_closed = True
            self._ring()
            self._thread.join(_CLOSE_S)

    def leave(self) -> None:
        """Finish what is here, ask for no more, and end. Any thread, and a signal handler."""
        if not self._is_leaving:
            self._leave_s = time.monotonic()
        self._is_leaving = True
        self._ring()

    # --- the talking thread ---

    def _ring(self) -> None:
        with suppress(OSError):  # full, so it rings already; or closed
            self._bell_rope.send(b"!")

    def _talk(self) -> None:
        try:
            while not self._is_closed:
                for key, mask in self._selector.select(self._patience_s()):
                    student: Student | None = key.data
                    if student is not None:
                        if self._students.get(student.number) is student:
                            self._go_on(student, mask)
                    elif key.fileobj in self._listeners:
                        self._accept(key.fileobj)
                    else:
                        self._has_news = True
                        with suppress(OSError):
                            self._bell.recv(1 << 12)
                for reply in self._computing.take_replies():
                    self._send(reply)
                self._look()
                if self._has_news:  # else it was a part of a task
                    self._has_news = False
                    self._ask()
                while self._to_flush:
                    self._flush(self._to_flush.popitem()[1])
                if self._is_leaving:
                    self._leave()
        finally:
            self._computing.close()
            self._flush_all()
            for student in list(self._students.values()):
                self._drop(student)
            self._selector.close()
            for end in (*self._listeners, self._bell, self._bell_rope):
                end.close()

    def _patience_s(self) -> float:
        deadlines = [student.deadline_s for student in self._students.values() if student.deadline_s]
        now_s = time.monotonic()
        return 0.0 if self._has_news else max(0.0, min([now_s + _LOOK_EVERY_S, *deadlines]) - now_s)

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        slept = now_s - self._looked_s > _LOOK_EVERY_S + _OWN_PAUSE_S
        self._looked_s = now_s
        for student in list(self._students.values()):
            is_late = student.deadline_s and now_s > student.deadline_s
            if is_late or (not slept and unanswered_s(student.stream.connection) > UNANSWERED_S):
                self._drop(student)

    def _leave(self) -> None:
        """Say so, and end when nothing is left to do."""
        if not self._left_told:
            self._left_told = True
            for student in list(self._students.values()):
                if not student.is_stranger:
                    student.stream.put(encode(say.Leaving()))
                    self._flush(student)
            for listener in self._listeners:
                with suppress(KeyError, ValueError):
                    self._selector.unregister(listener)
                listener.close()
        if self._computing.is_idle or time.monotonic() - self._leave_s > _LEAVE_S:
            self._computing.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError:
                return
            strangers = [student for student in self._students.values() if student.is_stranger]
            if len(strangers) >= _MOST_STRANGERS:
                self._drop(strangers[0])  # the one that has been silent for longest
            connection.setblocking(False)
            if connection.family == socket.AF_UNIX:
                same_host.widen(connection)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ask_for_answers(connection)
            if self._context is not None:
                try:
                    connection = tls.wrap(connection, self._context)
                except OSError:  # it has ended already
                    connection.close()
                    continue
            self._next_number += 1
            stream = FrameStream(connection, Limits(say.STRANGER_HEADER_BYTES), self._buffers)
            student = Student(self._next_number, stream, f"{peer[0]}:{peer[1]}" if peer else "this host", self._token)
            self._students[student.number] = student
            self._selector.register(connection, selectors.EVENT_READ, student)
            self._flush(student)

    def _go_on(self, student: Student, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                while self._students.get(student.number) is student and (frame := student.stream.receive()) is not None:
                    self._hear(student, frame)
        except (EOFError, OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError | ssl.SSLError):
                self._last_fault = say.shorten(f"{student.peer}: {error}")
            if isinstance(error, tls.PlainPeerError):
                self._refuse_plain(student.stream.connection)
            self._drop(student)
        else:
            self._to_flush[student.number] = student

    def _refuse_plain(self, connection: socket.socket) -> None:
        """Tell a student without TLS so, in its own way."""
        assert isinstance(connection, tls.TlsSocket)
        with suppress(OSError):
            plain = say.Refuse("this teacher speaks TLS; give the student its CA, as in EDL_HVD_TEACHERS_TLS_CA")
            connection.send_plain(json.dumps({"what": "refuse", "fields": {"why": plain.why}}).encode() + b"\n")
            # What it has said is read, or the system would reset the connection before it reads this.
            socket.socket.recv(connection, 1 << 16)

    def _flush(self, student: Student) -> None:
        if self._students.get(student.number) is not student:
            return
        try:
            student.stream.flush()
        except tls.PlainPeerError:
            return  # reading says so, too
        except OSError:
            self._drop(student)
            return
        needs_write = student.stream.needs_write
        if needs_write != student.needs_write:
            student.needs_write = needs_write
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if needs_write else 0)
            self._selector.modify(student.stream.connection, events, student)
        if student.stream.is_flushed and student.stage == "refused":
            self._drop(student)

    def _flush_all(self) -> None:
        """Send what is left, at the end; a student that does not read does not hold this up for long."""
        deadline_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline_s and any(not one.stream.is_flushed for one in self._students.values()):
            for student in list(self._students.values()):
                self._flush(student)
            time.sleep(0.005)

    def _drop(self, student: Student) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(student.stream.connection)
        student.stream.close()
        self._students.pop(student.number, None)
        self._has_news = True
        self._sharing = self._sharing.left(str(student.number))
        self._computing.forget(student.number)
        self._expect()

    def _expect(self) -> None:
        self._computing.expect(sum(len(student.wants) for student in self._students.values()))

    # --- what students say ---

    def _hear(self, student: Student, frame: Frame) -> None:
        message, name = student.hear(frame), str(student.number)
        self._has_news = True
        match message:
            case None:
                self._last_fault = f"{student.peer}: {student.fault}" if student.fault else self._last_fault
            case say.Look():
                student.stream.put(encode(self._status()))
            case say.Hello():
                self._computing.introduce(Introduction(student.number, message))
            case say.Have(tasks, lead):
                self._sharing = self._sharing.heard(name, tasks, lead)
            case say.Forget(number):
                self._computing.forget(student.number, number)
            case say.Nothing():
                student.replied()
                self._sharing = self._sharing.heard(name, 0, 0, is_reply=True)
                self._expect()
            case say.Give():
                self._take_task(student, message, frame.arrays)

    def _take_task(self, student: Student, give: say.Give, arrays: tuple[Array, ...]) -> None:
        assert student.hello is not None
        now_s = time.monotonic()
        trip_s = now_s - student.replied()
        self._round_trip_s = trip_s if not self._round_trip_s else 0.8 * self._round_trip_s + 0.2 * trip_s
        self._sharing = self._sharing.heard(str(student.number), give.tasks, give.lead, is_reply=True)
        self._expect()
        self._computing.put(StudentTask(student.number, give, arrays, student.hello, now_s))

    # --- what is said to them ---

    def _send(self, reply: StudentReply) -> None:
        student = self._students.get(reply.student)
        if student is None:
            return
        if student.stage == "introduced":
            self._finish_introduction(student, reply)
        elif not student.needs(reply.frame.fields.get("number")):
            return
        if reply.samples:
            self._note(student, reply)
        student.stream.put(reply.frame)
        self._to_flush[student.number] = student

    def _finish_introduction(self, student: Student, reply: StudentReply) -> None:
        assert student.hello is not None
        if reply.frame.what == "refuse":
            self._last_fault = str(reply.frame.fields["why"])
            student.stage, student.deadline_s = "refused", time.monotonic() + say.PROOF_S
            return
        student.stage = "ready"
        self._sharing = self._sharing.joined(
            str(student.number), student.hello.job, student.hello.micro_batch, student.hello.exact
        )

    def _note(self, student: Student, reply: StudentReply) -> None:
        assert student.hello is not None
        now_s, took_s = time.monotonic(), float(reply.frame.fields["compute_s"])
        self._sharing = self._sharing.computed(student.hello.job, reply.job_s)
        self._compute_s = took_s if not self._compute_s else 0.8 * self._compute_s + 0.2 * took_s
        self._total_compute_s += reply.job_s
        self._answered_tasks += 1
        self._answered_samples += reply.samples
        self._answered.append((now_s, reply.samples))
        while self._answered[0][0] < now_s - _RATE_S:
            self._answered.popleft()

    def _ask(self) -> None:
        """Ask students for tasks, as far as the next batch has room."""
        load = self._computing.load
        if self._is_leaving or load.has_suspect:
            return
        is_ahead = asks_ahead(self._compute_s, self._round_trip_s)
        if load.is_computing and not is_ahead:
            return
        while True:
            room = self._max_batch - load.samples - self._sharing.asked_samples
            name = self._sharing.next_student(room, not load.samples, is_ahead)
            if name is None:
                return
            self._sharing = self._sharing.asked(name)
            student = self._students[int(name)]
            student.ask()
            self._expect()
            self._to_flush[student.number] = student

    def _status(self) -> say.TeacherStatus:
        now_s = time.monotonic()
        recent = [samples for at_s, samples in self._answered if at_s >= now_s - _RATE_S]
        age_s = now_s - self._started_s
        return say.TeacherStatus(
            self._process, self._teacher.name, self._teacher.fingerprint, self._max_batch,
            students=sum(student.stage == "ready" for student in self._students.values()),
            waiting=self._computing.load.tasks, tasks=self._answered_tasks, samples=self._answered_samples,
            samples_per_s=sum(recent) / max(1e-3, min(age_s, _RATE_S)), compute_s=self._total_compute_s, age_s=age_s,
            last_fault=self._computing.last_fault or self._last_fault, is_leaving=self._is_leaving,
        )  # fmt: skip


def _is_loopback(host: str) -> bool:
    """Whether an address of IPv4 is one that only this machine reaches.

    A name is none, as it may stand for any address.

    >>> _is_loopback("127.2.0.3"), _is_loopback("127.x.example"), _is_loopback("0.0.0.0")
    (True, False, False)
    """
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False
