"""Traces: read, written, divided, cut, and replayed as a source of hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clocks import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_hvd.discovery.registry import make_source
from edl_hvd.discovery.sources.trace import TraceReplay
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.traces.text import format_trace, parse_trace, read_trace
from edl_hvd.traces.trace import HostChange, Trace

# Read here: in a test there is no variable of ours.
RECORDED = os.environ.get("EDL_HVD_TRACES")
FOUR = Trace(
    (HostChange(0.0, ("a", "b")), HostChange(60.0, ("c",), ("a",)), HostChange(90.0, ("d", "e")), HostChange(100.0))
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace: times in milliseconds, hosts that come and go, prices."""
    present: list[str] = []
    changes = []
    times_ms = draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8, unique=True).map(sorted))
    for number, time_ms in enumerate(times_ms):
        removed = draw(st.lists(st.sampled_from(present), unique=True)) if present else []
        least = 1 if number == 0 else 0
        added = [f"n{number}-{each}" for each in range(draw(st.integers(least, 3)))]
        price = draw(st.none() | st.integers(0, 10**6).map(lambda cents: cents / 100))
        if number == 0 or added or removed or price is not None or number == len(times_ms) - 1:
            changes.append(HostChange(time_ms / 1000, tuple(added), tuple(removed), price))
        present = [host for host in present if host not in removed] + added
    return Trace(tuple(changes))


@settings(max_examples=40)
@given(traces())
def test_a_trace_survives_being_written_down(trace: Trace) -> None:
    assert parse_trace(format_trace(trace, "made up\nby chance"), "trace") == trace


@settings(max_examples=40)
@given(traces(), st.integers(1, 5))
def test_what_is_divided_lasts_as_long_and_has_its_share_of_hosts(trace: Trace, by: int) -> None:
    divided = trace.divided(by)
    assert divided.end_s == trace.end_s
    assert parse_trace(format_trace(divided), "trace") == divided, "nobody is added twice or removed unseen"
    for change in trace.changes:
        there, whole = len(divided.hosts_at(change.time_s)), len(trace.hosts_at(change.time_s))
        assert there == (max(1, (2 * whole + by) // (2 * by)) if whole else 0)


@settings(max_examples=40)
@given(traces(), st.floats(0, 1), st.floats(0, 1))
def test_a_window_has_the_hosts_of_that_time(trace: Trace, one: float, other: float) -> None:
    from_s, until_s = sorted((one * trace.end_s, other * trace.end_s))
    if from_s == until_s:
        with pytest.raises(UsageError, match="there is no part from"):
            trace.window(from_s, until_s)
        return
    window = trace.window(from_s, until_s)
    assert window.end_s == until_s - from_s
    assert set(window.hosts_at(0)) == set(trace.hosts_at(from_s))
    assert set(window.hosts_at(window.end_s)) == set(trace.hosts_at(until_s))


def test_the_form_of_recorded_traces_is_read() -> None:
    text = "# from a market\n\n0,add,node1\r\n0, add ,node2,node3\n480000,remove,node2\n480000,add,node2\n"
    assert parse_trace(text, "trace") == Trace(
        (HostChange(0.0, ("node1", "node2", "node3")), HostChange(480.0, ("node2",), ("node2",)))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "trace has no host"),
        ("0,price,0.9\n60000,end\n", "trace has no host"),
        ("0,add\n", "line 1: '0,add' is not understood; expected 'MILLISECONDS,add,HOST'"),
        ("0,add,\n", "line 1: '0,add,' is not understood"),
        ("0 add node1\n", "line 1: '0 add node1' is not understood"),
        ("# one\n0,add,a\n1,drop,a\n", "line 3: '1,drop,a' is not understood"),
        ("0.5,add,a\n", "line 1: time '0.5' is not understood; expected whole milliseconds"),
        ("-1,add,a\n", "line 1: time '-1' is not understood"),
        ("\u0661,add,a\n", "line 1: time '\u0661' is not understood"),
        ("9,add,a\n8,add,b\n", r"line 2: time 8 is before that of the row above \(9\); expected order of time"),
        ("0,add,a\n1,add,a\n", "line 2: a is added but is there already"),
        ("0,add,a,a\n", "line 1: a is added but is there already"),
        ("0,add,a\n1,remove,b\n", "line 2: b is removed but is not there"),
        ("0,add,a\n0,remove,a\n", "line 2: a is removed at the moment at which it is added"),
        ("0,add,a b\n", "line 1: host name 'a b' is not usable"),
        ("0,add,a\n1,price,cheap\n", "line 2: price 'cheap' is not understood"),
        ("0,add,a\n1,price,nan\n", "line 2: price 'nan' is not understood"),
        ("0,add,a\n1,price,-1\n", "line 2: price '-1' is not understood"),
        ("0,add,a\n1,price,1,2\n", "line 2: price '1,2' is not understood"),
        ("0,add,a\n5,end\n6,add,b\n", "line 3: '6,add,b' comes after the end; expected 'end' in the last row"),
        ("0,add,a\n5,end,b\n", "line 2: '5,end,b' is not understood"),
    ],
)
def test_a_malformed_line_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_trace(text, "trace")


