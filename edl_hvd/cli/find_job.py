"""Find the job that a command of another terminal means."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

from edl_hvd.driver.job_folder.files import JobView, jobs_of_user, look


def find_job(path: str | None, flag: str) -> JobView | list[JobView]:
    """The job in a folder, or this user's only job on this machine; a list if there are several.

    Jobs whose ``edlrun`` is dead count only if none runs. Ends the program with one line and exit code 1 if there is no
    such job.

    Args:
        path: Folder of the job, or ``None``.
        flag: Flag or argument that names a folder, for the message.
    """
    if path is not None:
        view = look(Path(path).expanduser().absolute())
        return view if view is not None else refuse(f"{path} is not a job folder; expected one that edlrun made", 1)
    jobs = jobs_of_user()
    found = [view for view in jobs if view.running] or jobs
    if not found:
        refuse(f"no job of this user runs on this machine; for a job that has ended give its folder as {flag}", 1)
    return found[0] if len(found) == 1 else found


def refuse(problem: str, code: int) -> NoReturn:
    """End the program with one line and an exit code."""
    click.echo(f"error: {problem}", err=True)
    sys.exit(code)
