"""Workers that come while others train: they take the state over first, and join together where they can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from puppets import Stage
from test_membership import RULES, hosts, training

from edl_hvd.driver.membership import events


def warm_up(stage: Stage, worker: str) -> None:
    """From its start until it holds the state."""
    stage.be_ready(worker)
    stage.move_on(worker)


def with_newcomer(member: str, **options: Any) -> Stage:
    """Training on one host; the worker of another is ready and begins to take the state over."""
    stage = training(member, **options)
    stage.handle(hosts(member, "b:1"))
    stage.be_ready("b:0")
    return stage


def test_a_newcomer_waits_a_moment_for_others_that_are_starting_and_joins_with_them():
    stage = training("a:2")
    generation = stage.generation
    stage.handle(hosts("a:2", "b:2"))
    warm_up(stage, "b:0")
    stage.now_s += 0.3
    warm_up(stage, "b:1")
    assert stage.puppets["a:0"].change
    stage.settle(5)
    assert stage.generation == generation + 1
    assert len(stage.running) == 4


def test_it_waits_for_one_that_takes_the_state_over_and_not_longer_than_allowed():
    stage = training("a:2")
    stage.handle(hosts("a:2", "b:2"))
    stage.be_ready("b:1")
    warm_up(stage, "b:0")
    stage.now_s += 0.4
    stage.handle(events.Tick())
    assert not stage.puppets["a:0"].change
    stage.now_s += 0.1
    stage.handle(events.Tick())
    assert stage.puppets["a:0"].change


def test_a_newcomer_joins_at_once_where_nobody_else_is_on_the_way():
    stage = with_newcomer("a:2")
    stage.move_on("b:0")
    assert stage.puppets["a:0"].change


@pytest.mark.parametrize(("waited_s", "joins"), [(5, False), (601, True)])
def test_a_newcomer_takes_the_state_over_before_the_others_let_it_in_unless_that_takes_too_long(waited_s, joins):
    stage = with_newcomer("a:2")
    stage.now_s += waited_s
    stage.handle(events.Tick())
    assert stage.puppets["b:0"].follows == stage.generation
    assert stage.puppets["a:0"].change == joins
    stage.move_on("b:0")
    assert stage.puppets["a:0"].change


def test_after_a_death_nobody_waits_for_a_newcomer_without_state():
    stage = with_newcomer("a:3")
    stage.exit("a:2")
    for worker in ("a:0", "a:1", "a:0", "a:1"):
        stage.move_on(worker)
    assert stage.running == ["a:0", "a:1"]
    stage.settle(10)
    assert sorted(stage.running) == ["a:0", "a:1", "a:2", "b:0"]


def test_a_newcomer_without_state_is_taken_in_at_once_where_there_are_too_few_without_it():
    stage = with_newcomer("a:2", rules=replace(RULES, min_np=2))
    stage.exit("a:1")
    stage.move_on("a:0")
    for worker in ("a:0", "b:0"):
        stage.move_on(worker)
    assert stage.running == ["a:0", "b:0"]
