"""``edl-hvd checkpoint``: list, show and verify checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.checkpoint.reading.files import read_listed
from edl_hvd.checkpoint.tools.inspection import Overview, Verified, overviews, verify_each
from edl_hvd.cli.checkpoint_common import (
    all_option,
    bar,
    check_choice,
    json_option,
    measured,
    opened,
    print_table,
    size,
    step_option,
)
from edl_hvd.cli.checkpoint_transfer import copy_command, export_command, prune_command, restore_command
from edl_hvd.cli.formatting import clean, count
from edl_hvd.errors import StorageError

_LONGEST_VALUE = 60
# Characters of a plain value; longer values are cut, and --json has them whole.


@click.group("checkpoint")
def checkpoint_commands() -> None:
    """Inspect, verify, copy, export and remove checkpoints.

    URL is the job's checkpoint URL: a folder, s3://bucket/run, gs://bucket/run,
    az://container/run, or any URL that fsspec knows.

    \b
    Examples:
      edl-hvd checkpoint list runs/7/checkpoints
      edl-hvd checkpoint verify s3://bucket/run --all
      edl-hvd checkpoint export s3://bucket/run model.safetensors

    Exit code 1 when something is damaged or could not be done, 2 when the arguments are wrong. Documents:
    docs/checkpoints.md.
    """


checkpoint_commands.add_command(restore_command)
checkpoint_commands.add_command(export_command)
checkpoint_commands.add_command(copy_command)
checkpoint_commands.add_command(prune_command)


# --- list ---


@checkpoint_commands.command("list")
@click.argument("url")
@json_option
def list_command(url: str, as_json: bool) -> None:
    """List the checkpoints at URL, newest first.

    Reads manifests and the sizes of files only; 'verify' reads every byte. Exit code 1 when a checkpoint cannot be
    used, or when URL is a folder or bucket that does not exist.

    \b
    Examples:
      edl-hvd checkpoint list runs/7/checkpoints
      edl-hvd checkpoint list s3://bucket/run --json
    """
    with opened(url) as [storage]:
        found = list(overviews(storage))
        if not found and not storage.place_exists():
            raise StorageError(
                f"cannot list the checkpoints in {storage.url}: this folder or bucket does not exist; expected the URL "
                "that a job was given; correct it, or mount the disk on which the folder is"
            )
        if as_json:
            click.echo(json.dumps([_overview_as_json(overview) for overview in found], indent=2))
        elif found:
            print_table(_overviews_table(found))
        else:
            click.echo(f"no checkpoint is listed in {storage.url}")
    sys.exit(any(not overview.intact for overview in found))


def _overview_as_json(overview: Overview) -> dict[str, Any]:
    manifest = overview.manifest
    facts = {} if manifest is None else {
        "epoch": manifest.epoch, "samples": manifest.samples, "metrics": manifest.metrics,
        "size_bytes": manifest.size_bytes, "created": manifest.created, "world_size": manifest.world_size,
    }  # fmt: skip
    return {"step": overview.step, **facts, "valid": overview.intact, "problem": overview.problem}


def _overviews_table(found: list[Overview]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("step", "epoch", "samples", "size", "created", "workers"):
        table.add_column(column, justify="left" if column == "created" else "right", no_wrap=True)
    any_metrics = any(overview.manifest is not None and overview.manifest.metrics for overview in found)
    if any_metrics:
        table.add_column("metrics", overflow="fold")
    table.add_column("", overflow="fold")
    for overview in found:
        manifest = overview.manifest
        cells = [""] * 5 if manifest is None else [
            f"{manifest.epoch:,}", f"{manifest.samples:,}", size(manifest.size_bytes), _moment(manifest),
            str(manifest.world_size),
        ]  # fmt: skip
        word = "[green]valid[/]" if overview.intact else f"[bold red]not readable[/]: {clean(overview.problem)}"
        metrics = [clean(measured(manifest.metrics if manifest is not None else {}))] if any_metrics else []
        table.add_row(f"{overview.step:,}", *cells, *metrics, word)
    return table


def _moment(manifest: Manifest) -> str:
    """The time at which it was written, in UTC, to the second."""
    return clean(manifest.created[:19].replace("T", " "))


# --- show ---


@checkpoint_commands.command("show")
@click.argument("url")
@step_option
@json_option
def show_command(url: str, step: int | None, as_json: bool) -> None:
    """Show the progress, versions, state and tensors of a checkpoint.

    \b
    Examples:
      edl-hvd checkpoint show runs/7/checkpoints
      edl-hvd checkpoint show s3://bucket/run --step 4000 --json
    """
    with opened(url) as [storage]:
        [chosen] = chosen_steps(storage, step)
        manifest = read_listed(storage, chosen).manifest
        if as_json:
            click.echo(json.dumps({"url": storage.url, **asdict(manifest)}, indent=2))
            return
        for number, table in enumerate(_pictures(storage.url, manifest)):
            if number:
                click.echo()
            print_table(table)


def _pictures(url: str, manifest: Manifest) -> Iterator[Table]:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    for name, text in [
        ("checkpoint", f"step {manifest.step:,} in {url}"),
        ("progress", f"epoch {manifest.epoch:,}, {count(manifest.samples, 'sample')}"),
        *([("metrics", measured(manifest.metrics))] if manifest.metrics else []),
        ("written", f"{manifest.created} by {count(manifest.world_size, 'worker')} with {versions}"),
        ("contents", f"{count(len(manifest.tensors), 'tensor')} in {count(len(manifest.files), 'file')}, "
                     f"{size(manifest.size_bytes)}"),
    ]:  # fmt: skip
        facts.add_row(name, clean(text))
    yield facts
    plain = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    plain.add_column("plain state", overflow="fold")
    plain.add_column("", overflow="fold")
    for name, value in _flat(manifest.plain):
        plain.add_row(clean(name), clean(_summary(value)))
    yield plain
    tensors = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("tensor", "type", "shape", "bytes", "file", ""):
        tensors.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for name, entry in manifest.tensors.items():
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        cells = [clean(name), clean(entry.dtype), clean(shape), f"{entry.size_bytes:,}"]
        for piece in entry.pieces:
            rows = f"rows {piece.first_row:,} to {piece.first_row + piece.rows:,}" if len(entry.pieces) > 1 else ""
            tensors.add_row(*cells, clean(piece.file), rows)
            cells = [""] * 4
    yield tensors


def _flat(plain: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of the state and the counters, each by its name; those of the package itself are left out."""
    for name, value in plain.items():
        if isinstance(value, dict) and value and "__tensor__" not in value:
            yield from ((f"{name}/{inner}", item) for inner, item in value.items() if not inner.startswith("_"))
        else:
            yield name, value


