"""``edl-hvd fleet``: many jobs on the hosts of one source."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edl_hvd.cli.checkpoint_common import print_table
from edl_hvd.cli.edlrun import check_added_flags
from edl_hvd.cli.find_job import refuse
from edl_hvd.cli.fleet_client import FAILED, WRONG, ask, state_option, submit_job, view_of
from edl_hvd.cli.fleet_daemon import replay_command, serve_command
from edl_hvd.cli.fleet_view import claim_cells, facts_of, job_cells, trouble_line
from edl_hvd.cli.formatting import clean, count, duration
from edl_hvd.discovery.sources.hostfile import parse_host_list
from edl_hvd.driver.command_line.resume import HOST_FLAGS
from edl_hvd.errors import UsageError
from edl_hvd.fleet import events, messages
from edl_hvd.fleet.answers import LONGEST_CLAIM_S
from edl_hvd.fleet.messages import Agreed, PlanView
from edl_hvd.fleet.runs import JOBS, last_lines
from edl_hvd.fleet.state import JobPhase, JobSpec, shown_hosts, total
from edl_hvd.fleet.store import read_fleet_history
from edl_hvd.hosts import read_count, with_devices
from edl_hvd.json_values import as_fields
from edl_hvd.values import read_seconds

_CLAIM_PRIORITY = 1000
# Services come first: above what people give their jobs.
_POLL_S = 0.05
_LAST_LINES = 20
# As many as edlrun shows of a worker that failed.
_SHOWN_NAMES = 8


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


fleet_commands.add_command(serve_command)
fleet_commands.add_command(replay_command)


@fleet_commands.command("submit")
@click.option("--name", required=True, help="Name of the job, one of its own in the fleet.")
@click.option("--min", "least", type=click.IntRange(1), default=1, show_default=True, help="Fewest workers.")
@click.option("--max", "most", type=click.IntRange(1), help="Most workers.  [--min]")
@click.option("--priority", type=int, default=0, show_default=True,
              help="Jobs of a higher one get their --min first, and may stop those of a lower one.")  # fmt: skip
@click.option("--queue", default="default", show_default=True, help="Queue whose weight and limit it shares.")
@click.option("--family", metavar="NAME", default="",
              help="Jobs of one family are alike: each begins with what the others have measured.")  # fmt: skip
@click.option("--no-preempt", is_flag=True, help="Never stop it for a job of higher priority.")
@click.option("--retries", type=click.IntRange(0), default=0, show_default=True, help="Runs that may fail.")
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="Environment variable of its workers.")
@click.option("--edlrun", "flags", metavar="FLAGS", default="", help="More flags of edlrun, e.g. '--drain-lead 30'.")
@state_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def submit_command(
    name: str,
    least: int,
    most: int | None,
    priority: int,
    queue: str,
    family: str,
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

    Exit code 2: it is refused, because it can never run, edlrun refuses its flags, or another job has its name. 1: no
    daemon answers, or its disk is full. Documents: docs/cluster.md.
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
            flags=read_flags(flags),
            variables=tuple(variables),
            retries=retries,
            family=family,
        )
    except ValueError as error:
        refuse(str(error), WRONG)
    submit_job(state_dir, spec)


@fleet_commands.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@state_option
def list_command(as_json: bool, state_dir: Path) -> None:
    """List the jobs and claims of the fleet.

    \b
    Examples:
      edl-hvd fleet list --json

    Exit code 1: no daemon answers. Documents: docs/cluster.md.
    """
    view = view_of(state_dir)
    if as_json:
        click.echo(json.dumps(as_fields(view), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("name", "state", "slots", "wants", "step", "left", "samples/s", "waited", "why"):
        right = column in ("slots", "step", "left", "samples/s", "waited")
        table.add_column(column.upper(), justify="right" if right else "left")
    for row in view.jobs:
        table.add_row(*job_cells(row))
    for claim in view.claims:
        table.add_row(*claim_cells(claim, view.now_s))
    if table.row_count:
        print_table(table)
    slots = total(view.hosts)
    lacking = f"; {count(view.lacking, 'slot')} more would be used" if view.lacking else ""
    console.print(f"{count(len(view.hosts), 'host')}, {view.free} of {count(slots, 'slot')} free{lacking}")
    if view.trouble is not None:
        console.print(clean(trouble_line(view.trouble)))


@fleet_commands.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@state_option
def show_command(name: str, as_json: bool, state_dir: Path) -> None:
    """Show a job, its slots over time, and why.

    Of a job that failed, the last 20 lines of its output follow.

    \b
    Examples:
      edl-hvd fleet show resnet50

    Exit code 1: no daemon answers. 2: there is no such job. Documents: docs/cluster.md.
    """
    view = view_of(state_dir)
    row = next((row for row in view.jobs if row.job.name == name), None)
    if row is None:
        names = ", ".join(row.job.name for row in view.jobs[:20]) or "none"
        refuse(f"there is no job {name!r}; the jobs are {names}", WRONG)
    history: list[tuple[float, str]] = []
    for entry in read_fleet_history(state_dir.expanduser(), name):
        if entry.event == events.JobDeleted(name):
            history.clear()  # another job had its name
            continue
        history += [
            (entry.at_s, action.text)
            for action in entry.actions
            if isinstance(action, events.Tell) and action.about == name
        ]
    if as_json:
        click.echo(
            json.dumps({**as_fields(row), "history": [{"at_s": at, "text": text} for at, text in history]}, indent=2)
        )
        return
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    facts = facts_of(row, state_dir.expanduser().absolute())
    width = max(len(label) for label, _ in facts)
    for label, text in facts:
        # No table: the terminal itself wraps a long command, so that it is copied from there as one line.
        console.print(f"[dim]{label:<{width}}[/]  {escape(text) if label == 'command' else clean(text)}")
    console.print()
    for at_s, text in history:
        console.print(f"[dim]{duration(max(0.0, view.now_s - at_s)):>12} ago[/]  {clean(text)}")
    last = last_lines(state_dir.expanduser() / JOBS / name, _LAST_LINES) if row.job.phase is JobPhase.FAILED else []
    if last:
        console.print("\n[dim]its last output[/]")
    for line in last:
        console.print(escape("".join(character if character.isprintable() else " " for character in line)))


@fleet_commands.command("scale")
@click.argument("name")
@click.option("--max", "most", type=click.IntRange(1), required=True, help="Most workers from now on.")
@state_option
def scale_command(name: str, most: int, state_dir: Path) -> None:
    """Change the most workers that a job may have, while it trains.

    \b
    Examples:
      edl-hvd fleet scale resnet50 --max 2

    Exit code 2: it is refused. 1: no daemon answers, or its disk is full. Documents: docs/cluster.md.
    """
    click.echo(ask(state_dir, messages.ScaleRequest(name, most), Agreed).text)


@fleet_commands.command("stop")
@click.argument("name")
@state_option
def stop_command(name: str, state_dir: Path) -> None:
    """Let a job save a checkpoint and stop.

    It goes on with 'edl-hvd fleet resume'.

    \b
    Examples:
      edl-hvd fleet stop resnet50

    Exit code 2: it is refused. 1: no daemon answers, or its disk is full. Documents: docs/cluster.md.
    """
    click.echo(ask(state_dir, messages.StopRequest(name), Agreed).text)


@fleet_commands.command("resume")
@click.argument("name")
@state_option
def resume_command(name: str, state_dir: Path) -> None:
    """Let a job that was stopped or failed go on.

    It goes on from its newest checkpoint, as soon as there is room.

    \b
    Examples:
      edl-hvd fleet resume resnet50

    Exit code 2: it is refused. 1: no daemon answers, or its disk is full. Documents: docs/cluster.md.
    """
    click.echo(ask(state_dir, messages.ResumeRequest(name), Agreed).text)


@fleet_commands.command("delete")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--ended", "ended", metavar="TIME",
              help="All jobs that are complete or failed, and ended at least this long ago, e.g. 168h.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@state_option
def delete_command(names: Sequence[str], ended: str | None, yes: bool, state_dir: Path) -> None:
    """Delete jobs that have ended or were stopped.

    Their folders are removed, with output, history and the checkpoints that are there. Checkpoints that
    EDL_HVD_CHECKPOINT or the script has placed elsewhere stay. Their names are free for other jobs.

    \b
    Examples:
      edl-hvd fleet delete resnet50 --yes
      edl-hvd fleet delete --ended 168h --yes

    Exit code 2: it is refused, as for a job that runs. 1: no daemon answers, or its disk is full. Documents:
    docs/cluster.md.
    """
    if bool(names) == (ended is not None):
        refuse(f"{'NAME and --ended are both given' if names else 'NAME is missing'}; expected one of NAME... and "
               "--ended TIME, e.g. --ended 168h", WRONG)  # fmt: skip
    if ended is not None:
        names = _ended_since(ended, state_dir)
        if not names:
            click.echo(f"no job ended {ended} ago or earlier")
            return
    shown = ", ".join(names[:_SHOWN_NAMES]) + f" and {len(names) - _SHOWN_NAMES} more" * (len(names) > _SHOWN_NAMES)
    if not yes and not sys.stdin.isatty():
        refuse(f"cannot delete {shown}: standard input is no terminal on which to confirm it; give --yes", WRONG)
    where = state_dir.expanduser().absolute() / JOBS
    if not yes and not click.confirm(f"Delete {shown}, with all that is in their folders in {where}?", err=True):
        raise SystemExit(FAILED)
    for name in names:
        click.echo(ask(state_dir, messages.DeleteRequest(name), Agreed).text)


def _ended_since(text: str, state_dir: Path) -> list[str]:
    """Names of the jobs that ended by themselves this long ago or earlier, and of which no process is left."""
    try:
        for_s = read_seconds("--ended", text)
    except UsageError as error:
        refuse(str(error), WRONG)
    view = view_of(state_dir)
    rested = (row.job for row in view.jobs if row.job.phase.is_ended and row.job.has_left)
    return [job.name for job in rested if view.now_s - job.changed_s >= for_s]


@fleet_commands.command("claim")
@click.argument("name")
@click.option("--slots", type=click.IntRange(1), required=True, help="Number of slots.")
@click.option("--for", "for_text", metavar="TIME", help="Time after which it ends by itself, e.g. 60s. [never]")
@click.option("--priority", type=int, default=_CLAIM_PRIORITY, show_default=True,
              help="Jobs of a lower one are stopped for it, if shrinking them is not enough.")  # fmt: skip
@click.option("--wait/--no-wait", default=True, help="Wait until the slots are free.  [wait]")
@click.option("--devices", "with_numbers", is_flag=True, help="Print the numbers of its GPUs, too.")
@state_option
def claim_command(
    name: str, slots: int, for_text: str | None, priority: int, wait: bool, with_numbers: bool, state_dir: Path
) -> None:
    """Make room for something that is no job.

    Prints the hosts as soon as no worker is on the slots any more. They stay free until the time is over or 'edl-hvd
    fleet release' gives them back. Ctrl-C or SIGTERM before that releases the claim.

    \b
    Examples:
      edl-hvd fleet claim web --slots 2 --for 60s
      edl-hvd fleet claim web --slots 2 --devices

    Exit code 2: it is refused. 1: no daemon answers, its disk is full, or the claim ended before there was room. 130,
    143: interrupted by Ctrl-C or SIGTERM, and released. Documents: docs/cluster.md.
    """
    request = messages.ClaimRequest(name, slots, priority, _read_time(for_text))
    if not wait:
        click.echo(ask(state_dir, request, Agreed).text)
        return
    stays = (
        f"claim {name} stays in the fleet; release it once the daemon answers: "
        f"{shlex.join(['edl-hvd', 'fleet', 'release', name, '--state', str(state_dir)])}"
    )
    with _noted_signals() as noted:
        ask(state_dir, request, Agreed)
        while not noted:
            claim = next((one for one in view_of(state_dir, stays).claims if one.name == name), None)
            if claim is None:
                refuse(f"claim {name} ended before {_were_free(slots)} for it", FAILED)
            if total(claim.granted) == slots and not noted:
                click.echo("\n".join(map(with_devices, claim.devices)) if with_numbers else shown_hosts(claim.granted))
                return
            time.sleep(_POLL_S)
        ask(state_dir, messages.ReleaseRequest(name), Agreed, stays)
    click.echo(f"interrupted before {_were_free(slots)}; claim {name} is released", err=True)
    sys.exit(128 + noted[0])


def _were_free(slots: int) -> str:
    return f"{count(slots, 'slot')} {'was' if slots == 1 else 'were'} free"


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The numbers of SIGINT and SIGTERM as they arrive; neither ends the program meanwhile."""
    noted: list[int] = []
    former = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@fleet_commands.command("release")
