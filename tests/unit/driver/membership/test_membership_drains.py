"""Hosts that are to be left: at once, when they are told so, or shortly before they go."""

from __future__ import annotations

from dataclasses import replace

from test_membership import RULES, hosts, training

from edl_hvd.driver.membership import events


def test_a_host_that_was_drained_and_is_gone_may_come_back():
    job = training("a:1", "b:1")
    job.handle(events.DrainRequested("b", 30.0))
    job.settle(5)
    job.handle(hosts("a:1"))
    job.handle(hosts("a:1", "b:1"))
    job.settle(20)
    assert job.running == ["a:0"], "until its notice is over it may be the one that goes"
    job.now_s += 30.0
    job.handle(hosts("a:1"))
    job.handle(hosts("a:1", "b:1"))
    job.settle(5)
    assert job.running == ["a:0", "b:0"]


def test_a_host_that_is_announced_to_go_is_left_shortly_before():
    job = training("a:1", "b:1")
    job.handle(events.DrainRequested("b", 120.0, deferred=True))
    job.settle(105)
    assert job.running == ["a:0", "b:0"]
    assert job.generation == 1
    job.settle(10)
    assert job.running == ["a:0"]


def test_it_is_left_then_also_if_discovery_lists_it_no_more():
    job = training("a:1", "b:1")
    job.handle(events.DrainRequested("b", 120.0, deferred=True))
    job.handle(hosts("a:1"))
    job.settle(105)
    assert job.running == ["a:0", "b:0"]
    job.settle(10)
    assert job.running == ["a:0"]


def test_it_is_left_at_once_if_somebody_asks_for_that_or_nobody_else_is_there():
    job = training("a:1", "b:1")
    job.handle(events.DrainRequested("b", 120.0, deferred=True))
    job.handle(events.DrainRequested("b", 200.0))
    job.settle(5)
    assert job.running == ["a:0"]
    job.handle(events.DrainRequested("a", 120.0, deferred=True))
    job.settle(30)
    assert job.end is not None
    assert job.end.code == 75


def test_who_is_lost_on_a_host_that_is_to_go_is_not_started_again():
    job = training("a:1", "b:1")
    job.handle(events.DrainRequested("b", 120.0, deferred=True))
    job.exit("b:0")
    job.settle(60)
    assert job.running == ["a:0"]
    assert list(job.workers) == ["a:0"]


def test_the_successor_of_a_host_that_is_to_go_is_started_while_it_stays():
    job = training("a:1", "b:1", rules=replace(RULES, num_proc=2, max_np=2))
    job.handle(hosts("a:1", "b:1", "c:1"))
    job.handle(events.DrainRequested("b", 120.0, deferred=True))
    job.settle(105)
    assert job.running == ["a:0", "b:0"]
    assert "c:0" in job.workers
    job.settle(10)
    assert job.running == ["a:0", "c:0"]


def test_when_every_host_is_drained_one_worker_saves_and_the_job_asks_to_be_run_again():
    job = training("a:1", "b:1")
    for host in "ab":
        job.handle(events.DrainRequested(host, 120))
    job.settle(30)
    assert job.end is not None
    assert job.end.code == 75
    actions = [action for moment in job.lived for action in moment.actions]
    shut_downs = [action for action in actions if isinstance(action, events.ShutDownWorker)]
    assert sorted(action.save for action in shut_downs) == [False, True]
    assert all(100 < action.left_s <= 120 for action in shut_downs), "they are told how long their hosts stay"
