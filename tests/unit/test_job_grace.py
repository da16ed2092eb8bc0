"""How long whoever gets SIGTERM has, under ``edlrun``: as ``EDL_HVD_GRACE`` says."""

import asyncio

import pytest

from edl_hvd.driver.control import Message
from edl_hvd.driver.job import Job, Network
from edl_hvd.driver.membership.happenings import Formed, HostsFound, Ready
from edl_hvd.driver.membership.state import Rules
from edl_hvd.hosts import HostSlots

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
        job = Job(Rules(1, 1, 1), Idle(), Network(lambda host: "127.0.0.1"), Deaf(), grace_s=GRACE_S)
        await job.start()
        stop = False
        running = asyncio.create_task(
            job.run(lambda: asked == "edlrun" and job.membership.world.generation > 0, lambda: stop)
        )
        for happening in (HostsFound((HostSlots("a", 1),)), Ready("a:0", 1), Formed("a:0", 1, 1)):
            job.happen(happening)
        if asked == "a worker":
            job._hear(Message("a:0", 1, "drain", {}))
        while not job.membership.drains:
            await asyncio.sleep(0.001)
        drains, now_s = job.membership.drains, job.now_s
        stop = True
        for life in list(job._lives):
            life.cancel()
        await running
        return drains, now_s

    drains, now_s = asyncio.run(drained())
    assert list(drains) == ["a:0" if asked == "a worker" else "a"]
    [deadline_s] = drains.values()
    assert now_s <= deadline_s <= now_s + GRACE_S
    assert deadline_s >= GRACE_S
