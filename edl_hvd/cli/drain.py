"""``edl-hvd drain``: let a job leave a host, losing nothing."""

from __future__ import annotations

import sys
from typing import Any

import click

from edl_hvd.cli.find_job import find_job, refuse
from edl_hvd.cli.words import count
from edl_hvd.driver.job_folder.requests import LONGEST_NOTICE_S, ask


@click.command("drain")
@click.argument("host")
@click.option("--job", "job_dir", metavar="DIR", help="The job's folder. [asked on a terminal]")
@click.option(
    "--notice",
    "notice_s",
    metavar="SECONDS",
    type=click.FloatRange(0, LONGEST_NOTICE_S),
    default=120.0,
    help="When the host will be gone. [120]",
)
def drain_command(host: str, job_dir: str | None, notice_s: float) -> None:
    """Let the workers on HOST, or the one at HOST:SLOT, leave the job.

    They leave at the next commit, with exit code 0, and the others go on; nothing is lost or done twice. The job
    starts no workers there any more. Without --job, and with one job of this user on this machine, a terminal is asked
    whether that one is meant. Exit code 2 when the job has no such host, or none was named and no terminal can be
    asked; 1 when there is no such job, or the answer is no.
    """
    if job_dir is None and not sys.stdin.isatty():
        refuse(
            f"cannot drain {host}: no job was named, and standard input is no terminal on which to confirm one; "
            "expected the job's folder as --job DIR, which 'edl-hvd status' shows",
            2,
        )
    found = find_job(job_dir, "--job")
    if isinstance(found, list):
        refuse(f"{len(found)} jobs run; name one with --job: {', '.join(str(view.path) for view in found)}", 2)
    if not found.running:
        refuse(f"the edlrun of {found.path} does not run any more, so there is nobody to leave {host}", 1)
    if job_dir is None and not click.confirm(f"Drain {host} of the job {found.path} ({found.record.line})?", err=True):
        refuse(f"{host} is not drained; name another job with --job", 1)
    said = ask(found.path, {"what": "drain", "target": host, "notice_s": notice_s})
    if said.get("ok") is not True:
        refuse(str(said.get("problem")), 2)
    click.echo(_what_follows(host, said))


def _what_follows(host: str, said: dict[str, Any]) -> str:
    leaving, stay, least = len(said["workers"]), said["stay"], said["least"]
    if said["slots"] == 0:
        return f"{host} is left, and it was all that the job had: it saves a checkpoint and ends with exit code 75"
    who = f"{count(leaving, 'worker')} {'leaves' if leaving == 1 else 'leave'} {host} at the next commit"
    who = who if leaving else f"{host} has no worker now, and gets none"
    if stay < least:
        return f"{who}; {count(stay, 'worker')} of the {least} that --min-np asks for stay, so the job waits for more"
    return f"{who}; {count(stay, 'worker')} {'stays' if stay == 1 else 'stay'}"
