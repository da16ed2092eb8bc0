"""What a file, a plan and the words of a command line mean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clocks import FakeClock

from edl_hvd.discovery.flags import Flags
from edl_hvd.discovery.registry import make_source
from edl_hvd.discovery.sources.ec2 import Ec2ByTag, read_tag
from edl_hvd.discovery.sources.hostfile import HostsFile
from edl_hvd.discovery.sources.schedule import Schedule, hosts_at, notices_at, parse_plan, stamp
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


class TestHostsFile:
    def test_reads_the_three_forms_comments_and_blank_lines(self, tmp_path: Path) -> None:
        text = "# head\n\nnode-3\nnode-1 slots=4  # four\n10.0.0.7:2\nnode-2\tslots = 8\r\n"
        hosts = HostsFile(write(tmp_path / "hosts", text), default_slots=3).answer().hosts
        assert hosts == (
            HostSlots("node-3", 3),
            HostSlots("node-1", 4),
            HostSlots("10.0.0.7", 2),
            HostSlots("node-2", 8),
        )

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "lists no host"),
            ("# nothing\n", "lists no host"),
            ("node-1 slots=4\nnode-2 slo", "ends in the middle of the line 'node-2 slo'"),
            ("node-1\nnode-1:2\n", "line 2: node-1 is listed twice"),
            ("node-1 slots=0\n", "line 1: .* has 0 slots"),
            ("node-1:2 slots=4\n", "line 1: .* not understood"),
            ("node-1 max=4\n", "line 1: .* not usable"),
            ("a:b:c\n", "line 1: .* not understood"),
            ("fe80::1\n", "line 1: .* not understood"),
        ],
    )
    def test_refuses_what_it_cannot_be_sure_of(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(DiscoveryError, match=words):
            HostsFile(write(tmp_path / "hosts", text)).answer()

    def test_says_why_a_file_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(DiscoveryError, match="No such file"):
            HostsFile(str(tmp_path / "hosts")).answer()

    def test_sees_a_replaced_file_at_once(self, tmp_path: Path) -> None:
        source = HostsFile(write(tmp_path / "hosts", "a\n"))
        source.answer()
        os.replace(write(tmp_path / "part", "b\n"), tmp_path / "hosts")
        assert source.answer().hosts == (HostSlots("b", 1),)


class TestSchedule:
    PLAN = "0 add a:2\n20s add b\n+10 remove b  # gone at 30\n1min add a:4\n+0 add c\n"

    @pytest.mark.parametrize(
        ("elapsed_s", "expected"),
        [
            (-1, {}),
            (0, {"a": 2}),
            (19.9, {"a": 2}),
            (20, {"a": 2, "b": 1}),
            (30, {"a": 2}),
            (60, {"a": 4, "c": 1}),
            (1e9, {"a": 4, "c": 1}),
        ],
    )
    def test_hosts_come_and_go_at_their_times(self, elapsed_s: float, expected: dict[str, int]) -> None:
        hosts = hosts_at(parse_plan(self.PLAN, "plan"), elapsed_s)
        assert {entry.host: entry.slots for entry in hosts} == expected

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "plans nothing"),
            ("0 add\n", "line 1: .* not understood"),
            ("0 drop a\n", "line 1: .* not understood"),
            ("soon add a\n", "line 1: .* not understood"),
            ("5 steps add a\n", "line 1: .* not understood"),
            ("5steps add a\n", "line 1: .* is not a time"),
            ("-5 add a\n", "line 1: .* not understood"),
            ("10 add a\n5 add b\n", "line 2: time 5 is before"),
            ("0 add a\n5 remove b\n", "line 2: b is removed but is not there"),
            ("0 add a\n5 remove a\n6 remove a\n", "line 3: a is removed but is not there"),
            ("0 add a:1\n5 remove a:1\n", "line 2: 'remove a:1' names slots"),
            ("0 add a:1\n5 notice a\n", "line 2: '5 notice a' is not understood"),
            ("0 add a:1\n5 notice a:1 30s\n", "line 2: 'notice a:1' names slots"),
            ("0 add a:1\n5 notice a soon\n", "line 2: .* not understood"),
            ("0 add a:0\n", "line 1: .* has 0 slots"),
        ],
    )
    def test_refuses_a_plan_that_makes_no_sense(self, text: str, words: str) -> None:
        with pytest.raises(DiscoveryError, match=words):
            parse_plan(text, "plan")

    def test_a_host_of_which_it_is_known_that_it_will_go_is_there_until_then(self, tmp_path: Path) -> None:
        clock = FakeClock(100.0)
        plan = write(tmp_path / "plan", "0 add a\n0 add b\n20 notice b 30s\n25 add c\n")
        source = Schedule(plan, str(tmp_path / "started"), 100.0, clock)
        seen = []
        for pause_s in (0, 20, 20, 10):
            clock.sleep(pause_s)
            answer = source.answer()
            seen.append(("".join(entry.host for entry in answer.hosts), answer.notices))
        assert seen == [("ab", {}), ("ab", {"b": 30.0}), ("abc", {"b": 10.0}), ("ac", {})]

    def test_a_host_that_is_added_again_stays(self) -> None:
        plan = parse_plan("0 add a\n5 notice a 30s\n10 add a:2\n", "plan")
        assert (hosts_at(plan, 50), notices_at(plan, 20)) == ((HostSlots("a", 2),), {})

    def test_counts_from_the_first_question(self, tmp_path: Path) -> None:
        clock = FakeClock(1_000_000.0)
        source = Schedule(write(tmp_path / "plan", self.PLAN), str(tmp_path / "started"), clock=clock)
        assert source.answer().hosts == (HostSlots("a", 2),)
        clock.sleep(20)
        assert source.answer().hosts == (HostSlots("a", 2), HostSlots("b", 1))
        assert float((tmp_path / "started").read_text()) == 1_000_000.0

    def test_counts_from_a_given_start_without_a_file(self, tmp_path: Path) -> None:
        clock = FakeClock(1_000_000.0)
        source = Schedule(write(tmp_path / "plan", self.PLAN), str(tmp_path / "started"), 999_980.0, clock)
        assert source.answer().hosts == (HostSlots("a", 2), HostSlots("b", 1))
        assert not (tmp_path / "started").exists()

    def test_the_first_of_many_sets_the_start(self, tmp_path: Path) -> None:
        path = str(tmp_path / "started")
        assert [stamp(path, now_s) for now_s in (5.25, 6.0, 4.0)] == [5.25] * 3
        assert os.listdir(tmp_path) == ["started"]

    def test_refuses_a_start_that_is_no_time(self, tmp_path: Path) -> None:
        with pytest.raises(DiscoveryError, match="delete it to start from zero"):
            stamp(write(tmp_path / "started", "yesterday\n"), 5.0)


class TestFlags:
    def test_a_flag_replaces_its_variable_and_an_empty_variable_is_none(self) -> None:
        flags = Flags(["--a=1", "--b", "2"], ["--a=9", "--c=3", "--d="], ("a", "b", "c", "d"))
        assert [flags.text(name, "default") for name in "abcd"] == ["1", "2", "3", "default"]

    def test_a_bare_word_stands_for_one_flag(self) -> None:
        assert Flags(["here"], ["--file=there"], ("file",), bare="file").text("file", "") == "here"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--nothing", "1"], "unknown flag '--nothing'; accepted: --file, --slots, --stale, --first"),
            (["a", "b"], "--file is given 2 times"),
            (["a", "--slots"], "--slots has no value"),
            (["a", "--slots", "0"], "at least 1"),
            (["a", "--slots", "many"], "whole number"),
            (["a", "--stale", "5 steps"], "not a time"),
            ([], "no hosts file is given"),
        ],
    )
    def test_wrong_words_are_named(self, words: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            make_source("file", words, [])

    def test_a_local_source_is_asked_at_every_poll(self) -> None:
        question = make_source("file", ["hosts.txt", "--stale", "1min"], ["--slots=2"])
        assert (question.source, question.refresh_s, question.stale_s) == (HostsFile("hosts.txt", 2), 0, 60)

    @pytest.mark.parametrize("kind", ["file", "schedule", "trace", "mpijob"])
    def test_the_first_poll_of_a_local_source_waits_for_as_long_as_its_flag_says(self, kind: str) -> None:
        assert make_source(kind, ["a"], []).first_s == 20
        assert make_source(kind, ["a"], ["--first=3"]).first_s == 3

    def test_a_plan_keeps_its_start_beside_it(self) -> None:
        assert make_source("schedule", ["plan.txt"], []).source == Schedule("plan.txt", "plan.txt.started")

    def test_ec2_has_the_times_that_its_help_names(self) -> None:
        question = make_source("ec2", ["--tag", "a=b"], [])
        assert (question.refresh_s, question.stale_s, question.first_s) == (10, 300, 20)


class TestEc2:
    @pytest.mark.parametrize(
        ("text", "pair"), [("a=b", ("a", "b")), ("aws:x/y=b=c", ("aws:x/y", "b=c")), ("a=", ("a", ""))]
    )
    def test_reads_a_tag(self, text: str, pair: tuple[str, str]) -> None:
        assert read_tag(text) == pair

    @pytest.mark.parametrize("text", ["", "job", "=b"])
    def test_refuses_what_is_no_tag(self, text: str) -> None:
        with pytest.raises(UsageError, match="expected KEY=VALUE"):
            read_tag(text)

    def test_refuses_settings_that_ec2_has_not(self) -> None:
        with pytest.raises(UsageError, match="accepted: private-ip, private-dns"):
            Ec2ByTag((("a", "b"),), address="public-ip")
        with pytest.raises(UsageError, match="5 to 1000"):
            Ec2ByTag((("a", "b"),), page_size=4)
