"""Starts workers, on this machine, through ssh, or by the agent of a host."""

from __future__ import annotations

import asyncio
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl_hvd.driver.workers.agents import AgentHosts
from edl_hvd.driver.workers.output import Output
from edl_hvd.driver.workers.process import OUTPUT_PATIENCE_S, Transcript, WorkerProcess
from edl_hvd.driver.workers.remote_process import RemoteProcess
from edl_hvd.driver.workers.ssh import Ssh, Supervisor, exportable
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.gpus import VISIBLE_DEVICES, hides_gpus
from edl_hvd.settings import process_environment

_LOGINS_PER_HOST = 4
# An ssh server refuses at random from 10 unfinished logins on (MaxStartups), whoever they are from.
_FOR_ALL = {"PYTHONUNBUFFERED": "1"}
# A line should be seen when it is written, and the last ones of a worker that is killed at all.


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
        agents: Hosts whose workers are started by their agents; ``None``: there are none.
    """

    def __init__(
        self,
        program: Program,
        ssh: Ssh,
        is_local: Callable[[str], bool],
        output: Callable[[str, str, bytes], None],
        start_timeout_s: float = 30.0,
        agents: AgentHosts | None = None,
    ) -> None:
        self._program = program
        self._ssh = ssh
        self._is_local = is_local
        self._output = output
        self._start_timeout_s = start_timeout_s
        self._agents = agents
        self._logins: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_LOGINS_PER_HOST))

    async def start(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess:
        """Start the program, in a process group of its own and with an empty standard input.

        Waits while names are looked up, or four logins to the host are under way; cancelling leaves no process.
        On another host a worker has not started when this returns; why it could not is seen at its end. No
        command line shows a variable. A worker outlives a driver that is killed, and may go on printing: on
        another host its output is thrown away then; here printing blocks after a megabyte, but never fails.

        Args:
            worker: Its slot, as ``host:slot``.
            variables: For this worker, besides and above those of the program. Where that hides all GPUs of this
                machine, they stay hidden.

        Raises:
            UsageError: The program or its folder cannot be used here, or a variable cannot be exported.
            PlatformError: ssh cannot be run, or the agent of the host does not answer.
        """
        host = worker.rpartition(":")[0]
        if self._agents is not None and self._agents.serves(host):
            return await self._start_by_agent(self._agents, worker, host, variables)
        if await asyncio.to_thread(self._is_local, host):
            return await self._start_here(worker, variables)
        return await self._start_there(worker, host, variables)

    async def _start_here(self, worker: str, variables: Mapping[str, str]) -> WorkerProcess:
        words, folder = self._program.words, self._program.folder
        environment = {**self._program.environment, **variables, **_FOR_ALL}
        if hides_gpus(self._program.environment):
            environment[VISIBLE_DEVICES] = self._program.environment[VISIBLE_DEVICES]
        transcript = Transcript(worker, self._output)
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
        transcript = Transcript(worker, self._output)
        supervisor = self._supervisor(host, variables, transcript, "ssh")
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
        return RemoteProcess(worker, process, output, transcript, supervisor, login.release, self._start_timeout_s)

    async def _start_by_agent(
        self, agents: AgentHosts, worker: str, host: str, variables: Mapping[str, str]
    ) -> WorkerProcess:
        transcript = Transcript(worker, self._output)
        supervisor = self._supervisor(host, variables, transcript, "the agent's connection")
        channel = await asyncio.to_thread(agents.open, host, supervisor.command, self._start_timeout_s)
        with channel:
            output = Output(supervisor.take)
            words, keep = agents.relay_command(channel), channel.fileno()
            process = await output.start(words, process_environment(), None, talk=True, hold=False, keep=(keep,))
        return RemoteProcess(worker, process, output, transcript, supervisor, lambda: None, self._start_timeout_s)

    def _supervisor(self, host: str, variables: Mapping[str, str], transcript: Transcript, way: str) -> Supervisor:
        program = self._program
        environment = {**exportable(program.environment), **variables, **_FOR_ALL}
        return Supervisor(host, program.words, program.folder, environment, OUTPUT_PATIENCE_S, transcript.take, way)
