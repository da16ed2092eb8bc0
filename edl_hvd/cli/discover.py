"""``edl-hvd discover``: the hosts of a source, and why others are left out."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from edl_hvd.cli.formatting import count, duration
from edl_hvd.discovery.inspection import HostListing, Inspector, ListedHost, changes
from edl_hvd.discovery.registry import PolledSource
from edl_hvd.discovery.sources.combined import read_source, start_now
from edl_hvd.errors import DiscoveryError, UsageError

NO_ANSWER, WRONG_ARGUMENTS = 1, 2
# Exit codes of the discovery scripts.
_REDRAW_S = 1.0
# Ages and notices are shown in whole seconds.


@click.command("discover")
@click.argument("source")
@click.option(
    "--watch", is_flag=True, help="Repeat every second until Ctrl-C; without a terminal print a line for each change."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch a line for each answer.")
def discover_command(source: str, watch: bool, as_json: bool) -> None:
    """Show the hosts of SOURCE, and why others are left out.

    SOURCE has the form of 'edlrun --discover SOURCE'.

    \b
    Examples:
      edl-hvd discover file:hosts.txt
      edl-hvd discover ec2:tag=job=resnet50 --watch
      edl-hvd discover 'union(ec2:tag=job=7, file:spare.txt)' --json

    Exit code 0 when there are hosts, 1 when there are none or no answer that can be trusted, 2 when SOURCE is not
    understood. Documents: docs/discovery.md.
    """
    try:
        polled = read_source(source, start_now)
    except UsageError as error:
        click.echo(f"edl-hvd discover: {source!r}: {' '.join(str(error).split())}", err=True)
        sys.exit(WRONG_ARGUMENTS)
    try:
        code = _watch(polled, as_json) if watch else _show(polled, as_json)
    finally:
        polled.source.close()
    sys.exit(code)


def _show(polled: PolledSource, as_json: bool) -> int:
    try:
        listing = Inspector(polled).inspect()
    except (DiscoveryError, UsageError) as error:
        return _complain(str(error))
    if as_json:
        click.echo(json.dumps(to_json(listing), indent=2))
    else:
        Console(highlight=False).print(picture(listing, time.time()))
    return 0 if listing.hosts else _complain("there are no hosts")


def _complain(problem: str) -> int:
    click.echo(f"edl-hvd discover: {' '.join(problem.split())}", err=True)
    return NO_ANSWER


def _watch(polled: PolledSource, as_json: bool) -> int:
    """Show the hosts until Ctrl-C; poll the source as often as a job would."""
    every_s = max(_REDRAW_S, polled.refresh_s)
    show = _follow if as_json or not sys.stdout.isatty() else _follow_on_screen
    with contextlib.suppress(KeyboardInterrupt):
        show(Inspector(polled), every_s, as_json)
    return 0


def _follow(inspector: Inspector, every_s: float, as_json: bool) -> None:
    before: HostListing | None = None
    told = ""
    while True:
        problem = ""
        try:
            listing = inspector.inspect()
        except (DiscoveryError, UsageError) as error:
            problem = " ".join(str(error).split())
        else:
            if as_json:
                click.echo(json.dumps({"at_s": time.time(), **to_json(listing)}))
            else:
                for line in changes(before, listing):
                    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
            before, problem = listing, listing.remark
        if problem and problem != told:
            click.echo(f"edl-hvd discover: {problem}", err=True)
        told = problem
        sys.stdout.flush()
        time.sleep(every_s)


def _follow_on_screen(inspector: Inspector, every_s: float, as_json: bool) -> None:
    listing, problem, asked_s, at_s = HostListing(()), "", -every_s, time.time()
    with Live(auto_refresh=False, console=Console(highlight=False)) as live:
        while True:
            if time.monotonic() - asked_s >= every_s:
                asked_s = time.monotonic()
                try:
                    listing, problem, at_s = inspector.inspect(), "", time.time()
                except (DiscoveryError, UsageError) as error:
                    problem = " ".join(str(error).split())
            live.update(picture(listing, time.time(), at_s, problem), refresh=True)
            time.sleep(_REDRAW_S)


# --- JSON ---


def to_json(listing: HostListing) -> dict[str, object]:
    """The keys are ``hosts``, ``left_out`` and ``remark``; unknown details of a host are left out."""
    hosts = [{name: value for name, value in asdict(one).items() if value not in ("", None)} for one in listing.hosts]
    return {"hosts": hosts, "left_out": dict(listing.left_out), "remark": listing.remark}


# --- text ---


def picture(listing: HostListing, now_s: float, at_s: float | None = None, problem: str = "") -> RenderableType:
    """A table of the hosts, then what is left out. Columns without a value are not shown.

    Args:
        now_s: Present time in seconds since the epoch, for ages.
        at_s: Time at which the source was asked; ``None`` for now.
        problem: Reason why there is no newer answer; empty for none.
    """
    pieces: list[RenderableType] = []
    if listing.hosts:
        pieces.append(_hosts(listing.hosts, now_s, now_s - (now_s if at_s is None else at_s)))
    total = f"{count(len(listing.hosts), 'host')}, {count(listing.slots, 'slot')}"
    pieces.append(f"[bold]{total}[/]" if listing.hosts else "[yellow]no hosts[/]")
    if listing.left_out:
        left = Table.grid(padding=(0, 2))
        left.add_column(no_wrap=True, style="dim")
        left.add_column(overflow="fold")
        for name, why in listing.left_out.items():
            left.add_row(escape(name), escape(why))
        pieces += ["", "[dim]left out[/]", left]
    if listing.remark:
        pieces += ["", f"[yellow]{escape(listing.remark)}[/]"]
    if problem:
        age = "" if at_s is None else f" (the hosts are as of {duration(now_s - at_s)} ago)"
        pieces += ["", f"[bold red]{escape(problem)}[/]{age}"]
    return Group(*pieces)


def _hosts(hosts: tuple[ListedHost, ...], now_s: float, passed_s: float) -> Table:
    columns = {
        "host": [escape(one.host) for one in hosts],
        "slots": [str(one.slots) for one in hosts],
        "type": [escape(one.kind) for one in hosts],
        "zone": [escape(one.zone) for one in hosts],
        "$/h": ["" if one.price_usd_per_h is None else f"{one.price_usd_per_h:.4g}" for one in hosts],
        "age": ["" if one.since_s is None else duration(max(0.0, now_s - one.since_s)) for one in hosts],
        "notice": [_notice(one.notice_s, passed_s) for one in hosts],
    }
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    shown = [name for name, cells in columns.items() if any(cells)]
    for name in shown:
        table.add_column(name, justify="right" if name in ("slots", "$/h") else "left", overflow="fold")
    for row in zip(*(columns[name] for name in shown), strict=True):
        table.add_row(*row)
    return table


def _notice(notice_s: float | None, passed_s: float) -> str:
    return "" if notice_s is None else f"[bold red]gone in {duration(max(0.0, notice_s - passed_s))}[/]"
