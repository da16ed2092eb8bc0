"""Workers that come while others train: they take the state over first, and join together where they can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_workers import FakeJob
from test_membership import RULES, hosts, training

from edl_hvd.driver.membership import events


def warm_up(job: FakeJob, worker: str) -> None:
    """From its start until it holds the state."""
    job.be_ready(worker)
    job.move_on(worker)


def with_newcomer(member: str, **options: Any) -> FakeJob:
    """Training on one host; the worker of another is ready and begins to take the state over."""
    job = training(member, **options)
    job.handle(hosts(member, "b:1"))
    job.be_ready("b:0")
    return job


def test_a_newcomer_waits_a_moment_for_others_that_are_starting_and_joins_with_them():
    job = training("a:2")
    generation = job.generation
    job.handle(hosts("a:2", "b:2"))
    warm_up(job, "b:0")
    job.now_s += 0.3
    warm_up(job, "b:1")
    assert job.workers["a:0"].change
    job.settle(5)
    assert job.generation == generation + 1
    assert len(job.running) == 4


def test_it_waits_for_one_that_takes_the_state_over_and_not_longer_than_allowed():
    job = training("a:2")
    job.handle(hosts("a:2", "b:2"))
    job.be_ready("b:1")
    warm_up(job, "b:0")
    job.now_s += 0.4
    job.handle(events.Tick())
    assert not job.workers["a:0"].change
    job.now_s += 0.1
    job.handle(events.Tick())
    assert job.workers["a:0"].change


def test_a_newcomer_joins_at_once_where_nobody_else_is_on_the_way():
    job = with_newcomer("a:2")
    job.move_on("b:0")
    assert job.workers["a:0"].change


@pytest.mark.parametrize(("waited_s", "joins"), [(5, False), (601, True)])
def test_a_newcomer_takes_the_state_over_before_the_others_let_it_in_unless_that_takes_too_long(waited_s, joins):
    job = with_newcomer("a:2")
    job.now_s += waited_s
    job.handle(events.Tick())
    assert job.workers["b:0"].follows == job.generation
    assert job.workers["a:0"].change == joins
    job.move_on("b:0")
    assert job.workers["a:0"].change


def test_after_a_death_nobody_waits_for_a_newcomer_without_state():
    job = with_newcomer("a:3")
    job.exit("a:2")
    for worker in ("a:0", "a:1", "a:0", "a:1"):
        job.move_on(worker)
    assert job.running == ["a:0", "a:1"]
    job.settle(10)
    assert sorted(job.running) == ["a:0", "a:1", "a:2", "b:0"]


def test_a_newcomer_without_state_is_taken_in_at_once_where_there_are_too_few_without_it():
    job = with_newcomer("a:2", rules=replace(RULES, min_np=2))
    job.exit("a:1")
    job.move_on("a:0")
    for worker in ("a:0", "b:0"):
        job.move_on(worker)
    assert job.running == ["a:0", "b:0"]
