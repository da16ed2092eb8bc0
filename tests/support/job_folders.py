"""Folders of jobs that never ran, as their ``edlrun`` would have left them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edl_hvd.discovery.sources.hostfile import FixedHosts
from edl_hvd.driver.command_line.options import Options
from edl_hvd.driver.job_folder.claim import JobFolder, claim
from edl_hvd.driver.job_folder.files import RECORD, JobView, look, replace_file, to_text
from edl_hvd.driver.membership.state import Rules
from edl_hvd.driver.status import JobState, Status, TrainingProgress, WorkerStatus

COMMAND = ("python", "train.py", "--name", "two words")


def options(job_dir: Path | None = None, resume: bool = False, **fields) -> Options:
    where = None if job_dir is None else str(job_dir)
    return Options(COMMAND, FixedHosts(()), 1.0, Rules(1, 1, 1), job_dir=where, resume=resume, **fields)


def status(state: JobState = "training", step: int = 0, **fields) -> Status:
    return Status(at_s=time.time(), state=state, progress=TrainingProgress(step=step, known_step=step), **fields)


@contextlib.contextmanager
def claimed(job_dir: Path, resume: bool = False, **fields) -> Iterator[JobFolder]:
    """A job in this folder, whose ``edlrun`` is gone afterwards."""
    with claim(options(job_dir, resume, **fields)) as folder:
        yield folder
    gone = replace(folder.record, start_token="of a process that has ended")
    replace_file(job_dir / RECORD, to_text(gone))


def leave(job_dir: Path, *statuses: Status, **fields) -> None:
    """A job that ran in this folder and ended with the last of these statuses."""
    with claimed(job_dir, **fields) as folder:
        for one in statuses:
            folder.write_status(one)


def view_of(path: Path) -> JobView:
    view = look(path)
    assert view is not None
    return view


def everything() -> Status:
    worker = WorkerStatus("b:0", "member", 0, 2, 77, "mark", 12, "compute", 0.5, 0.1, None)
    return status("training", 12, workers=(worker, WorkerStatus("b:1", "empty", starts_in_s=3.5)), generation=3, size=1)
