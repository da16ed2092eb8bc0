"""A worker's process: its output passed on, its end and its stack, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edl_hvd.driver.workers.output import Output
from edl_hvd.driver.workers.stacks import shows_stack

OUTPUT_PATIENCE_S = 0.8
# How long after a worker's end its output is waited for. Recovery waits too, when somebody holds it open.
_STACK_S = 1.0
# The longest that the end of a worker is put off for its stack. py-spy takes 0.05 to 0.5 s, the fault handler 0.01 s.
_SPY_S = 0.7
# Of that; what is left is for the fault handler.
_STACK_PAUSE_S = 0.15
# Nothing marks the end of a stack, but all of it is written at once; over a slow network in a few pieces.
_LAST_LINES = 20
# As much of a traceback as fits an exit report.


class ProcessStarter(Protocol):
    """What starts workers; see :class:`edl_hvd.driver.workers.launcher.Launcher`."""

    async def start(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess: ...


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        code: Its exit code, or that of ssh when there was no worker or it was lost; ``None`` if a signal ended it.
        signal: The signal that ended it, else ``None``. A shell says the same of exit code 128 + n and signal n;
            from another host it is taken for the signal.
        problem: Why there was no worker or it was lost, in a sentence; else ``None``.
        certain: Whether the worker has ended for sure. Not when only the connection to it did.
    """

    code: int | None
    signal: int | None
    problem: str | None = None
    certain: bool = True

    @classmethod
    def of_child(cls, returncode: int, problem: str | None = None, certain: bool = True) -> Exit:
        """From what ``subprocess`` says: signal n is -n.

        >>> Exit.of_child(-9).text
        'killed by SIGKILL'
        """
        code, number = (returncode, None) if returncode >= 0 else (None, -returncode)
        return cls(code, number, problem, certain)

    @classmethod
    def of_shell(cls, status: int) -> Exit:
        """From what a shell says: signal n is 128 + n.

        >>> Exit.of_shell(137).text, Exit.of_shell(255).text
        ('killed by SIGKILL', 'exit code 255')
        """
        return cls(None, status - 128) if status - 128 in signal.valid_signals() else cls(status, None)

    @property
    def text(self) -> str:
        """For people: ``exit code 3``, ``killed by SIGKILL``, or the problem."""
        if self.problem is not None:
            return self.problem
        if self.signal is None:
            return f"exit code {self.code}"
        named = {int(member): member.name for member in signal.Signals}
        return f"killed by {named.get(self.signal, f'signal {self.signal}')}"


class Transcript:
    """Passes a worker's lines on and keeps the last ones."""

    def __init__(self, worker: str, output: Callable[[str, str, bytes], None]) -> None:
        self.last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.errors: asyncio.Queue[str] | None = None  # while somebody waits for lines of standard error
        self._worker = worker
        self._output = output

    def take(self, stream: str, line: bytes) -> None:
        self.last.append(line)
        if self.errors is not None and stream == "stderr":
            self.errors.put_nowait(line.decode(errors="replace").rstrip("\r\n"))
        self._output(self._worker, stream, line)


class WorkerProcess:
    """A worker that was started; see :meth:`Launcher.start`. Belongs to the event loop it was started in.

    Attributes:
        worker: Its slot, as ``host:slot``.
        pid: Of the process on this machine: the worker's, or that of the ssh which leads to it.
    """

    def __init__(
        self, worker: str, process: asyncio.subprocess.Process, output: Output, transcript: Transcript
    ) -> None:
        self.worker = worker
        self.pid = process.pid
        self._process = process
        self._output = output
        self._transcript = transcript
        self._running = True
        self._end = asyncio.get_running_loop().create_task(self._watch())

    @property
    def last_lines(self) -> list[str]:
        """The last 20 lines of its output, both streams, without newlines."""
        return [line.decode(errors="replace").rstrip("\r\n") for line in self._transcript.last]

    async def wait(self) -> Exit:
        """How it ended, once it has and its output has been passed on.

        What is left of the worker's process group is killed then, unless the worker ended with exit code 0: after a
        crash nobody else would, and the slot is about to be given to the next. A process that inherited the output
        and lives on delays the answer by at most a second. May be awaited by several, and cancelled.
        """
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """Send SIGTERM to the worker and all processes of its group. Does nothing when it has ended."""
        if self._running:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the worker and all processes of its group. Does nothing when it has ended.

        A worker on another host that cannot be told is given up after four seconds.
        """
        if self._running:
            self._signal(signal.SIGKILL)

    def ask_state(self, pid: int, answer: Callable[[str], None]) -> None:
        """Find out whether the worker runs. On another host the answer comes later, or never.

        Args:
            pid: What the worker says its process is, on its host; 0 if it has not said so.
            answer: Gets the letter of proc(5), "T" for stopped; empty if there is no such process.
        """
        _, letter = _look_up(pid, self.pid)
        answer(letter)

    async def stack(self, pid: int, stopped: bool = False) -> list[str]:
        """Make the worker's output show where it stands, and what it then writes to standard error; at most a second.

        Asked is py-spy, if its host has it, else Python's fault handler, which ``edl_hvd.init()`` has put in place. A
        process that is stopped cannot answer itself, and is not woken for it: it would go on.

        Args:
            pid: What the worker says its process is, on its host.
            stopped: It is stopped.
        """
        lines: list[str] = []
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._collect_stack(pid, stopped, lines), _STACK_S)
        return lines

    async def _collect_stack(self, pid: int, stopped: bool, lines: list[str]) -> None:
        heard = self._transcript.errors = asyncio.Queue[str]()
        try:
            if not await self._ask_for_stack(pid, stopped):
                return
            while True:
                begun = any(map(shows_stack, lines))
                lines.append(await asyncio.wait_for(heard.get(), _STACK_PAUSE_S if begun else None))
        finally:
            self._transcript.errors = None

    async def _ask_for_stack(self, pid: int, stopped: bool) -> bool:
        """Whether there may be an answer."""
        pid, letter = _look_up(pid, self.pid)
        if not letter or await self._spy(pid):
            return bool(letter)
        if stopped or not self._running:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)
        return True

    async def _spy(self, pid: int) -> bool:
        spy = shutil.which("py-spy")
        if spy is None:
            return False
        spying = await asyncio.create_subprocess_exec(
            *(spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            text, _ = await asyncio.wait_for(spying.communicate(), _SPY_S)
        except asyncio.TimeoutError:
            return False
        finally:
            if spying.returncode is None:
                spying.kill()
        for line in text.splitlines(keepends=True):
            self._transcript.take("stderr", line)
        return spying.returncode == 0

    async def _watch(self) -> Exit:
        returncode = await self._process.wait()
        # From now on the group's number is taken only while somebody is left in it; later it may be that of others.
        self._running = False
        if returncode != 0:
            signal_group(self.pid, signal.SIGKILL)
        await self._output.finish(OUTPUT_PATIENCE_S)
        return self._exit(returncode)

    def _signal(self, number: signal.Signals) -> None:
        signal_group(self.pid, number)

    def _exit(self, returncode: int) -> Exit:
        return Exit.of_child(returncode)


def _look_up(pid: int, group: int) -> tuple[int, str]:
    """That process of a group, else its leader, and its state as one letter; no letter if there is none."""
    for process in (pid, group):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:  # a number from within a container may be that of somebody else here
            return process, fields[0]
    return group, ""


def signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
