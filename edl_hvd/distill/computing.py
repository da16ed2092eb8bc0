"""What a teacher computes: tasks that wait, which of them make a batch, and the replies to them.

The thread that calls ``Computing.run`` computes; another one brings tasks and takes replies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from edl_hvd.distill import conversation as say
from edl_hvd.distill.conversation import Message, encode
from edl_hvd.distill.outputs import Outputs, row_types, to_tensors
from edl_hvd.distill.sharing import Lot, together
from edl_hvd.distill.teacher import Teacher, digest_answer
from edl_hvd.frames import Array, ArrayType, Frame

_LONGEST_DELAY_S = 0.02
# A batch that has begun to arrive is not waited for any longer.
_LOOK_EVERY_S = 0.5
_MOST_PROBES = 64


@dataclass(frozen=True)
class StudentTask:
    """A task that waits or is computed.

    Attributes:
        student: Number of the connection.
        give: What the student said of it.
        arrays: Inputs.
        hello: What the student wants of it.
        arrived_s: When its last byte came.
    """

    student: int
    give: say.Give
    arrays: tuple[Array, ...]
    hello: say.Hello
    arrived_s: float

    @property
    def lot(self) -> Lot:
        """What it may be computed together with."""
        is_alone = self.give.is_alone or self.hello.exact
        return Lot((self.hello.send, self.hello.outputs), self.give.samples, is_alone)


@dataclass(frozen=True)
class Introduction:
    """A hello that is answered when the model has answered the probe."""

    student: int
    hello: say.Hello


@dataclass(frozen=True)
class StudentReply:
    """What there is for a student.

    Attributes:
        student: Number of the connection.
        frame: Message, with its arrays.
        job_s: Time of the model that it took.
        samples: Number of samples answered.
    """

    student: int
    frame: Frame
    job_s: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Load:
    """What there is to do.

    Attributes:
        samples: Number of samples that wait.
        tasks: Number of tasks that wait.
        is_computing: Whether the model computes.
        has_suspect: Whether a task is here that teachers were lost with, so that no other should be.
    """

    samples: int
    tasks: int
    is_computing: bool
    has_suspect: bool


class Computing:
    """The tasks of a teacher, and its model. Methods do not block but ``run``; they may be called in any thread.

    Args:
        teacher: Model.
        process: Name of this process.
        max_batch: Largest number of samples in a forward pass, unless a single task has more.
        done: Called in the computing thread when there are replies.
    """

    def __init__(self, teacher: Teacher, process: str, max_batch: int, done: Callable[[], None]) -> None:
        self._teacher, self._process, self._max_batch, self._done = teacher, process, max_batch, done
        self._changed = threading.Condition()
        self._introductions: deque[Introduction] = deque()
        self._tasks: deque[StudentTask] = deque()
        self._replies: deque[StudentReply] = deque()
        self._batch: list[StudentTask] = []
        self._is_computing = self._is_closed = False
        self._expected = 0
        self.last_fault = ""
        self._probes: dict[Hashable, Message] = {}

    # --- for the thread that talks ---

    def introduce(self, introduction: Introduction) -> None:
        """Have a hello answered."""
        with self._changed:
            self._introductions.append(introduction)
            self._changed.notify_all()

    def put(self, task: StudentTask) -> None:
        """Have a task answered."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def expect(self, tasks: int) -> None:
        """Say how many tasks are asked for and may come at once, so that a batch waits for them for a moment."""
        with self._changed:
            self._expected = tasks
            if self._tasks:
                self._changed.notify_all()

    def forget(self, student: int, number: int | None = None) -> None:
        """Drop a task that waits, or all of a student."""
        with self._changed:
            self._tasks = deque(
                task for task in self._tasks if task.student != student or number not in (None, task.give.number)
            )

    def take_replies(self) -> list[StudentReply]:
        """The replies that are there; each is returned once."""
        with self._changed:
            replies = list(self._replies)
            self._replies.clear()
            return replies

    def close(self) -> None:
        """End ``run``, as soon as the present batch is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def load(self) -> Load:
        """What there is to do now."""
        with self._changed:
            here = [*self._batch, *self._tasks]
            return Load(
                sum(task.give.samples for task in self._tasks), len(self._tasks), self._is_computing,
                any(task.give.is_alone for task in here),
            )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """Whether nothing is here, and no reply waits to be taken."""
        with self._changed:
            return not (self._introductions or self._tasks or self._replies or self._is_computing or self._expected)

    # --- the computing thread ---

    def run(self) -> None:
        """Compute until :meth:`close`. Blocks."""
        while True:
            with self._changed:
                batch = self._next_batch()
                while batch is None and not self._is_closed:
                    self._changed.wait(self._delay_s())
                    batch = self._next_batch()
                if batch is None or self._is_closed:
                    return
            replies = [self._introduce(batch)] if isinstance(batch, Introduction) else self._answer(batch)
            with self._changed:
                self._replies.extend(replies)
                self._is_computing, self._batch = False, []
            self._done()

    def _delay_s(self) -> float:
        if not self._tasks:
            return _LOOK_EVERY_S
        return max(0.001, self._tasks[0].arrived_s + _LONGEST_DELAY_S - time.monotonic())

    def _next_batch(self) -> Introduction | list[StudentTask] | None:
        """What to do next; under the lock."""
        if self._introductions:
            self._is_computing = True
            return self._introductions.popleft()
        lots = [task.lot for task in self._tasks]
        count = together(lots, self._max_batch)
        if not count:
            return None
        samples = sum(lot.samples for lot in lots[:count])
        is_full = samples >= self._max_batch or count < len(lots) or lots[0].is_alone
        if not is_full and self._expected and time.monotonic() - self._tasks[0].arrived_s < _LONGEST_DELAY_S:
            return None
        self._is_computing = True
        self._batch = [self._tasks.popleft() for _ in range(count)]
        return self._batch

    def _introduce(self, introduction: Introduction) -> StudentReply:
        hello = introduction.hello
        key = (hello.send, hello.outputs, hello.exact, hello.micro_batch if hello.exact else 0)
        if key not in self._probes:
            if len(self._probes) > _MOST_PROBES:
                self._probes.clear()
            self._probes[key] = self._try(hello)
        return StudentReply(introduction.student, encode(self._probes[key]))

    def _try(self, hello: say.Hello) -> Message:
        try:
            outputs = Outputs.parse(hello.outputs)
            answer = self._teacher.probe(hello.send, hello.micro_batch, outputs, hello.exact)
        except Exception as error:  # whatever a model raises the second time
            return say.Refuse(say.shorten(str(error)))
        probe = digest_answer(answer) if hello.exact else ""
        rows = row_types(answer)
        return say.Teaching(self._process, self._teacher.name, self._teacher.fingerprint, rows, self._max_batch, probe)

    def _answer(self, tasks: list[StudentTask]) -> list[StudentReply]:
        """The replies to a batch; one that fails is tried in halves, down to single tasks."""
        began_s = time.monotonic()
        try:
            answers = self._run(tasks)
        except Exception as error:  # whatever a model raises
            self.last_fault = say.shorten(f"{type(error).__name__}: {error}")
            if len(tasks) == 1:
                return [StudentReply(tasks[0].student, encode(say.Cannot(tasks[0].give.number, self.last_fault)))]
            middle = len(tasks) // 2
            return self._answer(tasks[:middle]) + self._answer(tasks[middle:])
        took_s = time.monotonic() - began_s
        total = sum(task.give.samples for task in tasks)
        return [
            StudentReply(
                task.student,
                encode(say.Answer(task.give.number, began_s - task.arrived_s, took_s), arrays),
                took_s * task.give.samples / total,
                task.give.samples,
            )
            for task, arrays in zip(tasks, answers, strict=True)
        ]

    def _run(self, tasks: list[StudentTask]) -> list[tuple[Array, ...]]:
        hello = tasks[0].hello
        outputs = Outputs.parse(hello.outputs)
        inputs = [to_tensors(task.arrays) for task in tasks]
        if len(tasks) == 1:
            return [self._teacher.answer(inputs[0], outputs, hello.micro_batch if hello.exact else 0)]
        merged = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        return _split(self._teacher.answer(merged, outputs), [task.give.samples for task in tasks])


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
