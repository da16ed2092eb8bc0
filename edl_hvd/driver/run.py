"""Runs the job that the options describe, from the first discovery to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from edl_hvd.discovery.watch import HostWatch
from edl_hvd.driver.happenings import End
from edl_hvd.driver.job import Job, Listener, Network
from edl_hvd.driver.local_hosts import is_local
from edl_hvd.driver.options import Options
from edl_hvd.driver.output_files import OutputFiles
from edl_hvd.driver.processes import Launcher, Program
from edl_hvd.driver.remote import Ssh
from edl_hvd.errors import PlatformError
from edl_hvd.hosts import HostSlots
from edl_hvd.settings import own_environment

_DISCARD_PORT = 9  # of no importance: a datagram socket that is connected sends nothing


class Screen(Listener, Protocol):
    """What a person sees of the job."""

    def line(self, worker: str, stream: str, line: bytes) -> None:
        """A worker has printed ``line``."""

    def problem(self, text: str) -> None:
        """Something is wrong outside the job, such as discovery."""

    def ended(self, end: End) -> None:
        """The job is over."""


def run_job(options: Options, screen: Screen) -> int:
    """Run it. Blocks.

    Returns:
        Exit code: 0, 1 for a failure, 75 when it stopped on the way and wants to be run again, 130 after Ctrl-C.
    """
    return asyncio.run(_run(options, screen))


async def _run(options: Options, screen: Screen) -> int:
    loop = asyncio.get_running_loop()
    changes: asyncio.Queue[tuple[HostSlots, ...]] = asyncio.Queue()
    watch = HostWatch(
        options.source,
        changed=lambda hosts: _quietly(loop.call_soon_threadsafe(changes.put_nowait, hosts)),
        problem=lambda text: _quietly(loop.call_soon_threadsafe(screen.problem, text)),
        every_s=options.poll_every_s,
    )
    watch.start()
    try:
        with _signals(loop) as wishes:
            hosts = await _first_hosts(changes, options, wishes)
            network = await asyncio.to_thread(choose_network, options.network_interfaces, hosts)
            files = OutputFiles(options.output_filename)
            launcher = Launcher(
                Program(options.command, {**own_environment(), **options.worker_variables}, str(Path.cwd())),
                Ssh(options.ssh_port, options.ssh_identity_file),
                is_local,
                lambda worker, stream, line: _pass_on(screen, files, worker, stream, line),
            )
            with _record(options.record) as record, files:
                job = Job(options.rules, launcher, network, screen, record)
                await job.start()
                job.found(hosts)
                following = loop.create_task(_follow(changes, job))
                try:
                    end = await job.run(end_all=wishes.any, end_now=wishes.urgent)
                finally:
                    following.cancel()
    finally:
        await asyncio.to_thread(watch.close)
    screen.ended(end)
    return end.code


def _quietly(handle: object) -> None:
    """The callbacks of a watch return nothing."""


def _pass_on(screen: Screen, files: OutputFiles, worker: str, stream: str, line: bytes) -> None:
    screen.line(worker, stream, line)
    files.write(worker, stream, line)


async def _first_hosts(
    changes: asyncio.Queue[tuple[HostSlots, ...]], options: Options, wishes: Wishes
) -> tuple[HostSlots, ...]:
    timeout_s = options.rules.elastic_timeout_s
    waiting = asyncio.ensure_future(changes.get())
    done, _ = await asyncio.wait({waiting, asyncio.ensure_future(wishes.first.wait())}, timeout=timeout_s,
                                 return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    if waiting in done:
        return waiting.result()
    reason = "it was interrupted" if done else f"there were none for {timeout_s:.0f} s (--elastic-timeout)"
    raise PlatformError(f"waited for hosts, but {reason}; see what discovery reports")


async def _follow(changes: asyncio.Queue[tuple[HostSlots, ...]], job: Job) -> None:
    while True:
        job.found(await changes.get())


class Wishes:
    """What signals ask for: the first one to save and stop, the second to stop at once."""

    def __init__(self) -> None:
        self.count = 0
        self.first = asyncio.Event()

    def any(self) -> bool:
        return self.count > 0

    def urgent(self) -> bool:
        return self.count > 1

    def take(self) -> None:
        self.count += 1
        self.first.set()


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop) -> Iterator[Wishes]:
    wishes = Wishes()
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


def choose_network(
    interfaces: Sequence[str], hosts: Sequence[HostSlots], local: Callable[[str], bool] = is_local
) -> Network:
    """How workers on these hosts reach the driver and each other. Blocks while names are looked up.

    Raises:
        PlatformError: An interface does not exist here, or a host cannot be reached.
    """
    if interfaces:
        return Network(_address_of(interfaces[0]), interfaces[0])
    for entry in hosts:
        if not local(entry.host):
            return Network(_address_toward(entry.host), None)
    return Network("127.0.0.1", None)


def _address_toward(host: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _DISCARD_PORT))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise PlatformError(
            f"no way leads from here to host {host}: {error}; check its name and the network, or name an interface "
            "with --network-interfaces"
        ) from error


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    ask_address = 0x8915  # SIOCGIFADDR of netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, ask_address, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise PlatformError(
                f"network interface {interface!r} has no IPv4 address here: {error.strerror}; this host has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
