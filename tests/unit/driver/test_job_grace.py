"""How long whoever gets SIGTERM has, under ``edlrun``: as ``EDL_HVD_TERMINATION_GRACE`` says."""

import asyncio

import pytest
from clocks import FakeClock

from edl_hvd.driver.job import Job
from edl_hvd.driver.membership.events import Formed, HostsFound, Ready
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import Network
from edl_hvd.driver.workers.process import Exit
from edl_hvd.hosts import HostSlots
from edl_hvd.protocol import Drain

GRACE_S = 7.0


class Deaf:
    """Hears of everything and keeps nothing."""

    def __getattr__(self, name):
        return lambda *_: None


class Idle:
    """Starts processes that do nothing."""

    async def start(self, worker, variables):
        await asyncio.Event().wait()


@pytest.mark.parametrize("asked", ["a worker", "edlrun"])
def test_who_gets_sigterm_has_the_grace_that_the_environment_names(asked):
    async def drained():
        job = Job(Rules(1, 1, 1), Idle(), Network(lambda host: "127.0.0.1"), Deaf(), termination_grace_s=GRACE_S)
        await job.start()
        stop = False
        running = asyncio.create_task(
            job.run(lambda: asked == "edlrun" and job.membership.world.generation > 0, lambda: stop)
        )
        for event in (HostsFound((HostSlots("a", 1),)), Ready("a:0", 1), Formed("a:0", 1, 1)):
            job.handle(event)
        if asked == "a worker":
            job._on_message("a:0", 1, Drain())
        while not job.membership.drains:
            await asyncio.sleep(0.001)
        drains, now_s = job.membership.drains, job.now_s
        stop = True
        for task in list(job._tasks):
            task.cancel()
        await running
        return drains, now_s

    drains, now_s = asyncio.run(drained())
    assert list(drains) == ["a:0" if asked == "a worker" else "a"]
    [deadline_s] = drains.values()
    assert now_s <= deadline_s <= now_s + GRACE_S
    assert deadline_s >= GRACE_S


class Immovable:
    """A process that ends only when it is killed."""

    def __init__(self):
        self.pid = 1
        self.signals = []
        self._killed = asyncio.Event()

    def terminate(self):
        self.signals.append("terminate")

    def kill(self):
        self.signals.append("kill")
        self._killed.set()

    async def wait(self):
        await self._killed.wait()
        return Exit(None, 9)


class Starting:
    """Starts such processes."""

    def __init__(self):
        self.processes = {}

    async def start(self, worker, variables):
        self.processes[worker] = Immovable()
        return self.processes[worker]


@pytest.mark.parametrize(("signals", "code"), [(1, 75), (2, 130)], ids=["once", "twice"])
def test_a_worker_that_does_not_leave_is_killed_after_the_grace_or_at_the_second_signal(signals, code, monkeypatch):
    monkeypatch.setattr("edl_hvd.driver.job.WorkerProcess", Immovable)

    async def ended():
        clock, starter, network, asked = FakeClock(), Starting(), Network(lambda host: "127.0.0.1"), []
        job = Job(Rules(1, 1, 1), starter, network, Deaf(), clock=clock, termination_grace_s=GRACE_S)
        await job.start()
        running = asyncio.create_task(job.run(lambda: len(asked) > 0, lambda: len(asked) > 1))
        job.handle(HostsFound((HostSlots("a", 1),)))
        while not job.processes:
            await asyncio.sleep(0.001)
        for event in (Ready("a:0", 1), Formed("a:0", 1, 1)):
            job.handle(event)
        asked.append("SIGTERM")
        while not job.membership.drains:
            await asyncio.sleep(0.001)
        job.handle(HostsFound((HostSlots("a", 1), HostSlots("b", 1))))
        while len(job.membership.drains) < 2:  # what is found later is left as well
            await asyncio.sleep(0.001)
        clock.sleep(0.9 * GRACE_S)
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not running.done()
        process = starter.processes["a:0"]
        assert process.signals == []
        if signals == 2:
            asked.append("SIGTERM")
        else:
            clock.sleep(0.2 * GRACE_S)
        return await running, process.signals

    end, sent = asyncio.run(ended())
    assert end.code == code
    assert set(sent) == {"kill"}
    if code == 75:
        assert end.reason == (
            "workers were asked to save and leave within 7 s (EDL_HVD_TERMINATION_GRACE), but a:0, b:0 did "
            "not and were killed; run it again to go on at the newest checkpoint"
        )
