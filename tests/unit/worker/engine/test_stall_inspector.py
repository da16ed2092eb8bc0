"""Members without a driver find out by themselves that they wait for each other in different collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from clocks import FakeClock

from edl_hvd.errors import UsageError
from edl_hvd.key_value_store import KeyValueStore
from edl_hvd.worker.engine.stall_inspector import StalledCollective, StallInspector
from edl_hvd.world import World

MEMBERS = ("a:0", "b:0")


class Together(FakeClock):
    """Who waits lets the others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.others = lambda: None

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self.others()


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    with closing(KeyValueStore("127.0.0.1", token="secret")) as store:
        yield store


@pytest.fixture
def clock() -> Together:
    return Together()


def member(rank: int, store: KeyValueStore, clock: FakeClock) -> StallInspector:
    return StallInspector(World.of(1, MEMBERS, rank), store.place, 60.0, clock)


def look(*waits: StalledCollective, clock: FakeClock, times: int = 1) -> None:
    for _ in range(times):
        for wait in waits:
            wait.look()
        clock.sleep(0.5)


def test_every_member_comes_to_the_same_verdict(store, clock):
    first = StalledCollective(member(0, store, clock), "A", {"A": 1})
    second = StalledCollective(member(1, store, clock), "edl_hvd.flags", {"edl_hvd.flags": 5, "A": 0})
    look(first, second, clock=clock)
    errors: list[UsageError] = []

    def other() -> None:
        if not errors:
            clock.others = lambda: None
            with pytest.raises(UsageError) as error:
                second.look()
            errors.append(error.value)

    clock.others = other
    with pytest.raises(UsageError) as error:
        look(first, clock=clock, times=5)
    assert re.sub(r"for \d+ s", "", str(errors[0])) == re.sub(r"for \d+ s", "", str(error.value))
    assert "rank 0 (a:0) in 'A' at test_stall_inspector.py:" in str(error.value)
    assert "; rank 1 (b:0) in the sum of gradients at test_stall_inspector.py:" in str(error.value)


def test_who_waits_alone_for_a_member_that_computes_comes_to_no_verdict(store, clock, caplog):
    look(StalledCollective(member(0, store, clock), "A", {"A": 1}), clock=clock, times=100)
    assert caplog.messages == []


def test_a_collective_that_all_have_started_is_told_once_and_goes_on(store, clock, caplog):
    first = StalledCollective(member(0, store, clock), "B", {"A": 1, "B": 1})
    second = StalledCollective(member(1, store, clock), "A", {"A": 1})
    look(first, second, clock=clock, times=100)
    [message] = caplog.messages
    assert message.startswith("all 2 workers have waited 61 s at step ")


def test_a_report_that_was_withdrawn_or_replaced_between_two_looks_does_not_count(store, clock):
    first = StalledCollective(member(0, store, clock), "A", {"A": 1})
    others = member(1, store, clock)
    second = StalledCollective(others, "B", {"B": 1})
    look(first, second, clock=clock)
    second.end()
    look(first, clock=clock, times=10)
    for _ in range(10):  # each of them stands at one look
        second = StalledCollective(others, "B", {"B": 1})
        second.look()
        look(first, clock=clock)
        second.end()
    look(first, clock=clock, times=10)


def test_a_store_that_is_gone_decides_nothing(store, clock):
    first = StalledCollective(member(0, store, clock), "A", {"A": 1})
    second = StalledCollective(member(1, store, clock), "B", {"B": 1})
    look(first, second, clock=clock)
    store.close(broken=True)
    look(first, second, clock=clock, times=10)
    first.end()


def test_a_member_that_never_comes_to_the_verdict_is_not_waited_for_for_ever(store, clock):
    first = StalledCollective(member(0, store, clock), "A", {"A": 1})
    look(first, StalledCollective(member(1, store, clock), "B", {"B": 1}), clock=clock)
    began_s = clock.now_s
    with pytest.raises(UsageError):
        look(first, clock=clock, times=5)
    assert clock.now_s - began_s < 6.0


def test_the_report_of_a_large_model_fits_the_store(store, clock):
    started = {f"edl_hvd.gradient.layers.{number}.attention.projection.weight": 10**6 for number in range(20_000)}
    StalledCollective(member(0, store, clock), "A", started).look()
    report = store.get("/edl_hvd.waits/0")
    assert report is not None, "it was refused"
    assert len(report) < 1 << 20
