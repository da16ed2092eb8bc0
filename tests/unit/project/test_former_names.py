"""What had another name in the version before is read under it: flags and variables with a word, files without one."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest
from job_folders import claimed, view_of

from edl_hvd import settings
from edl_hvd.cli.edlrun import read_command_line
from edl_hvd.driver.command_line.flags import PRESENT_NAMES
from edl_hvd.driver.job_folder.files import RECORD, JobRecord
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.status import Countdown, Status, TrainingProgress, WorkerStatus
from edl_hvd.errors import ProtocolError, SettingsError, UsageError
from edl_hvd.events import EventLog, Resized, Restored, read_events
from edl_hvd.json_values import read_fields
from edl_hvd.preflight.messages import FROM_PROBE, Met
from edl_hvd.protocol import HELLO, Hello, decode
from edl_hvd.settings import FORMER_ARGUMENTS, FORMER_VARIABLES, Driver, Settings, own_environment

VALUES = {"EDL_HVD_KEEP": "7", "EDL_HVD_CHECKPOINT_SHARE": "0.5", "EDL_HVD_MEET_TIMEOUT": "7s", "EDL_HVD_GRACE": "7s"}
RULES = dict.fromkeys(("settle_s", "leave_s", "farewell_s", "steady_s"), 7.0)


@pytest.fixture(autouse=True)
def unsaid() -> None:
    """As in a process that has not said anything yet."""
    settings._warn_of_former_name.cache_clear()


# --- variables and arguments ---


@pytest.mark.parametrize("former", FORMER_VARIABLES)
def test_a_variable_is_read_under_its_former_name_with_one_line(former: str, caplog: pytest.LogCaptureFixture) -> None:
    name, value = FORMER_VARIABLES[former], VALUES[former]
    told = Settings.from_environment({former: value})
    assert told == Settings.from_environment({name: value}) != Settings()
    assert Settings.from_environment({former: value}) == told
    assert caplog.messages == [f"{former} is now called {name}; the former name is accepted in this version only"]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("former", FORMER_VARIABLES)
def test_a_variable_under_both_names_is_one_problem(former: str) -> None:
    name = FORMER_VARIABLES[former]
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment({former: VALUES[former], name: VALUES[former]})
    assert str(raised.value) == f"invalid settings:\n  {former} and {name} are one setting; expected {name} alone"


def test_a_present_variable_beside_an_empty_former_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.from_environment({"EDL_HVD_KEEP": "", "EDL_HVD_KEEP_NEWEST": "5"}).keep_newest == 5
    assert caplog.messages == []


@pytest.mark.parametrize(("former", "value"), [("keep", 7), ("checkpoint_share", 0.5)])
def test_an_argument_is_read_under_its_former_name(former: str, value: float, caplog: pytest.LogCaptureFixture) -> None:
    name = FORMER_ARGUMENTS[former]
    assert getattr(Settings.from_environment({}, **{former: value}), name) == value
    assert caplog.messages == [f"{former} is now called {name}; the former name is accepted in this version only"]
    with pytest.raises(SettingsError, match=f"{former} and {name} are one setting; expected {name} alone"):
        Settings.from_environment({}, **{former: value, name: value})


def test_the_decorator_takes_former_arguments() -> None:
    import edl_hvd

    edl_hvd.elastic(keep=5, checkpoint_share=0.5)
    with pytest.raises(SettingsError, match="keep and keep_newest are one setting"):
        edl_hvd.elastic(keep=5, keep_newest=5)


def test_workers_of_edlrun_get_present_names_and_repeat_no_word() -> None:
    assert own_environment({**VALUES, "OTHER": "1"}) == {
        "OTHER": "1", **{FORMER_VARIABLES[former]: value for former, value in VALUES.items()},
    }  # fmt: skip


def test_a_driver_is_read_under_the_former_name_of_a_field() -> None:
    driver = Driver("127.0.0.1", 1, "token", "a:0", 3)
    variables = driver.as_environment()
    variables["EDL_HVD_DRIVER_LIFE"] = variables.pop("EDL_HVD_DRIVER_INCARNATION")
    assert Driver.from_environment(variables) == driver


# --- flags ---


@pytest.mark.parametrize("former", PRESENT_NAMES)
def test_a_flag_is_read_under_its_former_name_with_one_line(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["-np", "1", "true"]
    told = read_command_line([former, "7", *rest])
    name = PRESENT_NAMES[former]
    line = f"edlrun: {former} is now called {name}; the former name is accepted in this version only\n"
    assert capsys.readouterr().err == line
    assert told.rules == read_command_line([name, "7", *rest]).rules != read_command_line(rest).rules
    assert told.given == {name: "7", "-np": "1"}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("former", PRESENT_NAMES)
def test_a_flag_under_both_names_is_one_error(former: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = PRESENT_NAMES[former]
    with pytest.raises(SystemExit) as ending:
        read_command_line([former, "7", name, "8", "-np", "1", "true"])
    assert ending.value.code == 2
    assert capsys.readouterr().err == f"edlrun: {former} and {name} are one flag; keep {name} alone\n"


def test_the_help_shows_the_present_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_command_line(["--help"])
    shown = capsys.readouterr().out
    assert [former for former in PRESENT_NAMES if former in shown] == []
    assert [name for name in PRESENT_NAMES.values() if name not in shown] == []


def test_a_job_that_goes_on_takes_over_former_flags_in_silence(
    runtime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with claimed(tmp_path / "job", given={"-np": "1", "--settle": "3", "--leave-before": "4"}):
        pass
    words = shlex.split(f"--resume --job-dir {tmp_path}/job")
    told = read_command_line(words)
    assert (told.rules.last_call_timeout_s, told.rules.drain_lead_s) == (3.0, 4.0)
    told = read_command_line(["--last-call-timeout", "5", *words])
    assert (told.rules.last_call_timeout_s, told.rules.drain_lead_s) == (5.0, 4.0)
    assert capsys.readouterr().err == ""


# --- files and messages ---


def test_a_status_of_the_version_before_reads() -> None:
    worker = {"worker": "a:0", "state": "member", "life": 2, "mark": "boot 7"}
    fields = {"at": 9.0, "state": "training", "figures": {"step": 3}, "workers": [worker]}
    assert read_fields(WorkerStatus, {**worker, "state": "dismissed"}).state == "terminating"
    aside = [{"who": "b", "remaining_s": 2.5}]
    assert read_fields(Status, {**fields, "aside": aside}) == Status(
        9.0, "training", progress=TrainingProgress(3), quarantined=(Countdown("b", 2.5),),
        workers=(WorkerStatus("a:0", "member", incarnation=2, start_token="boot 7"),),
    )  # fmt: skip
    with pytest.raises(UsageError, match="Status has 'at' and 'at_s', which are one field; expected one of them"):
        read_fields(Status, {**fields, "at_s": 9.0})


def test_a_job_record_of_the_version_before_reads(runtime: Path, tmp_path: Path) -> None:
    with claimed(tmp_path):
        pass
    record = json.loads((tmp_path / RECORD).read_text())
    for name, former in (("start_token", "mark"), ("began_at_s", "began_at"), ("started_at_s", "started_at")):
        record[former] = record.pop(name)
    known = view_of(tmp_path).record
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert view_of(tmp_path).record == known
    assert isinstance(known, JobRecord)


def test_rules_events_and_actions_of_the_version_before_read() -> None:
    rules = read_fields(Rules, {"num_proc": 1, "min_np": 1, "max_np": 1, **RULES})
    present = dict.fromkeys(("last_call_timeout_s", "drain_lead_s", "shutdown_timeout_s", "backoff_reset_s"), 7.0)
    assert rules == Rules(1, 1, 1, **present)  # type: ignore[arg-type]
    read, act = events.event_from_json, events.action_from_json
    ready = {"what": "Ready", "worker": "a:0", "life": 2, "step": 5}
    assert read(ready) == events.Ready("a:0", 2, 5)
    assert read({"what": "Warm", "worker": "a:0", "life": 2, "generation": 3}) == events.CaughtUp("a:0", 2, 3)
    assert read({"what": "HostsFound", "hosts": [], "unfit": ["b"]}) == events.HostsFound((), ("b",))
    drain = {"what": "DrainAsked", "target": "a", "notice_s": 1.0, "stays": True}
    assert read(drain) == events.DrainRequested("a", 1.0, deferred=True)
    assert act({"what": "AskChange", "generation": 3}) == events.RequestResize(3)
    assert act({"what": "TellGone", "generation": 3, "worker": "a:0"}) == events.NotifyPeerLost(3, "a:0")
    follow = {"what": "Follow", "worker": "b:0", "generation": 3, "guide": "a:0"}
    assert act(follow) == events.ReceiveState("b:0", 3, donor="a:0")
    dismiss = {"what": "Dismiss", "worker": "a:0", "life": 2, "save": True, "left_s": None}
    assert act(dismiss) == events.ShutDownWorker("a:0", 2, save=True)
    assert act({"what": "SetAside", "host": "b", "seconds": 60.0}) == events.QuarantineHost("b", 60.0)
    with pytest.raises(UsageError, match="Ready has 'life' and 'incarnation', which are one field"):
        read({**ready, "incarnation": 2})


def test_an_event_log_of_the_version_before_reads_under_present_names(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "now")
    log.emit(Resized(2, 2, 1, "failure", 0.5, 7))
    log.emit(Restored("file:///x", 7, 1, 56, 0.25))
    log.close()
    text = (tmp_path / "now").read_text()
    before = text.replace('"downtime_s"', '"seconds"').replace('"duration_s"', '"seconds"')
    assert before.count('"seconds"') == 2
    (tmp_path / "before").write_text(before + '{"time": 1.0, "event": "of a script", "seconds": 3}\n')
    found = read_events(tmp_path / "before")
    assert found[:2] == read_events(tmp_path / "now")
    assert found[2]["seconds"] == 3


def test_messages_are_read_under_the_former_names_of_their_fields() -> None:
    hello = {"what": "hello", "token": "x", "worker": "a:0", "life": 2}
    assert decode(json.dumps(hello).encode(), HELLO) == Hello("x", "a:0", 2)
    assert decode(b'{"what": "met", "pair": 1, "seconds": 0.5, "problem": ""}', FROM_PROBE) == Met(1, 0.5)
    with pytest.raises(ProtocolError, match="which are one field"):
        decode(json.dumps({**hello, "incarnation": 2}).encode(), HELLO)
