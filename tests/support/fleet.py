"""Real teachers in processes of their own, for tests: started in milliseconds, killed and stopped for real."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from forked import process_context
from waiting import soon

CLASSES = 5
_MOST = 64
# Teachers of a fleet.
# One process imports torch and forks all teachers: it has a single thread, which this one has not.
_CONTEXT = process_context("torch", "numpy", "edl_hvd.distill.serving")


class Sums:
    """A teacher whose answers anybody can check: sums of an image's parts.

    Args:
        delay_s: Seconds for which it sleeps before it answers.
        trouble: What goes wrong: "nan", "shape", "raise", "die", or "stop"; with inputs that hold ``trigger`` only, if
            that is given.
        trigger: Value of an input.
    """

    def __init__(
        self, delay_s: float = 0.0, trouble: str = "", trigger: float | None = None, print_as: str = ""
    ) -> None:
        self.delay_s, self.trouble, self.trigger = delay_s, trouble, trigger
        self.fingerprint = print_as

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay_s)
        answer = sums(images)
        is_probe = len(images) <= 2 and bool((images >= 0).all()) and bool((images < 1).all())
        is_hit = not is_probe if self.trigger is None else bool((images == self.trigger).any())
        if self.trouble and is_hit:
            if self.trouble in ("die", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self.trouble == "die" else signal.SIGSTOP)
            if self.trouble == "raise":
                raise RuntimeError("this input is not for me")
            if self.trouble == "shape":
                return answer[:, :3]
            row = 0 if self.trigger is None else int((images.flatten(1) == self.trigger).any(1).nonzero()[0])
            answer[row, 0] = float("nan")
        return answer


class Scaled:
    """A teacher whose answers tell which model it is.

    Args:
        scale: Factor of the sums; also its fingerprint.
    """

    def __init__(self, scale: int) -> None:
        self.scale, self.fingerprint = scale, f"model-{scale}"

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * sums(images)


def sums(images: torch.Tensor) -> torch.Tensor:
    """The right answer."""
    flat = images.flatten(1).double()
    weights = torch.arange(flat.shape[1], dtype=torch.float64).unsqueeze(1) * torch.arange(1.0, CLASSES + 1)
    return (flat @ torch.cos(weights)).float()


def _teach(model: Any, port: int, max_batch: int, token: str, files: tuple[str, str] | None, ready: Any) -> None:
    from edl_hvd.distill.serving import Serving
    from edl_hvd.distill.teacher import Teacher
    from edl_hvd.tls import server_context

    torch.set_num_threads(1)
    context = server_context(*files) if files else None
    serving = Serving(Teacher.of(model), max_batch, "127.0.0.1", port, lambda: token, context)
    signal.signal(signal.SIGTERM, lambda number, frame: serving.leave())
    ready.send(serving.port)
    serving.serve()


def free_port(count: int = 2) -> int:
    """The first of some free ports in a row, below those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


class Fleet:
    """Teachers on consecutive ports of this machine, and the file that lists them."""

    def __init__(self, folder: Path, token: str = "", tls: tuple[str, str] | None = None) -> None:
        self.token, self.tls = token, tls
        self.port = free_port(_MOST)
        self.path = folder / "teachers.txt"
        self.processes: dict[int, BaseProcess] = {}
        self._starting: dict[int, Any] = {}
        self._listed = 0

    @property
    def source(self) -> str:
        return f"file:{self.path}"

    def start(self, model: Any, number: int | None = None, max_batch: int = 8, wait: bool = True) -> int:
        """Start a teacher at a place of the fleet, the next one if none is named."""
        number = len(self.processes) if number is None else number
        if number in self.processes:
            soon(self.processes[number])
        here, there = _CONTEXT.Pipe()
        words = (model, self.port + number, max_batch, self.token, self.tls, there)
        process = _CONTEXT.Process(target=_teach, args=words)
        process.start()
        self.processes[number] = process
        self.list(max(number + 1, self._listed))
        self._starting[number] = here
        if wait:
            self.await_all()
        return number

    def await_all(self) -> None:
        """Wait until all that were started listen."""
        for here in self._starting.values():
            assert here.poll(300), "a teacher did not start"
            here.recv()
        self._starting.clear()

    def list(self, count: int) -> None:
        self._listed = count
        part = self.path.with_suffix(".part")
        part.write_text(f"localhost:{count}\n")
        part.replace(self.path)

    def signal(self, number: int, which: int) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, which)

    def kill(self, number: int) -> None:
        self.signal(number, signal.SIGKILL)
        soon(self.processes[number])

    def close(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError, AssertionError):
                os.kill(process.pid or 0, signal.SIGKILL)
            soon(process)


@contextmanager
def fleet(
    folder: Path, *models: Any, token: str = "", max_batch: int = 8, tls: tuple[str, str] | None = None
) -> Iterator[Fleet]:
    """Teachers with these models."""
    teachers = Fleet(folder, token, tls)
    try:
        for model in models:
            teachers.start(model, max_batch=max_batch)
        yield teachers
    finally:
        teachers.close()


class Images(torch.utils.data.Dataset[Any]):
    """Images that are a function of their index, and a label."""

    def __init__(self, length: int, side: int = 4) -> None:
        self.length, self.side = length, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, self.side, self.side, generator=generator), index
