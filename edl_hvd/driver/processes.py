"""Worker processes: starting them here or through ssh, passing their output on, ending them, saying how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edl_hvd.driver.exits import Exit
from edl_hvd.driver.local_hosts import is_local
from edl_hvd.driver.output import Output
from edl_hvd.driver.remote import Ssh, Supervisor, exportable
from edl_hvd.driver.stacks import shows_stack
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.settings import process_environment

__all__ = ["Exit", "Launcher", "Program", "Ssh", "WorkerProcess", "is_local"]

_PATIENCE_S = 0.8
# How long after a worker's end its output is waited for. Recovery waits too, when somebody holds it open.
_CUT_AFTER_S = 4.0
# An ssh that ought to end and does not has lost its host. Several times what the other side needs.
_STACK_S = 1.0
# The longest that the end of a worker is put off for its stack. py-spy takes 0.05 to 0.5 s, the fault handler 0.01 s.
_SPY_S = 0.7
# Of that; what is left is for the fault handler.
_STACK_PAUSE_S = 0.15
# Nothing marks the end of a stack, but all of it is written at once; over a slow network in a few pieces.
_LAST_LINES = 20
# As much of a traceback as fits an exit report.
_LOGINS_PER_HOST = 4
# An ssh server refuses at random from 10 unfinished logins on (MaxStartups), whoever they are from.


@dataclass(frozen=True)
class Program:
    """What every worker runs.

    Attributes:
        words: The command as the user typed it.
        environment: Variables for every worker; what means nothing on another host is not sent there.
        folder: Where it runs, on every host.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str


class Launcher:
    """Starts workers.

    Args:
        program: What they run.
        ssh: How other hosts are reached.
        is_local: Whether a host's workers are started without ssh; called in a thread, as it may ask a name server.
        output: Gets worker, ``"stdout"`` or ``"stderr"`` and a line, newline included; what is longer than 64 KiB
            comes in pieces, and a last line without newline when the worker has ended. Called in the event loop;
            must not raise.
        start_timeout_s: Longest time from the call of ssh until the other host begins to start a worker.
    """

    def __init__(
        self,
        program: Program,
        ssh: Ssh,
        is_local: Callable[[str], bool],
        output: Callable[[str, str, bytes], None],
        start_timeout_s: float = 30.0,
    ) -> None:
        self._program = program
        self._ssh = ssh
        self._is_local = is_local
        self._output = output
        self._start_timeout_s = start_timeout_s
        self._logins: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_LOGINS_PER_HOST))

    async def start(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess:
        """Start the program, in a process group of its own and with an empty standard input.

        Waits while names are looked up, or four logins to the host are under way; cancelling leaves no process.
        On another host a worker has not started when this returns; why it could not is seen at its end. No
        command line shows a variable. A worker outlives a driver that is killed, and may go on printing: on
        another host its output is thrown away then; here printing blocks after a megabyte, but never fails.

        Args:
            worker: Its slot, as ``host:slot``.
            variables: For this worker, besides and above those of the program.

        Raises:
            UsageError: The program or its folder cannot be used here, or a variable cannot be exported.
            PlatformError: ssh cannot be run.
        """
        host = worker.rpartition(":")[0]
        if await asyncio.to_thread(self._is_local, host):
            return await self._start_here(worker, variables)
        return await self._start_there(worker, host, variables)

    async def _start_here(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess:
        words, folder = self._program.words, self._program.folder
        environment = {**self._program.environment, **variables, **_FOR_ALL}
        transcript = _Transcript(worker, self._output)
        output = Output(transcript.take)
        try:
            process = await output.start(words, environment, folder, talk=False, hold=True)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"worker {worker} could not be started with {shlex.join(words)!r} in folder {folder!r}: {error}; "
                "expected a program that is found by PATH or path and can be run, and a folder that can be entered"
            ) from error
        return WorkerProcess(worker, process, output, transcript)

    async def _start_there(self, worker: str, host: str, variables: Mapping[str, str]) -> WorkerProcess:
        program = self._program
        environment = {**exportable(program.environment), **variables, **_FOR_ALL}
        transcript = _Transcript(worker, self._output)
        supervisor = Supervisor(host, program.words, program.folder, environment, _PATIENCE_S, transcript.take)
        words = self._ssh.command(host, supervisor.command)
        login = self._logins[host]
        await login.acquire()
        try:
            output = Output(supervisor.take)
            process = await output.start(words, process_environment(), None, talk=True, hold=False)
        except OSError as error:
            login.release()
            raise PlatformError(
                f"worker {worker} could not be started: cannot run {words[0]!r}: {error}; "
                "expected OpenSSH's client (package openssh-client) to be found by PATH"
            ) from error
        except BaseException:
            login.release()
            raise
        return _RemoteProcess(worker, process, output, transcript, supervisor, login.release, self._start_timeout_s)


_FOR_ALL = {"PYTHONUNBUFFERED": "1"}
# A line should be seen when it is written, and the last ones of a worker that is killed at all.


class _Transcript:
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
        self, worker: str, process: asyncio.subprocess.Process, output: Output, transcript: _Transcript
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
            _signal_group(self.pid, signal.SIGKILL)
        await self._output.finish(_PATIENCE_S)
        return self._exit(returncode)

    def _signal(self, number: signal.Signals) -> None:
        _signal_group(self.pid, number)

    def _exit(self, returncode: int) -> Exit:
        return Exit.of_child(returncode)


class _RemoteProcess(WorkerProcess):
    """The ssh that leads to a worker. Signals are sent through it; it is killed itself when it leads nowhere."""

    def __init__(
        self,
        worker: str,
        process: asyncio.subprocess.Process,
        output: Output,
        transcript: _Transcript,
        supervisor: Supervisor,
        end_login: Callable[[], None],
        start_timeout_s: float,
    ) -> None:
        super().__init__(worker, process, output, transcript)
        self._start_timeout_s = start_timeout_s
        self._supervisor = supervisor
        self._end_login: Callable[[], None] | None = end_login
        supervisor.on_word = self._take_word
        self._say(supervisor.script)
        self._too_late = asyncio.get_running_loop().call_later(start_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self._running and not self._supervisor.begun:
            self._supervisor.give_up(self._start_timeout_s)
            self._cut()

    def _take_word(self) -> None:
        self._finish_login()
        if self._supervisor.status is not None:
            self._cut_later()  # ssh is about to end as well, unless its host vanishes now

    def _finish_login(self) -> None:
        end_login, self._end_login = self._end_login, None
        if end_login is not None:
            end_login()

    def _signal(self, number: signal.Signals) -> None:
        # Before the connection stands, the word waits behind the script, and meets the worker as it starts.
        self._say(b"kill\n" if number == signal.SIGKILL else b"term\n")
        if number == signal.SIGKILL:
            self._cut_later()

    def ask_state(self, pid: int, answer: Callable[[str], None]) -> None:
        self._supervisor.on_state = answer
        self._say(b"state %d\n" % pid)

    async def _ask_for_stack(self, pid: int, stopped: bool) -> bool:
        self._say(b"%s %d\n" % (b"spy" if stopped else b"stack", pid))
        return True

    def _cut_later(self) -> None:
        asyncio.get_running_loop().call_later(_CUT_AFTER_S, self._cut)

    def _cut(self) -> None:
        if self._running:
            _signal_group(self.pid, signal.SIGKILL)

    def _say(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    def _exit(self, returncode: int) -> Exit:
        self._finish_login()
        self._too_late.cancel()
        return self._supervisor.exit(returncode)


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


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
