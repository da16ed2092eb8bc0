import json
import subprocess
import sys
from unittest.mock import ANY

import pytest

from edl_hvd.errors import SettingsError, UsageError
from edl_hvd.events import Committed, EventLog, JobEnded, read_events
from edl_hvd.hosts import HostSlots, format_hosts, parse_host
from edl_hvd.settings import Launch, Settings
from edl_hvd.values import Interval


def test_importing_the_package_imports_neither_torch_nor_horovod():
    code = "import edl_hvd, edl_hvd.events, sys; print([m for m in ('torch', 'horovod') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_loads():
    import edl_hvd

    for name in edl_hvd.__all__:
        assert getattr(edl_hvd, name) is not None


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (30, Interval(30, "seconds")),
        ("0.5s", Interval(0.5, "seconds")),
        ("200ms", Interval(0.2, "seconds")),
        ("10min", Interval(600, "seconds")),
        ("2 h", Interval(7200, "seconds")),
        ("500 steps", Interval(500, "steps")),
        ("1 step", Interval(1, "steps")),
        ("100000 samples", Interval(100000, "samples")),
        ("1 epoch", Interval(1, "epochs")),
        ("0.5 epochs", Interval(0.5, "epochs")),
    ],
)
def test_intervals_are_read_as_people_write_them(text, interval):
    assert Interval.parse(text) == interval


@pytest.mark.parametrize("text", ["", "0", "-5s", "often", "10 parsecs", "0.5 steps", "1e3s", 0, None])
def test_other_intervals_are_refused(text):
    with pytest.raises(SettingsError, match="is not understood"):
        Interval.parse(text)


def test_an_argument_beats_the_environment_and_that_the_default():
    environ = {"EDL_HVD_KEEP_NEWEST": "7", "EDL_HVD_COMMIT_EVERY": "4"}
    settings = Settings.from_environment(environ, keep_newest=2)
    assert (settings.keep_newest, settings.commit_every, settings.checkpoint) == (2, 4, None)


def test_all_problems_of_the_settings_are_reported_at_once():
    environ = {
        "EDL_HVD_KEEP_NEWEST": "many",
        "EDL_HVD_CHECKPOINT_EVERY": "often",
        "EDL_HVD_RESTART_LOST_PROGRESS": "yes",
    }
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment(environ)
    assert all(name in str(raised.value) for name in environ)
    with pytest.raises(SettingsError, match=r"keep_newest=0 is too small.*\n.*commit_every=0"):
        Settings.from_environment({}, keep_newest=0, commit_every=0)


def test_a_process_without_launcher_is_alone():
    assert Launch.from_environment({}) == Launch(run=ANY)


def test_what_horovodrun_sets_is_read():
    launch = Launch.from_environment(
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234", "HOROVOD_ELASTIC": "1",
         "HOROVOD_HOSTNAME": "node-1", "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}
    )  # fmt: skip
    assert (launch.address, launch.port, launch.elastic, launch.host) == ("10.0.0.1", 1234, True, "node-1")
    assert (launch.rank, launch.size) == (3, 4)
    with pytest.raises(SettingsError, match="HOROVOD_RANK='x'"):
        Launch.from_environment({"HOROVOD_RANK": "x"})


def test_hosts_are_read_and_written_in_horovods_form():
    assert parse_host("node-1:4") == HostSlots("node-1", 4)
    assert parse_host(" 10.0.0.7 ", default_slots=2) == HostSlots("10.0.0.7", 2)
    assert format_hosts([HostSlots("b", 1), HostSlots("a", 2)]) == "a:2\nb:1\n"


@pytest.mark.parametrize("text", ["", "a b", "a:", "a:b", "a:1:2", "a:0", "::1", "-a", "a:-1"])
def test_a_line_that_horovod_would_misread_is_refused(text):
    with pytest.raises(UsageError):
        parse_host(text)


def test_a_host_listed_twice_is_refused():
    with pytest.raises(UsageError, match="a is listed more than once"):
        format_hosts([HostSlots("a", 1), HostSlots("a", 2)])


def test_events_are_appended_by_several_writers_and_read_back(tmp_path):
    path = tmp_path / "runs" / "events.jsonl"
    logs = [EventLog(path), EventLog(path)]
    logs[0].emit(Committed(generation=1, size=2, step=3, epoch=0, samples=24))
    logs[1].emit(JobEnded(step=3, epoch=0, samples=24))
    for log in logs:
        log.close()
    assert [event["event"] for event in read_events(path)] == ["commit", "job_ended"]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"time": 1, "event": "commit"}) + '\n{"time": 2, "eve')
    assert [event["time"] for event in read_events(path)] == [1]


def test_without_a_file_events_go_nowhere(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    log = EventLog(None)
    log.emit(JobEnded(step=0, epoch=0, samples=0))
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
