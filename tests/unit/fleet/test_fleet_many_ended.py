"""Jobs that have ended: the daemon reads the folder of each once, and keeps of it what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from job_folders import leave, status

from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.job_folder.files import look
from edl_hvd.fleet import events, runs
from edl_hvd.fleet.keeper import Keeper
from edl_hvd.fleet.state import Fleet, FleetJob, FleetRules, JobPhase, JobSpec
from edl_hvd.fleet.store import FleetStore


@pytest.mark.usefixtures("runtime")
def test_the_folder_of_a_job_that_has_ended_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = FleetJob(JobSpec("one", ("true",), "/", 1, 1), 0.0, phase=JobPhase.FAILED, run=1)
    other = FleetJob(JobSpec("two", ("true",), "/", 1, 1), 0.0, phase=JobPhase.WAITING)
    store = FleetStore(tmp_path)
    store.keep(Fleet(), Fleet(jobs={"one": job, "two": other}), 1.0, 1.0, events.TimePassed(), ())
    store.close()
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    leave(tmp_path / "jobs" / "one", status(step=7))
    looked: list[str] = []
    monkeypatch.setattr(runs, "look", lambda folder, **more: (looked.append(folder.name), look(folder, **more))[1])

    daemon = Keeper(tmp_path, PolledSource(FixedHosts(()), 0.0, 0.0, 1.0), FleetRules(), {}, lambda about, text: None)
    first = daemon.view().jobs
    assert [row.progress.step for row in first] == [7, -1]
    assert daemon.view().jobs[0] is first[0]
    assert looked == ["one"]
    assert (daemon._runs._read, daemon._views) == ({}, {}), "nothing large stays"
    daemon.handle(events.JobResumeAsked("one"))
    [resumed, _] = daemon.view().jobs
    assert (resumed.job.phase, resumed.progress.step) == (JobPhase.WAITING, 7)
    daemon.fleet = replace(daemon.fleet, jobs={"one": job})
    daemon.handle(events.JobDeleted("one"))
    assert (daemon.view().jobs, daemon._rested) == ((), {})
    daemon._store.close()
