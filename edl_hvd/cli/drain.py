"""``edl-hvd drain``: make workers leave a job at the next commit."""

from __future__ import annotations

import sys
from typing import Any

import click

from edl_hvd.cli.find_job import find_job, refuse
from edl_hvd.cli.formatting import count
from edl_hvd.driver.job_folder.requests import LONGEST_NOTICE_S, ask


@click.command("drain")
@click.argument("host")
@click.option("--job", "job_dir", metavar="DIR", help="Folder of the job. [asked on a terminal]")
@click.option(
    "--notice",
    "notice_s",
    metavar="SECONDS",
    type=click.FloatRange(0, LONGEST_NOTICE_S),
    default=120.0,
    help="Seconds until the host will be gone. [120]",
)
def drain_command(host: str, job_dir: str | None, notice_s: float) -> None:
    """Make the workers on HOST, or at HOST:SLOT, leave the job.

    They leave at the next commit with exit code 0, and the others go on; no work is lost or repeated. The job starts no
    more workers there. Without --job, the command asks on the terminal whether it is to use this user's only job on
    this machine.

    \b
    Examples:
      edl-hvd drain node-3 --job runs/7
      edl-hvd drain node-3:1 --job runs/7 --notice 30

    Exit code 2 when the job has no such host, or no job is named and there is no terminal; 1 when there is no such job,
    or the answer is no. Documents: docs/edlrun.md.
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
        refuse(f"the edlrun of {found.path} is not running, so no worker can leave {host}", 1)
    if job_dir is None and not click.confirm(f"Drain {host} of the job {found.path} ({found.record.line})?", err=True):
        refuse(f"{host} is not drained; name another job with --job", 1)
    said = ask(found.path, {"what": "drain", "target": host, "notice_s": notice_s})
    if said.get("ok") is not True:
        refuse(str(said.get("problem")), 2)
    click.echo(_what_follows(host, said))


def _what_follows(host: str, said: dict[str, Any]) -> str:
    leaving, stay, least = len(said["workers"]), said["stay"], said["least"]
    if said["slots"] == 0:
        return f"{host} is the last host of the job: the job saves a checkpoint and ends with exit code 75"
    who = f"{count(leaving, 'worker')} {'leaves' if leaving == 1 else 'leave'} {host} at the next commit"
    who = who if leaving else f"{host} has no worker, and gets none"
    if stay < least:
        return f"{who}; {count(stay, 'worker')} of the {least} that --min-np asks for stay, so the job waits for more"
    return f"{who}; {count(stay, 'worker')} {'stays' if stay == 1 else 'stay'}"
