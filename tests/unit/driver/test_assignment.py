"""What ``edlrun`` tells a worker about its place before there is a world: distinct ranks, and 0 only once."""

from __future__ import annotations

import asyncio
from typing import Any

from edl_hvd.driver.job import Job
from edl_hvd.driver.membership.events import Exited, Formed, HostsFound, MembershipEvent, Raised, Ready
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.network import Network
from edl_hvd.hosts import HostSlots
from edl_hvd.settings import Driver, Launch, own_environment
from edl_hvd.worker import process
from edl_hvd.worker.joining.rendezvous import RendezvousInfo


class Deaf:
    """Hears of everything and keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Waiting:
    """Starts nothing; keeps the variables."""

    def __init__(self) -> None:
        self.given: list[tuple[str, dict[str, str]]] = []

    async def start(self, worker, variables):
        self.given.append((worker, dict(variables)))
        await asyncio.Event().wait()


def started(*events: MembershipEvent, rules: Rules) -> list[tuple[str, dict[str, str]]]:
    """What each worker got, in the order of their starts.."""

    async def play():
        starter = Waiting()
        job = Job(rules, starter, Network(lambda host: "127.0.0.1"), Deaf())
        await job.start()
        for event in events:
            job.handle(event)
            await asyncio.sleep(0.05)
        for task in list(job._tasks):
            task.cancel()
        await job._clean_up()
        return starter.given

    return asyncio.run(play())


def places(given: list[tuple[str, dict[str, str]]]) -> list[tuple[str, int, int, int, int]]:
    launches = [(worker, Launch.from_environment(variables)) for worker, variables in given]
    return [(worker, it.rank, it.size, it.local_rank, it.local_size) for worker, it in launches]


def hosts(*entries: tuple[str, int]) -> HostsFound:
    return HostsFound(tuple(HostSlots(*entry) for entry in entries))


AT_ONCE = Rules(4, 1, 8, backoff_s=0.0)


def world(*members: str) -> list[MembershipEvent]:
    return [*(Ready(member, 1) for member in members), *(Formed(member, 1, 1) for member in members)]


def test_the_workers_that_start_a_job_are_numbered_in_the_order_of_the_hosts():
    given = started(hosts(("b", 2), ("a", 2)), rules=AT_ONCE)
    assert sorted(places(given)) == [("a:0", 2, 4, 0, 2), ("a:1", 3, 4, 1, 2), ("b:0", 0, 4, 0, 2), ("b:1", 1, 4, 1, 2)]


def test_hosts_that_come_one_after_the_other_before_the_first_world_go_on_counting():
    given = started(hosts(("a", 2)), hosts(("a", 2), ("b", 2)), rules=AT_ONCE)
    assert [place[1:3] for place in places(given)] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_who_is_started_again_before_the_first_world_gets_the_number_that_became_free():
    given = started(hosts(("a", 2)), Exited("a:0", 1, False, "crashed"), hosts(("a", 2)), rules=AT_ONCE)
    assert [place[:2] for place in places(given)] == [("a:0", 0), ("a:1", 1), ("a:0", 0)]


def test_a_newcomer_is_numbered_behind_all_who_are_there():
    given = started(hosts(("a", 2)), *world("a:0", "a:1"), hosts(("a", 2), ("b", 2)), rules=Rules(2, 1, 8))
    assert places(given)[2:] == [("b:0", 2, 4, 0, 2), ("b:1", 3, 4, 1, 2)]


def test_a_newcomer_that_starts_after_another_has_its_own_number():
    grown = [hosts(("a", 2), ("b", 1)), hosts(("a", 2), ("b", 1), ("c", 1))]
    given = started(hosts(("a", 2)), *world("a:0", "a:1"), *grown, rules=Rules(2, 1, 8))
    assert [place[:3] for place in places(given)[2:]] == [("b:0", 2, 3), ("c:0", 3, 4)]


def test_who_replaces_rank_0_is_not_told_0_because_a_survivor_becomes_it():
    given = started(hosts(("a", 2)), *world("a:0", "a:1"), Exited("a:0", 1, False, "killed"), hosts(("a", 2)),
                    rules=Rules(2, 1, 8, backoff_s=0.0))  # fmt: skip
    assert [place[:3] for place in places(given)[2:]] == [("a:0", 1, 2)]


def test_a_rank_is_below_the_size_also_for_a_spare():
    given = started(hosts(("a", 3)), rules=Rules(2, 1, 2, spares=1))
    assert [place[1:3] for place in places(given)] == [(0, 3), (1, 3), (2, 3)]


def test_nothing_that_horovod_reads_names_a_place_before_there_is_a_world():
    """Its ``init()`` aborts or waits for others then."""
    [(_, variables), *_] = started(hosts(("a", 2)), rules=AT_ONCE)
    named = [name for name in variables if name.startswith("HOROVOD_")]
    assert set(named) == {"HOROVOD_ELASTIC", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME"}


def test_a_driver_that_is_started_by_a_worker_does_not_pass_on_who_that_is():
    names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_WORLD_KEY"]
    assert own_environment(dict.fromkeys([*names, "HOROVOD_CYCLE_TIME"], "1")) == {"HOROVOD_CYCLE_TIME": "1"}


def test_before_and_between_worlds_the_rank_is_the_last_that_is_known(monkeypatch):
    from edl_hvd.world import World

    place = process.Process(Launch(rank=2, size=3), None)
    monkeypatch.setattr(process, "_process", place)
    assert (process.rank(), process.size()) == (2, 3)
    place.joined = RendezvousInfo(World(1, 1, 2, members=("a:0", "a:1")), None, -1)
    place.joined = None
    assert (process.rank(), process.size()) == (1, 2)


def test_the_drivers_words_survive_the_environment():
    driver = Driver("10.0.0.1", 7, "token", "b:1", 3, 4, 6, 2, 5)
    assert Driver.from_environment(driver.as_environment()) == driver


def test_a_script_that_is_wrong_ends_the_job_at_once_before_the_first_step_only():
    async def play(*events):
        job = Job(Rules(2, 1, 8), Waiting(), Network(lambda host: "127.0.0.1"), Deaf())
        await job.start()
        for event in events:
            job.handle(event)
        for task in list(job._tasks):
            task.cancel()
        await job._clean_up()
        return job.membership.end

    wrong = Raised("a:1", 1, 0, "UsageError: no", hopeless=True)
    for before in ([], [Ready("a:0", 1)], world("a:0", "a:1")):
        end = asyncio.run(play(hosts(("a", 2)), *before, wrong))
        assert end is not None
        assert (end.code, end.reason) == (1, "the script of a:1 cannot be trained: UsageError: no")
    newcomer = Raised("b:0", 1, -1, "UsageError: no", hopeless=True)
    assert asyncio.run(play(hosts(("a", 2)), *world("a:0", "a:1"), hosts(("a", 2), ("b", 1)), newcomer)) is None
    assert asyncio.run(play(hosts(("a", 2)), *world("a:0", "a:1"), Raised("a:1", 1, 5, "UsageError: no"))) is None
    owned = Raised("a:1", 1, 5, "OwnedError: taken over", ends_job=True)
    end = asyncio.run(play(hosts(("a", 2)), *world("a:0", "a:1"), owned))
    assert end is not None
    assert (end.code, end.reason) == (1, "a:1 says that the job has to end: OwnedError: taken over")
    end = asyncio.run(play(hosts(("a", 2)), Exited("a:1", 1, True, "exit code 0")))
    assert end is not None
    assert "a:1 ended with exit code 0 without a call of its training function" in end.reason
