"""Combinations: which hosts they give, and what stands in for a part that fails."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from test_discovery_cached import FakeEntry
from waiting import soon

from edl_hvd.discovery.expression import Count
from edl_hvd.discovery.polling.cached import ask, find_answer
from edl_hvd.discovery.polling.record import Record
from edl_hvd.discovery.registry import PolledSource, make_source
from edl_hvd.discovery.source import Answer, HostDetails, Permission, Source
from edl_hvd.discovery.sources.combined import (
    CHEAPER,
    Selection,
    UnionSource,
    in_order,
    read_source,
    sources_in,
    start_now,
    take,
)
from edl_hvd.discovery.sources.ec2 import Ec2ByTag
from edl_hvd.discovery.sources.hostfile import HostsFile
from edl_hvd.discovery.sources.part import PART_S, RememberedSource
from edl_hvd.discovery.sources.schedule import Schedule
from edl_hvd.driver.command_line.options import Options, read_options
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots

A, B, C = HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 4)

# --- which hosts ---


@dataclass
class Told(Source):
    """A source with everything; gives each of ``answers`` in turn, the last one for ever. An exception is raised."""

    answers: list[tuple[HostSlots, ...] | Exception]
    prices: dict[str, float] = field(default_factory=dict)
    ends_s: dict[str, float] = field(default_factory=dict)
    closed: bool = False

    def answer(self) -> Answer:
        hosts = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(hosts, Exception):
            raise hosts
        details = {host: HostDetails(price_usd_per_h=price) for host, price in self.prices.items()}
        return Answer(hosts, self.ends_s, details, left_out={"i-7": "it is stopped"})

    def permissions(self) -> list[Permission]:
        return [Permission("ask", True, "it answers")]

    def close(self) -> None:
        self.closed = True


def union(*sources: Told, stale_s: float = 300.0, clock: FakeClock | None = None) -> UnionSource:
    clock = clock or FakeClock()
    return UnionSource(
        [RememberedSource(f"part-{number}", source, stale_s, clock) for number, source in enumerate(sources)]
    )


def test_a_union_has_the_hosts_of_all_and_of_a_host_that_several_have_the_first() -> None:
    first, second = Told([(A, B)], {"a": 1.0}, {"a": 30.0}), Told([(HostSlots("a", 8), C)], {"a": 9.0}, {"a": 20.0})
    both = union(first, second)
    details = {"a": HostDetails(price_usd_per_h=1.0)}
    assert both.answer() == Answer((A, B, C), {"a": 20.0}, details, {"i-7": "it is stopped"})
    assert len(list(both.permissions())) == 2
    both.close()
    assert first.closed
    assert second.closed


def test_a_part_that_fails_is_stood_in_for_until_its_answer_is_too_old() -> None:
    clock = FakeClock()
    first = Told([(A,), DiscoveryError("throttled")], {"a": 1.0}, {"a": 500.0})
    both = union(first, Told([(B,), (C,)]), clock=clock)
    known = both.answer()
    assert (known.hosts, known.age_s, known.warning) == ((A, B), 0.0, "")
    clock.sleep(300)
    bridged = both.answer()
    assert (bridged.hosts, bridged.age_s) == ((A, C), 300.0)
    assert bridged.warning == "giving the answer of part-0 of 300 s ago, good for 300 s: throttled"
    assert (bridged.details, bridged.notices) == (known.details, {"a": 200.0}), "a notice goes on meanwhile"
    clock.sleep(1)
    with pytest.raises(
        DiscoveryError, match=r"part-0: throttled; its last good answer is 301 s old, more than --stale"
    ):
        both.answer()


def test_a_part_without_any_good_answer_or_without_stale_time_fails_the_union_at_once() -> None:
    with pytest.raises(DiscoveryError, match=r"^part-1: throttled$"):
        union(Told([(A,)]), Told([DiscoveryError("throttled")])).answer()
    clock = FakeClock()
    both = union(Told([(A,), DiscoveryError("gone")]), stale_s=0.0, clock=clock)
    both.answer()
    clock.sleep(1)
    with pytest.raises(DiscoveryError, match=r"^part-0: gone$"):
        both.answer()


def test_a_part_without_hosts_counts_when_it_says_so_twice() -> None:
    both = union(Told([(A,), (), (A,), (), DiscoveryError("throttled"), (), ()]), Told([(B,)]))
    assert [both.answer().hosts for _ in range(7)] == [(A, B)] * 6 + [(B,)]


def test_what_a_part_says_besides_no_hosts_counts_at_once() -> None:
    source = Told([(A,), ()], {"a": 1.0})
    both = union(source)
    both.answer()
    source.ends_s = {"a": 30.0}
    doubted = both.answer()
    assert (doubted.hosts, doubted.notices) == ((A,), {"a": 30.0})
    assert "it says that it has no hosts" in doubted.warning


def test_an_error_of_ours_in_a_part_is_not_bridged() -> None:
    both = union(Told([(A,), ZeroDivisionError("oops")]))
    both.answer()
    with pytest.raises(ZeroDivisionError):
        both.answer()


def test_a_part_that_hangs_holds_up_the_others_once_and_is_not_asked_twice() -> None:
    class Hanging(Told):
        def answer(self) -> Answer:
            answer = super().answer()
            if answer.hosts != (A,):
                soon(released)
            return answer

    released, clock = threading.Event(), FakeClock()
    hanging = RememberedSource("part-0", Hanging([(A,), (B,), (C,)]), 300.0, clock)
    hanging.start()
    assert hanging.answer().hosts == (A,)
    hanging.start()
    clock.sleep(PART_S)
    bridged = hanging.answer()
    assert bridged.hosts == (A,)
    assert "it has not answered for 30 s" in bridged.warning
    clock.sleep(300)
    hanging.start()
    with pytest.raises(
        DiscoveryError, match="part-0: it has not answered for 330 s; its last good answer is 330 s old"
    ):
        hanging.answer()
    released.set()
    hanging._results.put(soon(hanging._results))  # its answer has come
    hanging.start()
    assert hanging.answer().hosts == (B,)


def test_what_a_union_knows_survives_its_process() -> None:
    clock = FakeClock()
    before = union(Told([(A,)]), Told([(B,)]), clock=clock)
    before.answer()
    memory = json.loads(json.dumps(before.memory(clock.now_s)))
    clock.sleep(100)
    after = union(Told([DiscoveryError("throttled")]), Told([(C,)]), clock=clock)
    after.recall(memory, clock.now_s - 100)
    answer = after.answer()
    assert (answer.hosts, answer.age_s) == ((A, C), 100.0)


@pytest.mark.parametrize("memory", [None, 7, [], {"part-0": [1]}, {"part-0": [[["a b", 1]], 0, 0, None]}])
def test_a_memory_that_does_not_read_is_none(memory: object) -> None:
    both = union(Told([DiscoveryError("throttled")]))
    both.recall(memory, 0.0)
    with pytest.raises(DiscoveryError, match="throttled"):
        both.answer()


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (Count(8), "a:2 b:1 c:4"),
        (Count(7), "a:2 b:1 c:4"),
        (Count(4), "a:2 b:1 c:1"),
        (Count(3), "a:2 b:1"),
        (Count(1), "a:1"),
        (Count(2, "hosts"), "a:2 b:1"),
        (Count(9, "hosts"), "a:2 b:1 c:4"),
    ],
)
def test_a_limit_is_reached_exactly_and_never_exceeded(most: Count, expected: str) -> None:
    assert " ".join(map(str, take((A, B, C), most))) == expected


def test_a_limit_keeps_the_hosts_that_it_gave_before() -> None:
    limited = Selection(Told([(B, C), (A, B, C), (A, C)]), Count(2, "hosts"), "limit(..., 2 hosts)", False)
    answers = [limited.answer() for _ in range(3)]
    assert [answer.hosts for answer in answers] == [(B, C), (B, C), (C, A)]
    assert answers[-1].left_out == {"i-7": "it is stopped"}


def test_who_is_left_out_by_a_limit_is_named_and_has_neither_details_nor_notice() -> None:
    source = Told([(A, B)], {"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 5.0})
    limited = Selection(source, Count(1, "hosts"), "limit(..., 1 hosts)", False).answer()
    assert limited.hosts == (A,)
    assert limited.left_out["b"] == "limit(..., 1 hosts) has its 1 hosts"
    assert (set(limited.details), set(limited.notices)) == ({"a"}, {"a"})


def test_the_cheapest_slots_come_first_and_unknown_prices_last() -> None:
    source = Told([(A, B, C, HostSlots("d", 1))], {"a": 4.0, "b": 1.5, "c": 4.0})  # 2, 1.5 and 1 for a slot
    preferred = Selection(source, Count(3, "hosts"), "prefer(..., 3 hosts)", True).answer()
    assert [entry.host for entry in preferred.hosts] == ["c", "b", "a"]
    assert preferred.left_out["d"] == "prefer(..., 3 hosts) has its 3 hosts; its price is not known"


def test_a_host_in_use_is_not_traded_for_one_that_is_only_slightly_cheaper() -> None:
    a, b = HostSlots("a", 1), HostSlots("b", 1)
    source = Told([(a, b)], {"a": 1.0, "b": 1.1})
    preferred = Selection(source, Count(1), "prefer(..., 1)", True)
    chosen = []
    for price_b in (1.1, 0.9, CHEAPER + 0.01, CHEAPER - 0.01, 1.0, 1.2, 1.3):
        source.prices["b"] = price_b
        chosen.append(preferred.answer().hosts[0].host)
    assert chosen == ["a", "a", "a", "b", "b", "b", "a"]


prices = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10))


@given(prices, st.frozensets(st.sampled_from("abcdef")), st.integers(1, 6))
def test_the_choice_stays_while_prices_stay(known: dict[str, float], in_use: frozenset[str], count: int) -> None:
    found = [HostSlots(host, 1) for host in "abcdef"]

    def choose(before: frozenset[str]) -> frozenset[str]:
        return frozenset(entry.host for entry in take(in_order(found, known, before), Count(count)))

    once = choose(in_use)
    assert choose(once) == once
    assert len(once) == count


def test_a_choice_survives_its_process() -> None:
    before = Selection(Told([(B, C)]), Count(1, "hosts"), "limit(..., 1 hosts)", False)
    before.answer()
    after = Selection(Told([(A, B, C)]), Count(1, "hosts"), "limit(..., 1 hosts)", False)
    after.recall(json.loads(json.dumps(before.memory(0.0))), 0.0)
    assert after.answer().hosts == (B,)


# --- from text to sources ---


def test_a_combination_is_asked_as_rarely_as_its_rarest_part_and_bridged_as_each_part_says() -> None:
    asked = read_source("union(file:a, url:https://h/x,refresh=30,stale=60)")
    assert (asked.refresh_s, asked.stale_s, asked.first_s, asked.is_damped) == (30, 60, 20, True)
    files = read_source("limit(union(file:a, schedule:plan.txt), 8)")
    assert (files.refresh_s, files.stale_s, files.first_s, files.is_damped) == (0, 0, 20, False)
    assert list(sources_in(files.source)) == [HostsFile("a"), Schedule("plan.txt", "plan.txt.started")]
    assert read_source("file:a", lambda leaf: ["--slots=4"]).source == HostsFile("a", 4)


def test_a_plan_begins_with_who_asks_unless_its_start_is_given() -> None:
    clock = FakeClock(1000.7)

    def start_of(text: str) -> float | None:
        source = read_source(text, lambda leaf: start_now(leaf, clock)).source
        assert isinstance(source, Schedule)
        return source.start_s

    assert start_of("schedule:plan.txt") == 1000
    assert start_of("schedule:plan.txt,start=7") == 7
    assert start_of("schedule:plan.txt,start-file=f") is None
    assert read_source("file:a", lambda leaf: start_now(leaf, clock)).source == HostsFile("a")


def test_the_flags_of_the_script_beat_those_of_its_sources() -> None:
    asked = make_source("source", ["union(file:a, file:b)", "--stale", "60", "--refresh=5"], ["--first=7"])
    assert (asked.refresh_s, asked.stale_s, asked.first_s) == (5, 60, 7)
    assert asked.source.parts[0] == HostsFile("a")


def test_who_prefers_the_cheapest_asks_for_prices() -> None:
    def asks(text: str) -> list[bool]:
        sources = sources_in(read_source(text).source)
        return [one._instances._options.prices for one in sources if isinstance(one, Ec2ByTag)]

    assert asks("prefer(union(ec2:tag=a=b, file:a), 8)") == [True]
    assert asks("union(limit(ec2:tag=a=b, 8), prefer(ec2:tag=a=b,prices=no, 8))") == [False, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("union(file:a, ec2:job)", "ec2:job: unexpected word 'job'"),
        ("limit(file:slots=4, 3)", "file:slots=4: no hosts file is given"),
        ("source:x", "there is no kind 'source'"),
    ],
)
def test_a_source_of_a_combination_that_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_source("source", [text], [])
    assert str(raised.value).startswith(f"--source {text!r}: ")
    assert words in str(raised.value)


# --- in scripts and under edlrun ---


def test_what_stands_in_for_a_part_and_for_the_whole_are_not_added_up() -> None:
    """A script gives a union's answer for as long as its oldest part may be given, and no longer."""
    clock, record = FakeClock(), Record()

    def poll(*answers: tuple[HostSlots, ...] | Exception) -> tuple[str, str]:
        """As a new process each time: what it knows is in the record."""
        nonlocal record
        source = union(*(Told([answer]) for answer in answers), clock=clock)
        asked = PolledSource(source, refresh_s=10, stale_s=300, first_s=20)
        entry = FakeEntry(Record.from_text(record.to_text(10, "boot"), "boot"), clock)
        ask(asked, entry, clock)
        record = entry.record
        return find_answer(asked, entry, clock)

    assert poll((A,), (B,)) == ("a:2\nb:1\n", "")
    clock.sleep(290)
    answer, remark = poll(DiscoveryError("throttled"), (B, C))
    assert answer == "a:2\nb:1\nc:4\n"
    assert remark == "giving the answer of part-0 of 290 s ago, good for 300 s: throttled"
    clock.sleep(5)
    answer, remark = poll(DiscoveryError("throttled"), DiscoveryError("gone"))
    assert answer == "a:2\nb:1\nc:4\n"
    assert remark.endswith("of part-1 of 5 s ago, good for 300 s: gone")
    clock.sleep(10)
    with pytest.raises(
        DiscoveryError, match=r"part-0: throttled; .* 305 s old, more than --stale 300 allows; the last"
    ):
        poll(DiscoveryError("throttled"), (B, C))


