"""``edl-hvd fleet``: many jobs on the hosts of one source."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from edl_hvd.cli.find_job import refuse
from edl_hvd.cli.fleet_page import FleetPage
from edl_hvd.cli.fleet_view import claim_cells, facts_of, job_cells
from edl_hvd.cli.formatting import clean, count, duration
from edl_hvd.cli.metrics_text import check_prometheus
from edl_hvd.discovery.sources.hostfile import parse_host_list
from edl_hvd.driver.command_line.options import find_command
from edl_hvd.driver.network import is_local
from edl_hvd.errors import EdlHvdError, UsageError
from edl_hvd.fleet import events, messages
from edl_hvd.fleet.answers import LONGEST_CLAIM_S
from edl_hvd.fleet.hosts_source import read_hosts
from edl_hvd.fleet.keeper import Keeper, hold
from edl_hvd.fleet.messages import Agreed, FleetReply, FleetRequest, FleetView, PlanView, Refused, call
from edl_hvd.fleet.replay import decide_again
from edl_hvd.fleet.state import FleetRules, JobSpec, shown_hosts, total
from edl_hvd.fleet.store import read_fleet_history
from edl_hvd.hosts import read_count, with_devices
from edl_hvd.planning.values import QueueRule
from edl_hvd.settings import own_environment, process_environment
from edl_hvd.status_server import StatusServer
from edl_hvd.values import read_seconds

FAILED, WRONG = 1, 2
STATE = "runs/fleet"
_CLAIM_PRIORITY = 1000
# Services come first: above what people give their jobs.
_POLL_S = 0.05
Reply = TypeVar("Reply")


def _state_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--state",
        "state_dir",
        metavar="DIR",
        default=STATE,
        show_default=True,
        type=click.Path(path_type=Path),
        help="Folder of the fleet.",
    )(function)


@click.group("fleet")
def fleet_commands() -> None:
    """Run many jobs on the hosts of one source.

    A daemon shares the slots: each job gets between its --min and its --max of workers, a new job starts at once while
    others shrink, and what others than jobs claim is free within seconds. Each job is an 'edlrun' that outlives the
    daemon.

    \b
    Examples:
      edl-hvd fleet serve --discover file:hosts.txt
      edl-hvd fleet submit --name resnet50 --min 1 --max 4 -- python train.py
      edl-hvd fleet list

    Documents: docs/cluster.md.
    """


@fleet_commands.command("serve")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, each with its number of slots.")
@click.option("--discover", metavar="SOURCE", help="Source of hosts, as for 'edlrun --discover'.")
@click.option("--queue", "queues", metavar="NAME=WEIGHT[:LIMIT]", multiple=True,
              help="Weight of a queue beside others, and most slots of its jobs. [1, no limit]")  # fmt: skip
@click.option("--whole-hosts", is_flag=True, help="Let each host belong to one job at a time.")
@click.option("--favour-short", type=click.FloatRange(0, 1), default=FleetRules.favour_short, show_default=True,
              help="How far jobs with little work left go first.")  # fmt: skip
@click.option("--http", "where", metavar="[ADDRESS:]PORT",
              help="Serve a page and /metrics for Prometheus; on 127.0.0.1 unless told otherwise.")  # fmt: skip
@_state_option
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

    Exit code 0: ended by a signal. 1: the state cannot be used any more. 2: an argument is wrong, or another daemon
    holds the folder. Documents: docs/cluster.md.
    """
    try:
        source = read_hosts(hosts, discover)
        rules = FleetRules(tuple(map(_read_queue, queues)), whole_hosts, favour_short)
        state = state_dir.expanduser().absolute()
        with hold(state), ExitStack() as open_here:
            shown = FleetPage() if where is not None else None
            publish = None if shown is None else shown.update
            keeper = Keeper(state, source, rules, own_environment(), _tell, publish=publish)
            click.echo(f"the fleet in {state} shares its hosts; Ctrl-C ends the daemon, and its jobs go on")
            if shown is not None and where is not None:
                check_prometheus()
                documents = {"/": shown.html, "/metrics": shown.metrics}
                server = open_here.enter_context(StatusServer(where, documents))
                click.echo(f"its page is {server.url}, its metrics {server.url}metrics")
            asyncio.run(keeper.run())
    except UsageError as error:
        refuse(str(error), WRONG)
    left = sum(job.phase in ("starting", "running", "stopping") for job in keeper.fleet.jobs.values())
    click.echo(f"the daemon ends; {count(left, 'job')} {'goes' if left == 1 else 'go'} on")


