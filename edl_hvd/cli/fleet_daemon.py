"""``edl-hvd fleet serve`` and ``replay``: run the daemon of a fleet, and repeat its decisions."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from edl_hvd.cli.find_job import refuse
from edl_hvd.cli.fleet_client import FAILED, STATE, WRONG, state_option
from edl_hvd.cli.fleet_page import FleetPage
from edl_hvd.cli.formatting import count
from edl_hvd.cli.metrics_text import check_prometheus
from edl_hvd.errors import UsageError
from edl_hvd.fleet import events
from edl_hvd.fleet.hosts_source import read_hosts
from edl_hvd.fleet.keeper import Keeper
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import FleetRules
from edl_hvd.fleet.state_folder import hold
from edl_hvd.fleet.store import read_fleet_history
from edl_hvd.hosts import read_count
from edl_hvd.planning.values import QueueRule
from edl_hvd.settings import own_environment
from edl_hvd.status_server import StatusServer


@click.command("serve")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, each with its number of slots.")
@click.option("--discover", metavar="SOURCE", help="Source of hosts, as for 'edlrun --discover'.")
@click.option("--queue", "queues", metavar="NAME=WEIGHT[:LIMIT]", multiple=True,
              help="Weight of a queue beside others, and most slots of its jobs. [1, no limit]")  # fmt: skip
@click.option("--whole-hosts", is_flag=True, help="Let each host belong to one job at a time.")
@click.option("--favour-short", type=click.FloatRange(0, 1), default=FleetRules.favour_short, show_default=True,
              help="How far jobs with little work left go first.")  # fmt: skip
@click.option("--http", "where", metavar="[ADDRESS:]PORT",
              help="Serve a page and /metrics for Prometheus; on 127.0.0.1 unless told otherwise.")  # fmt: skip
@state_option
def serve_command(
    hosts: str | None,
    discover: str | None,
    queues: Sequence[str],
    whole_hosts: bool,
    favour_short: float,
    where: str | None,
    state_dir: Path,
) -> None:
    """Share hosts among jobs, until Ctrl-C or SIGTERM.

    Jobs go on when the daemon ends, however it ends. The next one in the same --state takes them over.

    \b
    Examples:
      edl-hvd fleet serve -H localhost:4
      edl-hvd fleet serve --discover file:hosts.txt --queue vision=2
      edl-hvd fleet serve --discover file:hosts.txt --http 8400

    Exit code 0: ended by a signal. 1: the state cannot be used any more, or is gone. 2: an argument is wrong, or
    another daemon holds the folder. Documents: docs/cluster.md.
    """
    try:
        source = read_hosts(hosts, discover)
        rules = FleetRules(tuple(map(_read_queue, queues)), whole_hosts, favour_short)
        state = state_dir.expanduser().absolute()
        with hold(state), ExitStack() as open_here:
            shown = FleetPage() if where is not None else None
            publish = None if shown is None else shown.update
            keeper = Keeper(state, source, rules, own_environment(), _tell, publish=publish)
            server = None
            if shown is not None and where is not None:
                check_prometheus()
                documents = {"/": shown.html, "/metrics": shown.metrics}
                server = open_here.enter_context(StatusServer(where, documents))
            click.echo(f"the fleet in {state} shares its hosts; Ctrl-C ends the daemon, and its jobs go on")
            if server is not None:
                click.echo(f"its page is {server.url}, its metrics {server.url}metrics")
            asyncio.run(keeper.run())
    except UsageError as error:
        refuse(str(error), WRONG)
    left = sum(job.phase.is_alive for job in keeper.fleet.jobs.values())
    click.echo(f"the daemon ends; {count(left, 'job')} {'goes' if left == 1 else 'go'} on")


def _tell(about: str, text: str) -> None:
    with suppress(OSError):  # the disk of a log may be full, which must not end the daemon
        click.echo(f"{time.strftime('%H:%M:%S')}  {f'{about}: ' * bool(about)}{text}")


def _read_queue(text: str) -> QueueRule:
    name, equals, value = text.partition("=")
    weight, colon, limit = value.partition(":")
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    most = read_count(limit) if colon else None
    if not name or not equals or not 0 < number < float("inf") or (colon and not most):
        raise UsageError(f"--queue {text!r} is not usable; expected NAME=WEIGHT or NAME=WEIGHT:LIMIT, e.g. vision=2:8")
    return QueueRule(name, number, most)


@click.command("replay")
@click.argument("state_dir", metavar="[DIR]", default=STATE, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print each event and what follows, a JSON object in a line.")
def replay_command(state_dir: Path, as_json: bool) -> None:
    """Repeat the decisions of a fleet from its history. Nothing is started.

    DIR is the folder of the fleet; its daemon may run. Entries beyond 64 MiB are not kept: it begins with the oldest.

    \b
    Examples:
      edl-hvd fleet replay
      edl-hvd fleet replay runs/fleet --json

    Exit code 1 when a decision differs from the recorded one: another version decided otherwise. Documents:
    docs/cluster.md.
    """
    number, differing = 0, 0
    for decision in decide_again(read_fleet_history(state_dir.expanduser())):
        number += 1
        differing += decision.differs
        if as_json:
            actions = [events.event_as_json(action) for action in decision.actions]
            line = {"at_s": decision.at_s, **events.event_as_json(decision.event), "actions": actions}
            click.echo(json.dumps(line | {"differs": True} if decision.differs else line))
            continue
        for action in decision.actions:
            if isinstance(action, events.Tell):
                click.echo(f"{decision.at_s:>10.3f} s  {f'{action.about}: ' * bool(action.about)}{action.text}")
        if decision.differs:
            click.echo(f"{decision.at_s:>10.3f} s  decided otherwise than recorded, after {decision.event}")
    if not as_json:
        verdict = "all as recorded" if not differing else f"{differing:,} otherwise than recorded"
        click.echo(f"{count(number, 'decision')}, {verdict}")
    sys.exit(FAILED if differing else 0)
