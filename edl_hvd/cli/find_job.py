"""Which job a command of another terminal means."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

from edl_hvd.driver.job_folder.files import JobView, look, running_jobs


def find_job(path: str | None, flag: str) -> JobView | list[JobView]:
    """The job in this folder, or the only one of this user on this machine; several if it could be any of them.

    Jobs that run come first; only where there are none, those whose ``edlrun`` is dead. Ends the program with exit
    code 1 and one line when there is no such job.

    Args:
        path: The folder, or ``None``.
        flag: What a person gives to name one, for the message.
    """
    if path is not None:
        view = look(Path(path).expanduser().absolute())
        return view if view is not None else refuse(f"{path} is no folder of a job; expected one that edlrun made", 1)
    running, dead = running_jobs()
    found = running or dead
    if not found:
        refuse(f"no job of this user runs on this machine; {flag} names the folder of one that has ended", 1)
    return found[0] if len(found) == 1 else found


def refuse(problem: str, code: int) -> NoReturn:
    """End the program with one line."""
    click.echo(f"error: {problem}", err=True)
    sys.exit(code)
