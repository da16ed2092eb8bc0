"""Costs: their flags and defaults, and what an event log tells of them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from edl_hvd import events
from edl_hvd.errors import UsageError
from edl_hvd.simulator.costs import Costs, flag_of
from edl_hvd.simulator.measured import MeasuredCost, measure, with_measured

DOCUMENT = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
BENCHMARKS = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("entry", fields(Costs), ids=lambda entry: entry.name)
def test_the_document_has_the_flag_and_its_default(entry: Any) -> None:
    assert f"| `{flag_of(entry)}` | {entry.default:g} s |" in DOCUMENT


@pytest.mark.parametrize("entry", fields(Costs), ids=lambda entry: entry.name)
def test_a_default_is_derived_from_a_part_of_the_benchmarks(entry: Any) -> None:
    title, _, figure = entry.metadata["source"].partition(":")
    if title == "not measured over a network":
        return
    parts = {part.partition("\n")[0]: part for part in BENCHMARKS.split("\n## ")[1:]}
    part = next(part for name, part in parts.items() if name.split(",")[0] == title.split(",")[0])
    numbers = re.findall(r"\d+\.\d+|\d{3,}", figure)
    assert [number for number in numbers if not re.search(rf"\b{number}\b", part)] == []


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"resize_s": -1.0}, "--resize-cost is -1.0 s; expected a time, at least 0"),
        ({"start_s": float("nan")}, "--start-time is nan s"),
        ({"step_s": 0.0}, "--step-time is 0.0 s; expected a time, more than 0"),
    ],
)
def test_what_is_no_time_is_refused(costs: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Costs(**costs)


def line(time_s: float, event: events.Event) -> dict[str, Any]:
    return {"time": time_s, "event": event.kind, **vars(event)}


LOG = [
    line(0.0, events.JobStarted("a:0", 1)),
    line(0.1, events.WorldFormed(1, 2, ["a:0", "b:0"], 0)),
    line(0.5, events.Restored("url", 7, 0, 56, 2.5)),
    line(1.0, events.Committed(1, 2, 1, 0, 8)),
    line(1.5, events.Committed(1, 2, 2, 0, 16)),
    line(2.7, events.Committed(1, 2, 4, 0, 32)),
    line(5.0, events.WorkerLost(2, "b:0")),
    line(5.1, events.Resized(2, 2, 1, "failure", 0.25, 4)),
    line(5.2, events.Committed(2, 1, 5, 0, 40)),
    line(5.6, events.Committed(2, 1, 6, 0, 48)),
    line(9.0, events.JobStarted("b:0", 2)),
    line(11.0, events.WorldFormed(3, 2, ["a:0", "b:0"], 6)),
    line(11.1, events.Resized(3, 1, 2, "change", 0.3, 6)),
    line(11.6, events.Resized(4, 2, 3, "change", 0.5, 6)),
    line(12.0, events.CheckpointWritten("url", 6, 1000, 4.0)),
]


def test_an_event_log_tells_what_things_took() -> None:
    found = {one.name: (pytest.approx(one.seconds), one.times) for one in measure(LOG)}
    assert found == {
        "restore_s": (2.5, 1),
        "step_s": (0.5, 3),
        "recover_s": (0.25, 1),
        "start_s": (3.0, 1),
        "resize_s": (0.4, 2),
        "follow_s": (11.1 - 0.3 - 9.0, 1),
        "write_s": (4.0, 1),
    }
    costs = with_measured(Costs(), measure(LOG))
    assert (costs.resize_s, costs.write_s, costs.gloo_timeout_s) == (pytest.approx(0.4), 4.0, 30.0)


def test_a_log_without_any_cost_is_refused() -> None:
    with pytest.raises(UsageError, match="the event log holds no cost"):
        with_measured(Costs(), measure(LOG[:1]))


def test_a_cost_that_was_measured_replaces_the_default_alone() -> None:
    assert with_measured(Costs(), [MeasuredCost("resize_s", 0.7, 3, "resized")]) == Costs(resize_s=0.7)
