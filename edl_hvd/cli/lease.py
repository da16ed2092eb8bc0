"""``edl-hvd lease``: this host is one of a job's, for as long as the command runs."""

from __future__ import annotations

import signal
import socket
import sys
import threading

import click

from edl_hvd.discovery.leasing import EVERY_S, HeldHostLease
from edl_hvd.errors import StorageError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.values import read_seconds

FAILED, WRONG_ARGUMENTS = 1, 2
_WAKE_EVERY_S = 1.0
# The handler of a signal that another thread took runs when the main thread does.


@click.command("lease")
@click.argument("url")
@click.option("--host", default=None, help="Name under which others reach this host.  [its own]")
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Number of workers, or teachers.")
@click.option("--every", default=f"{EVERY_S:g}s", show_default=True, help="Time between two writes.")
def lease_command(url: str, host: str | None, slots: int, every: str) -> None:
    """Hold a lease: this host is one of a job's.

    URL is a folder that all hosts share, s3://bucket/prefix, or another storage. A job that looks there finds its hosts
    by 'edlrun --discover leases:URL'. The lease is given back at SIGTERM and Ctrl-C; of a host that dies it ends after
    10 seconds, or what the source's 'lapse' says: at least four times --every.

    \b
    Examples:
      edl-hvd lease s3://bucket/job-7/hosts --slots 8
      edlrun -np 2 --discover leases:s3://bucket/job-7/hosts python train.py

    Exit code 0: given back. 1: the storage refuses it. 2: an argument is wrong. Documents: docs/discovery.md.
    """
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ending.set())
    try:
        own = HostSlots(host or socket.gethostname(), slots)
        lease = HeldHostLease(url, own, read_seconds("--every", every), report)
    except UsageError as error:
        click.echo(f"edl-hvd lease: {error}", err=True)
        sys.exit(WRONG_ARGUMENTS)
    except StorageError as error:
        click.echo(f"edl-hvd lease: {error}", err=True)
        sys.exit(FAILED)
    click.echo(f"holding {lease.where}")
    while not ending.wait(_WAKE_EVERY_S):
        pass
    lease.close()


def report(problem: str) -> None:
    """Say that a lease cannot be written, or that it can again."""
    click.echo(f"the lease cannot be written: {problem}" if problem else "the lease is written again", err=True)
