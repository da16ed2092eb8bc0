"""``edlrun`` whose workers are forked from a process that has imported torch, once for the whole job.

To import torch takes a worker most of a second of processor time, ``quick_start.py`` or not, and a job of these tests
starts three or four. Each is a child of ``edlrun`` as always, in a session of its own, with an environment, descriptors
and a main module of its own; only what it imports is there already. The driver is the product's, but for the call that
starts a process. The tests of launchers, of the example, of documents, of several hosts and of random faults start
workers as users do.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LONGEST_MESSAGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 8
_LONG_S = 60.0


@dataclass(frozen=True)
class Start:
    """What a worker runs. Its output and what it holds open besides come as descriptors."""

    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str


# --- in the process that forks workers -----------------------------------------------------------------------------


def serve(line: socket.socket, driver: int) -> Start:
    """Fork a worker for each message. Returns in the workers only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(0)
    os.setsid()
    _import_all()
    line.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, _LONGEST_MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        start: Start = pickle.loads(message)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The worker of a process that ends belongs to the driver from then on.
            middle = os.getpid()
            worker = os.fork()
            if worker:
                os.write(writer, str(worker).encode())
                os._exit(0)
            for descriptor in (reader, writer, line.detach()):
                os.close(descriptor)
            while os.getppid() == middle:
                os.sched_yield()
            _settle_in(start, descriptors)
            return start
        os.waitpid(middle, 0)
        line.send(os.read(reader, 32))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _import_all() -> None:
    import gc

    import quick_start  # noqa: F401

    # isort: split
    import edl_hvd

    for name in edl_hvd.__all__:
        getattr(edl_hvd, name)
    importlib.import_module("horovod.torch")
    gc.freeze()


def _settle_in(start: Start, descriptors: list[int]) -> None:
    """What is a process's own, as if this one had been started."""
    os.setsid()
    output, errors, *held = descriptors
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    for name, number in (("stdout", 1), ("stderr", 2)):
        given = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)  # as with PYTHONUNBUFFERED
        stream = io.TextIOWrapper(raw, given.encoding, given.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # A shell may have started all of this with it ignored; what the driver handles, its workers find as Python has it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()
    progress = sys.modules["edl_hvd.worker.progress"].progress
    progress.enter(progress.phase)  # since now


def run(start: Start) -> None:
    """Run the worker's script as the main module; returns where it ends."""
    script = Path(start.words[1])
    sys.argv = list(start.words[1:])
    sys.path[0] = str(script.parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    exec(compile(script.read_text(), script, "exec"), main.__dict__)


# --- in the driver -------------------------------------------------------------------------------------------------


class Forks:
    """Takes the place of ``asyncio.create_subprocess_exec`` where a script of these tests is started."""

    def __init__(self, line: socket.socket) -> None:
        line.setblocking(False)
        self._line = line
        self._one_at_a_time = asyncio.Lock()
        self._is_ready = False
        self._others = asyncio.create_subprocess_exec

    async def start(self, *words: str, **how: Any) -> Any:
        if len(words) < 2 or words[0] != sys.executable or not words[1].endswith("_script.py"):
            return await self._others(*words, **how)
        async with self._one_at_a_time:
            if not self._is_ready:
                self._is_ready = await asyncio.get_running_loop().sock_recv(self._line, 16) == b"ready"
            return Forked(self._fork(words, **how))

    def _fork(
        self,
        words: tuple[str, ...],
        env: Mapping[str, str],
        cwd: str,
        stdout: int,
        stderr: int,
        pass_fds: list[int],
        **_: Any,
    ) -> int:
        message = pickle.dumps(Start(words, dict(env), cwd))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._line, [message], [stdout, stderr, *pass_fds])
            select.select([self._line], [], [], _LONG_S)
            return int(self._line.recv(32))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)


class Forked:
    """What the driver uses of a process.

    Attributes:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self._end: asyncio.Future[int] = loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._end.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return await asyncio.shield(self._end)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    driver = os.getpid()
    if os.fork() == 0:
        ours.close()
        run(serve(theirs, driver))
        return
    theirs.close()
    asyncio.create_subprocess_exec = Forks(ours).start  # type: ignore[assignment]
    from edl_hvd.cli.edlrun import main as edlrun

    edlrun()


if __name__ == "__main__":
    main()
