"""Hosts that come and go again and again: when they are left out, in scripts and under edlrun."""

from __future__ import annotations

import json
import threading

import pytest
from clocks import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from test_discovery_cached import FakeEntry, FakeSource
from waiting import LONG_S, soon

from edl_hvd.discovery.damping import FLAPS, REUSE_AFTER_S, WINDOW_S, Damping
from edl_hvd.discovery.polling.cached import ask, find_answer
from edl_hvd.discovery.polling.record import Record
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.source import Answer, Source
from edl_hvd.discovery.watch import HostWatch
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots

A, B = HostSlots("a", 2), HostSlots("b", 1)
Hosts = tuple[HostSlots, ...]


def flapped(times: int, period_s: float = 20.0) -> tuple[Damping, float]:
    """Host a came back N times, the last time just now; b was there all the time."""
    damping, now_s = Damping().observed((A, B), 0.0), 0.0
    for _ in range(times):
        damping = damping.observed((B,), now_s + period_s / 2)
        now_s += period_s
        damping = damping.observed((A, B), now_s)
    return damping, now_s


def test_a_host_is_left_out_after_it_has_come_back_several_times() -> None:
    assert flapped(FLAPS - 1)[0].kept((A, B)) == (A, B)
    damping, now_s = flapped(FLAPS)
    assert damping.kept((A, B)) == (B,)
    assert damping.left_out(now_s) == {
        "a": "it has come back 3 times within 10 min; it counts again when it has stayed for 2 min"
    }
    assert damping.left_out(now_s + 30)["a"].endswith(", 30 s so far")


def test_it_counts_again_when_it_has_stayed_for_a_while() -> None:
    damping, now_s = flapped(FLAPS)
    damping = damping.observed((A, B), now_s + REUSE_AFTER_S - 1)
    assert damping.kept((A, B)) == (B,)
    damping = damping.observed((A, B), now_s + REUSE_AFTER_S)
    assert damping.kept((A, B)) == (A, B)
    assert damping.left_out(now_s + REUSE_AFTER_S) == {}


def test_to_go_while_it_is_left_out_begins_the_wait_anew() -> None:
    damping, now_s = flapped(FLAPS)
    damping = damping.observed((B,), now_s + 100).observed((A, B), now_s + 110)
    assert damping.observed((A, B), now_s + REUSE_AFTER_S + 10).kept((A, B)) == (B,)


def test_returns_of_long_ago_do_not_count() -> None:
    assert flapped(FLAPS + 5, period_s=WINDOW_S / (FLAPS - 1))[0].kept((A, B)) == (A, B)


def test_a_host_that_was_gone_for_long_is_a_new_one() -> None:
    damping, now_s = flapped(FLAPS)
    later = damping.observed((B,), now_s + 1).observed((B,), now_s + WINDOW_S + 1)
    assert later.hosts.keys() == {"b"}


def test_a_change_of_slots_is_no_coming_and_going() -> None:
    damping = Damping()
    for number in range(20):
        damping = damping.observed((HostSlots("a", 1 + number % 2), B), float(number))
    assert damping.kept((A, B)) == (A, B)


def test_where_it_would_leave_nobody_it_leaves_everybody() -> None:
    damping = Damping()
    for number in range(2 * FLAPS + 1):
        damping = damping.observed(() if number % 2 else (A, B), float(number))
    assert damping.kept((A, B)) == (A, B)
    assert damping.left_out(10.0) == {}


histories = st.lists(st.tuples(st.floats(0.1, 200), st.sets(st.sampled_from("abc"))), max_size=30)


@settings(max_examples=40)
@given(histories)
def test_who_is_in_is_never_thrown_out(history: list[tuple[float, set[str]]]) -> None:
    damping, now_s = Damping(), 0.0
    before: set[str] = set()
    for passed_s, names in history:
        now_s += passed_s
        answer = tuple(HostSlots(name, 1) for name in sorted(names))
        # Unless the only ones who kept it company are gone, and all were in although they should not have been.
        all_suppressed = bool(damping.hosts) and all(one.is_suppressed for one in damping.hosts.values() if one.there)
        damping = damping.observed(answer, now_s)
        kept = {entry.host for entry in damping.kept(answer)}
        assert bool(kept) == bool(answer)
        if not all_suppressed:
            assert before & names <= kept
        before = kept


