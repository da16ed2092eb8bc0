"""The GPUs of a fleet's jobs: which numbers each has, and how its workers hear of them."""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.fleet.devices import numbered
from edl_hvd.fleet.runs import Runs
from edl_hvd.fleet.state import Fleet, FleetJob, HeldClaim, JobSpec
from edl_hvd.hosts import HostSlots


def job(name: str, given: int, occupied: int = 0) -> FleetJob:
    spec = JobSpec(name, ("python", "train.py"), "/work", 1, 8)
    return FleetJob(spec, 0.0, given=_on(given), occupied=_on(occupied))


def _on(slots: int) -> tuple[HostSlots, ...]:
    return (HostSlots("a", slots),) if slots else ()


HOST = HostSlots("a", 4)


def fleet_of(*jobs: FleetJob, host: HostSlots = HOST, claims: tuple[HeldClaim, ...] = ()) -> Fleet:
    return numbered(
        Fleet(hosts=(host,), jobs={one.name: one for one in jobs}, claims={one.name: one for one in claims})
    )


def changed(fleet: Fleet, given: int, occupied: int) -> Fleet:
    """The fleet after a change of job one."""
    one = replace(fleet.jobs["one"], given=_on(given), occupied=_on(occupied))
    return numbered(replace(fleet, jobs={**fleet.jobs, "one": one}))


def devices(fleet: Fleet) -> dict[str, tuple[int, ...]]:
    return {one.name: entry.devices for one in fleet.jobs.values() for entry in one.devices}


def test_two_jobs_on_a_host_have_gpus_of_their_own():
    assert devices(fleet_of(job("one", 2), job("two", 2))) == {"one": (0, 1), "two": (2, 3)}


def test_a_gpu_is_given_on_when_the_worker_that_has_it_has_ended():
    fleet = fleet_of(job("one", 4, occupied=4))
    fleet = changed(fleet, given=2, occupied=4)
    assert devices(fleet) == {"one": (0, 1, 2, 3)}, "its workers on slots 2 and 3 are leaving"
    assert fleet.jobs["one"].listed[0].devices == (0, 1)
    fleet = changed(fleet, given=2, occupied=2)
    fleet = numbered(replace(fleet, jobs={**fleet.jobs, "two": job("two", 1)}))
    assert devices(fleet) == {"one": (0, 1), "two": (2,)}
    fleet = changed(fleet, given=3, occupied=2)
    assert devices(fleet) == {"one": (0, 1, 3), "two": (2,)}, "those that go on keep theirs"


def test_a_claim_has_gpus_of_its_own():
    claim = HeldClaim("web", 2, 1000, 0.0, granted=_on(2))
    fleet = fleet_of(job("one", 2), claims=(claim,))
    assert fleet.claims["web"].devices == (HostSlots("a", 2, (2, 3)),)


def test_the_numbers_are_those_that_the_source_names():
    assert devices(fleet_of(job("one", 1), job("two", 1), host=HostSlots("a", 2, (4, 6)))) == {"one": (4,), "two": (6,)}


def test_a_host_that_shrinks_has_no_gpu_twice():
    fleet = fleet_of(job("one", 2, occupied=2), job("two", 2, occupied=2))
    fleet = numbered(replace(fleet, hosts=(HostSlots("a", 2),)))
    assert devices(fleet) == {"one": (0, 1), "two": (2, 3)}
    assert devices(changed(fleet, given=1, occupied=1)) == {"one": (0,), "two": (2, 3)}


def test_the_hosts_file_of_a_job_names_them(tmp_path):
    runs = Runs(tmp_path, {})
    fleet = fleet_of(job("one", 1), job("two", 2))
    runs.folder_of("two").mkdir(parents=True)
    runs.write_hosts("two", fleet.jobs["two"].listed)
    assert (runs.folder_of("two") / "hosts").read_text() == "a slots=2 devices=1,2\n"