def _summary(value: Any) -> str:
    if isinstance(value, (dict, list)):
        tensors = _tensors_in(value)
        if isinstance(value, dict) and "__tensor__" in value:
            return "1 tensor"
        entries = f"{len(value):,} {'entry' if len(value) == 1 else 'entries'}"
        return f"{entries}, {count(tensors, 'tensor')}" if tensors else entries
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _tensors_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 if "__tensor__" in value else sum(map(_tensors_in, value.values()))
    return sum(map(_tensors_in, value)) if isinstance(value, list) else 0


# --- verify ---


@checkpoint_commands.command("verify")
@click.argument("url")
@step_option
@all_option("Verify every checkpoint that is listed.")
@json_option
def verify_command(url: str, step: int | None, every: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint and name what is damaged.

    Exit code 1 when something is damaged.

    \b
    Examples:
      edl-hvd checkpoint verify runs/7/checkpoints
      edl-hvd checkpoint verify s3://bucket/run --all
    """
    check_choice(step, every)
    found: list[Verified] = []
    with opened(url) as [storage], bar("Reading") as tell:
        for verified in verify_each(storage, chosen_steps(storage, step, every), tell):
            found.append(verified)
            if not as_json:
                _print_verified(verified)
    if as_json:
        click.echo(json.dumps([_verified_as_json(verified) for verified in found], indent=2))
    sys.exit(any(verified.damaged for verified in found))


def _verified_as_json(verified: Verified) -> dict[str, Any]:
    return {**asdict(verified), "valid": not verified.damaged}


def _print_verified(verified: Verified) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not verified.damaged:
        console.print(f"step {verified.step:,}: [green]valid[/], {size(verified.size_bytes)}")
        return
    console.print(f"step {verified.step:,}: [bold red]damaged[/]")
    for reason in verified.damaged.values():
        console.print(f"  {clean(reason)}")