@settings(max_examples=40)
@given(histories, st.floats(0, 1000))
def test_what_is_remembered_survives_its_process(history: list[tuple[float, set[str]]], pause_s: float) -> None:
    damping, now_s = Damping(), 0.0
    for passed_s, names in history:
        now_s += passed_s
        damping = damping.observed([HostSlots(name, 1) for name in names], now_s)
    memory = json.loads(json.dumps(damping.to_memory(now_s)))
    again = Damping().recalled(memory, now_s + pause_s)
    assert again.hosts.keys() == damping.hosts.keys()
    for host, one in again.hosts.items():
        assert (one.there, one.is_suppressed) == (damping.hosts[host].there, damping.hosts[host].is_suppressed)
        assert one.since_s - damping.hosts[host].since_s == pytest.approx(pause_s, abs=1e-6)


@pytest.mark.parametrize("memory", [None, 7, [], {"a": 1}, {"a": [True, "x", [], False]}, {"a": [True, 1.0, 2, False]}])
def test_a_memory_that_does_not_read_is_none(memory: object) -> None:
    assert Damping().recalled(memory, 0.0) == Damping()


# --- in a script ---


def poll_each(answers: list[Hosts | Exception], is_damped: bool = True) -> list[tuple[str, str]]:
    """What polls print, one question after the other, each of a new process: only the record is handed on."""
    clock, record, printed = FakeClock(), Record(), []
    for answer in answers:
        source = FakeSource([answer])
        asked = PolledSource(source, refresh_s=10, stale_s=300, first_s=20, is_damped=is_damped)
        entry = FakeEntry(Record.from_text(record.to_text(10, "boot"), "boot"), clock)
        ask(asked, entry, clock)
        record = entry.record
        printed.append(find_answer(asked, entry, clock))
        clock.sleep(10)
    return printed


FLAPPING: list[Hosts | Exception] = [(A, B), (B,), (A, B), (B,), (A, B), (B,), (A, B)]


def test_a_script_leaves_out_a_host_that_flaps_and_says_why() -> None:
    printed = poll_each([*FLAPPING, *[(A, B)] * 12])
    assert printed[5] == ("b:1\n", "")
    assert printed[6] == (
        "b:1\n",
        "a is left out: it has come back 3 times within 10 min; it counts again when it has stayed for 2 min",
    )
    assert [answer for answer, _ in printed[6:]] == ["b:1\n"] * 12 + ["a:2\nb:1\n"]
    assert printed[-1][1] == ""


def test_an_outage_between_is_neither_coming_nor_going() -> None:
    printed = poll_each([(A, B), *(DiscoveryError("throttled"), (A, B)) * 5])
    assert [answer for answer, _ in printed] == ["a:2\nb:1\n"] * 11


def test_a_local_source_is_not_damped() -> None:
    assert poll_each(FLAPPING, is_damped=False)[-1] == ("a:2\nb:1\n", "")


# --- under edlrun ---


class Played(Source):
    """Answers every ten seconds of ``clock``; when there are no more answers, waits to be closed."""

    def __init__(self, answers: list[Hosts], clock: FakeClock, notices: dict[str, float] | None = None) -> None:
        self._answers = answers
        self._notices = notices or {}
        self._clock = clock
        self.is_over = threading.Event()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def answer(self) -> Answer:
        if not self._answers:
            self.is_over.set()
            self._closed.wait(LONG_S)
            return Answer()
        self._clock.sleep(10)
        return Answer(self._answers.pop(0), notices=self._notices)


def test_edlrun_leaves_out_a_host_that_flaps_and_says_so_once() -> None:
    clock, told, seen = FakeClock(), [], []
    # Gone is who is missing twice in a row.
    played = Played([(A, B), *[(B,), (B,), (A, B)] * 3, *[(A, B)] * 12], clock)
    watch = HostWatch(played, seen.append, told.append, every_s=0.0, clock=clock, damping=Damping())
    watch.start()
    soon(played.is_over)
    watch.close()
    assert seen == [(A, B), (B,), (B, A), (B,), (B, A), (B,), (B, A)]
    assert clock.now_s == 1000.0 + 220, "a came back for the third time at 100 s and counted from 220 s on"
    assert len(told) == 1
    assert told[0].startswith("a is left out: it has come back 3 times")


def test_edlrun_hears_of_the_end_of_hosts_that_it_has_and_of_no_others() -> None:
    clock, told = FakeClock(), []
    # Left out in the answer that announces its end, as a pod is; believed to be there until the next.
    played = Played([(B, A), (B,), (B,)], clock, notices={"a": 9.0, "never came": 5.0})
    watch = HostWatch(
        played, lambda hosts: None, lambda error: None, lambda *notice: told.append(notice), every_s=0.0, clock=clock
    )
    watch.start()
    soon(played.is_over)
    watch.close()
    assert told == [("a", 9.0)]