@fleet_commands.command("submit")
@click.option("--name", required=True, help="Name of the job, one of its own in the fleet.")
@click.option("--min", "least", type=click.IntRange(1), default=1, show_default=True, help="Fewest workers.")
@click.option("--max", "most", type=click.IntRange(1), help="Most workers.  [--min]")
@click.option("--priority", type=int, default=0, show_default=True,
              help="Jobs of a higher one get their --min first, and may stop those of a lower one.")  # fmt: skip
@click.option("--queue", default="default", show_default=True, help="Queue whose weight and limit it shares.")
@click.option("--no-preempt", is_flag=True, help="Never stop it for a job of higher priority.")
@click.option("--retries", type=click.IntRange(0), default=0, show_default=True, help="Runs that may fail.")
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="Environment variable of its workers.")
@click.option("--edlrun", "flags", metavar="FLAGS", default="", help="More flags of edlrun, e.g. '--drain-lead 30'.")
@_state_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def submit_command(
    name: str,
    least: int,
    most: int | None,
    priority: int,
    queue: str,
    no_preempt: bool,
    retries: int,
    variables: Sequence[str],
    flags: str,
    state_dir: Path,
    command: Sequence[str],
) -> None:
    """Run a script with --min to --max workers.

    COMMAND is a script that uses edl_hvd. It runs in this folder, with the environment of the daemon. Its status,
    output and checkpoints are in the folder jobs/NAME of the fleet, unless the script or EDL_HVD_CHECKPOINT says where
    checkpoints go.

    \b
    Examples:
      edl-hvd fleet submit --name resnet50 --min 1 --max 4 -- python train.py
      edl-hvd fleet submit --name bert --min 2 --priority 5 -- python bert.py

    Exit code 2: it is refused, because it can never run or another job has its name. 1: no daemon answers. Documents:
    docs/cluster.md.
    """
    try:
        spec = JobSpec(
            name=name,
            command=tuple(command),
            folder=str(Path.cwd()),
            least=least,
            most=least if most is None else most,
            priority=priority,
            queue=queue,
            preemptible=not no_preempt,
            flags=check_flags(shlex.split(flags)),
            variables=tuple(variables),
            retries=retries,
        )
    except ValueError as error:
        refuse(str(error), WRONG)
    submit_job(state_dir, spec)


def submit_job(state_dir: Path, spec: JobSpec) -> None:
    """Submit a job and say so. Ends the program where the daemon refuses it, or does not answer."""
    problem = find_command(spec.command, process_environment())
    if problem and any(is_local(entry.host) for entry in _view(state_dir).hosts):
        refuse(problem, WRONG)
    click.echo(_agreed(state_dir, messages.SubmitRequest(spec)).text)


