"""Who passes the gate when: hosts come and go while others are looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from clocks import FakeClock

from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.host_feed import HostFeed
from edl_hvd.driver.membership.events import DrainRequested, HostsFound
from edl_hvd.driver.preflight.gate import AGAIN_S, RETRY_S
from edl_hvd.driver.preflight.preflight import PreflightResult
from edl_hvd.driver.status import Countdown
from edl_hvd.hosts import HostSlots
from edl_hvd.preflight.measured import HostFindings, Measured

A, B, C = (HostSlots(name, 1) for name in "abc")
GOOD = Measured("cpu", 1, 100.0)


class Looks:
    """Looks that end when the test says how."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[str], list[str]]] = []
        self._ends: list[asyncio.Future[dict[str, str]]] = []

    async def look(self, new: Sequence[HostSlots], known: Sequence[HostFindings]) -> list[PreflightResult]:
        self.begun.append(([entry.host for entry in new], [findings.host for findings in known]))
        self._ends.append(asyncio.get_running_loop().create_future())
        faults = await self._ends[-1]
        return [
            PreflightResult(
                HostFindings(entry.host, entry.slots, None if faults.get(entry.host) == "mute" else GOOD),
                faults.get(entry.host, ""),
            )
            for entry in new
        ]

    async def fail(self, error: Exception) -> None:
        self._ends[-1].set_exception(error)
        await settle()

    async def end(self, **faults: str) -> None:
        self._ends[-1].set_result(faults)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Scene:
    def __init__(self) -> None:
        self.looks, self.clock = Looks(), FakeClock()
        self.notes: list[str] = []
        note = self.notes.append
        self.feed = HostFeed(FixedHosts(()), self.looks.look, note, note, clock=self.clock)

    async def list(self, *hosts: HostSlots) -> None:
        self.feed.changed(hosts)
        await settle()

    def told(self) -> Sequence[HostsFound | DrainRequested]:
        news = []
        while not self.feed.news.empty():
            news.append(self.feed.news.get_nowait())
        return news


def scene(act):
    """The test with a scene, in an event loop."""

    def run() -> None:
        async def play() -> None:
            one = Scene()
            await act(one)
            await one.feed.close()
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(play())

    run.__name__, run.__doc__ = act.__name__, act.__doc__
    return run


@scene
async def test_nobody_is_in_before_it_was_looked_at(one):
    await one.list(A, B)
    assert one.told() == []
    await one.looks.end()
    assert one.told() == [HostsFound((A, B))]
    assert one.looks.begun == [(["a", "b"], [])]


@scene
async def test_newcomers_are_looked_at_together_when_the_look_before_is_over(one):
    await one.list(A)
    await one.list(A, B)
    await one.list(A, B, C)
    assert one.looks.begun == [(["a"], [])]
    await one.looks.end()
    assert one.looks.begun[1:] == [(["b", "c"], ["a"])]
    await one.looks.end()
    assert one.told() == [HostsFound((A,)), HostsFound((A, B, C))]


@scene
async def test_a_host_that_fails_is_listed_as_unfit_and_told_with_its_numbers(one):
    await one.list(A, B)
    await one.looks.end(b="40 GFLOP/s")
    assert one.told() == [HostsFound((A, B), failed_preflight=("b",))]
    assert one.notes[-1] == "b gets no workers: 40 GFLOP/s; it is looked at again in 600 s"
    assert one.feed.gate.rejected == (Countdown("b", AGAIN_S, "40 GFLOP/s"),)


@pytest.mark.parametrize(("fault", "pause_s"), [("40 GFLOP/s", AGAIN_S), ("mute", RETRY_S)])
def test_it_is_looked_at_again_after_a_while_and_told_once_for_the_same_fault(fault, pause_s):
    @scene
    async def play(one):
        await one.list(A, B)
        await one.looks.end(b=fault)
        one.clock.sleep(pause_s - 0.001)
        await one.list(A, B)
        assert len(one.looks.begun) == 1
        one.clock.sleep(0.002)
        await one.list(A, B)
        assert one.looks.begun[1:] == [(["b"], ["a"])]
        told = len(one.notes)
        await one.looks.end(b=fault)
        assert len(one.notes) == told
        one.clock.sleep(pause_s + 0.001)
        await one.list(A, B)
        await one.looks.end()
        assert one.told() == [HostsFound((A, B), failed_preflight=("b",)), HostsFound((A, B))]
        assert one.feed.gate.rejected == ()

    play()


@scene
async def test_who_is_in_stays_in_with_other_slots_and_is_looked_at_anew_only_if_it_was_gone(one):
    await one.list(A, B)
    await one.looks.end()
    await one.list(HostSlots("a", 4), B)
    await one.list(B)
    await one.list(A, B)
    assert one.told() == [HostsFound((A, B)), HostsFound((HostSlots("a", 4), B)), HostsFound((B,))]
    assert one.looks.begun[1:] == [(["a"], ["b"])]


@scene
async def test_a_host_that_goes_while_it_is_looked_at_does_not_come_in(one):
    await one.list(A, B)
    await one.list(A)
    await one.looks.end()
    assert one.told() == [HostsFound((A,))]


@scene
async def test_a_notice_for_a_host_that_is_in_is_the_jobs_and_for_another_keeps_it_out(one):
    await one.list(A, B)
    one.feed.noticed("b", 120.0)
    await one.looks.end()
    assert one.told() == [HostsFound((A, B), failed_preflight=("b",))]
    assert [out.reason for out in one.feed.gate.rejected] == ["it is to go in 120 s"]
    one.feed.noticed("a", 30.0)
    assert one.told() == [DrainRequested("a", 30.0, deferred=True)]


@scene
async def test_a_host_set_aside_is_forgotten_when_it_is_gone(one):
    await one.list(A, B)
    await one.looks.end(b="40 GFLOP/s")
    await one.list(A)
    await one.list(A, B)
    assert one.looks.begun[1:] == [(["b"], ["a"])]


@scene
async def test_a_look_that_fails_is_taken_again(one):
    await one.list(A)
    await one.looks.fail(OSError("no more descriptors"))
    assert one.told() == [HostsFound((A,), failed_preflight=("a",))]
    assert "it could not be measured: OSError: no more descriptors" in one.notes[-1]
    one.clock.sleep(RETRY_S + 0.001)
    await one.list(A)
    await one.looks.end()
    assert one.told() == [HostsFound((A,))]


@scene
async def test_closing_ends_a_look_that_is_under_way(one):
    await one.list(A)
    await one.feed.close()
    assert one.told() == []
