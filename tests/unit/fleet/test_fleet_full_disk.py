"""A daemon whose disk is full: it decides nothing, says so once, and goes on when there is room."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG_S, until

from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.fleet import runs
from edl_hvd.fleet.events import FleetEvent, RulesGiven
from edl_hvd.fleet.keeper import Keeper
from edl_hvd.fleet.messages import (
    Agreed,
    FleetView,
    Refused,
    StopRequest,
    SubmitRequest,
    ViewRequest,
    call,
    is_served,
)
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import Fleet, FleetRules, JobSpec
from edl_hvd.fleet.store import FleetDiskFullError, FleetStore, read_fleet_history
from edl_hvd.hosts import HostSlots

RULES = FleetRules()


def serve(folder: Path, slots: int, use: Callable[[Keeper], None], rules: FleetRules = RULES) -> list[str]:
    """Run a daemon, and use it from another thread; what it has told."""
    told: list[str] = []
    hosts = (HostSlots("localhost", slots),) if slots else ()
    source = PolledSource(FixedHosts(hosts), 60.0, 0.0, 1.0)
    keeper = Keeper(folder, source, rules, dict(os.environ), lambda about, text: told.append(text))

    async def run() -> None:
        daemon = asyncio.create_task(keeper.run())
        try:
            await asyncio.to_thread(until, lambda: is_served(folder))
            await asyncio.wait_for(asyncio.to_thread(use, keeper), LONG_S)
        finally:
            keeper._ending.set()
            await daemon

    asyncio.run(run())
    return told


def jobs(folder: Path) -> list[str]:
    view = call(folder, ViewRequest())
    assert isinstance(view, FleetView)
    return [row.job.name for row in view.jobs]


def test_a_request_is_refused_while_the_disk_is_full_and_granted_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SubmitRequest(JobSpec("large", ("true", "x" * 100_000), "/", 1, 1))
    turn, turns = Keeper._turn, [0]

    def counted(keeper: Keeper) -> None:
        turn(keeper)
        turns[0] += 1

    monkeypatch.setattr(Keeper, "_turn", counted)

    def use(keeper: Keeper) -> None:
        until(lambda: jobs(tmp_path) == [])
        asyncio.run_coroutine_threadsafe(limit(keeper, 12), loop(keeper)).result(30)
        for _ in range(3):
            reply = call(tmp_path, large)
            assert isinstance(reply, Refused)
            assert reply.may_be_later
            assert reply.problem == (
                f"the state of the fleet in {tmp_path / 'fleet.sqlite'} cannot be written: the disk is full (database "
                f"or disk is full); expected some room in {tmp_path}; make room, and ask again"
            )
            seen = turns[0]
            until(lambda seen=seen: turns[0] > seen + 1)  # it looks for room meanwhile
        assert jobs(tmp_path) == []
        asyncio.run_coroutine_threadsafe(limit(keeper, 1 << 20), loop(keeper)).result(30)
        assert isinstance(call(tmp_path, large), Agreed)
        until(lambda: keeper._full_since_s is None)

    told = serve(tmp_path, 0, use)
    assert [("disk is full" in text, "there is room again" in text) for text in told] == [(True, False), (False, True)]


async def limit(keeper: Keeper, pages: int) -> None:
    keeper._store._file.execute(f"PRAGMA max_page_count = {pages}")


def loop(keeper: Keeper) -> asyncio.AbstractEventLoop:
    found = keeper._ending._loop  # type: ignore[attr-defined]
    assert isinstance(found, asyncio.AbstractEventLoop)
    return found


@pytest.mark.parametrize("what", ["RunStarted", "HostsListed", "RunEnded", "TimePassed"])
def test_what_could_not_be_kept_is_kept_later_and_no_job_runs_twice(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, failing = FleetStore.keep, [3]

    def fail(
        store: FleetStore, before: Fleet, after: Fleet, at_s: float, wall_s: float, event: FleetEvent, do: Any
    ) -> None:
        if type(event).__name__ == what and failing[0]:
            failing[0] -= 1
            raise FleetDiskFullError("the disk is full; make room")
        keep(store, before, after, at_s, wall_s, event, do)

    monkeypatch.setattr(FleetStore, "keep", fail)
    command = ["sh", "-c", f"echo $$ >> {tmp_path}/started; exec sleep 60"]
    monkeypatch.setattr(runs, "edlrun_command", lambda spec, folder: command)

    def use(keeper: Keeper) -> None:
        until(lambda: call(tmp_path, SubmitRequest(JobSpec("one", ("true",), "/", 1, 1))))
        until(lambda: keeper.fleet.jobs["one"].pid and (tmp_path / "started").exists())
        until(lambda: (tmp_path / "started").read_text().split())
        assert (tmp_path / "started").read_text().split() == [str(keeper.fleet.jobs["one"].pid)]
        pid = keeper.fleet.jobs["one"].pid
        assert isinstance(call(tmp_path, StopRequest("one")), Agreed)
        until(lambda: not keeper.fleet.jobs["one"].pid)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: keeper._full_since_s is None)

    told = serve(tmp_path, 1, use)
    is_struck = what != "TimePassed"  # it is kept only where something follows from it
    assert failing == ([0] if is_struck else [3])
    assert sum("the disk is full" in text for text in told) == is_struck
    assert not any(decision.differs for decision in decide_again(read_fleet_history(tmp_path)))


def test_a_daemon_that_begins_on_a_full_disk_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, failing = FleetStore.keep, [3]

    def fail(
        store: FleetStore, before: Fleet, after: Fleet, at_s: float, wall_s: float, event: FleetEvent, do: Any
    ) -> None:
        if isinstance(event, RulesGiven) and failing[0]:
            failing[0] -= 1
            raise FleetDiskFullError("the disk is full; make room")
        keep(store, before, after, at_s, wall_s, event, do)

    monkeypatch.setattr(FleetStore, "keep", fail)
    rules = FleetRules(favour_short=0.25)
    told = serve(tmp_path, 1, lambda keeper: until(lambda: keeper.fleet.rules == rules and keeper.fleet.hosts), rules)
    assert failing == [0]
    assert [("disk is full" in text, "there is room again" in text) for text in told] == [(True, False), (False, True)]
