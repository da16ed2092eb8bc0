"""``edl-hvd status``: the state of a job, from another terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from edl_hvd.cli.find_job import find_job
from edl_hvd.cli.formatting import checkpoint, count, duration, join, pace, shortage, state
from edl_hvd.driver.job_folder.claim import format_time
from edl_hvd.driver.job_folder.files import JobView, look
from edl_hvd.driver.membership.state import host_of
from edl_hvd.driver.status import Countdown, Status, WorkerState, WorkerStatus
from edl_hvd.stage_times import StageTimes
from edl_hvd.teacher_counts import TeacherCounts

_OLD_S = 5.0
# A status is written every second; the age of an older one is shown.
_SHOWN_PHASE_S = 1.0
_SLOT_STATES: dict[WorkerState, str] = {
    "starting": "starting",
    "ready": "ready",
    "member": "training",
    "failing": "ending with an error",
    "terminating": "leaving",
    "dying": "being ended",
    "empty": "down",
    "orphaned": "saving, then ending",
}
_STAGES = {
    "read_s": "the loader makes it",
    "queued_s": "until a teacher asks for it",
    "wire_s": "to the teacher and back",
    "waiting_s": "at the teacher, behind others",
    "compute_s": "in the teacher's model",
    "ready_s": "answered ahead of the training",
    "decode_s": "the answer becomes tensors",
}


@click.command("status")
@click.argument("job_dir", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
@click.option("--watch", is_flag=True, help="Repeat every second until the job has ended, or Ctrl-C.")
@click.option("--profile", is_flag=True, help="Show where the time of a micro-batch goes, with teachers.")
def status_command(job_dir: str | None, as_json: bool, watch: bool, profile: bool) -> None:
    """Show the state of a job that edlrun runs.

    JOB_DIR is the folder that 'edlrun --job-dir' names. Without it, this user's only job on this machine is shown, or a
    list of this user's jobs.

    \b
    Examples:
      edl-hvd status
      edl-hvd status runs/7 --watch
      edl-hvd status runs/7 --json
      edl-hvd status runs/7 --profile

    Exit code 1 when there is no such job. Documents: docs/edlrun.md.
    """
    found = find_job(job_dir, "JOB_DIR")
    if isinstance(found, list):
        _list(found, as_json)
        return
    if as_json:
        if watch:
            _follow(found, lambda view: click.echo(json.dumps(_to_json(view))))
        else:
            click.echo(json.dumps(_to_json(found), indent=2))
        return
    console = Console(highlight=False)
    if not watch:
        console.print(_picture(found, profile))
        return
    with Live(_picture(found, profile), auto_refresh=False, console=console) as live:
        _follow(found, lambda view: live.update(_picture(view, profile), refresh=True))


def _follow(view: JobView, show: Callable[[JobView], None]) -> None:
    try:
        while True:
            show(view)
            if not view.running:
                return
            time.sleep(1.0)
            now = look(view.path)
            # A folder that --job-dir did not name is removed with its job.
            view = now if now is not None else replace(view, running=False)
    except KeyboardInterrupt:
        return


# --- JSON ---


def _to_json(view: JobView) -> dict[str, Any]:
    status = None if view.status is None else asdict(view.status)
    return {"folder": str(view.path), "running": view.running, "dead": view.dead, "job": asdict(view.record),
            "status": status}  # fmt: skip


# --- text ---


def _list(views: list[JobView], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_to_json(view) for view in views], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for column in ("job", "since", "state", "step"):
        table.add_column(column, no_wrap=True, overflow="fold")
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
    for view in views:
        status = view.status
        word = "[bold red]dead[/]" if view.dead else state(status) if status else "unknown"
        step = f"{status.progress.step:,}" if status else ""
        since, command = format_time(view.record.started_at_s), escape(view.record.line)
        table.add_row(escape(str(view.path)), since, word, step, command)
    Console(highlight=False).print(table)


def _picture(view: JobView, with_profile: bool = False) -> RenderableType:
    record, status = view.record, view.status
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    since = join(
        [f"{format_time(record.started_at_s)} ({duration(time.time() - record.started_at_s)})", f"host {record.host}",
         f"process {record.pid}", "" if record.run == 1 else f"run {record.run}"]
    )  # fmt: skip
    rows = [("job", escape(str(view.path))), ("command", escape(record.line)), ("since", escape(since))]
    rows.append(("state", _state(view)))
    if status is not None:
        rows += _rows(status)
    for name, text in rows:
        facts.add_row(name, text)
    parts: list[RenderableType] = [facts]
    if with_profile:
        stages = status.teachers.stages if status is not None and status.teachers is not None else None
        parts += ["", "no teacher answers now" if stages is None else _profile(stages)]
    workers = _workers(status, time.time() - status.at_s) if status is not None and view.running else None
    if workers is not None:
        parts += ["", workers]
    return Group(*parts)


def _rows(status: Status) -> list[tuple[str, str]]:
    progress = status.progress
    speed = "" if progress.samples_per_s is None or status.state != "training" else pace(progress.samples_per_s)
    trained = count(progress.samples, "sample") if progress.samples else ""
    rows = [
        ("step", join([f"{max(progress.step, progress.known_step, 0):,}", speed, trained])),
        ("checkpoint", "none yet" if progress.saved_step < 0 else checkpoint(progress).replace("checkpoint", "step")),
    ]
    if status.teachers is not None:
        rows.append(("teachers", _teachers(status.teachers)))
    if status.shortage is not None:
        rows.append(("workers", join(shortage(status.shortage))))
    rows += [("drained", escape(_remaining(drain, status))) for drain in status.drains]
    rows += [("quarantined", escape(_left_out(one))) for one in status.quarantined]
    return rows


def _teachers(counts: TeacherCounts) -> str:
    return join(
        [f"{counts.teachers:,}", pace(counts.samples_per_s), f"lead {counts.lead} of {counts.window}",
         f"waiting {counts.waited_share:.1%}"]
    )  # fmt: skip


def _profile(stages: StageTimes) -> Table:
    """Where the time of a micro-batch goes: the stages follow each other, those of many micro-batches overlap."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("stage", "ms", "share", "of a micro-batch"):
        table.add_column(column, justify="right" if column in ("ms", "share") else "left")
    times = asdict(stages)
    whole_s = sum(times.values())
    for name, what in _STAGES.items():
        share = times[name] / whole_s if whole_s else 0.0
        table.add_row(name.removesuffix("_s"), f"{1000 * times[name]:,.2f}", f"{share:.1%}", what)
    table.add_row("all", f"{1000 * whole_s:,.2f}", "", "mean of this pass over the data")
    return table


