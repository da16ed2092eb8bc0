"""Hosts that are to be left: at once, when they are told so, or shortly before they go."""

from __future__ import annotations

from dataclasses import replace

from test_membership import RULES, hosts, training

from edl_hvd.driver.membership import events


def test_a_host_that_was_drained_and_is_gone_may_come_back():
    stage = training("a:1", "b:1")
    stage.handle(events.DrainRequested("b", 30.0))
    stage.settle(5)
    stage.handle(hosts("a:1"))
    stage.handle(hosts("a:1", "b:1"))
    stage.settle(20)
    assert stage.running == ["a:0"], "until its notice is over it may be the one that goes"
    stage.now_s += 30.0
    stage.handle(hosts("a:1"))
    stage.handle(hosts("a:1", "b:1"))
    stage.settle(5)
    assert stage.running == ["a:0", "b:0"]


def test_a_host_that_is_announced_to_go_is_left_shortly_before():
    stage = training("a:1", "b:1")
    stage.handle(events.DrainRequested("b", 120.0, deferred=True))
    stage.settle(105)
    assert stage.running == ["a:0", "b:0"]
    assert stage.generation == 1
    stage.settle(10)
    assert stage.running == ["a:0"]


def test_it_is_left_then_also_if_discovery_lists_it_no_more():
    stage = training("a:1", "b:1")
    stage.handle(events.DrainRequested("b", 120.0, deferred=True))
    stage.handle(hosts("a:1"))
    stage.settle(105)
    assert stage.running == ["a:0", "b:0"]
    stage.settle(10)
    assert stage.running == ["a:0"]


def test_it_is_left_at_once_if_somebody_asks_for_that_or_nobody_else_is_there():
    stage = training("a:1", "b:1")
    stage.handle(events.DrainRequested("b", 120.0, deferred=True))
    stage.handle(events.DrainRequested("b", 200.0))
    stage.settle(5)
    assert stage.running == ["a:0"]
    stage.handle(events.DrainRequested("a", 120.0, deferred=True))
    stage.settle(30)
    assert stage.end is not None
    assert stage.end.code == 75


def test_who_is_lost_on_a_host_that_is_to_go_is_not_started_again():
    stage = training("a:1", "b:1")
    stage.handle(events.DrainRequested("b", 120.0, deferred=True))
    stage.exit("b:0")
    stage.settle(60)
    assert stage.running == ["a:0"]
    assert list(stage.puppets) == ["a:0"]


def test_the_successor_of_a_host_that_is_to_go_is_started_while_it_stays():
    stage = training("a:1", "b:1", rules=replace(RULES, num_proc=2, max_np=2))
    stage.handle(hosts("a:1", "b:1", "c:1"))
    stage.handle(events.DrainRequested("b", 120.0, deferred=True))
    stage.settle(105)
    assert stage.running == ["a:0", "b:0"]
    assert "c:0" in stage.puppets
    stage.settle(10)
    assert stage.running == ["a:0", "c:0"]


def test_when_every_host_is_drained_one_worker_saves_and_the_job_asks_to_be_run_again():
    stage = training("a:1", "b:1")
    for host in "ab":
        stage.handle(events.DrainRequested(host, 120))
    stage.settle(30)
    assert stage.end is not None
    assert stage.end.code == 75
    actions = [action for moment in stage.lived for action in moment.actions]
    dismissals = [action for action in actions if isinstance(action, events.ShutDownWorker)]
    assert sorted(action.save for action in dismissals) == [False, True]
    assert all(100 < action.left_s <= 120 for action in dismissals), "they are told how long their hosts stay"