@click.argument("name")
@state_option
def release_command(name: str, state_dir: Path) -> None:
    """Give the slots of a claim back.

    \b
    Examples:
      edl-hvd fleet release web

    Exit code 2: it is refused. 1: no daemon answers, or its disk is full. Documents: docs/cluster.md.
    """
    click.echo(ask(state_dir, messages.ReleaseRequest(name), Agreed).text)


@fleet_commands.command("plan")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Ask about these hosts instead of the fleet's.")
@click.option("--with-job", "jobs", metavar="NAME:MIN:MAX[:PRIORITY]", multiple=True, help="Ask as if it were there.")
@click.option("--with-claim", "claims", metavar="NAME:SLOTS[:PRIORITY]", multiple=True, help="The same.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@state_option
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
    view = ask(state_dir, request, PlanView)
    if as_json:
        click.echo(json.dumps(as_fields(view), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("NAME", "HAS", "GETS", "HOSTS", "WHY"):
        table.add_column(column, justify="right" if column in ("HAS", "GETS") else "left")
    for share in view.shares:
        table.add_row(share.name, str(share.has), str(share.gets), shown_hosts(share.hosts), clean(share.why))
    print_table(table)
    if view.lacking:
        console.print(f"{count(view.lacking, 'slot')} more would be used")


# --- reading ---

OWN_FLAGS = ("-np", "--min-np", "--max-np", "--job-dir", "--resume", *HOST_FLAGS)


def read_flags(text: str) -> tuple[str, ...]:
    """The words of ``--edlrun``, as a shell reads them, and as ``edlrun`` accepts them.

    Raises:
        UsageError: It does not, or one of them is the fleet's business; one line.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--edlrun {text!r} is not usable: {error}; expected flags as a shell reads them, e.g. '--drain-lead 30'"
        ) from None
    try:
        check_added_flags(words, OWN_FLAGS, "the fleet")
    except UsageError as error:
        raise UsageError(f"--edlrun {text!r} is not usable: {'; '.join(str(error).splitlines())}") from None
    return words


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
