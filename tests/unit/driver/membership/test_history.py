"""A job's history in a file, and its replay."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from fake_workers import FakeJob, check_replay, kept_if_it_fails, random_job, run_at_random

from edl_hvd.cli.replay import replay_command
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.history import FORMAT, History, HistoryEntry, Recorder, read_history, replay
from edl_hvd.driver.membership.state import Rules, begin
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

RULES = Rules(num_proc=2, min_np=1, max_np=4)
ONE_HOST = events.HostsFound((HostSlots("a", 2),))


def written(path: Path, *lines: object) -> Path:
    """A file with a good first line and these lines after it."""
    header = {"format": FORMAT, "rules": {"num_proc": 2, "min_np": 1, "max_np": 4}}
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in (header, *lines)))
    return path


def played() -> FakeJob:
    """A short job: two workers train, one is killed and comes back, both come to the end."""
    job = FakeJob(RULES)
    job.handle(ONE_HOST)
    job.settle(5)
    job.exit("a:1")
    job.settle(5)
    for worker in ("a:0", "a:1"):
        job.handle(events.Done(worker, job.workers[worker].incarnation))
    for worker in ("a:0", "a:1"):
        job.exit(worker, clean=True)
    return job


# --- written and replayed ---


@pytest.mark.parametrize("seed", range(40))
def test_a_random_history_written_and_replayed_gives_the_same_membership_and_the_same_actions(seed, tmp_path):
    chance = random.Random(seed)
    job = random_job(chance)
    with kept_if_it_fails(job, tmp_path / "failed.jsonl"):
        run_at_random(job, chance, injections=250)
        job.settle(100)
    path = tmp_path / "history.jsonl"
    path.write_text(job.history)
    check_replay(job.lived, path)


def test_a_history_that_is_looked_at_while_it_is_written_stays_exact(tmp_path):
    job = FakeJob(RULES)
    job.handle(ONE_HOST)
    path = tmp_path / "history.jsonl"
    for _ in range(50):
        job.now_s += 0.05
        job.handle(events.Tick())
        path.write_text(job.history)
        check_replay(job.lived, path)


def test_time_that_passes_during_a_long_start_takes_one_line_and_counts(tmp_path):
    """Each tick of a start moves the moment from which a job without workers is given up."""
    job = FakeJob(replace(RULES, elastic_timeout_s=60))
    job.handle(ONE_HOST)
    for _ in range(20 * 100):
        job.now_s += 0.05
        job.handle(events.Tick())
    job.handle(events.HostsFound(()))
    for worker in ("a:0", "a:1"):
        job.exit(worker)
    job.settle(100)
    assert job.end is not None
    path = tmp_path / "history.jsonl"
    path.write_text(job.history)
    assert len(job.lived) > 2000
    assert len(read_history(path).entries) < 10
    check_replay(job.lived, path)


def test_an_event_that_the_state_machine_does_not_survive_is_the_last_line():
    file = io.StringIO()
    membership = begin(RULES, 0.0)
    recorder = Recorder(file, membership)
    membership, _ = recorder.transition(membership, ONE_HOST, 0.0)
    membership, _ = recorder.transition(membership, events.Tick(), 0.5)
    with pytest.raises(TypeError):
        recorder.transition(membership, events.DrainRequested("a", "soon"), 1.0)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in file.getvalue().splitlines()[1:]]
    assert [line["what"] for line in lines] == ["HostsFound", "Tick", "DrainRequested"]
    assert lines[-1] == {"at_s": 1.0, "what": "DrainRequested", "target": "a", "notice_s": "soon", "deferred": False}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full, the disk that is always full")
def test_a_full_disk_ends_the_record_and_not_the_job(caplog):
    membership = begin(RULES, 0.0)
    with open("/dev/full", "w") as file:
        recorder = Recorder(file, membership)
        for at_s in range(3):
            membership, _ = recorder.transition(membership, ONE_HOST, float(at_s))
        recorder.flush()
    assert membership.having("starting") == ["a:0", "a:1"]
    [warning] = caplog.messages
    assert "No space left on device" in warning
    assert "the job goes on" in warning


# --- read ---


def test_a_history_cut_off_at_any_place_reads_up_to_its_last_whole_line(tmp_path):
    text = played().history
    whole = written(tmp_path / "whole")
    whole.write_text(text)
    entries = read_history(whole).entries
    for length in range(text.index("\n") + 1, len(text)):
        (tmp_path / "cut").write_text(text[:length])
        history = read_history(tmp_path / "cut")
        # A line that lacks nothing but its end is whole.
        count = text[:length].count("\n") - 1 + (text[length] == "\n")
        assert history.entries == entries[:count]
        assert bool(history.note) == (text[length - 1] != "\n" and text[length] != "\n")


READY = {"at_s": 1.0, "what": "Ready", "worker": "a:0", "incarnation": 1}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("no JSON", "'no JSON' is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", r"\[1\] is no entry; expected an object with 'at_s' and 'what'"),
        ({"what": "Tick"}, "'at_s' is None; expected a number"),
        ('{"at_s": NaN, "what": "Tick"}', "NaN is no number"),
        ('{"at_s": 1e999, "what": "Tick"}', "'at_s' is inf; expected a number"),
        ({"at_s": True, "what": "Tick"}, "'at_s' is True; expected a number"),
        ({"at_s": 0.5, "what": "Tick"}, "'at_s' is 0.5, which is before 1.0; expected lines in order of time"),
        ({"at_s": 2}, "expected an object with 'what' one of HostsFound, Ready, "),
        ({"at_s": 2, "what": "Magic"}, "'Magic'.*expected an object with 'what' one of HostsFound, Ready, "),
        ({"at_s": 2, "what": ["Tick"]}, "expected an object with 'what' one of HostsFound, Ready, "),
        ({"at_s": 2, "what": "Tick", "extra": 1}, "Tick has no field 'extra'; expected no field"),
        ({**READY, "incarnation": "first"}, "Ready.incarnation is 'first'; expected a whole number"),
        ({**READY, "incarnation": True}, "Ready.incarnation is True; expected a whole number"),
        ({**READY, "worker": 7}, "Ready.worker is 7; expected a text"),
        ({"at_s": 2, "what": "Done", "worker": "a:0"}, "Done lacks 'incarnation'; expected worker, incarnation"),
        ({"at_s": 2, "what": "DrainRequested", "target": "a", "notice_s": "1"}, "notice_s is '1'; expected a number"),
        ({"at_s": 2, "what": "HostsFound", "hosts": "a:2"}, "HostsFound.hosts is 'a:2'; expected a list"),
        ({"at_s": 2, "what": "HostsFound", "hosts": ["a:2"]}, "'a:2' is no HostSlots; expected an object with host, s"),
        ({"at_s": 2, "what": "HostsFound", "hosts": [{"host": "a", "slots": 0}]}, "'a' has 0 slots; expected 1 to"),
        ({"at_s": 2, "what": "Tick", "actions": "none"}, "'actions' is 'none'; expected a list"),
        ({"at_s": 2, "what": "Tick", "actions": [READY]}, "expected an object with 'what' one of Spawn, "),
        ("x" * 100_000, "'x{199} ... is no JSON"),
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_number_and_what_is_accepted(line, told, tmp_path):
    path = written(tmp_path / "history", READY, line, READY)
    with pytest.raises(UsageError, match=told) as caught:
        read_history(path)
    assert f"cannot read the history in '{path}', line 3: " in str(caught.value)
    assert "expected a file that 'edlrun --record' wrote" in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: it is empty"),
        ("{}\n", 'line 1: {} is no first line of a history; expected {"format": "edl_hvd membership 1"'),
        ('{"format": "edl_hvd membership 2", "rules": {}}\n', "line 1: .* is no first line of a history"),
        (f'{{"format": "{FORMAT}"}}\n', "line 1: None is no Rules; expected an object with num_proc, min_np"),
        (f'{{"format": "{FORMAT}", "rules": {{"num_proc": 2}}}}\n', "line 1: Rules lacks 'min_np'"),
        (f'{{"format": "{FORMAT}", "rules": {{"magic": 2}}}}\n', "line 1: Rules has no field 'magic'"),
        ('{"format": "edl', "line 1: .* is no JSON"),
        ("\x00\xff\n", "line 1: .* is no JSON"),
    ],
)
def test_a_file_that_is_no_history_is_refused(text, told, tmp_path):
    path = tmp_path / "history"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_history(path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the history in '.*/nothing': No such file"):
        read_history(tmp_path / "nothing")
    with pytest.raises(UsageError, match="Is a directory"):
        read_history(tmp_path)


def test_rules_that_are_not_named_have_their_defaults_and_actions_may_be_left_out(tmp_path):
    history = read_history(written(tmp_path / "history", {"at_s": 0, "what": "Tick"}))
    assert history == History(RULES, (HistoryEntry(0, events.Tick()),))
    assert [decision.differs for decision in replay(history)] == [False]


# --- shown ---


def shown(path: Path, *flags: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(replay_command, [str(path), *flags])
    assert done.exit_code == exit_code, done.output
    return done.output


def test_a_replay_tells_what_happened_what_follows_and_what_came_of_it(tmp_path):
    path = tmp_path / "history"
    path.write_text(played().history)
    lines = [line.rstrip() for line in shown(path).splitlines()]
    assert lines[:4] == [
        "     0.000 s  the hosts are a:2",
        "              → start a:0",
        "              → start a:1",
        "     0.000 s  a:0 is ready and holds nothing",
    ]
    killed = lines.index("     5.000 s  a:1 has failed: killed by SIGKILL")
    assert lines[killed + 1] == "              → tell the members of world 1 that a:1 is gone"
    assert "              → start a:1 (incarnation 2)" in lines[killed:]
    assert lines[-6:] == [
        "slot  state  rank  incarnation  step     since",
        "a:0   empty                  1        10.000 s",
        "a:1   empty                  2        10.000 s",
        "",
        "The last world is 3, running: a:0, a:1",
        "The job ended with exit code 0",
    ]


def test_a_replay_stops_where_it_is_told_to(tmp_path):
    path = tmp_path / "history"
    path.write_text(played().history)
    text = shown(path, "--until", "5")
    assert "killed by SIGKILL" in text
    assert "incarnation 2" not in text
    assert "a:0   member     0            1     1  5.000 s" in text or "a:0   ready" in text
    assert text.endswith("The job had not ended\n")
    assert json.loads(shown(path, "--until", "5", "--json"))["end"] is None


def test_a_replay_as_json_holds_the_decisions_and_the_membership(tmp_path):
    job = played()
    path = tmp_path / "history"
    path.write_text(job.history)
    document = json.loads(shown(path, "--json"))
    assert document["decisions"] == [json.loads(line) for line in job.history.splitlines()[1:]]
    assert document["slots"]["a:1"]["incarnation"] == 2
    assert document["world"]["members"] == ["a:0", "a:1"]
    assert (document["end"], document["difference"], document["note"]) == ({"code": 0, "reason": ""}, None, "")


def test_the_first_decision_that_differs_from_the_record_is_pointed_out(tmp_path):
    path = tmp_path / "history"
    path.write_text(
        played().history.replace('"worker": "a:1", "incarnation": 2}]', '"worker": "a:1", "incarnation": 3}]')
    )
    text = shown(path, exit_code=1)
    place = text.index("              recorded:\n                → start a:1 (incarnation 3)\n")
    assert text[place:].startswith(
        "              recorded:\n                → start a:1 (incarnation 3)\n"
        "              now:\n                → start a:1 (incarnation 2)\n"
    )
    assert "At 6.000 s another decision was recorded" in text
    assert "has completed the training" not in text
    assert json.loads(shown(path, "--json", exit_code=1))["difference"] == {
        "at_s": 6.0,
        "recorded": [{"what": "Spawn", "worker": "a:1", "incarnation": 3}],
        "now": [{"what": "Spawn", "worker": "a:1", "incarnation": 2}],
    }
    assert "another decision" not in shown(path, "--until", "5.9")


def test_a_decision_that_was_not_taken_then_or_is_not_taken_now_differs_too(tmp_path):
    hosts = {"at_s": 0, "what": "HostsFound", "hosts": [{"host": "a", "slots": 1}]}
    assert "recorded: nothing" in shown(written(tmp_path / "then", {**hosts, "actions": []}), exit_code=1)
    tick = {"at_s": 0, "what": "Tick", "actions": [{"what": "QuarantineHost", "host": "a", "cooldown_s": 60}]}
    text = shown(written(tmp_path / "now", tick), exit_code=1)
    assert "→ give host a no workers for 60 s\n" in text
    assert "now: nothing" in text


def test_a_history_cut_short_is_replayed_with_a_note(tmp_path):
    path = written(tmp_path / "history", {"at_s": 0, "what": "Tick"})
    path.write_text(path.read_text() + '{"at_s": 1, "wh')
    text = shown(path)
    assert "There was no world yet\nThe job had not ended\nnote: its last line is cut short" in text
    assert json.loads(shown(path, "--json"))["note"].startswith("its last line is cut short")


def test_what_a_worker_printed_stays_text(tmp_path):
    error = "[red]no\x1b[2J\n\ud800more[/x]"
    raised = {"at_s": 0, "what": "Raised", "worker": "a:0", "incarnation": 1, "step": 3, "error": error}
    assert "a:0 raised at step 3: [red]no?[2J ?more[/x]\n" in shown(written(tmp_path / "history", raised))


def test_every_event_and_every_action_has_its_words(tmp_path):
    lines: list[dict[str, object]] = [
        {"what": "HostsFound", "hosts": []},
        {"what": "Ready", "worker": "a:0", "incarnation": 2, "step": 7},
        {"what": "CaughtUp", "worker": "a:0", "incarnation": 1, "generation": 2},
        {"what": "Formed", "worker": "a:0", "incarnation": 1, "generation": 3},
        {"what": "Raised", "worker": "a:0", "incarnation": 1, "step": 3, "error": "ValueError: x"},
        {"what": "Done", "worker": "a:0", "incarnation": 1},
        {"what": "Exiting", "worker": "a:0", "incarnation": 1},
        {"what": "Exited", "worker": "a:0", "incarnation": 1, "clean": True, "how": "exit code 0"},
        {"what": "Lost", "worker": "a:0", "incarnation": 1, "reason": "it said nothing"},
        {"what": "DrainRequested", "target": "a", "notice_s": 120.0},
        {"what": "Deadlocked", "generation": 3, "reason": "they wait"},
    ]  # fmt: skip
    actions = [
        {"what": "Spawn", "worker": "a:0", "incarnation": 1},
        {"what": "ReceiveState", "worker": "b:0", "generation": 1, "donor": "a:0"},
        {"what": "Publish", "generation": 1, "members": ["a:0", "b:0"]},
        {"what": "RequestResize", "generation": 1},
        {"what": "NotifyPeerLost", "generation": 1, "worker": "b:0"},
        {"what": "ShutDownWorker", "worker": "a:0", "incarnation": 1, "save": True, "left_s": 7.5},
        {"what": "Kill", "worker": "a:0", "incarnation": 1, "reason": "it was stuck"},
        {"what": "QuarantineHost", "host": "a", "cooldown_s": 60.0},
        {"what": "End", "code": 1, "reason": "it is over"},
    ]  # fmt: skip
    last: dict[str, object] = {"what": "Tick", "actions": actions}
    assert {line["what"] for line in (*lines, last)} == {kind.__name__ for kind in get_args(events.MembershipEvent)}
    assert {line["what"] for line in actions} == {kind.__name__ for kind in get_args(events.Action)}
    path = written(tmp_path / "history", *({"at_s": 0, **line} for line in (*lines, last)))
    words = [line[14:] for line in shown(path, exit_code=1).splitlines()]
    assert words[:22] == [
        "there are no hosts",
        "a:0 (incarnation 2) is ready and holds step 7",
        "a:0 has caught up with world 2",
        "a:0 has formed world 3",
        "a:0 raised at step 3: ValueError: x",
        "a:0 has completed the training",
        "the process of a:0 begins to end",
        "a:0 has ended well: exit code 0",
        "a:0 is lost: it said nothing",
        "a has to be left within 120 s",
        "world 3 is deadlocked: they wait",
        "time has passed",
        "recorded:",
        "  → start a:0",
        "  → let b:0 receive the state from a:0, while world 1 trains",
        "  → publish world 1: a:0, b:0",
        "  → ask the members of world 1 to leave it at the next commit",
        "  → tell the members of world 1 that b:0 is gone",
        "  → ask a:0 to exit, with a checkpoint before",
        "  → end a:0: it was stuck",
        "  → give host a no workers for 60 s",
        "  → end the job with exit code 1: it is over",
    ]


def test_a_failing_history_is_kept_where_it_can_be_replayed(tmp_path, capsys):
    job = FakeJob(RULES)
    job.handle(ONE_HOST)
    job.exit("a:0")
    job.workers["a:0"] = job.workers["a:1"]  # as if the process had not ended
    path = tmp_path / "failed.jsonl"
    with pytest.raises(AssertionError, match="two processes in one slot"), kept_if_it_fails(job, path):
        job.settle(5)
    printed = capsys.readouterr().out
    assert f"edl-hvd replay {path}\n" in printed
    assert path.read_text() in printed
    assert "→ start a:0 (incarnation 2)\n" in shown(path)