def _remaining(drain: Countdown, status: Status) -> str:
    there = any(drain.who in (one.worker, host_of(one.worker)) for one in status.workers)
    return f"{drain.who} leaves within {duration(drain.remaining_s)}" if there else f"{drain.who} has left"


def _left_out(one: Countdown) -> str:
    return f"{one.who} for {duration(one.remaining_s)}" + (f": {one.reason}" if one.reason else "")


def _state(view: JobView) -> str:
    status = view.status
    if view.dead:
        at = f", last seen {format_time(status.at_s)}" if status else ""
        return f"[bold red]dead[/]: its edlrun was killed{at}; go on with --resume"
    if status is None:
        return "[yellow]its status does not read[/]"
    if status.end is not None:
        colour = {0: "green", 75: "yellow"}.get(status.end.code, "bold red")
        reason = f": {escape(status.end.reason)}" if status.end.reason else ""
        return f"[{colour}]ended with exit code {status.end.code}[/] at {format_time(status.at_s)}{reason}"
    colour = "green" if status.state in ("training", "finishing") else "yellow"
    age_s = time.time() - status.at_s
    world = "" if not status.generation else f"generation {status.generation}"
    size = "" if not status.size or status.shortage else count(status.size, "worker")
    return join([f"[{colour}]{state(status)}[/]", world, size, f"as of {duration(age_s)} ago" * (age_s > _OLD_S)])


def _workers(status: Status, age_s: float) -> Table | None:
    if not status.workers:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("host", "slot", "rank", "state", "step", "phase", "last beat", "process"):
        table.add_column(column, justify="right" if column in ("slot", "rank", "step", "process") else "left")
    shown = ""
    for one in status.workers:
        host = host_of(one.worker)
        table.add_row(escape(host) if host != shown else "", *_cells(one, age_s))
        shown = host
    return table


def _cells(one: WorkerStatus, age_s: float) -> list[str]:
    phase = one.phase
    if phase and one.phase_s >= _SHOWN_PHASE_S:
        phase += f" for {duration(one.phase_s)}"
    state = _SLOT_STATES[one.state]
    if one.starts_in_s is not None:
        state += f", starts in {duration(math.ceil(one.starts_in_s))}"
    beat = "" if one.beat_age_s is None else f"{one.beat_age_s + age_s:.1f} s ago"
    rank = "" if one.rank is None else str(one.rank)
    return [one.worker.rpartition(":")[2], rank, state, "" if one.step is None else f"{one.step:,}", phase, beat,
            "" if one.pid is None else str(one.pid)]  # fmt: skip
