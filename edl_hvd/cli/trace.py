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
    "hosts": "What an autoscaler wants.",
    "hours": "How long the trace is.",
    "zones": "Over which hosts are spread.",
    "life_h": "Mean life of a host that no shortage ends, in hours.",
    "life_shape": "Of its Weibull distribution; below 1 the young go first.",
    "shortages_per_day": "In each zone, in the mean.",
    "shortage_share": "Probability with which a host of the zone goes then.",
    "shortage_min": "Mean time for which the zone gives no host, in minutes.",
    "wait_min": "Mean time for which a missing host is waited for, in minutes.",
    "price_usd_per_h": "Mean price of a host's hour; 0: a trace without prices.",
}


@click.group("trace")
def trace_commands() -> None:
    """Traces of hosts that come and go."""


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
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Another one, another trace. [0]")
@click.option("--output", metavar="FILE", help="Write it there. [standard output]")
def generate_command(seed: int, output: str | None, **described: float) -> None:
    """Make up a trace of a spot market, as CSV. The same flags, the same trace.

    Hosts live for a Weibull time; shortages take many of a zone at once; one that is missing comes after an exponential
    time. docs/simulate.md has the distributions and their sources.
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
