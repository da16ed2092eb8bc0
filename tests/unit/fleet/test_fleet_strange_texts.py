"""Texts that this system cannot pass on: a job that has one fails alone, and a command of such a folder is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from job_folders import leave, status

from edl_hvd.cli.main import commands
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.status import WorkerStatus
from edl_hvd.fleet import events
from edl_hvd.fleet.keeper import Keeper
from edl_hvd.fleet.runs import Runs
from edl_hvd.fleet.state import Fleet, FleetJob, FleetRules, JobPhase, JobSpec
from edl_hvd.fleet.store import FleetStore
from edl_hvd.hosts import HostSlots
from edl_hvd.process_identity import start_token

ALONE = "\ud800"  # half of a character: JSON has it, and no encoding
HOSTS = (HostSlots("localhost", 2),)


def keeper(folder: Path) -> Keeper:
    """The daemon of a fleet before it runs."""
    return Keeper(folder, PolledSource(FixedHosts(()), 0.0, 0.0, 1.0), FleetRules(), {}, lambda about, text: None)


@pytest.mark.parametrize(
    "fields", [{"command": ("true", ALONE)}, {"folder": f"/{ALONE}"}, {"variables": (f"A={ALONE}",)}]
)
def test_a_text_that_no_encoding_has_fails_its_job_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    daemon = keeper(tmp_path)
    daemon.handle(events.HostsListed(HOSTS))
    daemon.handle(events.JobSubmitted(replace(JobSpec("one", ("true",), "/", 1, 1), **fields)))
    job = daemon.fleet.jobs["one"]
    assert (job.phase, job.exit_code) == (JobPhase.FAILED, 2)
    assert job.why.startswith("job one could not be started in ")
    assert len(job.why.splitlines()) == 1
    daemon._store.close()


def test_a_daemon_begins_where_an_earlier_one_could_not_start_such_a_job(tmp_path: Path) -> None:
    store = FleetStore(tmp_path)
    spec = JobSpec("one", ("true", ALONE), "/", 1, 1)
    job = FleetJob(spec, 0.0, phase=JobPhase.STARTING, share=HOSTS[:1], given=(HostSlots("localhost", 1),), run=1)
    store.keep(Fleet(), Fleet(hosts=HOSTS, jobs={"one": job}), 1.0, 1.0, events.TimePassed(), ())
    store.close()
    daemon = keeper(tmp_path)
    daemon._turn()
    assert daemon.fleet.jobs["one"].phase is JobPhase.FAILED
    daemon._store.close()


@pytest.mark.parametrize("command", ["list", "stop one", "submit --name one -- true"])
def test_a_folder_that_cannot_be_looked_into_is_one_sentence(command: str, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 100)
    first, *rest = command.split()
    asked = CliRunner().invoke(commands, ["fleet", first, "--state", str(folder), *rest])
    assert (asked.exit_code, asked.stdout) == (1, "")
    assert asked.stderr == f"error: the folder {folder} cannot be used: File name too long; expected one of this user\n"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("worker", ["nobody", ":0", "a:one", "a:999999999"])
def test_a_status_that_names_no_worker_leaves_the_slots_of_its_job_as_they_were(worker: str, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    here = WorkerStatus(worker, "member", pid=os.getpid(), start_token=start_token(os.getpid()))
    leave(tmp_path / "jobs" / "one", status(step=7, workers=(here,)))
    job = FleetJob(JobSpec("one", ("true",), "/", 1, 1), 0.0, phase=JobPhase.FAILED, occupied=HOSTS)
    view = Runs(tmp_path, {}).view(job)
    assert view.occupied == HOSTS
    assert view.status is not None
    assert view.status.progress.step == 7
