"""Runs the job that the options describe, from the first discovery to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, cast

from edl_hvd.discovery.damping import Damping
from edl_hvd.driver.command_line.options import Options, is_python
from edl_hvd.driver.host_feed import HostFeed
from edl_hvd.driver.job import Job
from edl_hvd.driver.job_folder.claim import JobFolder, claim
from edl_hvd.driver.job_folder.requests import Requests, answer
from edl_hvd.driver.membership.events import DrainRequested, End, HostsFound
from edl_hvd.driver.membership.transition import SAVED
from edl_hvd.driver.network import Network, choose_network, is_local
from edl_hvd.driver.preflight.gate import Look
from edl_hvd.driver.preflight.preflight import Preflight
from edl_hvd.driver.reporter import Reporter, Screen
from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.output import OutputFiles
from edl_hvd.driver.workers.ssh import Ssh
from edl_hvd.errors import EdlHvdError, PlatformError
from edl_hvd.settings import Settings, own_environment

_ORPHANS_S = 600.0
# A last checkpoint of some gigabytes over a slow network, as for a worker that is asked to exit.
_ORPHAN_POLL_S = 0.2


def run_job(options: Options, screen: Screen) -> int:
    """Run it. Blocks.

    Returns:
        Exit code: 0, 1 for a failure, 75 when it stopped on the way and wants to be run again, 130 after Ctrl-C.

    Raises:
        UsageError: Its folder belongs to another job; nothing was started.
        PlatformError: It could not begin.
    """
    with claim(options) as folder:
        return asyncio.run(_run(options, screen, folder))


async def _run(options: Options, screen: Screen, folder: JobFolder) -> int:
    reporter = Reporter(screen, folder.write_status, folder.begun)
    try:
        end = await _train(options, screen, folder, reporter)
    except EdlHvdError as error:
        await reporter.close(End(1, str(error)))
        raise
    await reporter.close(end)
    screen.ended(end)
    if end.code == SAVED and folder.resume_line:
        screen.note(f"go on with: {folder.resume_line}")
    return end.code


async def _train(options: Options, screen: Screen, folder: JobFolder, reporter: Reporter) -> End:
    loop = asyncio.get_running_loop()
    network = choose_network(options.network_interfaces, _ssh(options))
    damping = Damping() if options.is_damped else None
    look = _look(options, network, screen)
    feed = HostFeed(options.source, look, screen.problem, screen.note, options.poll_every_s, damping)
    with _signals(loop, screen) as wishes:
        await _outlive_orphans(folder, screen, wishes)
        feed.start()
        try:
            hosts = await _first_hosts(feed, options, wishes)
            with contextlib.ExitStack() as stack:
                files = stack.enter_context(OutputFiles(options.output_filename))
                record = _both(stack.enter_context(_record(options.record)), stack.enter_context(folder.history()))
                program = Program(options.command, _environment(options, folder), str(Path.cwd()))
                launcher = _launcher(options, program, lambda *line: _pass_on(screen, files, *line))
                known_step = folder.begun.figures.known_step
                settings = Settings.from_environment()
                job = Job(
                    options.rules,
                    launcher,
                    network,
                    reporter,
                    record,
                    known_step=known_step,
                    grace_s=settings.grace_s,
                    collective_timeout_s=settings.collective_timeout_s,
                )
                return await _follow_through(job, reporter, folder, screen, hosts, feed, wishes)
        finally:
            await feed.close()


def _look(options: Options, network: Network, screen: Screen) -> Look | None:
    """How hosts are measured before they get workers; ``None``: they are not."""
    if options.preflight is None:
        return None
    python = options.command[0] if is_python(options.command[0]) else sys.executable
    # By the same program, in the same folder and environment as a worker, or it would be another one that is measured.
    environment = {**own_environment(), **options.worker_variables}
    program = Program((python, "-m", "edl_hvd.preflight"), environment, str(Path.cwd()))
    launcher = _launcher(options, program, screen.line if options.verbose else lambda *line: None)
    return Preflight(launcher, network, options.preflight).look


async def _follow_through(
    job: Job,
    reporter: Reporter,
    folder: JobFolder,
    screen: Screen,
    hosts: HostsFound,
    feed: HostFeed,
    wishes: Wishes,
) -> End:
    """The job from its first hosts to its end."""
    reporter.watch(job, feed.gate)
    requests = Requests(lambda line: _obey(job, screen, line))
    await job.start()
    job.handle(hosts)
    following = asyncio.get_running_loop().create_task(_follow(feed, job, screen))
    try:
        try:
            await requests.start(folder.path)
        except OSError as error:
            screen.note(f"no requests are taken, as {folder.path} can hold no socket: {error}; the job goes on")
        return await job.run(end_all=wishes.any, end_now=wishes.urgent)
    finally:
        requests.close()
        following.cancel()


def _obey(job: Job, screen: Screen, line: bytes) -> Mapping[str, object]:
    """Do what somebody in another terminal asks for."""
    reply = answer(line, job.membership, job.now_s)
    if reply.event is not None:
        _drain(job, screen, reply.event)
    return reply.fields


def _drain(job: Job, screen: Screen, asked: DrainRequested) -> None:
    if asked.deferred:
        lead_s = min(asked.notice_s, job.membership.rules.drain_lead_s)
        screen.note(f"{asked.target} is to go in {asked.notice_s:.0f} s; its workers leave {lead_s:.0f} s before that")
    else:
        screen.note(f"asked to leave {asked.target} within {asked.notice_s:.0f} s")
    job.handle(asked)


async def _outlive_orphans(folder: JobFolder, screen: Screen, wishes: Wishes) -> None:
    """Workers of an earlier run that lost their driver save and go; their checkpoint is the one to start from.

    Raises:
        PlatformError: They do not go.
    """
    orphans = folder.orphans
    if not orphans:
        return
    pids = ", ".join(str(orphan.pid) for orphan in orphans)
    screen.note(f"waiting for the workers of the edlrun that was killed, which save and end (processes {pids})")
    ends_s = asyncio.get_running_loop().time() + _ORPHANS_S
    while orphans := folder.orphans:
        if wishes.any() or asyncio.get_running_loop().time() > ends_s:
            pids = " ".join(str(orphan.pid) for orphan in orphans)
            raise PlatformError(
                f"workers of the job's earlier run are still there (processes {pids}), so nothing was started; end "
                f"them (kill {pids}), then give the same command again"
            )
        await asyncio.sleep(_ORPHAN_POLL_S)


def _environment(options: Options, folder: JobFolder) -> Mapping[str, str]:
    own = own_environment()
    return {**own, **folder.checkpoint_variable(own), **options.worker_variables}


def _launcher(options: Options, program: Program, output: Callable[[str, str, bytes], None]) -> Launcher:
    return Launcher(program, _ssh(options), is_local, output, options.start_timeout_s)


def _ssh(options: Options) -> Ssh:
    return Ssh(options.ssh_port, options.ssh_identity_file)


def _pass_on(screen: Screen, files: OutputFiles, worker: str, stream: str, line: bytes) -> None:
    screen.line(worker, stream, line)
    files.write(worker, stream, line)


async def _first_hosts(feed: HostFeed, options: Options, wishes: Wishes) -> HostsFound:
    timeout_s = options.rules.elastic_timeout_s
    waiting = asyncio.ensure_future(feed.news.get())
    done, _ = await asyncio.wait({waiting, asyncio.ensure_future(wishes.first.wait())}, timeout=timeout_s,
                                 return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    if waiting in done:
        hosts = waiting.result()
        assert isinstance(hosts, HostsFound), "a notice follows the answer that lists its host"
        return hosts
    reason = "it was interrupted" if done else f"there were none for {timeout_s:.0f} s (--elastic-timeout)"
    raise PlatformError(f"waited for hosts, but {reason}; see what discovery reports")


async def _follow(feed: HostFeed, job: Job, screen: Screen) -> None:
    while True:
        event = await feed.news.get()
        if isinstance(event, DrainRequested):
            _drain(job, screen, event)
        else:
            job.handle(event)


class Wishes:
    """What signals ask for: the first one to save and stop, the second to stop at once.

    Args:
        asked: Called at the first one.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self._asked = asked
        self.count = 0
        self.first = asyncio.Event()

    def any(self) -> bool:
        return self.count > 0

    def urgent(self) -> bool:
        return self.count > 1

    def take(self) -> None:
        self.count += 1
        if self.count == 1:
            self._asked()
        self.first.set()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, screen: Screen) -> Iterator[Wishes]:
    wishes = Wishes(lambda: screen.note("asked to stop: workers save and leave; asked again, it ends them at once"))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, wishes.take)
    try:
        yield wishes
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _record(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


class _Both(io.TextIOBase):
    """Two files that get the same."""

    def __init__(self, *files: TextIO) -> None:
        self._files = files

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self._files:
            file.flush()

    def close(self) -> None:
        """Each of them, also where one cannot write what it still holds."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()


def _both(first: TextIO | None, second: TextIO | None) -> TextIO | None:
    if first is not None and second is not None:
        return cast(TextIO, _Both(first, second))
    return first or second
