"""Runs the job that the options describe, from the first discovery to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.discovery.damping import Damping
from edl_hvd.driver.command_line.options import Options, is_python
from edl_hvd.driver.host_feed import HostFeed
from edl_hvd.driver.job import Job
from edl_hvd.driver.job_folder.claim import JobFolder, claim
from edl_hvd.driver.job_folder.requests import Requests, answer
from edl_hvd.driver.membership.events import DrainRequested, End, HostsFound
from edl_hvd.driver.membership.intake import UNUSABLE
from edl_hvd.driver.membership.transition import SAVED
from edl_hvd.driver.network import Network, choose_network, is_local
from edl_hvd.driver.preflight.gate import Look
from edl_hvd.driver.preflight.preflight import Preflight
from edl_hvd.driver.reporter import Reporter, Screen
from edl_hvd.driver.workers.agents import AgentHosts
from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.output import OutputFiles
from edl_hvd.driver.workers.process import signal_group
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import EdlHvdError, PlatformError, UsageError
from edl_hvd.process_identity import is_stopped
from edl_hvd.protocol import LONGEST_SAVE_S, SAME_SIGTERM_S
from edl_hvd.settings import Settings, family_timings, own_environment
from edl_hvd.time_slice import ask_for_short_time_slices

_DESCRIPTORS = 65_536
_ORPHAN_POLL_S = 0.2
_LATE_S = 5.0
# Orphans end by themselves; on a busy machine their own timers may be late.


def run_job(options: Options, screen: Screen) -> int:
    """Run it. Blocks.

    Returns:
        Exit code: 0, 1 for a failure, 75 when it stopped on the way and wants to be run again, 130 after Ctrl-C.

    Raises:
        UsageError: Its folder belongs to another job or cannot be used, or a port is not free; nothing was started.
        PlatformError: It could not begin.
    """
    ask_for_short_time_slices()
    allow_descriptors()
    with claim(options) as folder:
        return asyncio.run(EdlRun(options, screen, folder).run())


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors, often 1,024, as far as the system allows: a worker needs six."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ShutdownRequests:
    """What signals ask for: the first one to save and stop, the second to stop at once.

    SIGTERM within a second of SIGTERM is the same request; a second Ctrl-C is always another one.

    Args:
        on_first: Called at the first one.
        clock: For the time between two signals.

    Attributes:
        first: Set at the first one.
    """

    def __init__(self, on_first: Callable[[], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._on_first = on_first
        self._clock = clock
        self._count = 0
        self._terminated_s = float("-inf")
        self.first = asyncio.Event()

    def is_requested(self) -> bool:
        return self._count > 0

    def is_urgent(self) -> bool:
        return self._count > 1

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM of the running event loop as requests, for as long as the block lasts."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            now_s = self._clock.monotonic_s()
            if now_s - self._terminated_s < SAME_SIGTERM_S:
                return
            self._terminated_s = now_s
        self._count += 1
        if self._count == 1:
            self._on_first()
        self.first.set()


class EdlRun:
    """One run of a job: what the options, the screen and the job's folder have in common from its begin to its end.

    Args:
        options: What the user asked for.
        screen: What a person sees of it.
        folder: The folder of the job, held by this run.
    """

    def __init__(self, options: Options, screen: Screen, folder: JobFolder) -> None:
        self._options = options
        self._screen = screen
        self._folder = folder
        self._reporter = Reporter(screen, folder.write_status, folder.begun, family_timings())
        self._ssh = Ssh(options.ssh_port, options.ssh_identity_file)
        self._agents = options.source if isinstance(options.source, AgentHosts) else None
        self._shutdown = ShutdownRequests(
            lambda: screen.note("asked to stop: workers save and leave; asked again, it ends them at once")
        )

    async def run(self) -> int:
        """Run it to its end; the exit code.

        Raises:
            UsageError: What was asked for cannot be started.
            PlatformError: It could not begin.
        """
        try:
            end = await self._train()
        except EdlHvdError as error:
            await self._reporter.close(End(UNUSABLE if isinstance(error, UsageError) else 1, str(error)))
            raise
        await self._reporter.close(end)
        self._screen.ended(end)
        if end.code == SAVED and self._folder.resume_line:
            self._screen.note(f"go on with: {self._folder.resume_line}")
        return end.code

    async def _train(self) -> End:
        options, screen = self._options, self._screen
        network = choose_network(options.network_interfaces, self._ssh)
        damping = Damping() if options.is_damped else None
        look = self._look(network)
        feed = HostFeed(options.source, look, screen.problem, screen.note, options.poll_every_s, damping)
        with self._shutdown.handling_signals():
            await self._wait_for_orphans()
            if self._agents is not None:
                self._agents.listen()
                screen.note(f"waiting for agents at port {self._agents.port}: edl-hvd join HOST:{self._agents.port}")
            feed.start()
            try:
                hosts = await self._first_hosts(feed)
                with contextlib.ExitStack() as stack:
                    end = await self._run_job(self._make_job(network, stack), hosts, feed)
                if self._agents is not None and end.code != SAVED:  # else they wait for the run that goes on
                    await asyncio.to_thread(self._agents.end_job, end.code)
                return end
            finally:
                await feed.close()

    def _make_job(self, network: Network, stack: contextlib.ExitStack) -> Job:
        """The job before its start; the stack closes the files that it writes."""
        options, folder, own, settings = self._options, self._folder, own_environment(), Settings.from_environment()
        files = stack.enter_context(OutputFiles(options.output_filename, self._screen.note))

        def pass_on(worker: str, stream: str, line: bytes) -> None:
            self._screen.line(worker, stream, line)
            files.write(worker, stream, line)

        environment = {
            **own,
            **folder.checkpoint_variable(own),
            **folder.hash_variable(own),
            **options.worker_variables,
        }
        return Job(
            options.rules,
            self._launcher(options.command, environment, pass_on),
            network,
            self._reporter,
            stack.enter_context(folder.history(options.record)),
            known_step=folder.begun.progress.known_step,
            termination_grace_s=settings.termination_grace_s,
            collective_timeout_s=settings.collective_timeout_s,
            seed=folder.record.seed,
        )

    def _look(self, network: Network) -> Look | None:
        """How hosts are measured before they get workers; ``None``: they are not."""
        options = self._options
        if options.preflight is None:
            return None
        python = options.command[0] if is_python(options.command[0]) else sys.executable
        # By the same program, in the same folder and environment as a worker, or another one would be measured.
        environment = {**own_environment(), **options.worker_variables}
        output = self._screen.line if options.verbose else lambda *line: None
        launcher = self._launcher((python, "-m", "edl_hvd.preflight"), environment, output)
        return Preflight(launcher, network, options.preflight).look

    def _launcher(
        self, words: tuple[str, ...], environment: Mapping[str, str], output: Callable[[str, str, bytes], None]
    ) -> Launcher:
        program = Program(words, environment, str(Path.cwd()))
        return Launcher(program, self._ssh, is_local, output, self._options.start_timeout_s, self._agents)

    async def _wait_for_orphans(self) -> None:
        """Workers of an earlier run that lost their driver save and go; their checkpoint is the one to start from.

        They have their grace to come to that, and then time to save. One that is stopped cannot end itself; it and
        whatever else is there afterwards is killed.

        Raises:
            PlatformError: The user does not want to wait, or they cannot be killed.
        """
        orphans = self._folder.orphans
        if not orphans:
            return
        pids = ", ".join(str(orphan.pid) for orphan in orphans)
        grace_s = Settings.from_environment().termination_grace_s + _LATE_S
        self._screen.note(
            f"waiting for the workers of the edlrun that was killed, which save and end (processes {pids}); what "
            f"stands still is killed after {grace_s:.0f} s, and what still saves after {grace_s + LONGEST_SAVE_S:.0f} s"
        )
        clock = asyncio.get_running_loop()
        began_s = clock.time()
        while orphans := self._folder.orphans:
            waited_s = clock.time() - began_s
            late = [
                orphan.pid
                for orphan in orphans
                if orphan.pid is not None
                and waited_s >= (grace_s if is_stopped(orphan.pid) else grace_s + LONGEST_SAVE_S)
            ]
            if self._shutdown.is_requested() or not self._kill_orphans(late):
                pids = " ".join(str(orphan.pid) for orphan in orphans)
                raise PlatformError(
                    f"workers of the job's earlier run are still there (processes {pids}), so nothing was started; end "
                    f"them (kill {pids}), then give the same command again"
                )
            await asyncio.sleep(_ORPHAN_POLL_S)

    def _kill_orphans(self, pids: Sequence[int]) -> bool:
        """Kill processes and those that they have started; whether this user may."""
        for pid in pids:
            self._screen.note(f"process {pid} of the earlier run neither saves nor ends, and is killed")
            try:
                signal_group(pid, signal.SIGKILL)  # each worker leads a group of its own
            except PermissionError:
                return False
        return True

    async def _first_hosts(self, feed: HostFeed) -> HostsFound:
        """The first hosts that discovery finds.

        Raises:
            PlatformError: There are none in time, or the user does not want to wait.
        """
        timeout_s = self._options.rules.elastic_timeout_s
        waiting = asyncio.ensure_future(feed.news.get())
        interrupted = asyncio.ensure_future(self._shutdown.first.wait())
        done, _ = await asyncio.wait({waiting, interrupted}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            hosts = waiting.result()
            assert isinstance(hosts, HostsFound), "a notice follows the answer that lists its host"
            return hosts
        reason = "it was interrupted" if done else f"there were none for {timeout_s:.0f} s (--elastic-timeout)"
        raise PlatformError(f"waited for hosts, but {reason}; see what discovery reports")

    async def _run_job(self, job: Job, hosts: HostsFound, feed: HostFeed) -> End:
        """The job from its first hosts to its end."""
        self._reporter.watch(job, feed.gate)
        requests = Requests(lambda line: self._handle_request(job, line))
        await job.start()
        job.handle(hosts)
        following = asyncio.get_running_loop().create_task(self._follow(feed, job))
        path = self._folder.path
        try:
            try:
                await requests.start(path)
            except OSError as error:
                self._screen.note(f"no requests are taken, as {path} can hold no socket: {error}; the job goes on")
            return await job.run(end_all=self._shutdown.is_requested, end_now=self._shutdown.is_urgent)
        finally:
            requests.close()
            following.cancel()

    async def _follow(self, feed: HostFeed, job: Job) -> None:
        """Pass on to the job what discovery finds."""
        while True:
            event = await feed.news.get()
            if isinstance(event, DrainRequested):
                self._drain(job, event)
            else:
                job.handle(event)

    def _handle_request(self, job: Job, line: bytes) -> Mapping[str, object]:
        """Do what is asked for in another terminal; the answer."""
        reply = answer(line, job.membership, job.now_s)
        if reply.event is not None:
            self._drain(job, reply.event)
        return reply.fields

    def _drain(self, job: Job, request: DrainRequested) -> None:
        target, notice_s = request.target, request.notice_s
        if request.deferred:
            lead_s = min(notice_s, job.membership.rules.drain_lead_s)
            self._screen.note(f"{target} is to go in {notice_s:.0f} s; its workers leave {lead_s:.0f} s before that")
        else:
            self._screen.note(f"asked to leave {target} within {notice_s:.0f} s")
        job.handle(request)
