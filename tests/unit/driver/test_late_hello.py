"""A worker that was told to go while it was starting, and whose start has swallowed the signal, hears it at its hello.

It may have handled SIGTERM before ``edl_hvd.init()``, or said it at the moment of the signal.
"""

from __future__ import annotations

import asyncio

import pytest
from test_driver_faults import Process
from test_job_grace import Deaf
from waiting import LONG_S

from edl_hvd.driver.job import Job
from edl_hvd.driver.membership.events import Formed, HostsFound, Lost, Ready
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import Network
from edl_hvd.driver.workers.process import WorkerProcess
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import TO_WORKER, Drain, Hello, ShutDown, decode, encode

BOTH, FIRST = HostsFound((HostSlots("a", 1), HostSlots("b", 1))), HostsFound((HostSlots("a", 1),))


class Deafened(Process):
    """A process that counts its signals and ends at SIGKILL, once it has connected."""

    def __init__(self) -> None:
        super().__init__()
        self.signals: list[int] = []
        self.is_deaf = True

    def _signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.is_deaf:
            self.ended.set()


class Starter:
    def __init__(self) -> None:
        self.processes: dict[str, Deafened] = {}

    async def start(self, worker: str, variables: object) -> WorkerProcess:
        self.processes[worker] = Deafened()
        return self.processes[worker]


async def job_whose_newcomer_was_signalled(starter: Starter, how: str) -> tuple[Job, asyncio.Task[object]]:
    """Worker b:0 was started beside a:0, which trains, and was told to go before it connected."""
    job = Job(Rules(1, 1, 2), starter, Network(lambda host: "127.0.0.1"), Deaf())
    await job.start()
    running = asyncio.create_task(job.run(end_now=lambda: "ended" in job.__dict__))
    for event in (FIRST, Ready("a:0", 1), Formed("a:0", 1, 1), BOTH):
        job.handle(event)
    while len(job.processes) < 2:
        await asyncio.sleep(0)
    job.handle(FIRST if how == "its host is gone" else Lost("b:0", 1, "its host does not answer"))
    assert job.membership.slots["b:0"].state == ("terminating" if how == "its host is gone" else "dying")
    return job, running


@pytest.mark.parametrize("says", ["nothing", "its handler has asked for a drain"])
def test_it_is_told_to_go_when_it_connects(says: str) -> None:
    async def test() -> tuple[object, dict[str, float]]:
        starter = Starter()
        job, running = await job_whose_newcomer_was_signalled(starter, "its host is gone")
        assert len(starter.processes["b:0"].signals) == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", job._port)
        writer.write(encode(Hello(job._control.token, "b:0", 1)))
        if says != "nothing":
            writer.write(encode(Drain()))
        job.handle(BOTH)  # discovery lists the host again meanwhile
        told = decode(await asyncio.wait_for(reader.readline(), LONG_S), TO_WORKER)
        for process in starter.processes.values():
            process.ended.set()
        writer.close()
        while job.processes.get("b:0") is not None and job._processes["b:0"][0] == 1:
            await asyncio.sleep(0.001)
        drains = dict(job.membership.drains)
        await end(job, running, starter)
        return told, drains

    told, drains = asyncio.run(test())
    assert told == ShutDown(save=False, left_s=None)
    assert not drains, "the signal was the driver's own: nobody wants the slot back"


def test_it_is_killed_when_it_connects_and_was_to_die() -> None:
    async def test() -> list[int]:
        starter = Starter()
        job, running = await job_whose_newcomer_was_signalled(starter, "its host does not answer")
        signals = starter.processes["b:0"].signals
        before = len(signals)
        starter.processes["b:0"].is_deaf = False
        _, writer = await asyncio.open_connection("127.0.0.1", job._port)
        writer.write(encode(Hello(job._control.token, "b:0", 1)))
        await asyncio.wait_for(starter.processes["b:0"].ended.wait(), LONG_S)
        writer.close()
        await end(job, running, starter)
        return signals[before:]

    assert asyncio.run(test()) == [9]


async def end(job: Job, running: asyncio.Task[object], starter: Starter) -> None:
    job.__dict__["ended"] = True
    for process in starter.processes.values():
        process.is_deaf = False
    await asyncio.wait_for(running, LONG_S)
