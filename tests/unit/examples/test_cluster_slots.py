"""The picture of the cluster demo: slots over time, out of a fleet's history."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edl_hvd.fleet import events
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import Fleet, JobSpec
from edl_hvd.fleet.store import FleetEntry
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots

HERE = Path(__file__).parents[3] / "examples" / "cluster"


@pytest.fixture
def slots(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delitem(sys.modules, "slots", raising=False)
    import slots

    return slots


def history() -> list[FleetEntry]:
    fleet, entries = Fleet(), []
    spec = JobSpec("one", ("true",), "/", 1, 4)
    happened = (
        (0.0, events.HostsListed((HostSlots("a", 4),))),
        (1.0, events.JobSubmitted(spec)),
        (2.0, events.RunStarted("one", 7, "token")),
        (5.0, events.SlotsClaimed("web", 2, 0)),
        (6.0, events.RunObserved("one", ())),
        (9.0, events.RunEnded("one", 0, "")),
    )
    for at_s, event in happened:
        fleet, actions = turn(fleet, event, at_s)
        entries.append(FleetEntry(at_s, event, actions))
    return entries


def test_spans_say_who_had_what_when(slots):
    spans = slots.slot_spans(decide_again(history()))
    assert [(span.name, span.begin_s, span.end_s, span.slots) for span in spans] == [
        ("one", 1.0, 2.0, 4),
        ("one", 2.0, 5.0, 4),
        ("one", 5.0, 6.0, 2),
        ("web", 5.0, 6.0, 2),
        ("one", 6.0, 9.0, 2),
        ("web", 6.0, 9.0, 2),
    ]


def test_the_picture_is_drawn(slots, tmp_path):
    slots.draw(slots.slot_spans(decide_again(history())), tmp_path / "slots.png", 4)
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")
    slots.draw([], tmp_path / "empty.png", 4)
