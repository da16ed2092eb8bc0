"""``edlrun`` whose workers are forked from a process that has imported torch.

To import torch takes a worker most of a second of processor time, ``quick_start.py`` or not, and a job of these tests
starts three or four. Each is a child of ``edlrun`` as always, in a session of its own, with an environment, descriptors
and a main module of its own; only what it imports is there already. The driver is the product's, but for the call that
starts a process. The tests of launchers, of the example, of documents, of several hosts and of random faults start
workers as users do.

Run as a program, it makes the imports once for its job. ``prepared.py`` has them made once for all jobs of a process
of tests: ``--prepare`` is the process that makes them. For each job it forks the one that forks the job's workers, and
starts the driver as that one's parent (``--line``), a program of its own without torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A job's processes carry this variable; Horovod gives each worker a session of its own, so groups do not find them.
# The process that makes the imports has a value as long, in the place of which its children put theirs.
TOKEN, NO_TOKEN = "EDL_HVD_TEST_JOB", "0" * 32

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LONGEST_MESSAGE_BYTES = 1 << 20
_MOST_DESCRIPTORS = 8
_LONG_S = 60.0


@dataclass(frozen=True)
class Start:
    """What a worker, or a driver, runs. Its output and what it holds open besides come as descriptors."""

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
    start, descriptors = _fork_for_each_message(line)
    _settle_in(start, descriptors)
    return start


def _fork_for_each_message(line: socket.socket) -> tuple[Start, list[int]]:
    """Fork a child of the process at the other end for each of its messages; returns in those children only.

    The other end gets ``ready`` first, and then the number of each child. It has to adopt orphans meanwhile.
    """
    line.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, _LONGEST_MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        start: Start = pickle.loads(message)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The child of a process that ends belongs to the other end's process from then on.
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()  # Who hears its number may send a signal to its group.
            os.write(writer, str(os.getpid()).encode())
            for descriptor in (reader, writer, line.detach()):
                os.close(descriptor)
            while os.getppid() == middle:
                os.sched_yield()
            return start, descriptors
        os.waitpid(middle, 0)
        line.send(os.read(reader, 32))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _import_all() -> None:
    import quick_start  # noqa: F401

    import edl_hvd

    for name in edl_hvd.__all__:
        getattr(edl_hvd, name)
    importlib.import_module("horovod.torch")
    gc.freeze()


def _settle_in(start: Start, descriptors: list[int]) -> None:
    """What is a process's own, as if this one had been started."""
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
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "edl_hvd.worker.progress" in sys.modules:
        progress = sys.modules["edl_hvd.worker.progress"].progress
        progress.enter(progress.phase)  # since now


def run(start: Start) -> None:
    """Run the worker's script, or the code behind ``-c``, as the main module; returns where it ends."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if start.words[1] == "-c":
        sys.argv, sys.path[0], name, text = ["-c", *start.words[3:]], "", "<string>", start.words[2]
    else:
        script = Path(start.words[1])
        sys.argv, sys.path[0], name, text = list(start.words[1:]), str(script.parent), str(script), script.read_text()
        main.__file__ = name
    exec(compile(text, name, "exec"), main.__dict__)


# --- in the process that forks those, for many jobs ----------------------------------------------------------------


def prepare(line: socket.socket, modules: Sequence[str]) -> Start | None:
    """Start a driver, or run a script, for each message. Returns the script in its process, nothing in a worker's.

    Args:
        line: To who asks for them.
        modules: What is imported; if empty, what workers of jobs need.
    """
    os.setsid()
    if modules:
        for name in modules:
            importlib.import_module(name)
        gc.freeze()
    else:
        _import_all()
    start, descriptors = _fork_for_each_message(line)
    if start.words[1] != __file__:
        _be_known_as_of(start)
        _settle_in(start, descriptors)
        _end_with_parent()
        return start
    _end_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in zip((nothing, *descriptors), (0, 1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(start.folder)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    driver = os.getpid()
    if os.fork() == 0:
        ours.close()
        _be_known_as_of(start)
        os.environ.clear()
        os.environ.update(start.environment)
        run(serve(theirs, driver))
        return None
    theirs.close()
    ours.set_inheritable(True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program that it starts does not
        signal.signal(number, signal.SIG_DFL)
    words = [*start.words[:2], "--line", str(ours.fileno()), *start.words[2:]]
    os.execve(words[0], words, start.environment)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _be_known_as_of(start: Start) -> None:
    """Let /proc tell of this process to which job it belongs, as of one that has been started with that variable."""
    name = TOKEN.encode()
    token = start.environment.get(TOKEN, "").encode()
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    if len(token) == len(NO_TOKEN):
        ctypes.memmove(library.getenv(name), token, len(token))


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
        return fork_by(self._line, Start(words, dict(env), cwd), [stdout, stderr, *pass_fds])


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


def fork_by(line: socket.socket, start: Start, descriptors: list[int]) -> int:
    """The number of a child of this process that is forked by the process at the other end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(line, [pickle.dumps(start)], descriptors)
        select.select([line], [], [], _LONG_S)
        return int(line.recv(32))
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    if sys.argv[1] == "--prepare":
        start = prepare(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
        if start:
            run(start)
        return
    if sys.argv[1] == "--line":
        line = socket.socket(fileno=int(sys.argv[2]))
        line.set_inheritable(False)
        del sys.argv[1:3]
        _drive(line)
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    driver = os.getpid()
    if os.fork() == 0:
        ours.close()
        run(serve(theirs, driver))
        return
    theirs.close()
    _drive(ours)


def _drive(line: socket.socket) -> None:
    asyncio.create_subprocess_exec = Forks(line).start  # type: ignore[assignment]
    from edl_hvd.cli.edlrun import main as edlrun

    edlrun()


if __name__ == "__main__":
    main()
