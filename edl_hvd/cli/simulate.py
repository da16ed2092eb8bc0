"""``edl-hvd simulate``: the goodput of a job on the hosts of a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edl_hvd.checkpoint.reading.files import Tell
from edl_hvd.cli.checkpoint_common import bar, print_table
from edl_hvd.cli.formatting import duration
from edl_hvd.cli.simulate_cluster import simulate_cluster_command
from edl_hvd.errors import UsageError
from edl_hvd.events import read_events
from edl_hvd.simulator.comparison import Comparison, SimulationPlan, compare
from edl_hvd.simulator.costs import Costs, flag_of
from edl_hvd.simulator.measured import MeasuredCost, measure, with_measured
from edl_hvd.simulator.picture import NAMES, draw
from edl_hvd.simulator.timeline import Result
from edl_hvd.traces.text import read_trace
from edl_hvd.values import Interval


class Seconds(click.ParamType):
    """A time such as "0.3s", "10min" or "0", read as seconds."""

    name = "time"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = self._read(str(value))
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is no time; expected one such as '0.3s', '10min' or '0'", parameter, context)
        return seconds

    def _read(self, text: str) -> float:
        try:
            interval = Interval.parse(text)
        except UsageError:
            return math.nan
        return interval.count if interval.unit == "seconds" else math.nan


class Every(click.ParamType):
    """An interval of time, or "auto"."""

    name = "time|auto"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Interval:
        try:
            interval = Interval.parse_or_auto(value)
        except UsageError:
            interval = None
        if interval is None or interval.unit not in ("seconds", "auto"):
            self.fail(f"{value!r} is no time; expected one such as '10min', or 'auto'", parameter, context)
        return interval


def cost_options(command: Callable) -> Callable:
    """Add a flag for each of the ``Costs``."""
    for entry in reversed(fields(Costs)):
        text = f"{entry.metadata['meaning']} [{entry.default:g} s]"
        command = click.option(flag_of(entry), entry.name, type=Seconds(), metavar="TIME", help=text)(command)
    return command


@click.group("simulate", invoke_without_command=True)
@click.pass_context
@click.option(
    "--trace",
    "path",
    metavar="FILE",
    help="Trace of hosts, as CSV, or spot-day, which comes with this package.",
)
@click.option(
    "--divide", type=click.IntRange(min=1), default=1, metavar="N", help="Simulate one host for every N of the trace."
)
@click.option(
    "--from", "from_s", type=Seconds(), default=0.0, metavar="TIME", help="Begin at this time of the trace. [0]"
)
@click.option("--until", "until_s", type=Seconds(), metavar="TIME", help="End at this time of the trace.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, metavar="N",
              help="Run the trace N times as fast, at the same costs. [1]")  # fmt: skip
@click.option(
    "--price", type=click.FloatRange(min=0), metavar="USD", help="Price of one host for an hour. [the trace's]"
)
@click.option("--notice", "notice_s", type=Seconds(), default=0.0, metavar="TIME",
              help="edl_hvd: time from a notice to the end of a host. [0: no notices]")  # fmt: skip
@click.option("--poll", "poll_s", type=Seconds(), default=1.0, metavar="TIME",
              help="Time between two polls of the host source; 10s for clouds. [1s]")  # fmt: skip
@click.option(
    "--min-np",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="edl_hvd: fewest hosts with which training goes on. [1]",
)
@click.option("--checkpoint-every", type=Every(), default="auto",
              help="edl_hvd: time between checkpoints. [auto: as in a job]")  # fmt: skip
@click.option("--stock-checkpoint-every", type=Every(), default="auto",
              help="The other systems: time between checkpoints. [auto: the best found]")  # fmt: skip
@click.option("--costs", "log", metavar="EVENTS.jsonl", help="Take the costs from the event log of a real run.")
@cost_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--picture", metavar="FILE.png", help="Draw hosts and goodput over time in this file.")
def simulate_command(
    context: click.Context, path: str | None, divide: int, from_s: float, until_s: float | None, speed: float,
    price: float | None, notice_s: float, poll_s: float, min_np: int, checkpoint_every: Interval,
    stock_checkpoint_every: Interval, log: str | None, as_json: bool, picture: str | None, **given: float | None,
) -> None:  # fmt: skip
    """Compare the goodput of three systems on a trace of hosts.

    edl_hvd runs the driver's own membership in virtual time. Restarting from checkpoints and stock Horovod elastic are
    models. The costs come from docs/benchmarks.md, from an event log, or from flags, which win.

    \b
    Examples:
      edl-hvd simulate --trace spot-day
      edl-hvd simulate --trace spot.csv --costs events.jsonl --notice 2min
      edl-hvd simulate --trace spot.csv --divide 12 --picture spot.png

    'edl-hvd simulate cluster' compares policies for many jobs on one cluster. Documents: docs/simulate.md.
    """
    if context.invoked_subcommand is not None:
        return
    if path is None:
        raise click.UsageError("Missing option '--trace'.", context)
    measured = _measure(log)
    costs = with_measured(Costs(), measured) if log is not None else Costs()
    costs = Costs(**{**asdict(costs), **{name: value for name, value in given.items() if value is not None}})
    trace = read_trace(path)
    if price is not None:
        trace = trace.priced(price)
    trace = trace.window(from_s, trace.end_s if until_s is None else until_s).divided(divide).faster(speed)
    plan = SimulationPlan(trace, costs, min_np, checkpoint_every, stock_checkpoint_every, poll_s, notice_s)
    with bar("Simulating", "%") as tell:
        comparison = compare(plan, _percent(tell))
    if picture is not None:
        draw(comparison, picture, _title(path, divide, comparison))
    if as_json:
        click.echo(json.dumps(_plain(comparison, measured), indent=2))
    else:
        _print(comparison, measured)


simulate_command.add_command(simulate_cluster_command)


def _percent(tell: Tell) -> Callable[[str, float], None]:
    """What tells a bar how far two of the systems are, each time it is a percent more; the third takes no time."""
    last = -1

    def told(system: str, done: float) -> None:
        nonlocal last
        percent = int(50 * ((system == "edl_hvd") + done))
        if percent != last:
            last = percent
            tell(percent, 100)

    return told


def _measure(log: str | None) -> list[MeasuredCost]:
    if log is None:
        return []
    try:
        events = read_events(log)
    except OSError as error:
        raise UsageError(f"cannot read the event log {log}: {error.strerror}") from error
    try:
        return measure(events)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{log} is no event log: {error!r}; expected the file that EDL_HVD_EVENTS names") from error


def _title(path: str, divide: int, comparison: Comparison) -> str:
    divided = f", one host for every {divide}" if divide > 1 else ""
    return f"{Path(path).name}{divided}: {duration(comparison.plan.trace.end_s)}"


def _plain(comparison: Comparison, measured: list[MeasuredCost]) -> dict[str, Any]:
    trace = comparison.plan.trace
    return {
        "trace": {"seconds": trace.end_s, "most_hosts": trace.most_hosts, "host_seconds": trace.host_seconds},
        "costs": asdict(comparison.plan.costs),
        "measured": [asdict(one) for one in measured],
        "runs": comparison.runs,
        "systems": {
            system: {
                **asdict(result),
                "goodput": result.goodput,
                "usd_per_useful_hour": result.usd_per_useful_hour,
                "checkpoint_every_s": comparison.every_s[system],
            }
            for system, result in comparison.results.items()
        },
    }


def _print(comparison: Comparison, measured: list[MeasuredCost]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    trace = comparison.plan.trace
    mean = trace.host_seconds / trace.end_s
    console.print(
        f"{duration(trace.end_s)}, {mean:.1f} hosts in the mean and {trace.most_hosts} at most, "
        f"{trace.host_seconds / 3600:,.0f} host-hours"
    )
    for one in measured:
        console.print(f"{one.name} = {one.seconds:.3f} s, median of {one.times} ({one.source})")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for system in comparison.results:
        table.add_column(NAMES[system], justify="right")
    for name, tell in _ROWS:
        cells = [tell(result, comparison.every_s[system]) for system, result in comparison.results.items()]
        if any(cells):
            table.add_row(name, *cells)
    print_table(table)
    if comparison.runs > 1:
        console.print(f"Without a host for too long, edl_hvd's job ended and was run again: {comparison.runs} runs")


def _share(part: float, result: Result) -> str:
    return f"{100 * part / result.possible:.2f} %"


def _money(value: float | None) -> str:
    return "" if value is None else f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"


_ROWS: tuple[tuple[str, Callable[[Result, float], str]], ...] = (
    ("goodput", lambda result, _: _share(result.useful, result)),
    ("  work lost", lambda result, _: _share(result.lost, result)),
    ("  writing checkpoints", lambda result, _: _share(result.stalled, result)),
    ("  standing still", lambda result, _: _share(result.still, result)),
    ("  hosts not in the world", lambda result, _: _share(result.waiting, result)),
    ("time standing still", lambda result, _: duration(result.still_s)),
    ("changes of the world", lambda result, _: f"{result.changes:,}"),
    ("checkpoints", lambda result, _: f"{result.checkpoints:,}"),
    ("  one every", lambda _, every_s: duration(every_s)),
    ("cost of the hosts", lambda result, _: _money(result.cost_usd)),
    ("  per useful host-hour", lambda result, _: _money(result.usd_per_useful_hour)),
)