@fleet_commands.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_state_option
def list_command(as_json: bool, state_dir: Path) -> None:
    """List the jobs and claims of the fleet.

    \b
    Examples:
      edl-hvd fleet list --json

    Exit code 1: no daemon answers. Documents: docs/cluster.md.
    """
    view = _view(state_dir)
    if as_json:
        click.echo(json.dumps(asdict(view), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("name", "state", "slots", "wants", "step", "left", "samples/s", "waited", "why"):
        right = column in ("slots", "step", "left", "samples/s", "waited")
        table.add_column(column.upper(), justify="right" if right else "left")
    for row in view.jobs:
        table.add_row(*job_cells(row))
    for claim in view.claims:
        table.add_row(*claim_cells(claim, view.now_s))
    if table.row_count:
        console.print(table)
    slots = total(view.hosts)
    lacking = f"; {count(view.lacking, 'slot')} more would be used" if view.lacking else ""
    console.print(f"{count(len(view.hosts), 'host')}, {view.free} of {count(slots, 'slot')} free{lacking}")


@fleet_commands.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_state_option
def show_command(name: str, as_json: bool, state_dir: Path) -> None:
    """Show a job, its slots over time, and why.

    \b
    Examples:
      edl-hvd fleet show resnet50

    Exit code 1: no daemon answers. 2: there is no such job. Documents: docs/cluster.md.
    """
    view = _view(state_dir)
    row = next((row for row in view.jobs if row.job.name == name), None)
    if row is None:
        names = ", ".join(row.job.name for row in view.jobs[:20]) or "none"
        refuse(f"there is no job {name!r}; the jobs are {names}", WRONG)
    history = [
        (entry.at_s, action.text)
        for entry in read_fleet_history(state_dir.expanduser())
        for action in entry.actions
        if isinstance(action, events.Tell) and action.about == name
    ]
    if as_json:
        click.echo(
            json.dumps({**asdict(row), "history": [{"at_s": at, "text": text} for at, text in history]}, indent=2)
        )
        return
    console = Console(highlight=False, soft_wrap=True)
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    for label, text in facts_of(row, state_dir.expanduser().absolute()):
        facts.add_row(label, clean(text))
    console.print(facts)
    console.print()
    for at_s, text in history:
        console.print(f"[dim]{duration(max(0.0, view.now_s - at_s)):>12} ago[/]  {clean(text)}")


@fleet_commands.command("scale")
@click.argument("name")
@click.option("--max", "most", type=click.IntRange(1), required=True, help="Most workers from now on.")
@_state_option
def scale_command(name: str, most: int, state_dir: Path) -> None:
    """Change the most workers that a job may have, while it trains.

    \b
    Examples:
      edl-hvd fleet scale resnet50 --max 2

    Exit code 2: it is refused. 1: no daemon answers. Documents: docs/cluster.md.
    """
    click.echo(_agreed(state_dir, messages.ScaleRequest(name, most)).text)


@fleet_commands.command("stop")
@click.argument("name")
@_state_option
def stop_command(name: str, state_dir: Path) -> None:
    """Let a job save a checkpoint and stop.

    It goes on with 'edl-hvd fleet resume'.

    \b
    Examples:
      edl-hvd fleet stop resnet50

    Exit code 2: it is refused. 1: no daemon answers. Documents: docs/cluster.md.
    """
    click.echo(_agreed(state_dir, messages.StopRequest(name)).text)


@fleet_commands.command("resume")
@click.argument("name")
@_state_option
def resume_command(name: str, state_dir: Path) -> None:
    """Let a job that was stopped or failed go on.

    It goes on from its newest checkpoint, as soon as there is room.

    \b
    Examples:
      edl-hvd fleet resume resnet50

    Exit code 2: it is refused. 1: no daemon answers. Documents: docs/cluster.md.
    """
    click.echo(_agreed(state_dir, messages.ResumeRequest(name)).text)


@fleet_commands.command("claim")
@click.argument("name")
@click.option("--slots", type=click.IntRange(1), required=True, help="Number of slots.")
@click.option("--for", "for_text", metavar="TIME", help="Time after which it ends by itself, e.g. 60s. [never]")
@click.option("--priority", type=int, default=_CLAIM_PRIORITY, show_default=True,
              help="Jobs of a lower one are stopped for it, if shrinking them is not enough.")  # fmt: skip
@click.option("--wait/--no-wait", default=True, help="Wait until the slots are free.  [wait]")
@click.option("--devices", "with_numbers", is_flag=True, help="Print the numbers of its GPUs, too.")
@_state_option
def claim_command(
    name: str, slots: int, for_text: str | None, priority: int, wait: bool, with_numbers: bool, state_dir: Path
) -> None:
    """Make room for something that is no job.

    Prints the hosts as soon as no worker is on the slots any more. They stay free until the time is over or 'edl-hvd
    fleet release' gives them back.

    \b
    Examples:
      edl-hvd fleet claim web --slots 2 --for 60s
      edl-hvd fleet claim web --slots 2 --devices

    Exit code 2: it is refused. 1: no daemon answers, or the claim ended before there was room. Documents:
    docs/cluster.md.
    """
    request = messages.ClaimRequest(name, slots, priority, _read_time(for_text))
    agreed = _agreed(state_dir, request)
    if not wait:
        click.echo(agreed.text)
        return
    while True:
        claim = next((one for one in _view(state_dir).claims if one.name == name), None)
        if claim is None:
            refuse(f"claim {name} ended before {count(slots, 'slot')} were free for it", FAILED)
        if total(claim.granted) == slots:
            click.echo("\n".join(map(with_devices, claim.devices)) if with_numbers else shown_hosts(claim.granted))
            return
        time.sleep(_POLL_S)


@fleet_commands.command("release")
@click.argument("name")
@_state_option
def release_command(name: str, state_dir: Path) -> None:
    """Give the slots of a claim back.

    \b
    Examples:
      edl-hvd fleet release web

    Exit code 2: it is refused. 1: no daemon answers. Documents: docs/cluster.md.
    """
    click.echo(_agreed(state_dir, messages.ReleaseRequest(name)).text)


@fleet_commands.command("plan")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Ask about these hosts instead of the fleet's.")
@click.option("--with-job", "jobs", metavar="NAME:MIN:MAX[:PRIORITY]", multiple=True, help="Ask as if it were there.")
@click.option("--with-claim", "claims", metavar="NAME:SLOTS[:PRIORITY]", multiple=True, help="The same.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@_state_option
def plan_command(hosts: str | None, jobs: Sequence[str], claims: Sequence[str], as_json: bool, state_dir: Path) -> None:
    """Show what the planner would do now, and why. Nothing is done.

    \b
    Examples:
      edl-hvd fleet plan
      edl-hvd fleet plan --with-job bert:2:8:5 -H node-1:4,node-2:4

    Exit code 1: no daemon answers. 2: an argument is wrong. Documents: docs/cluster.md.
    """
    try:
        request = messages.PlanRequest(
            () if hosts is None else parse_host_list(hosts),
            tuple(map(_read_job, jobs)),
            tuple(map(_read_claim, claims)),
        )
    except UsageError as error:
        refuse(str(error), WRONG)
    view = _expect(_ask(state_dir, request), PlanView)
    if as_json:
        click.echo(json.dumps(asdict(view), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("NAME", "HAS", "GETS", "HOSTS", "WHY"):
        table.add_column(column, justify="right" if column in ("HAS", "GETS") else "left")
    for share in view.shares:
        table.add_row(share.name, str(share.has), str(share.gets), shown_hosts(share.hosts), clean(share.why))
    console.print(table)
    if view.lacking:
        console.print(f"{count(view.lacking, 'slot')} more would be used")


@fleet_commands.command("replay")
@click.argument("state_dir", metavar="[DIR]", default=STATE, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print each event and what follows, a JSON object in a line.")
def replay_command(state_dir: Path, as_json: bool) -> None:
    """Repeat all decisions of a fleet from its history. Nothing is started.

    DIR is the folder of the fleet; its daemon may run.

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


# --- asking ---


def _ask(state_dir: Path, request: FleetRequest) -> FleetReply:
    """The daemon's answer. Ends the program where it refuses."""
    try:
        reply = call(state_dir.expanduser(), request)
    except EdlHvdError as error:
        refuse(str(error), FAILED)
    if isinstance(reply, Refused):
        refuse(reply.problem, WRONG)
    return reply


def _expect(reply: FleetReply, kind: type[Reply]) -> Reply:
    if not isinstance(reply, kind):
        refuse(f"the daemon answered with {type(reply).__name__}; expected {kind.__name__} of this version", FAILED)
    return reply


def _agreed(state_dir: Path, request: FleetRequest) -> Agreed:
    return _expect(_ask(state_dir, request), Agreed)


def _view(state_dir: Path) -> FleetView:
    return _expect(_ask(state_dir, messages.ViewRequest()), FleetView)


def _tell(about: str, text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {f'{about}: ' * bool(about)}{text}")


# --- reading ---

OWN_FLAGS = (
    "-np", "--num-proc", "--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "-H", "--hosts", "--hostfile",
    "-hostfile", "--host-discovery-script", "--discover", "--job-dir", "--resume",
)  # fmt: skip


def check_flags(words: Sequence[str]) -> tuple[str, ...]:
    """More flags of ``edlrun``, checked.

    Raises:
        UsageError: One of them is the fleet's business.
    """
    for word in words:
        if word.split("=")[0] in OWN_FLAGS:
            raise UsageError(
                f"--edlrun {word!r} is not usable: the fleet gives {word.split('=')[0]} itself; leave it out"
            )
    return tuple(words)


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


def _read_time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        for_s = read_seconds("--for", text)
    except UsageError as error:
        refuse(str(error), WRONG)
    if for_s > LONGEST_CLAIM_S:
        refuse(f"--for {text!r} is not a time of at most a year; expected e.g. '60s' or '2h'", WRONG)
    return for_s


def _read_job(text: str) -> JobSpec:
    name, *numbers = text.split(":")
    counts = [_read_integer(number) for number in numbers]
    if len(counts) not in (2, 3) or None in counts:
        raise UsageError(f"--with-job {text!r} is not usable; expected NAME:MIN:MAX or NAME:MIN:MAX:PRIORITY")
    least, most, priority = (*(number or 0 for number in counts), 0)[:3]
    return JobSpec(name, ("true",), "/", least, most, priority)


def _read_claim(text: str) -> messages.ClaimRequest:
    name, *numbers = text.split(":")
    counts = [_read_integer(number) for number in numbers]
    if len(counts) not in (1, 2) or None in counts:
        raise UsageError(f"--with-claim {text!r} is not usable; expected NAME:SLOTS or NAME:SLOTS:PRIORITY")
    slots, priority = (*(number or 0 for number in counts), _CLAIM_PRIORITY)[:2]
    return messages.ClaimRequest(name, slots, priority, None)


def _read_integer(text: str) -> int | None:
    number = read_count(text.removeprefix("-"))
    return None if number is None else -number if text.startswith("-") else number
