"""What ``edl-hvd discover`` and the doctor make of a source's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from clocks import FakeClock
from rich.console import Console

from edl_hvd.cli.discover import picture, to_json
from edl_hvd.discovery.expression import Count
from edl_hvd.discovery.inspection import HostListing, Inspector, ListedHost, changes
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.source import Answer, HostDetails, Permission, Source
from edl_hvd.discovery.sources.combined import Selection
from edl_hvd.doctor import outside
from edl_hvd.doctor.findings import ADVICE, MISSING, OK
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots

A, B = HostSlots("a", 2), HostSlots("b", 1)


@dataclass
class Known(Source):
    """A source of which everything is known."""

    listed: tuple[HostSlots, ...] = (B, A)
    aside: dict[str, str] = field(default_factory=lambda: {"i-7": "it is stopped"})

    def answer(self) -> Answer:
        details = {"a": HostDetails("p3.2xlarge", "eu-1a", 3.06, 500.0)}
        return Answer(self.listed, {"b": 90.0}, details, self.aside)


def inspector(source: Known, clock: FakeClock, is_damped: bool = True) -> Inspector:
    return Inspector(PolledSource(source, 10, 300, 20, is_damped=is_damped), clock)


def shown(listing: HostListing, now_s: float, at_s: float | None = None, problem: str = "") -> str:
    console = Console(width=100, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(picture(listing, now_s, at_s, problem))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_a_look_has_the_hosts_in_order_with_what_is_known_of_them() -> None:
    listing = inspector(Known(), FakeClock()).inspect()
    assert listing.hosts == (
        ListedHost("a", 2, "p3.2xlarge", "eu-1a", 3.06, 500.0, None),
        ListedHost("b", 1, notice_s=90.0),
    )
    assert (listing.slots, listing.left_out) == (3, {"i-7": "it is stopped"})


def test_a_host_whose_age_the_source_does_not_know_is_there_since_it_was_first_seen() -> None:
    clock, source = FakeClock(), Known((B,))
    one = inspector(source, clock)
    assert [host.since_s for host in one.inspect().hosts] == [None]
    clock.sleep(10)
    source.listed = (B, HostSlots("c", 1))
    one.inspect()
    clock.sleep(10)
    assert [host.since_s for host in one.inspect().hosts] == [None, 1010.0]


def test_what_flaps_is_left_out_as_a_job_would() -> None:
    clock, source = FakeClock(), Known()
    damped, plain = inspector(source, clock), inspector(source, clock, is_damped=False)
    for number in range(7):
        source.listed = (B,) if number % 2 else (A, B)
        listing, all_of_it = damped.inspect(), plain.inspect()
        clock.sleep(10)
    assert [one.host for one in listing.hosts] == ["b"]
    assert listing.left_out["a"].startswith("it has come back 3 times")
    assert [one.host for one in all_of_it.hosts] == ["a", "b"]


def test_a_host_that_is_listed_twice_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match="listed more than once"):
        inspector(Known((A, A)), FakeClock()).inspect()


def test_changes_are_told_once_each() -> None:
    clock, source = FakeClock(), Known()
    one = inspector(source, clock)
    first = one.inspect()
    assert changes(None, first) == ["+ a:2", "+ b:1", "  b will be gone in 90 s", "  i-7 is left out: it is stopped"]
    assert changes(first, one.inspect()) == []
    source.listed, source.aside = (HostSlots("a", 4),), {"b": "it is being deleted"}
    second = one.inspect()
    assert changes(first, second) == [
        "- b:1 (it is being deleted)",
        "  a has 4 instead of 2 slots",
        "  b is left out: it is being deleted",
        "  i-7 is no longer left out",
    ]


def test_the_table_shows_what_is_known_and_no_empty_column() -> None:
    listing = inspector(Known(), FakeClock()).inspect()
    assert [" ".join(line.split()) for line in shown(listing, now_s=4100.0).splitlines()] == [
        "host slots type zone $/h age notice",
        "a 2 p3.2xlarge eu-1a 3.06 1 h 0 min",
        "b 1 gone in 1:30 min",
        "2 hosts, 3 slots",
        "",
        "left out",
        "i-7 it is stopped",
    ]
    assert shown(HostListing((ListedHost("a", 2),)), 0.0).splitlines() == [
        "host  slots",
        "a         2",
        "1 host, 2 slots",
    ]


def test_the_table_counts_on_while_there_is_nothing_newer() -> None:
    listing = inspector(Known(), FakeClock()).inspect()
    text = shown(listing, now_s=1100.0, at_s=1070.0, problem="throttled [again]")
    assert "gone in 1:00 min" in text
    assert "throttled [again] (the hosts are as of 30 s ago)" in text


def test_json_leaves_out_what_is_not_known() -> None:
    listing = HostListing(
        (ListedHost("a", 2, zone="z", notice_s=0.0), ListedHost("b", 1)), {"c": "it is stopped"}, "old"
    )
    assert to_json(listing) == {
        "hosts": [{"host": "a", "slots": 2, "zone": "z", "notice_s": 0.0}, {"host": "b", "slots": 1}],
        "left_out": {"c": "it is stopped"},
        "remark": "old",
    }


def test_a_selection_says_whom_it_left_out() -> None:
    limited = Selection(Known(), Count(2), "limit(..., 2)", False)
    listing = Inspector(PolledSource(limited, 0, 0, 0), FakeClock()).inspect()
    assert listing.left_out == {"b": "limit(..., 2) has its 2 slots", "i-7": "it is stopped"}


# --- the doctor ---


@pytest.mark.parametrize(
    ("granted", "verdict", "fix"),
    [(True, OK, ""), (False, MISSING, "grant it; docs/discovery.md has"), (None, ADVICE, "could not be found out")],
)
def test_a_permission_is_there_or_missing_or_unknown(granted: bool | None, verdict: str, fix: str) -> None:
    finding = outside.judge_permission(Permission("list pods", granted, "status 403"))
    assert (finding.subject, finding.verdict, finding.found) == ("permission", verdict, "list pods: status 403")
    assert fix in finding.fix


def test_the_doctor_asks_a_source(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a:2\nb\n")
    (found,) = outside.check_source(f"limit(file:{tmp_path}/hosts.txt, 2)")
    assert found.verdict == OK
    assert found.found.startswith("1 host, 2 slots, ")
    assert found.found.endswith(" s, 1 left out")
    (missing,) = outside.check_source(f"file:{tmp_path}/none.txt")
    assert (missing.verdict, missing.subject) == (MISSING, "source")
    (wrong,) = outside.check_source("fil:hosts.txt")
    assert (wrong.verdict, wrong.fix) == (MISSING, "correct --discover")
    (tmp_path / "plan.txt").write_text("1h add a\n")
    (empty,) = outside.check_source(f"schedule:{tmp_path}/plan.txt")
    assert (empty.verdict, empty.found) == (ADVICE, "it answers, with no hosts")
    assert not (tmp_path / "plan.txt.started").exists(), "to look at a plan does not begin it"
