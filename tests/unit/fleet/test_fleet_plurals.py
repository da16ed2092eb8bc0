"""One slot is one slot in every sentence of a fleet, and several are slots."""

from __future__ import annotations

import re

import pytest
from fleet_world import World

from edl_hvd.fleet import events, messages
from edl_hvd.fleet.answers import decide, what_if
from edl_hvd.fleet.messages import PlanView
from edl_hvd.fleet.state import Fleet, FleetRules, JobSpec
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import QueueRule

_WRONG = re.compile(
    r"(?<![\d.,:])(1 (slots|jobs|hosts|workers|resizes) |1 slot are|(?!1\b)\d+ (slot|job|host|worker)\b)"
)


def fleet_of(slots: int, *happened: events.FleetEvent) -> Fleet:
    fleet = Fleet(FleetRules((QueueRule("small", 1.0, slots),)))
    for event in (events.HostsListed((HostSlots("a", slots),)), *happened):
        fleet, _ = turn(fleet, event, 0.0)
    return fleet


def spec(name: str, least: int = 1, most: int | None = None, queue: str = "default") -> JobSpec:
    return JobSpec(name, ("true",), "/", least, most or least, queue=queue)


@pytest.mark.parametrize("number", [1, 2])
def test_an_answer_names_one_slot_and_several(number: int) -> None:
    slots = "1 slot" if number == 1 else "2 slots"
    fleet = fleet_of(number, events.JobSubmitted(spec("one", number, 4)))
    for request, expected in (
        (messages.ScaleRequest("one", number), f"one gets at most {slots}"),
        (messages.ClaimRequest("web", number, 0, None), f"web waits for {slots}"),
        (messages.SubmitRequest(spec("two", number + 1)), f"all hosts of the fleet together have {number};"),
        (messages.SubmitRequest(spec("two", number + 1, queue="small")), f"job two needs at least {number + 1} slots,"),
    ):
        reply = decide(fleet, request).reply
        said = getattr(reply, "text", "") or getattr(reply, "problem", "")
        assert expected in said
        assert not _WRONG.search(said)
    view = what_if(fleet, messages.PlanRequest(claims=(messages.ClaimRequest("web", number, 0, None),)), 1.0)
    assert isinstance(view, PlanView)
    assert f"0 of {slots}, priority 0" in view.shares[-1].why
    full = what_if(fleet, messages.PlanRequest(jobs=(spec("two", number),)), 1.0)
    assert isinstance(full, PlanView)
    assert f"it needs at least {slots}; beside the minimums of others 0 slots are left" in full.shares[-1].why


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_is_told_with_the_right_plural(seed: int) -> None:
    world = World(seed, (HostSlots("a", 1), HostSlots("b", 2)))
    said: set[str] = set()
    for _ in range(80):
        world.anything()
        world.pass_time()
        said |= {job.why for job in world.fleet.jobs.values()} | {one.why for one in world.fleet.claims.values()}
    for _, _, actions in world.history:
        said |= {action.text for action in actions if isinstance(action, events.Tell)}
    assert any("slot" in text for text in said)
    assert [text for text in said if _WRONG.search(text)] == []
