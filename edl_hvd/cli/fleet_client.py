"""Ask the daemon of a fleet: for the commands of ``edl-hvd fleet``, and for ``edl-hvd train``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import click

from edl_hvd.cli.find_job import refuse
from edl_hvd.driver.command_line.options import find_command
from edl_hvd.driver.network import is_local
from edl_hvd.errors import EdlHvdError
from edl_hvd.fleet import messages
from edl_hvd.fleet.messages import Agreed, FleetRequest, FleetView, Refused, call
from edl_hvd.fleet.state import JobSpec
from edl_hvd.settings import process_environment

FAILED, WRONG = 1, 2
STATE = "runs/fleet"
Reply = TypeVar("Reply")

state_option = click.option(
    "--state", "state_dir", metavar="DIR", default=STATE, show_default=True, type=click.Path(path_type=Path),
    help="Folder of the fleet.",
)  # fmt: skip


def submit_job(state_dir: Path, spec: JobSpec) -> None:
    """Submit a job and say so. Ends the program where the daemon refuses it, or does not answer."""
    problem = find_command(spec.command, process_environment())
    if problem and any(is_local(entry.host) for entry in view_of(state_dir).hosts):
        refuse(problem, WRONG)
    click.echo(ask(state_dir, messages.SubmitRequest(spec), Agreed).text)


def ask(state_dir: Path, request: FleetRequest, kind: type[Reply], otherwise: str = "") -> Reply:
    """The daemon's reply, of this kind. Ends the program where the daemon refuses, or does not answer.

    Args:
        state_dir: Folder of the fleet.
        request: What is asked.
        kind: Kind of the reply.
        otherwise: What holds if the daemon does not answer, for the message.
    """
    try:
        reply = call(state_dir.expanduser(), request)
    except EdlHvdError as error:
        refuse(f"{error}; {otherwise}" if otherwise else str(error), FAILED)
    if isinstance(reply, Refused):
        refuse(reply.problem, FAILED if reply.may_be_later else WRONG)
    if not isinstance(reply, kind):
        refuse(f"the daemon answered with {type(reply).__name__}; expected {kind.__name__} of this version", FAILED)
    return reply


def view_of(state_dir: Path, otherwise: str = "") -> FleetView:
    """The fleet as its daemon shows it now. As :func:`ask`."""
    return ask(state_dir, messages.ViewRequest(), FleetView, otherwise)
