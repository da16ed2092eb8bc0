"""Hosts on which no worker can be started: what the membership makes of them."""

from __future__ import annotations

from fake_workers import FakeJob

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import Rules
from edl_hvd.hosts import HostSlots

REFUSED = "ssh could not connect to host c (exit code 255): Connection refused"
A_B_C = tuple(HostSlots(name, 1) for name in "abc")


def job_of(*hosts: HostSlots, **rules) -> FakeJob:
    job = FakeJob(Rules(**{"num_proc": 2, "min_np": 2, "max_np": 8, "cooldown_s": 60.0, **rules}))
    job.handle(events.HostsFound(hosts))
    return job


def refuse(job: FakeJob, worker: str) -> None:
    fake = job.workers[worker]
    job.handle(events.Exited(worker, fake.incarnation, clean=False, how=REFUSED, began=False))


def refuse_until_set_aside(job: FakeJob, worker: str) -> None:
    while worker.partition(":")[0] not in job.membership.quarantined:
        if worker in job.workers:
            refuse(job, worker)
        job.now_s += 1.0
        job.handle(events.Tick())


def set_aside(job: FakeJob) -> list[events.QuarantineHost]:
    return [action for one in job.lived for action in one.actions if isinstance(action, events.QuarantineHost)]


def test_while_others_start_a_host_that_refuses_ends_nothing_and_they_begin_without_it():
    job = job_of(*A_B_C, hosts_are_fixed=True)
    refuse_until_set_aside(job, "c:0")
    assert set_aside(job) == [events.QuarantineHost("c", 60.0, REFUSED)]
    assert job.end is None
    job.be_ready("a:0")
    job.be_ready("b:0")
    assert job.membership.world.members == ("a:0", "b:0")


def test_the_fewest_workers_are_enough_when_the_rest_cannot_be_reached():
    job = job_of(*A_B_C, num_proc=3)
    job.be_ready("a:0")
    refuse_until_set_aside(job, "c:0")
    assert job.membership.world.generation == 0, "the other one is still on its way"
    job.be_ready("b:0")
    assert job.membership.world.members == ("a:0", "b:0")


def test_a_job_that_may_not_be_smaller_waits_for_the_host_and_starts_with_it():
    job = job_of(*A_B_C, num_proc=3, min_np=3)
    job.be_ready("a:0")
    job.be_ready("b:0")
    refuse_until_set_aside(job, "c:0")
    assert job.membership.world.generation == 0
    job.now_s += 61.0
    job.handle(events.Tick())
    job.be_ready("c:0")
    assert job.membership.world.members == ("a:0", "b:0", "c:0")


def test_when_none_of_the_named_hosts_lets_anybody_in_the_job_ends_as_for_a_wrong_flag():
    job = job_of(*A_B_C[2:], num_proc=1, min_np=1, hosts_are_fixed=True)
    refuse_until_set_aside(job, "c:0")
    assert job.end == events.End(2, f"no worker could be started, c:0 because {REFUSED}")


def test_a_discovered_host_that_lets_nobody_in_yet_is_waited_for():
    job = job_of(*A_B_C[2:], num_proc=1, min_np=1)
    refuse_until_set_aside(job, "c:0")
    assert job.end is None
    job.now_s += 61.0
    job.handle(events.Tick())
    job.be_ready("c:0")
    assert job.membership.world.members == ("c:0",)


def test_and_not_for_longer_than_the_elastic_timeout():
    job = job_of(*A_B_C[2:], num_proc=1, min_np=1, elastic_timeout_s=100.0)
    while job.end is None and job.now_s < 1000:
        if "c:0" in job.workers:
            refuse(job, "c:0")
        job.now_s += 1.0
        job.handle(events.Tick())
    assert job.end is not None
    assert job.end.code == 1
    assert job.end.reason.startswith("fewer than 1 workers were ready for 100 s")
    assert job.now_s < 110
