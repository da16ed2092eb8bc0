"""``edl-hvd checkpoint restore``, ``export``, ``copy`` and ``prune``: copy checkpoints, or remove them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.checkpoint.retention.collector import plan_by_hand
from edl_hvd.checkpoint.retention.policy import Pruning, RetentionPolicy, carry_out
from edl_hvd.checkpoint.tools.copying import Copied, copy_each, restore_to
from edl_hvd.checkpoint.tools.export import export
from edl_hvd.cli.checkpoint_common import all_option, bar, check_choice, json_option, opened, size, step_option
from edl_hvd.cli.formatting import count
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.values import Best, Interval


@click.command("restore")
@click.argument("url")
@click.option("--to", "folder", required=True, metavar="DIR", help="Folder that is new or empty.")
@step_option
@json_option
def restore_command(url: str, folder: str, step: int | None, as_json: bool) -> None:
    """Copy one checkpoint into a local folder; verify every byte.

    A job can use the folder as its checkpoint URL. Nothing is overwritten.

    \b
    Examples:
      edl-hvd checkpoint restore s3://bucket/run --to checkpoints
      edl-hvd checkpoint restore s3://bucket/run --step 4000 --to checkpoints
    """
    with opened(url) as [storage]:
        [chosen] = chosen_steps(storage, step)
        with bar("Restoring") as tell:
            target = restore_to(storage, folder, chosen, tell)
    _say(as_json, {"step": chosen, "url": target}, f"step {chosen:,} is in {target}")


@click.command("export")
@click.argument("url")
@click.argument("out", metavar="FILE")
@step_option
@click.option("--prefix", metavar="NAME", help="Attribute of State to export. [the only module]")
@json_option
def export_command(url: str, out: str, step: int | None, prefix: str | None, as_json: bool) -> None:
    """Write a model's weights to a .safetensors or .pt file.

    The tensors have the names of the model's own state_dict. safetensors, or torch.load(FILE, weights_only=True),
    reads the file, also where edl_hvd is not installed. Nothing is overwritten.

    \b
    Examples:
      edl-hvd checkpoint export s3://bucket/run model.safetensors
      edl-hvd checkpoint export runs/7/checkpoints model.pt --prefix generator
    """
    with opened(url) as [storage]:
        [chosen] = chosen_steps(storage, step)
        with bar("Exporting") as tell:
            done = export(storage, out, chosen, prefix, tell)
    what = f"{count(done.tensors, 'tensor')} of {done.attribute!r}, step {done.step:,}"
    _say(as_json, asdict(done), f"{done.path}: {what}, {size(done.size_bytes)}")


@click.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@step_option
@all_option("Copy every checkpoint that is listed, the oldest first.")
@json_option
def copy_command(source: str, target: str, step: int | None, every: bool, as_json: bool) -> None:
    """Copy checkpoints from one URL to another; verify every byte.

    A copy is listed when it is whole; an interrupted copy can be repeated. Nothing is overwritten: exit code 1 when TO
    has a different checkpoint of that step.

    \b
    Examples:
      edl-hvd checkpoint copy runs/7/checkpoints s3://bucket/run
      edl-hvd checkpoint copy s3://bucket/run runs/7/checkpoints --all
    """
    check_choice(step, every)
    outcomes: list[Copied] = []
    with opened(source, target) as [origin, goal], bar("Copying") as tell:
        for outcome in copy_each(origin, goal, chosen_steps(origin, step, every), tell):
            outcomes.append(outcome)
            if not as_json:
                click.echo(f"step {outcome.step:,}: {_outcome_in_words(outcome)}", err=bool(outcome.problem))
    if as_json:
        click.echo(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    sys.exit(any(outcome.problem for outcome in outcomes))


def _outcome_in_words(outcome: Copied) -> str:
    if outcome.problem:
        return f"not copied: {outcome.problem}"
    return "was there already" if outcome.was_there else "copied"


@click.command("prune")
@click.argument("url")
@click.option(
    "--keep", type=click.IntRange(min=1), required=True, metavar="N", help="Number of valid checkpoints to keep."
)
@click.option("--keep-every", metavar="INTERVAL", help="Keep also a milestone for each INTERVAL, e.g. '10000 steps'.")
@click.option("--keep-best", metavar="METRIC:MODE", help="Keep also the best one, e.g. by 'loss:min'.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; only list what would be removed.")
@json_option
def prune_command(
    url: str, keep: int, keep_every: str | None, keep_best: str | None, dry_run: bool, as_json: bool
) -> None:
    """Remove all but the newest N valid checkpoints.

    A job does the same after each new checkpoint. A checkpoint is valid if 'list' says so. A milestone is the first
    checkpoint at or after a multiple of INTERVAL. Files of interrupted checkpoints are removed, too; those beside
    checkpoints that stay, after an hour.

    Give the job's own --keep-every and --keep-best, or its milestones and its best checkpoint are removed.

    \b
    Examples:
      edl-hvd checkpoint prune s3://bucket/run --keep 3 --dry-run
      edl-hvd checkpoint prune s3://bucket/run --keep 3 --keep-best loss:min
    """
    with opened(url) as [storage]:
        every = None if keep_every is None else Interval.parse_counted(keep_every)
        best = None if keep_best is None else Best.parse(keep_best)
        pruning = plan_by_hand(storage, RetentionPolicy(keep, every, best), SYSTEM_CLOCK)
        if not dry_run:
            with bar("Removing", "objects") as tell:
                carry_out(storage, pruning, tell)
    _say(as_json, {"dry_run": dry_run, **asdict(pruning)}, _pruning_in_words(pruning, dry_run))


def _pruning_in_words(pruning: Pruning, dry_run: bool) -> str:
    def steps(numbers: list[int]) -> str:
        return ", ".join(f"{step:,}" for step in numbers) or "none"

    lines = [f"kept: step {steps(pruning.kept)}"]
    if pruning.milestones:
        lines.append(f"milestones, kept: step {steps(pruning.milestones)}")
    if pruning.best is not None:
        lines.append(f"best, kept: step {pruning.best:,}")
    if pruning.spared:
        lines.append(f"not valid, left alone: step {steps(pruning.spared)}")
    verb = "would be removed" if dry_run else "removed"
    objects = f"{count(len(pruning.keys), 'object')}, {size(pruning.size_bytes)}"
    lines.append(f"{verb}: step {steps(pruning.removed)} ({objects})" if pruning.keys else f"{verb}: nothing")
    if pruning.orphans:
        lines.append(f"among them, left beside what stays: {count(len(pruning.orphans), 'object')}")
    return "\n".join(lines)


def _say(as_json: bool, value: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(value, indent=2) if as_json else text)