def test_a_file_that_does_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the trace .*/none.csv: No such file"):
        read_trace(str(tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"the trace .*/bytes.csv is not text"):
        read_trace(str(tmp_path / "bytes.csv"))


def test_what_a_trace_tells() -> None:
    assert (FOUR.end_s, FOUR.most_hosts, FOUR.host_seconds) == (100.0, 4, 2 * 90 + 4 * 10)
    assert FOUR.counts == [(0.0, 2), (90.0, 4)]
    assert FOUR.hosts_at(60) == ("b", "c")


def test_the_cost_follows_the_price_and_is_unknown_without_one() -> None:
    assert FOUR.cost_usd is None
    assert FOUR.priced(3.6).cost_usd == pytest.approx(0.22)
    doubled = Trace(
        (HostChange(0.0, ("a",), price_usd_per_h=1.0), HostChange(3600.0, price_usd_per_h=2.0), HostChange(7200.0))
    )
    assert doubled.cost_usd == 3.0
    late = Trace((HostChange(0.0, ("a",)), HostChange(3600.0, price_usd_per_h=2.0), HostChange(7200.0)))
    assert late.cost_usd is None


def test_the_real_traces_are_read() -> None:
    if not RECORDED:
        pytest.skip("EDL_HVD_TRACES does not name a folder of recorded traces")
    for path in Path(RECORDED).glob("*.csv"):
        trace = read_trace(str(path))
        assert parse_trace(format_trace(trace), path.name) == trace


class TestReplay:
    TRACE = "0,add,x\n0,add,y\n40000,remove,x\n60000,add,z\n80000,add,w\n90000,remove,z\n"

    def replay(self, folder: Path, clock: FakeClock, **options: object) -> TraceReplay:
        (folder / "trace.csv").write_text(self.TRACE)
        return TraceReplay(str(folder / "trace.csv"), str(folder / "started"), clock=clock, **options)  # type: ignore[arg-type]

    def seen(self, source: TraceReplay, clock: FakeClock, *pauses_s: float) -> list[str]:
        found = []
        for pause_s in pauses_s:
            clock.sleep(pause_s)
            found.append(" ".join(sorted(str(host) for host in source.answer().hosts)))
        return found

    def test_hosts_come_and_go_as_many_times_as_fast(self, tmp_path: Path) -> None:
        clock = FakeClock(1_000_000.0)
        source = self.replay(tmp_path, clock, speed=20.0, slots=4)
        assert self.seen(source, clock, 0, 1.9, 0.1, 1, 1, 1000) == ["x:4 y:4"] * 2 + [
            "y:4",
            "y:4 z:4",
            "w:4 y:4 z:4",
            "w:4 y:4",
        ]
        assert float((tmp_path / "started").read_text()) == 1_000_000.0

    def test_it_begins_where_it_is_told_to(self, tmp_path: Path) -> None:
        clock = FakeClock(500.0)
        source = self.replay(tmp_path, clock, start_s=490.0, skip_s=50.0)
        assert self.seen(source, clock, 0, 20) == ["y:1 z:1", "w:1 y:1 z:1"]
        assert not (tmp_path / "started").exists()

    def test_each_host_is_played_by_one_that_is_free_and_the_others_wait(self, tmp_path: Path) -> None:
        clock = FakeClock(0.0)
        stand_ins = (HostSlots("localhost", 1), HostSlots("127.0.0.1", 2))
        source = self.replay(tmp_path, clock, start_s=0.0, stand_ins=stand_ins)
        assert self.seen(source, clock, 0, 40, 20, 20, 10) == [
            "127.0.0.1:2 localhost:1", "127.0.0.1:2", "127.0.0.1:2 localhost:1", "127.0.0.1:2 localhost:1",
            "127.0.0.1:2 localhost:1",
        ]  # fmt: skip

    def test_it_divides(self, tmp_path: Path) -> None:
        clock = FakeClock(0.0)
        source = self.replay(tmp_path, clock, start_s=0.0, divide=2)
        assert [len(names.split()) for names in self.seen(source, clock, 0, 60, 20, 10)] == [1, 1, 2, 1]

    def test_a_notice_comes_as_long_before_in_the_time_of_the_trace(self, tmp_path: Path) -> None:
        clock = FakeClock(0.0)
        source = self.replay(tmp_path, clock, start_s=0.0, speed=10.0, notice_s=20.0)
        notices = []
        for pause_s in (1.9, 0.1, 1.0, 1.0):
            clock.sleep(pause_s)
            notices.append(source.answer().notices)
        assert notices == [{}, {"x": pytest.approx(2.0)}, {"x": pytest.approx(1.0)}, {}]

    def test_a_trace_that_is_wrong_is_no_answer(self, tmp_path: Path) -> None:
        source = self.replay(tmp_path, FakeClock())
        (tmp_path / "trace.csv").write_text("0,add,x\n0,add")
        with pytest.raises(DiscoveryError, match="ends in the middle of the line"):
            source.answer()
        (tmp_path / "trace.csv").write_text("0,add,x\n0,add,x\n")
        with pytest.raises(DiscoveryError, match=r"trace.csv line 2: x is added but is there already"):
            source.answer()

    def test_the_words_of_a_command_line(self) -> None:
        words = ["t.csv", "--speed", "20", "--divide=12", "--hosts", "a:1,b:2", "--skip", "2h", "--notice", "2min"]
        question = make_source("trace", words, ["--stale=5"])
        stand_ins = (HostSlots("a", 1), HostSlots("b", 2))
        expected = TraceReplay("t.csv", "t.csv.started", None, 20.0, 12, 7200.0, 120.0, 1, stand_ins)
        assert (question.source, question.refresh_s, question.stale_s) == (expected, 0, 5)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "no trace is given"),
            (["t", "--speed", "0"], "--speed '0' is not usable; expected a number greater than 0"),
            (["t", "--speed", "fast"], "--speed 'fast' is not usable"),
            (["t", "--divide", "0"], "--divide '0' is not usable"),
            (["t", "--hosts", "a:1,a:2"], "--hosts names a more than once"),
            (["t", "--hosts", "a:x"], "'a:x' is not understood"),
        ],
    )
    def test_wrong_words_are_named(self, words: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            make_source("trace", words, [])