def test_edlrun_reads_combinations(tmp_path: Path) -> None:
    def read(text: str, **more: str) -> Options:
        given = {"-np": "1", "--discover": text, **more}
        return read_options(("true",), given, {"PATH": os.defpath}, clock=FakeClock())

    (tmp_path / "a").write_text("node-1\n")
    (tmp_path / "plan").write_text("0 add node-2:8\n")
    both = f"union(file:{tmp_path}/a, schedule:{tmp_path}/plan)"
    options = read(f"limit({both}, 6)", **{"--slots-per-host": "4"})
    assert (options.source.answer().hosts, options.poll_every_s) == (
        (HostSlots("node-1", 4), HostSlots("node-2", 2)),
        0.2,
    )
    assert not options.is_damped
    assert not (tmp_path / "plan.started").exists()
    with_server = read(f"union(file:{tmp_path}/a, url:https://hosts.example.com/x)")
    assert (with_server.poll_every_s, with_server.is_damped) == (10, True)
    for text, words in (
        (f"union(file:{tmp_path}/a, fil:b)", "there is no kind 'fil'"),
        (f"union(file:{tmp_path}/a, file:{tmp_path}/none)", "cannot read the hosts file"),
        (f"limit(trace:{tmp_path}/none, 8)", "cannot read the trace"),
    ):
        with pytest.raises(UsageError, match=words):
            read(text)
