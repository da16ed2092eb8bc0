"""A teacher's process: it pulls tasks from students, computes, and answers.

One thread talks with all students; the thread that calls ``Serving.serve`` computes. Nobody sends a task that was not
asked for, so a student cannot fill the memory of a teacher.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from edl_hvd.distill import conversation as say
from edl_hvd.distill import proof
from edl_hvd.distill.conversation import Message, decode, encode
from edl_hvd.distill.outputs import Outputs, row_types, to_tensors
from edl_hvd.distill.sharing import Lot, Sharing, asks_ahead, together
from edl_hvd.distill.teacher import Teacher, check_probe, digest_answer
from edl_hvd.errors import EdlHvdError, PlatformError, ProtocolError, UsageError
from edl_hvd.frames import Array, ArrayType, Frame, FrameStream, Limits
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

_MOST_STRANGERS = 64
_LONGEST_DELAY_S = 0.02
# A batch that has begun to arrive is not waited for any longer.
_LOOK_EVERY_S = 0.5
_OWN_PAUSE_S = 1.0
_LEAVE_S = 30.0
_RATE_S = 10.0
_CLOSE_S = 5.0
_FLUSH_S = 2.0


@dataclass(frozen=True)
class _Task:
    """A task that waits or is computed.

    Attributes:
        student: Number of the connection.
        number: Number that the student gave it.
        arrays: Inputs.
        samples: Number of samples.
        lot: What it may be computed together with.
        is_suspect: Whether teachers were lost with it, so that this one should hold nothing else meanwhile.
        arrived_s: When its last byte came.
    """

    student: int
    number: int
    arrays: tuple[Array, ...]
    samples: int
    lot: Lot
    is_suspect: bool
    arrived_s: float


@dataclass(frozen=True)
class _Introduction:
    """A hello that is answered when the model has answered the probe."""

    student: int
    hello: say.Hello


@dataclass(frozen=True)
class _Reply:
    """What the computing thread has for a student."""

    student: int
    frame: Frame
    job_s: float = 0.0
    samples: int = 0
    rows: tuple[ArrayType, ...] = ()


@dataclass
class _Student:
    """A connection.

    Attributes:
        stage: "nonce", "proof", "hello", "introduced" (the probe runs), "ready" or "refused".
        wants: Moments at which a task was asked for and none has come.
        unwanted: Tasks that it needs no more, and that may be in computation.
    """

    number: int
    stream: FrameStream
    peer: str
    stage: str = "nonce"
    deadline_s: float = 0.0
    nonce: str = ""
    hello: say.Hello | None = None
    wants: deque[float] = field(default_factory=deque)
    unwanted: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    needs_write: bool = False


class Serving:
    """A teacher that listens.

    Args:
        teacher: Model.
        max_batch: Largest number of samples in a forward pass, unless a single task has more.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token: Gives the token at every call; an empty one is accepted on the loopback interface alone.

    Attributes:
        port: Port that it listens on.

    Raises:
        UsageError: There is no token, and others could reach the port.
        PlatformError: The port cannot be had.
    """

    def __init__(
        self, teacher: Teacher, max_batch: int, host: str = "127.0.0.1", port: int = 0,
        token: Callable[[], str] = lambda: "",
    ) -> None:  # fmt: skip
        if not token() and not host.startswith("127."):
            raise UsageError(
                f"a teacher on {host} without a token would answer anybody; set EDL_HVD_TEACHERS_TOKEN, or listen on "
                "127.0.0.1"
            )
        self._teacher, self._max_batch, self._token = teacher, max_batch, token
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise PlatformError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._started_s = time.monotonic()
        self._lock = threading.Condition()
        # Under the lock:
        self._introductions: deque[_Introduction] = deque()
        self._tasks: deque[_Task] = deque()
        self._replies: deque[_Reply] = deque()
        self._is_computing = self._is_leaving = self._is_closed = False
        self._has_suspect = False
        self._asked = 0
        self._last_fault = ""
        # Of the talking thread:
        self._students: dict[int, _Student] = {}
        self._sharing = Sharing()
        self._next_number = 0
        self._left_told = False
        self._leave_s = 0.0
        self._compute_s = self._round_trip_s = 0.0
        self._answered_tasks = self._answered_samples = 0
        self._total_compute_s = 0.0
        self._answered: deque[tuple[float, int]] = deque()
        self._looked_s = time.monotonic()
        self._probes: dict[tuple[object, ...], Message] = {}
        self._bell, self._bell_rope = socket.socketpair()
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._talk, name="edl_hvd students", daemon=True)

    def serve(self) -> None:
        """Answer until :meth:`leave` is called and all that was taken is answered. Blocks."""
        self._thread.start()
        try:
            while True:
                with self._lock:
                    batch = self._next_batch()
                    while batch is None and not self._is_over():
                        self._lock.wait(self._delay_s())
                        batch = self._next_batch()
                    if batch is None:
                        break
                self._compute(batch)
        finally:
            with self._lock:
                self._is_closed = True
            self._ring()
            self._thread.join(_CLOSE_S)

    def leave(self) -> None:
        """Finish what is here, ask for no more, and end. Any thread, and a signal handler."""
        if not self._is_leaving:
            self._leave_s = time.monotonic()
        self._is_leaving = True
        self._ring()

    def _is_over(self) -> bool:
        if self._is_closed or (self._is_leaving and time.monotonic() - self._leave_s > _LEAVE_S):
            return True
        is_idle = not self._tasks and not self._asked and not self._introductions and not self._replies
        return self._is_leaving and self._left_told and is_idle

    # --- the computing thread ---

    def _delay_s(self) -> float:
        if not self._tasks:
            return _LOOK_EVERY_S
        return max(0.001, self._tasks[0].arrived_s + _LONGEST_DELAY_S - time.monotonic())

    def _next_batch(self) -> _Introduction | list[_Task] | None:
        """What to do next; under the lock."""
        if self._introductions:
            self._is_computing = True
            return self._introductions.popleft()
        count = together([task.lot for task in self._tasks], self._max_batch)
        if not count:
            return None
        samples = sum(task.samples for task in list(self._tasks)[:count])
        is_full = samples >= self._max_batch or count < len(self._tasks) or self._tasks[0].lot.is_alone
        if not is_full and self._asked and time.monotonic() - self._tasks[0].arrived_s < _LONGEST_DELAY_S:
            return None
        self._is_computing = True
        batch = [self._tasks.popleft() for _ in range(count)]
        self._has_suspect = any(task.is_suspect for task in batch)
        return batch

    def _compute(self, batch: _Introduction | list[_Task]) -> None:
        replies = [self._introduce(batch)] if isinstance(batch, _Introduction) else self._answer(batch)
        with self._lock:
            self._replies.extend(replies)
            self._is_computing = self._has_suspect = False
        self._ring()

    def _introduce(self, introduction: _Introduction) -> _Reply:
        hello = introduction.hello
        key = (hello.send, hello.outputs, hello.exact, hello.micro_batch if hello.exact else 0)
        if key not in self._probes:
            if len(self._probes) > _MOST_STRANGERS:
                self._probes.clear()
            self._probes[key] = self._try(hello)
        return _Reply(introduction.student, encode(self._probes[key]))

    def _try(self, hello: say.Hello) -> Message:
        try:
            outputs = Outputs.parse(hello.outputs)
            samples = hello.micro_batch if hello.exact else min(2, hello.micro_batch)
            answers = [self._teacher.probe(hello.send, samples, outputs, hello.exact) for _ in range(2)]
        except Exception as error:  # whatever a model raises
            sent = ", ".join(str(one) for one in hello.send)
            return say.Refuse(
                say.shorten(f"the model {self._teacher.name} fails on one micro-batch of {sent} per sample: {error}")
            )
        why = check_probe(answers[0])
        if not why and digest_answer(answers[0]) != digest_answer(answers[1]):
            why = "it answers the same input in two ways; is dropout on, or is it a function of chance?"
        if why:
            return say.Refuse(say.shorten(f"the model {self._teacher.name} is no teacher: {why}"))
        probe = digest_answer(answers[0]) if hello.exact else ""
        rows = row_types(answers[0])
        return say.Teaching(self._process, self._teacher.name, self._teacher.fingerprint, rows, self._max_batch, probe)

    def _answer(self, tasks: list[_Task]) -> list[_Reply]:
        """The replies to a batch; one that fails is tried in halves, down to single tasks."""
        began_s = time.monotonic()
        try:
            answers = self._run(tasks)
        except Exception as error:  # whatever a model raises
            self._last_fault = say.shorten(f"{type(error).__name__}: {error}")
            if len(tasks) == 1:
                return [_Reply(tasks[0].student, encode(say.Cannot(tasks[0].number, self._last_fault)))]
            middle = len(tasks) // 2
            return self._answer(tasks[:middle]) + self._answer(tasks[middle:])
        took_s = time.monotonic() - began_s
        total = sum(task.samples for task in tasks)
        return [
            _Reply(
                task.student,
                encode(say.Answer(task.number, began_s - task.arrived_s, took_s), arrays),
                took_s * task.samples / total,
                task.samples,
                row_types(arrays),
            )
            for task, arrays in zip(tasks, answers, strict=True)
        ]

    def _run(self, tasks: list[_Task]) -> list[tuple[Array, ...]]:
        student = self._students.get(tasks[0].student)
        if student is None or student.hello is None:
            return [() for _ in tasks]  # gone meanwhile
        outputs = Outputs.parse(student.hello.outputs)
        inputs = [to_tensors(task.arrays) for task in tasks]
        if len(tasks) == 1:
            return [self._teacher.answer(inputs[0], outputs, student.hello.micro_batch if student.hello.exact else 0)]
        merged = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        whole = self._teacher.answer(merged, outputs)
        return _split(whole, [task.samples for task in tasks])

    # --- the talking thread ---

    def _ring(self) -> None:
        with suppress(OSError):  # full, so it rings already; or closed
            self._bell_rope.send(b"!")

    def _talk(self) -> None:
        try:
            while not self._is_closed:
                for key, mask in self._selector.select(self._patience_s()):
                    student: _Student | None = key.data
                    if student is not None:
                        if self._students.get(student.number) is student:
                            self._go_on(student, mask)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        with suppress(OSError):
                            self._bell.recv(1 << 12)
                self._send_replies()
                self._tell_of_leaving()
                self._look()
                self._ask()
        finally:
            self._flush_all()
            for student in list(self._students.values()):
                self._drop(student)
            for resource in (self._selector, self._listener, self._bell, self._bell_rope):
                resource.close()
            with self._lock:
                self._is_closed = True
                self._lock.notify_all()

    def _patience_s(self) -> float:
        deadlines = [student.deadline_s for student in self._students.values() if student.deadline_s]
        now_s = time.monotonic()
        return max(0.0, min([now_s + _LOOK_EVERY_S, *deadlines]) - now_s)

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

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            strangers = [one for one in self._students.values() if one.stage in ("nonce", "proof", "refused")]
            if len(strangers) >= _MOST_STRANGERS:
                self._drop(strangers[0])  # the one that has been silent for longest
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_answers(connection)
            self._next_number += 1
            stream = FrameStream(connection, Limits(say.STRANGER_HEADER_BYTES))
            student = _Student(self._next_number, stream, f"{peer[0]}:{peer[1]}")
            student.deadline_s, student.nonce = time.monotonic() + say.PROOF_S, proof.new_nonce()
            self._students[student.number] = student
            self._selector.register(connection, selectors.EVENT_READ, student)
            stream.put(encode(say.Nonce(say.PROTOCOL, student.nonce)))
            self._flush(student)

    def _go_on(self, student: _Student, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                while self._students.get(student.number) is student and (frame := student.stream.receive()) is not None:
                    self._hear(student, frame)
        except (EOFError, OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._last_fault = say.shorten(f"{student.peer}: {error}")
            self._drop(student)
        else:
            self._flush(student)

    def _flush(self, student: _Student) -> None:
        if self._students.get(student.number) is not student:
            return
        try:
            needs_write = not student.stream.flush()
        except OSError:
            self._drop(student)
            return
        if needs_write != student.needs_write:
            student.needs_write = needs_write
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if needs_write else 0)
            self._selector.modify(student.stream.connection, events, student)
        if not needs_write and student.stage == "refused":
            self._drop(student)

    def _flush_all(self) -> None:
        """Send what is left, at the end; a student that does not read does not hold this up for long."""
        deadline_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline_s and any(not one.stream.is_flushed for one in self._students.values()):
            for student in list(self._students.values()):
                self._flush(student)
            time.sleep(0.005)

    def _drop(self, student: _Student) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(student.stream.connection)
        student.stream.connection.close()
        self._students.pop(student.number, None)
        self._sharing = self._sharing.left(str(student.number))
        with self._lock:
            self._tasks = deque(task for task in self._tasks if task.student != student.number)
            self._count_asked()
            self._lock.notify_all()

    def _count_asked(self) -> None:
        self._asked = sum(len(student.wants) for student in self._students.values())

    # --- what students say ---

    def _hear(self, student: _Student, frame: Frame) -> None:
        match student.stage:
            case "nonce":
                self._take_nonce(student, decode(frame, say.NONCE))
            case "proof":
                self._take_proof(student, decode(frame, say.PROOF))
            case "hello":
                self._take_hello(student, decode(frame, say.FROM_NEW_STUDENT))
            case "ready":
                self._take(student, decode(frame, say.FROM_STUDENT), frame.arrays)
            case _:
                raise ProtocolError(f"a message {frame.what[:20]!r} came at a moment when none was expected")

    def _take_nonce(self, student: _Student, message: Message) -> None:
        assert isinstance(message, say.Nonce)
        if message.protocol != say.PROTOCOL or not proof.is_nonce(message.nonce):
            raise ProtocolError(f"it speaks protocol {message.protocol}; expected {say.PROTOCOL}")
        student.nonce, student.stage = f"{student.nonce} {message.nonce}", "proof"

    def _take_proof(self, student: _Student, message: Message) -> None:
        if not isinstance(message, say.Proof):
            raise ProtocolError("a student has nothing to refuse")
        ours, theirs = student.nonce.split()
        try:
            token = self._token()
        except EdlHvdError as error:
            self._refuse(student, f"this teacher cannot read its own token: {error}")
            return
        if not proof.is_proof(message.proof, token, proof.STUDENT, theirs, ours):
            self._last_fault = f"{student.peer} holds another token"
            self._refuse(student, "the token is another one; give both sides the same EDL_HVD_TEACHERS_TOKEN")
            return
        student.stream.put(encode(say.Proof(proof.prove(token, proof.TEACHER, ours, theirs))))
        student.stage, student.deadline_s = "hello", 0.0
        student.stream.limits = Limits(say.HEADER_BYTES)

    def _refuse(self, student: _Student, why: str) -> None:
        student.stream.put(encode(say.Refuse(say.shorten(why))))
        student.stage, student.deadline_s = "refused", time.monotonic() + say.PROOF_S

    def _take_hello(self, student: _Student, message: Message) -> None:
        if isinstance(message, say.Look):
            student.stream.put(encode(self._status()))
            return
        assert isinstance(message, say.Hello)
        if not message.send or not 0 < message.micro_batch <= 1 << 24:
            raise ProtocolError("a hello names no input, or no size of a micro-batch")
        student.hello, student.stage = message, "introduced"
        with self._lock:
            self._introductions.append(_Introduction(student.number, message))
            self._lock.notify_all()

    def _take(self, student: _Student, message: Message, arrays: tuple[Array, ...]) -> None:
        name, now_s = str(student.number), time.monotonic()
        assert student.hello is not None
        if isinstance(message, say.Have):
            self._sharing = self._sharing.heard(name, message.tasks, message.lead)
        elif isinstance(message, say.Forget):
            with self._lock:
                self._tasks = deque(
                    task for task in self._tasks if (task.student, task.number) != (student.number, message.number)
                )
            if message.number in student.held:
                student.held.discard(message.number)
                student.unwanted.add(message.number)
        else:
            if not student.wants:
                raise ProtocolError("a task came that was not asked for")
            asked_s = student.wants.popleft()
            self._limit(student)
            if isinstance(message, say.Nothing):
                self._sharing = self._sharing.heard(name, 0, 0, is_reply=True)
            else:
                assert isinstance(message, say.Give)
                self._take_task(student, message, arrays, asked_s, now_s)
            with self._lock:
                self._count_asked()
                self._lock.notify_all()

    def _take_task(
        self, student: _Student, give: say.Give, arrays: tuple[Array, ...], asked_s: float, now_s: float
    ) -> None:
        assert student.hello is not None
        hello = student.hello
        if not 0 < give.samples <= hello.micro_batch:
            raise ProtocolError(f"a task of {give.samples} samples came; expected 1 to {hello.micro_batch}")
        say.check_arrays(arrays, hello.send, give.samples)
        self._sharing = self._sharing.heard(str(student.number), give.tasks, give.lead, is_reply=True)
        trip_s = now_s - asked_s
        self._round_trip_s = trip_s if not self._round_trip_s else 0.8 * self._round_trip_s + 0.2 * trip_s
        student.held.add(give.number)
        lot = Lot((hello.send, hello.outputs), give.samples, give.is_alone or hello.exact)
        with self._lock:
            self._tasks.append(_Task(student.number, give.number, arrays, give.samples, lot, give.is_alone, now_s))

    def _limit(self, student: _Student) -> None:
        """Accept a body only while a task is asked for."""
        assert student.hello is not None
        body_bytes = say.row_bytes(student.hello.send) * student.hello.micro_batch if student.wants else 0
        student.stream.limits = Limits(say.HEADER_BYTES, body_bytes)

    # --- what is said to them ---

    def _send_replies(self) -> None:
        while True:
            with self._lock:
                if not self._replies:
                    return
                reply = self._replies.popleft()
                self._lock.notify_all()
            student = self._students.get(reply.student)
            if student is not None:
                self._send_reply(student, reply)

    def _send_reply(self, student: _Student, reply: _Reply) -> None:
        number = reply.frame.fields.get("number")
        if student.stage == "introduced":
            self._finish_introduction(student, reply)
        elif number in student.unwanted:
            student.unwanted.discard(number)
            return
        else:
            student.held.discard(number)
        if reply.samples:
            self._note(student, reply)
        student.stream.put(reply.frame)
        self._flush(student)

    def _finish_introduction(self, student: _Student, reply: _Reply) -> None:
        assert student.hello is not None
        if reply.frame.what == "refuse":
            self._last_fault = str(reply.frame.fields["why"])
            student.stage, student.deadline_s = "refused", time.monotonic() + say.PROOF_S
            return
        student.stage = "ready"
        self._sharing = self._sharing.joined(str(student.number), student.hello.job, student.hello.micro_batch)

    def _note(self, student: _Student, reply: _Reply) -> None:
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
        if self._is_leaving:
            return
        with self._lock:
            is_computing = self._is_computing
            if self._has_suspect or any(task.is_suspect for task in self._tasks):
                return
            waiting = sum(task.samples for task in self._tasks)
        is_empty = not waiting and not is_computing
        if is_computing and not asks_ahead(self._compute_s, self._round_trip_s):
            return
        while True:
            room = self._max_batch - waiting - self._sharing.asked_samples
            name = self._sharing.next_student(room, is_empty or (is_computing and not waiting))
            if name is None:
                return
            self._sharing = self._sharing.asked(name)
            student = self._students[int(name)]
            student.wants.append(time.monotonic())
            self._limit(student)
            with self._lock:
                self._count_asked()
            student.stream.put(encode(say.Want()))
            self._flush(student)

    def _tell_of_leaving(self) -> None:
        if not self._is_leaving or self._left_told:
            return
        for student in list(self._students.values()):
            if student.stage in ("hello", "introduced", "ready"):
                student.stream.put(encode(say.Leaving()))
                self._flush(student)
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()
        with self._lock:
            self._left_told = True
            self._lock.notify_all()

    def _status(self) -> say.TeacherStatus:
        now_s = time.monotonic()
        recent = [samples for at_s, samples in self._answered if at_s >= now_s - _RATE_S]
        age_s = now_s - self._started_s
        return say.TeacherStatus(
            self._process, self._teacher.name, self._teacher.fingerprint, self._max_batch,
            students=sum(one.stage == "ready" for one in self._students.values()),
            waiting=len(self._tasks), tasks=self._answered_tasks, samples=self._answered_samples,
            samples_per_s=sum(recent) / max(1e-3, min(age_s, _RATE_S)), compute_s=self._total_compute_s, age_s=age_s,
            last_fault=self._last_fault, is_leaving=self._is_leaving,
        )  # fmt: skip


def _split(whole: tuple[Array, ...], counts: list[int]) -> list[tuple[Array, ...]]:
    """The answer to a batch as those to its tasks."""
    parts: list[tuple[Array, ...]] = []
    begin = 0
    for count in counts:
        part = []
        for array in whole:
            shape = (count, *array.type.shape[1:])
            row = ArrayType(array.type.name, array.type.dtype, array.type.shape[1:]).size_bytes
            content = memoryview(array.content)[begin * row : (begin + count) * row]
            part.append(Array(ArrayType(array.type.name, array.type.dtype, shape), content))
        parts.append(tuple(part))
        begin += count
    return parts
