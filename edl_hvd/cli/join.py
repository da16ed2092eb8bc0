"""``edl-hvd join``: this host belongs to a job, whose driver starts workers on it without ssh."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import threading
from contextlib import suppress

import click

from edl_hvd.errors import UsageError
from edl_hvd.host_agent import DriverAddress, HostAgent
from edl_hvd.hosts import HostSlots, read_count
from edl_hvd.proof import read_token
from edl_hvd.settings import process_environment
from edl_hvd.values import read_seconds

WRONG_ARGUMENTS = 2


@click.command("join")
@click.argument("driver")
@click.option("--host", default=None, help="Name or address under which the other hosts reach this one.  [its own]")
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Number of workers.")
@click.option("--token-file", required=True, help="File with the token of the job, the same as the driver has.")
@click.option("--grace", default="10s", show_default=True, help="Time for the workers to leave after SIGTERM.")
@click.option("--patience", default="10min", show_default=True, help="Longest time without a driver.")
def join_command(driver: str, host: str | None, slots: int, token_file: str, grace: str, patience: str) -> None:
    """Let a job start workers on this host.

    DRIVER is the HOST:PORT of 'edlrun --agents-port PORT'. This host calls it, so it needs no ssh server. When the
    driver is gone, it is called again, until another one goes on with the job. SIGTERM lets the workers leave.

    \b
    Examples:
      edlrun -np 2 --agents-port 7077 --token-file token python train.py
      edl-hvd join 10.0.0.1:7077 --slots 8 --token-file token

    Exit code 0: the job has ended well, or this host has left it. 1: the job has failed, or its driver does not want
    this host. 2: an argument is wrong. Documents: docs/agents.md.
    """
    try:
        agent = HostAgent(
            read_address(driver),
            HostSlots(host or socket.gethostname(), slots),
            read_token(token_file),
            process_environment(),
            read_seconds("--patience", patience),
            lambda text: click.echo(f"edl-hvd join: {text}", err=True),
        )
        grace_s = read_seconds("--grace", grace)
    except UsageError as error:
        click.echo(f"edl-hvd join: {error}", err=True)
        sys.exit(WRONG_ARGUMENTS)

    def leave() -> None:
        # In a thread, as the interrupted one may hold what this waits for.
        threading.Thread(target=agent.leave, args=(grace_s,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: leave())
    sys.exit(agent.run())


def read_address(text: str) -> DriverAddress:
    """The address of a driver.

    >>> str(read_address("10.0.0.1:7077"))
    '10.0.0.1:7077'

    Raises:
        UsageError: The text is none.
    """
    host, _, port = text.rpartition(":")
    number = read_count(port)
    if not _is_host(host) or number is None or not 1 <= number <= 65535:
        raise UsageError(f"DRIVER {text!r} is no address; expected HOST:PORT, e.g. 10.0.0.1:7077")
    return DriverAddress(host, number)


def _is_host(text: str) -> bool:
    """Whether this is a name or an address, and not one with a port of its own."""
    if ":" not in text:
        return bool(text)
    with suppress(ValueError):
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
        return True
    return False
