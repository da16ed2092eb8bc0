"""How long a wait may go on after a member has left, and how native code is waited for."""

import threading

import pytest
from clocks import FakeClock

from edl_hvd.worker.engine.departures import Departures
from edl_hvd.worker.engine.native_call import NativeCall


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def departures(clock):
    return Departures(clock)


def test_a_wait_has_hope_while_nobody_has_left(clock, departures):
    wait = departures.wait()
    clock.sleep(100_000)
    assert not wait.needs_help
    assert not wait.is_lost


@pytest.mark.parametrize(("regular", "grace_s"), [(False, 0), (True, 5)])
def test_after_a_departure_the_connections_are_broken_first_and_then_the_wait_is_given_up(
    clock, departures, regular, grace_s
):
    wait = departures.wait()
    clock.sleep(10)
    departures.note("rank 3", regular=regular)
    seen = {}
    for moment_s in (0, 0.2, 0.3, 1.9, 2.1):
        clock.now_s = 1_010 + grace_s + moment_s
        seen[moment_s] = (wait.needs_help, wait.is_lost)
    assert seen == {0: (False, False), 0.2: (False, False), 0.3: (True, False), 1.9: (True, False), 2.1: (True, True)}


def test_without_a_driver_there_is_time_to_agree_at_a_commit_and_no_world_forms_any_more(clock, departures):
    wait = departures.wait()
    departures.note_orphaned()
    assert departures.reason == "the driver"
    seen = {}
    for moment_s in (3.2, 3.3, 4.9, 5.1):
        clock.now_s = 1_000 + moment_s
        seen[moment_s] = (wait.needs_help, wait.is_lost)
    assert seen == {3.2: (False, False), 3.3: (True, False), 4.9: (True, False), 5.1: (True, True)}


def test_a_member_that_dies_counts_at_once_though_the_driver_is_gone_too(clock, departures):
    departures.note_orphaned()
    wait = departures.wait()
    clock.sleep(1)
    departures.note("rank 3", regular=False)
    clock.sleep(0.3)
    assert wait.needs_help


def test_a_wait_that_begins_after_a_departure_gets_the_same_time(clock, departures):
    departures.note("rank 3", regular=False)
    clock.sleep(60)
    wait = departures.wait()
    clock.sleep(0.2)
    assert not wait.needs_help
    clock.sleep(2)
    assert wait.is_lost


def test_a_death_counts_more_than_a_regular_departure_whichever_came_first(clock, departures):
    departures.note("rank 1", regular=True)
    departures.note("rank 2", regular=False)
    departures.note("rank 3", regular=True)
    assert departures.reason == "rank 2"
    wait = departures.wait()
    clock.sleep(2.1)
    assert wait.is_lost


def test_a_native_call_returns_or_goes_on(clock):
    end = threading.Event()
    call = NativeCall(end.wait)
    assert not call.returns_within(0.01)
    assert not call.returns_within(30, hopeless=lambda: True)
    end.set()
    assert call.returns_within(30)


def test_what_a_native_call_raises_arrives():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        NativeCall(fail).returns_within(30)
