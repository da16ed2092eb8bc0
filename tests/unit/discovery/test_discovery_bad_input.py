"""What people, editors and other programs write instead of hosts: read as it is meant, or refused in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.discovery.expression import parse_expression
from edl_hvd.discovery.polling.record import Record
from edl_hvd.discovery.registry import PolledSource, make_source
from edl_hvd.discovery.source import Source
from edl_hvd.discovery.sources.combined import read_source
from edl_hvd.discovery.sources.google_api import _read_object
from edl_hvd.discovery.sources.hostfile import HostsFile, read_hostfile
from edl_hvd.discovery.sources.kubernetes import _read_list
from edl_hvd.discovery.sources.mpijob import MpiJob
from edl_hvd.discovery.sources.schedule import Schedule
from edl_hvd.discovery.sources.trace import TraceReplay
from edl_hvd.discovery.sources.url import read_listed
from edl_hvd.discovery.watch import TrustedHosts
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots, format_hosts, parse_host
from edl_hvd.http_client import HttpAnswer
from edl_hvd.traces.text import read_trace

MANY_DIGITS = "9" * 5000
ARABIC_FOUR = "\N{ARABIC-INDIC DIGIT FOUR}"
MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
DEEP = b'{"a":' * 100_000

AB = (HostSlots("a", 1), HostSlots("b", 2))


def hosts_file(path: Path) -> Source:
    return HostsFile(str(path))


def schedule(path: Path) -> Source:
    return Schedule(str(path), "", start_s=0.0, clock=FakeClock())


def trace(path: Path) -> Source:
    return TraceReplay(str(path), "", start_s=0.0, clock=FakeClock())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (hosts_file, "a:1\nb slots=2\n"),
        (schedule, "0 add a:1\n0 add b:2\n"),
        (trace, "0,add,a\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_first_line(
    tmp_path: Path, make: Callable[[Path], Source], text: str
) -> None:
    for name, content in (("plain", text), ("marked", MARK + text)):
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert make(tmp_path / "marked").answer().hosts == make(tmp_path / "plain").answer().hosts


def test_a_byte_order_mark_is_no_host_elsewhere_either(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{MARK}a:1\nb:2\n", encoding="utf-8")
    assert read_hostfile(str(path)) == AB
    assert read_listed(HttpAnswer(200, {}, path.read_bytes()), None).hosts == AB
    path.write_text(f"{MARK}0,add,a\n", encoding="utf-8")
    assert read_trace(str(path)).hosts_at(0) == ("a",)


def test_a_hosts_file_that_changes_is_written_as_hostfiles_of_mpi_are(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=1 max-slots=8\nb slots = 2\tmax_slots=2 # both\n")
    assert HostsFile(str(path)).answer().hosts == AB


@pytest.mark.parametrize("text", ["NODE-1:1\nnode-1:1\n", "Node-1\nnode-1\n"])
def test_one_name_in_capitals_and_small_letters_is_one_host(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(DiscoveryError, match="line 2: node-1 is listed twice"):
        HostsFile(str(path)).answer()
    assert read_hostfile(str(path)) == (HostSlots("node-1", 2),)
    (tmp_path / "other").write_text("NODE-1:1\n")
    (tmp_path / "hosts").write_text("node-1:1\n")
    union = read_source(f"union(file:{path}, file:{tmp_path / 'other'})").source
    assert union.answer().hosts == (HostSlots("node-1", 1),)


def test_details_are_those_of_the_host_in_whatever_letters() -> None:
    body = b'{"hosts": [{"host": "Node-1", "slots": 1, "zone": "z", "notice_s": 5}]}'
    answer = read_listed(HttpAnswer(200, {}, body), None)
    assert (answer.details["node-1"].zone, answer.notices) == ("z", {"node-1": 5.0})


@pytest.mark.parametrize("count", ["1" * 20, "100001", ARABIC_FOUR, MANY_DIGITS, "-1", "1_0", "0", "²", ""])
def test_slots_are_a_number_that_a_host_can_have(tmp_path: Path, count: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"a:{count}\n", encoding="utf-8")
    for read in (HostsFile(str(path)).answer, lambda: read_listed(HttpAnswer(200, {}, path.read_bytes()), None)):
        with pytest.raises((DiscoveryError, UsageError)) as raised:
            read()
        assert len(str(raised.value)) < 400
    if count != "100001":
        with pytest.raises(UsageError, match=r"--slots .* is not usable"):
            make_source("file", [str(path), f"--slots={count or 'x'}"], [])


def test_slots_may_have_leading_zeros() -> None:
    assert parse_host("a:0004") == HostSlots("a", 4)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a slots=2 devices=0", r"2 slots and the devices \[0\]; expected one number for each slot"),
        ("a devices=1,1", r"the devices \[1, 1\]; expected one number"),
        ("a devices=0,x", "devices='0,x' is not understood; expected numbers of GPUs"),
        ("a devices=", "devices='' is not understood"),
        ("a devices=-1", "devices='-1' is not understood"),
    ],
)
def test_devices_are_one_number_for_each_slot(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{line}\n")
    with pytest.raises(DiscoveryError, match=problem):
        HostsFile(str(path)).answer()
    with pytest.raises(UsageError, match=problem):
        read_hostfile(str(path))


def test_devices_of_a_host_on_several_lines_are_those_of_all(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a devices=2\na devices=3,0\n")
    assert read_hostfile(str(path)) == (HostSlots("a", 3, (2, 3, 0)),)
    path.write_text("a devices=2\na slots=1\n")
    with pytest.raises(UsageError, match="one number for each slot"):
        read_hostfile(str(path))


@pytest.mark.parametrize("body", [DEEP, b"[" * 100_000, b'{"a": ' + MANY_DIGITS.encode() + b"}"])
def test_an_answer_that_python_cannot_read_is_no_fault_of_ours(body: bytes) -> None:
    answer = HttpAnswer(200, {}, body)
    for read in (lambda: read_listed(answer, None), lambda: _read_object(answer, "x"), lambda: _read_list(answer)):
        with pytest.raises((DiscoveryError, UsageError)):
            read()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (schedule, f"{MANY_DIGITS} add a:1\n"),
        (schedule, f"0 add a:1\n0 notice a {MANY_DIGITS}\n"),
        (trace, f"{MANY_DIGITS},add,a\n"),
        (trace, f"{ARABIC_FOUR},add,a\n"),
    ],
)
def test_times_of_thousands_of_digits_are_refused(tmp_path: Path, make: Callable[[Path], Source], text: str) -> None:
    (tmp_path / "plan").write_text(text, encoding="utf-8")
    with pytest.raises(DiscoveryError, match=r"line [12]: "):
        make(tmp_path / "plan").answer()


class CountedName(str):
    """Counts how often names are compared."""

    comparisons: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)

    def lower(self) -> CountedName:
        return self


def test_many_hosts_take_as_many_comparisons_as_sorting_them() -> None:
    names = [CountedName(f"node-{number:05}") for number in range(3000)]
    CountedName.comparisons = 0
    assert format_hosts(HostSlots(name, 1) for name in names).count("\n") == 3000
    assert CountedName.comparisons < 40 * 3000, "12 for each of them to sort; all pairs were 9,000,000"


def test_a_watch_of_many_hosts_compares_each_with_a_few() -> None:
    hosts = tuple(HostSlots(CountedName(f"node-{number:05}"), 1) for number in range(3000))
    trusted = TrustedHosts()
    CountedName.comparisons = 0
    for answer in (hosts, hosts[:-1], hosts[:-1], hosts[1:]):
        trusted, _ = trusted.answered(answer, 0.0)
    assert len(trusted.hosts) == 3000, "the first is missed once, the last is gone and back"
    assert CountedName.comparisons < 40 * 3000


def test_the_lines_of_code_for_a_file_grow_with_its_lines(tmp_path: Path) -> None:
    def lines_of(hosts: int) -> int:
        """Lines of code run in the package to read a file of N hosts, and to print them."""
        (tmp_path / "hosts").write_text("".join(f"node-{number:05}:4\n" for number in range(hosts)))
        count = 0

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            if "/edl_hvd/" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace_line

        before = sys.gettrace()
        sys.settrace(trace_line)
        try:
            assert format_hosts(HostsFile(str(tmp_path / "hosts")).answer().hosts).count("\n") == hosts
        finally:
            sys.settrace(before)
        return count

    few, many = lines_of(200), lines_of(2000)
    assert few > 200
    assert many < 10.5 * few, (few, many)


# --- what a poll is from ---


def polled(source: Source) -> PolledSource:
    return PolledSource(source, refresh_s=0, stale_s=0, first_s=0)


@pytest.mark.parametrize(
    ("make", "text", "holds_s"),
    [
        (hosts_file, "a:1\n", float("inf")),
        (schedule, "0 add a\n1500 add b\n2000 notice a 100\n", 500.0),
        (schedule, "0 add a\n900 notice a 200\n", 100.0),
        (schedule, "0 add a\n", float("inf")),
        (trace, "0,add,a\n1700000,add,b\n", 700.0),
        (trace, "0,add,a\n", float("inf")),
    ],
)
def test_a_local_answer_holds_until_its_file_or_the_plan_changes_it(
    tmp_path: Path, make: Callable[[Path], Source], text: str, holds_s: float
) -> None:
    (tmp_path / "file").write_text(text)
    source = make(tmp_path / "file")
    assert source.answer().holds_s == holds_s
    assert str(tmp_path / "file") in source.files


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])).map(lambda text: " ".join(text.split())))
def test_the_signs_of_files_survive_being_written(signs: str) -> None:
    record = Record(answered_s=1.0, answer="a:1\n", unchanged=signs)
    assert Record.from_text(record.to_text(0, "boot"), "boot") == record


def mpijob(path: Path) -> Source:
    (path.parent / "hostfile").write_text("a slots=1\n")
    path.rename(path.parent / "discover_hosts.sh")
    return MpiJob(str(path.parent))


@pytest.mark.parametrize("end", ["\n", ""], ids=["whole", "half"])
@pytest.mark.parametrize("make", [hosts_file, schedule, trace, mpijob])
def test_of_a_line_that_is_very_long_a_message_shows_its_beginning(
    tmp_path: Path, make: Callable[[Path], Source], end: str
) -> None:
    file = tmp_path / "file"
    file.write_text("#!/bin/sh\n" + "[" * 100_000 + end)
    with pytest.raises((DiscoveryError, UsageError)) as refused:
        make(file).answer()
    assert "'[[[[" in str(refused.value)
    assert len(str(refused.value)) < 500 + len(str(tmp_path))


def test_a_limit_of_thousands_of_digits_is_refused_in_a_line() -> None:
    with pytest.raises(UsageError, match="limit has no number") as caught:
        parse_expression(f"limit(file:hosts.txt, {MANY_DIGITS})", frozenset({"file"}))
    assert len(str(caught.value)) < 400
