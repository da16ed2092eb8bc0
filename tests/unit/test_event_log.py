from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edl_hvd.errors import StorageError, UsageError
from edl_hvd.events import EventLog, WorkerLost, read_events

COMMIT = '{"time": 1, "event": "commit"}\n'


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """As if the disk were full behind so many bytes of a file: what fits is written, then writing fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def workers(path: Path) -> list[str]:
    return [event["worker"] for event in read_events(path)]


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open the event log"):
        EventLog(tmp_path)


def test_a_full_disk_is_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("/dev/full")
    for number in range(3):
        log.emit(WorkerLost(1, f"a:{number}"))
    log.close()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("edl_hvd.events", "WARNING")
    assert "'/dev/full': No space left on device; the job goes on" in record.getMessage()
    assert "EDL_HVD_EVENTS" in record.getMessage()


def test_events_are_written_again_when_there_is_room_behind_the_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit(WorkerLost(1, "a:0"))
    with largest_file(path.stat().st_size + 10):
        log.emit(WorkerLost(1, "a:1"))
        log.emit(WorkerLost(1, "a:2"))
    assert len(path.read_bytes().splitlines()[1]) == 10
    log.emit(WorkerLost(1, "a:3"))
    log.emit(WorkerLost(1, "a:4"))
    log.close()
    assert workers(path) == ["a:0", "a:3", "a:4"]
    assert len(path.read_bytes().splitlines()) == 4


def test_the_rest_of_a_short_write_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log, write = EventLog(path), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    log.emit(WorkerLost(1, "a:0"))
    log.emit(WorkerLost(1, "a:1"))
    log.close()
    assert workers(path) == ["a:0", "a:1"]
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("damaged", [b'{"time": 2, "eve', b'"b:0"}', b"\xff\x00", b"", b"12", b"{}"])
def test_a_damaged_line_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(COMMIT.encode() + damaged + b"\n" + COMMIT.encode())
    assert [event["event"] for event in read_events(path)] == ["commit", "commit"]
    [record] = caplog.records
    assert f"{path}: 1 of 3 lines are no events" in record.getMessage()


def test_a_whole_log_is_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("")
    assert read_events(path) == []
    path.write_text(2 * COMMIT + "{")
    assert len(read_events(path)) == 2
    assert not caplog.records


def test_a_file_of_another_kind_is_no_event_log(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n")
    with pytest.raises(UsageError, match=r"spot\.csv is no event log: none of its 1 lines"):
        read_events(path)
