"""``edl-hvd hosts``: the hosts of a source, as a discovery script prints them."""

from __future__ import annotations

from pathlib import Path

import click

from edl_hvd.cli.start import become_poll

_SCRIPTS = Path(__file__).parents[1] / "discovery_scripts"


@click.command("hosts")
@click.argument("source", required=False)
@click.option(
    "--scripts", is_flag=True, help="Print the folder of the discovery scripts, which take a tenth of the time."
)
def hosts_command(source: str | None, scripts: bool) -> None:
    """Print a host:slots line for each host of SOURCE.

    SOURCE has the form of 'edlrun --discover SOURCE'. This is a discovery script for stock horovodrun: polls share an
    answer, which a process in the background renews.

    \b
    Examples:
      edl-hvd hosts file:hosts.txt
      edl-hvd hosts ec2:tag=job=resnet50
      edl-hvd hosts --scripts

    Exit code 0 when there are hosts, 1 when there are none or no answer that can be trusted, 2 when SOURCE is not
    understood. Documents: docs/horovodrun.md and docs/discovery.md.
    """
    if scripts and source is None:
        click.echo(_SCRIPTS.resolve())
    elif source is not None and not scripts:
        become_poll(source)
    else:
        raise click.UsageError("give SOURCE, e.g. file:hosts.txt, or --scripts alone")
