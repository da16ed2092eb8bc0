"""Hosts on which no worker can be started: what the membership makes of them."""

from __future__ import annotations

from puppets import Stage

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import Rules
from edl_hvd.hosts import HostSlots

REFUSED = "ssh could not connect to host c (exit code 255): Connection refused"
A_B_C = tuple(HostSlots(name, 1) for name in "abc")


def stage_of(*hosts: HostSlots, **rules) -> Stage:
    stage = Stage(Rules(**{"num_proc": 2, "min_np": 2, "max_np": 8, "cooldown_s": 60.0, **rules}))
    stage.handle(events.HostsFound(hosts))
    return stage


def refuse(stage: Stage, worker: str) -> None:
    puppet = stage.puppets[worker]
    stage.handle(events.Exited(worker, puppet.incarnation, clean=False, how=REFUSED, began=False))


def refuse_until_set_aside(stage: Stage, worker: str) -> None:
    while worker.partition(":")[0] not in stage.membership.quarantined:
        if worker in stage.puppets:
            refuse(stage, worker)
        stage.now_s += 1.0
        stage.handle(events.Tick())


def set_aside(stage: Stage) -> list[events.QuarantineHost]:
    return [action for one in stage.lived for action in one.actions if isinstance(action, events.QuarantineHost)]


def test_while_others_start_a_host_that_refuses_ends_nothing_and_they_begin_without_it():
    stage = stage_of(*A_B_C, hosts_are_fixed=True)
    refuse_until_set_aside(stage, "c:0")
    assert set_aside(stage) == [events.QuarantineHost("c", 60.0, REFUSED)]
    assert stage.end is None
    stage.be_ready("a:0")
    stage.be_ready("b:0")
    assert stage.membership.world.members == ("a:0", "b:0")


def test_the_fewest_workers_are_enough_when_the_rest_cannot_be_reached():
    stage = stage_of(*A_B_C, num_proc=3)
    stage.be_ready("a:0")
    refuse_until_set_aside(stage, "c:0")
    assert stage.membership.world.generation == 0, "the other one is still on its way"
    stage.be_ready("b:0")
    assert stage.membership.world.members == ("a:0", "b:0")


def test_a_job_that_may_not_be_smaller_waits_for_the_host_and_starts_with_it():
    stage = stage_of(*A_B_C, num_proc=3, min_np=3)
    stage.be_ready("a:0")
    stage.be_ready("b:0")
    refuse_until_set_aside(stage, "c:0")
    assert stage.membership.world.generation == 0
    stage.now_s += 61.0
    stage.handle(events.Tick())
    stage.be_ready("c:0")
    assert stage.membership.world.members == ("a:0", "b:0", "c:0")


def test_when_none_of_the_named_hosts_lets_anybody_in_the_job_ends_as_for_a_wrong_flag():
    stage = stage_of(*A_B_C[2:], num_proc=1, min_np=1, hosts_are_fixed=True)
    refuse_until_set_aside(stage, "c:0")
    assert stage.end == events.End(2, f"no worker could be started, c:0 because {REFUSED}")


def test_a_discovered_host_that_lets_nobody_in_yet_is_waited_for():
    stage = stage_of(*A_B_C[2:], num_proc=1, min_np=1)
    refuse_until_set_aside(stage, "c:0")
    assert stage.end is None
    stage.now_s += 61.0
    stage.handle(events.Tick())
    stage.be_ready("c:0")
    assert stage.membership.world.members == ("c:0",)


def test_and_not_for_longer_than_the_elastic_timeout():
    stage = stage_of(*A_B_C[2:], num_proc=1, min_np=1, elastic_timeout_s=100.0)
    while stage.end is None and stage.now_s < 1000:
        if "c:0" in stage.puppets:
            refuse(stage, "c:0")
        stage.now_s += 1.0
        stage.handle(events.Tick())
    assert stage.end is not None
    assert stage.end.code == 1
    assert stage.end.reason.startswith("fewer than 1 workers were ready for 100 s")
    assert stage.now_s < 110
