"""Entry point of ``edl-hvd``."""

from __future__ import annotations

import io
import sys

import click
from rich.console import Console

import edl_hvd
from edl_hvd.cli.build import build_command
from edl_hvd.cli.checkpoint import checkpoint_commands
from edl_hvd.cli.discover import discover_command
from edl_hvd.cli.doctor import doctor_command
from edl_hvd.cli.drain import drain_command
from edl_hvd.cli.fleet import fleet_commands
from edl_hvd.cli.hosts import hosts_command
from edl_hvd.cli.join import join_command
from edl_hvd.cli.lease import lease_command
from edl_hvd.cli.operator import operator_command
from edl_hvd.cli.replay import replay_command
from edl_hvd.cli.simulate import simulate_command
from edl_hvd.cli.status import status_command
from edl_hvd.cli.teach import teach_command
from edl_hvd.cli.teachers import teachers_command
from edl_hvd.cli.trace import trace_commands
from edl_hvd.cli.train import train_command
from edl_hvd.errors import EdlHvdError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(edl_hvd.__version__, prog_name="edl-hvd")
def commands() -> None:
    """Elastic training for PyTorch on Horovod.

    'edlrun' starts jobs; these commands look after them, their hosts and their checkpoints.

    \b
    Examples:
      edl-hvd doctor
      edl-hvd status --watch
      edl-hvd checkpoint list s3://bucket/run

    'edl-hvd COMMAND --help' explains a command. Documents: docs/overview.md, or 'make docs'.
    """


commands.add_command(build_command)
commands.add_command(checkpoint_commands)
commands.add_command(discover_command)
commands.add_command(doctor_command)
commands.add_command(drain_command)
commands.add_command(fleet_commands)
commands.add_command(hosts_command)
commands.add_command(join_command)
commands.add_command(lease_command)
commands.add_command(operator_command)
commands.add_command(replay_command)
commands.add_command(simulate_command)
commands.add_command(status_command)
commands.add_command(teach_command)
commands.add_command(teachers_command)
commands.add_command(trace_commands)
commands.add_command(train_command)


def main() -> None:
    """Run the command line; an error of the package ends in its message and exit code 1, without a traceback.

    A character that the encoding of the terminal or file lacks is printed as a question mark.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        commands()
    except EdlHvdError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
