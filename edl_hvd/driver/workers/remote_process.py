"""A worker's process on another host."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from edl_hvd.driver.workers.output import Output
from edl_hvd.driver.workers.process import Exit, Transcript, WorkerProcess, signal_group
from edl_hvd.driver.workers.ssh import Supervisor

_CUT_AFTER_S = 4.0
# An ssh that ought to end and does not has lost its host. Several times what the other side needs.


class RemoteProcess(WorkerProcess):
    """The ssh that leads to a worker. Signals are sent through it; it is killed itself when it leads nowhere."""

    def __init__(
        self,
        worker: str,
        process: asyncio.subprocess.Process,
        output: Output,
        transcript: Transcript,
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
            signal_group(self.pid, signal.SIGKILL)

    def _say(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    def _exit(self, returncode: int) -> Exit:
        self._finish_login()
        self._too_late.cancel()
        return self._supervisor.exit(returncode)
