"""What the commands of ``edl-hvd checkpoint`` share: options, opening storages, tables, progress, sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table

from edl_hvd.checkpoint.reading.files import Tell
from edl_hvd.cli.find_job import refuse
from edl_hvd.errors import UsageError
from edl_hvd.storage import Storage, open_storage

_WIDEST = 10_000
# Columns: more than any name or path needs.

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
step_option = click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Step of the checkpoint. [the newest]"
)


def all_option(help: str) -> Callable[[Callable], Callable]:
    """``--all`` of a command that takes ``--step`` too."""
    return click.option("--all", "every", is_flag=True, help=help)


@contextmanager
def opened(*urls: str) -> Iterator[list[Storage]]:
    """The storages at these URLs; a wrong URL or argument ends the program with one line and exit code 2."""
    storages: list[Storage] = []
    try:
        for url in urls:
            storages.append(open_storage(url))
        yield storages
    except UsageError as error:
        refuse(str(error), 2)
    finally:
        for storage in storages:
            storage.close()


def check_choice(step: int | None, every: bool) -> None:
    """Refuse ``--step`` together with ``--all``."""
    if step is not None and every:
        raise click.UsageError("--step and --all exclude each other")


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or as wide as its rows if standard output is no terminal."""
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _WIDEST)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


@contextmanager
def bar(text: str, unit: str = "bytes") -> Iterator[Tell]:
    """A progress bar on standard error, if that is a terminal; it is removed when the work is done."""
    if not sys.stderr.isatty():
        yield lambda done, whole: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = {"bytes": DownloadColumn, "%": TaskProgressColumn}.get(unit, MofNCompleteColumn)()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def size(size_bytes: int) -> str:
    """
    >>> size(999), size(1_234_567), size(3_000_000_000)
    ('999 B', '1.2 MB', '3.0 GB')
    """
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{size_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def measured(metrics: Mapping[str, float]) -> str:
    """
    >>> measured({"accuracy": 0.91234567, "loss": 12.0})
    'accuracy=0.91235 loss=12'
    """
    return " ".join(f"{name}={value:.5g}" for name, value in metrics.items())
