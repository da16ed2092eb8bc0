"""Teachers over plain Unix sockets: what the bytes of a service cost a student at the least.

There are no names, bounds, tokens or faults here, and each answer comes from the teacher that was free for the longest
time. A student has one thread with a selector, as ``edl_hvd.distill`` has, which sends a micro-batch to a teacher and
takes the answer. Nothing that a student does with either is part of it.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

Answer = Callable[[torch.Tensor], torch.Tensor]


class PlainFleet:
    """Processes that each sleep for an answer; a student has a connection to each.

    Args:
        folder: Folder of their sockets.
        answers: The models, one for each process.
        shape: Shape of a micro-batch of uint8.
        students: Number of students.
        context: Starts the processes.
    """

    def __init__(
        self, folder: Path, answers: Iterable[Answer], shape: tuple[int, ...], students: int, context: BaseContext
    ) -> None:
        self.paths: list[str] = []
        self._processes: list[BaseProcess] = []
        for number, answer in enumerate(answers):
            path = str(folder / f"teacher-{number}")
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            process = context.Process(target=_teach, args=(listener, answer, shape, students), daemon=True)  # type: ignore[attr-defined]
            process.start()
            listener.close()
            self.paths.append(path)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _teach(listener: socket.socket, answer: Answer, shape: tuple[int, ...], students: int) -> None:
    torch.set_num_threads(1)
    selector = selectors.DefaultSelector()
    for _ in range(students):
        selector.register(listener.accept()[0], selectors.EVENT_READ)
    images = torch.empty(shape, dtype=torch.uint8)
    while True:
        for key, _ in selector.select():
            connection: Any = key.fileobj
            if not _fill(connection, memoryview(images.numpy()).cast("B")):
                return
            connection.sendall(memoryview(answer(images).numpy()).cast("B"))


def _fill(connection: socket.socket, view: memoryview) -> bool:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


class PlainLoader:
    """A loader whose batches carry the answers of a ``PlainFleet``, in order.

    Args:
        loader: Loader of batches, whose first tensor is sent.
        paths: Sockets of the teachers.
        answer_shape: Shape of an answer of float32.
        ahead: Number of micro-batches that are read ahead.
    """

    def __init__(self, loader: Iterable[Any], paths: list[str], answer_shape: tuple[int, ...], ahead: int) -> None:
        self._loader, self._shape, self._ahead = loader, answer_shape, ahead
        self._selector = selectors.DefaultSelector()
        self._free: deque[socket.socket] = deque()
        for path in paths:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self._selector.register(connection, selectors.EVENT_READ)
            self._free.append(connection)
        self._bell, self._rope = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._tasks: deque[tuple[int, torch.Tensor]] = deque()
        self._answers: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        batches: deque[tuple[int, Any]] = deque()
        for number, batch in enumerate(self._loader):
            batches.append((number, batch))
            self._tasks.append((number, batch[0]))
            self._rope.send(b"!")
            if len(batches) > self._ahead:
                yield self._answered(*batches.popleft())
        while batches:
            yield self._answered(*batches.popleft())

    def _answered(self, number: int, batch: Any) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers)
            return (*batch, self._answers.pop(number))

    def _serve(self) -> None:
        given: dict[socket.socket, int] = {}
        while True:
            for key, _ in self._selector.select():
                connection: Any = key.fileobj
                if connection is self._bell:
                    self._bell.recv(1 << 12)
                    continue
                answer = torch.empty(self._shape)
                if not _fill(connection, memoryview(answer.numpy()).cast("B")):
                    return
                with self._changed:
                    self._answers[given.pop(connection)] = answer
                    self._changed.notify_all()
                self._free.append(connection)
            while self._tasks and self._free:
                number, images = self._tasks.popleft()
                connection = self._free.popleft()
                given[connection] = number
                connection.sendall(memoryview(images.numpy()).cast("B"))
