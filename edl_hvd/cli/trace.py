"""``edl-hvd trace``: traces of hosts that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from edl_hvd.errors import UsageError
from edl_hvd.traces.market import Market, generate
from edl_hvd.traces.text import format_trace

_MEANINGS = {
    "hosts": "Number of hosts that an autoscaler wants.",
    "hours": "Length of the trace in hours.",
    "zones": "Number of zones over which the hosts are spread.",
    "life_h": "Mean life in hours of a host that no shortage ends.",
    "life_shape": "Weibull shape of that life; below 1 young hosts go first.",
    "shortages_per_day": "Mean number of shortages in each zone.",
    "shortage_share": "Probability that a shortage takes a host of its zone.",
    "shortage_min": "Mean minutes for which a shortage lasts.",
    "wait_min": "Mean minutes until a missing host is replaced.",
    "price_usd_per_h": "Mean price of one host for an hour; 0 for no prices.",
}


@click.group("trace")
def trace_commands() -> None:
    """Make traces of hosts that come and go.

    \b
    Examples:
      edl-hvd trace generate --hosts 64 --hours 24 --output spot.csv

    Documents: docs/simulate.md.
    """


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _market_options(command: Callable) -> Callable:
    for entry in reversed(fields(Market)):
        kind: Any = int if isinstance(entry.default, int) else float
        text = f"{_MEANINGS[entry.name]} [{entry.default:g}]"
        command = click.option(_flag(entry.name), entry.name, type=kind, default=entry.default, help=text)(command)
    return command


@trace_commands.command("generate")
@_market_options
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of the random numbers. [0]")
@click.option("--output", metavar="FILE", help="File of the trace. [standard output]")
def generate_command(seed: int, output: str | None, **described: float) -> None:
    """Make a synthetic trace of a spot market, as CSV.

    The same flags and seed give the same trace. Hosts live for a Weibull time, shortages take many hosts of a zone at
    once, and a missing host is replaced after an exponential time.

    \b
    Examples:
      edl-hvd trace generate --hosts 64 --hours 24 --seed 5 --output spot.csv

    Documents: docs/simulate.md, with the distributions and their sources.
    """
    market = Market(**described)  # type: ignore[arg-type]
    others = [
        f"{_flag(entry.name)} {described[entry.name]:g}"
        for entry in fields(Market)
        if described[entry.name] != entry.default or entry.name in ("hosts", "hours")
    ]
    text = format_trace(generate(market, seed), f"edl-hvd trace generate {' '.join(others)} --seed {seed}")
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the trace {output}: {error.strerror}") from error
