"""What is told of the time between two worlds, and by whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clocks import FakeClock

from edl_hvd.events import EventLog
from edl_hvd.worker.downtime import Downtime
from edl_hvd.world import World

THREE = ("a:0", "b:0", "c:0")


class Told:
    """One worker's interruption, and what it writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clock = FakeClock()
        self.interruption = Downtime(EventLog(path, self.clock), self.clock)

    def events(self) -> list[dict[str, object]]:
        lines = self._path.read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "events.jsonl")


def test_the_first_member_of_the_last_world_tells_who_is_gone_and_how_long_training_stood_still(told: Told) -> None:
    told.interruption.begin("failure", World(4, 1, 3, members=THREE))
    told.clock.sleep(2.5)
    # A newcomer got rank 0.
    told.interruption.announce(World(5, 1, 3, members=("d:0", "b:0", "c:0")), [0, 4, 4], step=70)
    world_formed, worker_lost, resized = told.events()
    assert world_formed == {
        "event": "world_formed", "generation": 5, "size": 3, "members": ["d:0", "b:0", "c:0"], "step": 70,
    }  # fmt: skip
    assert worker_lost == {"event": "worker_lost", "generation": 5, "worker": "a:0"}
    assert resized == {
        "event": "resized", "generation": 5, "old_size": 3, "new_size": 3, "cause": "failure", "downtime_s": 2.5,
        "step": 70,
    }  # fmt: skip


def test_nobody_tells_it_twice(told: Told) -> None:
    told.interruption.begin("failure", World(4, 2, 3, members=THREE))
    told.interruption.announce(World(5, 2, 3, members=("d:0", "b:0", "c:0")), [0, 4, 4], step=70)
    assert told.events() == []


def test_who_leaves_by_agreement_is_not_lost(told: Told) -> None:
    told.interruption.begin("change", World(4, 0, 3, members=THREE))
    told.interruption.announce(World(5, 0, 2, members=("a:0", "c:0")), [4, 4], step=70)
    assert [event["event"] for event in told.events()] == ["world_formed", "resized"]


def test_a_world_that_breaks_before_its_first_commit_prolongs_the_stop(told: Told) -> None:
    told.interruption.begin("change", World(4, 0, 3, members=THREE))
    told.clock.sleep(1.0)
    told.interruption.begin("failure", World(5, 0, 2, members=("a:0", "b:0")))
    told.clock.sleep(1.0)
    told.interruption.announce(World(6, 0, 1, members=("a:0",)), [5], step=70)
    resized = told.events()[-1]
    assert (resized["cause"], resized["downtime_s"], resized["old_size"]) == ("failure", 2.0, 2)


def test_worlds_that_break_are_counted_while_nobody_is_missing_and_nothing_is_committed(told: Told) -> None:
    found = []
    for generation, members in enumerate([THREE, THREE, THREE, ("a:0", "b:0"), ("a:0", "b:0")], start=1):
        told.interruption.begin("failure", World(generation, 0, len(members), members=members))
        found.append(told.interruption.resets_without_commit)
    assert found == [1, 2, 3, 1, 2]
    told.interruption.end()
    assert told.interruption.resets_without_commit == 0
