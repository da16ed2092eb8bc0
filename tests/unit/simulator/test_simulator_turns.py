"""The simulator decides as the driver does: many news at once and few ticks, or one by one and every tick."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edl_hvd.driver.membership.events import Action, MembershipEvent
from edl_hvd.driver.membership.state import Membership, Rules
from edl_hvd.driver.membership.transition import transition
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.edlrun_model import DriverSimulation
from edl_hvd.simulator.timeline import Timeline
from edl_hvd.simulator.virtual_time import tick_after
from edl_hvd.traces.trace import HostChange, Trace


def advance_one_by_one(
    membership: Membership, news: Sequence[MembershipEvent], now_s: float
) -> tuple[Membership, tuple[Action, ...]]:
    done: list[Action] = []
    for event in news:
        membership, actions = transition(membership, event, now_s)
        done += actions
    return membership, tuple(done)


def every_tick(membership: Membership, now_s: float) -> float:
    return tick_after(now_s)


def random_trace(chance: random.Random, end_s: float) -> Trace:
    """Up to five hosts; often all of them go."""
    present: list[str] = []
    changes, made = [], 0
    for time_s in sorted({0.0, *(round(chance.uniform(0, end_s), 3) for _ in range(chance.randint(3, 9)))}):
        gone = [host for host in present if chance.random() < 0.35]
        room = 5 - len(present) + len(gone)
        come = [f"n{made + number}" for number in range(min(room, chance.choice((0, 1, 1, 2, 3)) if made else 2))]
        made += len(come)
        present = [host for host in present if host not in gone] + come
        changes.append(HostChange(time_s, tuple(come), tuple(gone)))
    return Trace((*changes, HostChange(end_s)))


@pytest.mark.parametrize("seed", range(8))
def test_decisions_are_those_of_a_driver_that_hears_one_thing_after_the_other(seed: int) -> None:
    chance = random.Random(seed)
    trace = random_trace(chance, 30.0)
    least = chance.choice((1, 1, 2))
    rules = Rules(least, least, 4, elastic_timeout_s=chance.choice((2, 600)))
    notice_s = chance.choice((0.0, 4.0))
    seen = []
    for how in ({}, {"advance": advance_one_by_one, "timer": every_tick}):
        timeline = Timeline(8.0, 0.1, 2.0)
        simulation = DriverSimulation(trace, Costs(start_s=0.7), rules, timeline, notice_s=notice_s, **how)  # type: ignore[arg-type]
        simulation.run()
        assert timeline.spans, "something has trained"
        seen.append((simulation.runs, timeline.checkpoints, [repr(span) for span in timeline.spans]))
    assert seen[0] == seen[1]
