"""A fleet whose file was emptied or removed, and whose jobs are there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from job_folders import leave, status, view_of

from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.job_folder.files import RECORD, replace_file, to_text
from edl_hvd.errors import StorageError
from edl_hvd.fleet import events
from edl_hvd.fleet.keeper import Keeper
from edl_hvd.fleet.state import FleetRules, JobSpec
from edl_hvd.fleet.store import FILE
from edl_hvd.process_identity import start_token


def keeper(folder: Path) -> Keeper:
    """The daemon of a fleet before it runs."""
    return Keeper(folder, PolledSource(FixedHosts(()), 0.0, 0.0, 1.0), FleetRules(), {}, lambda about, text: None)


def lost(folder: Path, how: str) -> None:
    """Empty or remove the file of a fleet, and what SQLite keeps beside it."""
    for path in folder.glob(f"{FILE}*"):
        if path.name == FILE and how == "emptied":
            path.write_bytes(b"")
        else:
            path.unlink()


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_daemon_does_not_begin_an_empty_fleet_beside_the_folders_of_jobs(tmp_path: Path, how: str) -> None:
    first = keeper(tmp_path)
    for name in ("ended", "running"):
        first.handle(events.JobSubmitted(JobSpec(name, ("true",), "/", 1, 1)))
        (tmp_path / "jobs" / name).mkdir(parents=True)
        leave(tmp_path / "jobs" / name, status())
    record = tmp_path / "jobs" / "running" / RECORD
    own = replace(view_of(record.parent).record, pid=os.getpid(), start_token=start_token(os.getpid()))
    replace_file(record, to_text(own))
    first._store.close()
    again = keeper(tmp_path)
    assert list(again.fleet.jobs) == ["ended", "running"], "the file is there"
    again._store.close()

    lost(tmp_path, how)
    for _ in range(2):
        with pytest.raises(StorageError) as raised:
            keeper(tmp_path)
        assert str(raised.value) == (
            f"{tmp_path / FILE} is empty or was removed, and {tmp_path / 'jobs'} holds jobs that it should know "
            f"(ended; running, which runs as process {os.getpid()}); put the file back; or end those that run (kill "
            f"{os.getpid()}), then move {tmp_path / 'jobs'} away, or name another --state"
        )
    (tmp_path / "jobs").rename(tmp_path / "old")
    assert keeper(tmp_path).fleet.jobs == {}


@pytest.mark.usefixtures("runtime")
def test_a_damaged_file_is_refused_with_the_jobs_that_go_on(tmp_path: Path) -> None:
    keeper(tmp_path)._store.close()
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    for is_running in (False, True):
        if is_running:
            (tmp_path / "jobs" / "one").mkdir(parents=True)
            leave(tmp_path / "jobs" / "one", status())
            record = tmp_path / "jobs" / "one" / RECORD
            own = replace(view_of(record.parent).record, pid=os.getpid(), start_token=start_token(os.getpid()))
            replace_file(record, to_text(own))
        with pytest.raises(StorageError) as raised:
            keeper(tmp_path)
        assert str(raised.value) == (
            f"the state of the fleet in {tmp_path / FILE} cannot be used: file is not a database; expected a folder on "
            "a local disk that this user can write, and a file of this version; or name another --state"
            + f", after ending the jobs that go on (one: kill {os.getpid()})"
            * is_running
        )
