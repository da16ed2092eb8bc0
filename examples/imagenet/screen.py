"""The screen of the demo: a live line, the events of the run, and the tables at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from picture import describe
from report import Report, arrows
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from teacher_history import TeacherHistory


class Screen:
    """Screen of a run. In a terminal a bar stays at the bottom; elsewhere only events are printed.

    Args:
        console: Console to print to.
        samples: Number of samples of the whole run.
    """

    def __init__(self, console: Console, samples: int) -> None:
        self._console = console
        self._start_s: float | None = None
        self._now_s = 0.0
        self._facts: dict[str, str] = {}
        self._bar = Progress(
            BarColumn(30), TaskProgressColumn(), TextColumn("{task.fields[facts]}"), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=samples, facts="starting")

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def announce(self, title: str) -> None:
        """Show that a scene begins."""
        self._say(f"[bold cyan]{title}[/]")

    def observe(self, line: dict[str, Any]) -> None:
        """Show one line of the event log."""
        self._start_s = self._start_s or line["time"]
        self._now_s = line["time"] - self._start_s
        show = getattr(self, f"_on_{line['event']}", None)
        if show is not None:
            show(line)

    def _on_world_formed(self, line: dict[str, Any]) -> None:
        size = line["size"]
        self._facts["workers"] = f"{size} worker" + ("" if size == 1 else "s")
        self._say(f"world {line['generation']} with {self._facts['workers']}: {', '.join(line['members'])}")

    def _on_resized(self, line: dict[str, Any]) -> None:
        self._say(f"training goes on at step {line['step']} after {line['downtime_s']:.2f} s")

    def _on_worker_lost(self, line: dict[str, Any]) -> None:
        self._say(f"[red]{line['worker']} is gone[/]")

    def _on_worker_left(self, line: dict[str, Any]) -> None:
        self._say(f"{line['worker']} has left")

    def _on_commit(self, line: dict[str, Any]) -> None:
        self._facts["epoch"] = f"epoch {line['epoch'] + 1}"
        self._bar.update(self._task, completed=line["samples"], facts=" · ".join(self._facts.values()))

    def _on_metrics(self, line: dict[str, Any]) -> None:
        if "loss" in line["values"]:
            self._facts["loss"] = f"loss {line['values']['loss']:.3f}"
        if "top1" in line["values"]:
            self._facts["top1"] = f"top-1 {line['values']['top1']:.1%}"

    def _say(self, text: str) -> None:
        self._bar.console.print(f"[dim]{self._now_s:7.1f} s[/]  {text}", highlight=False)


def resize_table(report: Report) -> Table:
    """A table with a row for each resize."""
    table = Table(title="Resizes", title_justify="left", box=SIMPLE_HEAD)
    for heading, justify in (
        ("at", "right"), ("what happened", "left"), ("workers", "left"), ("step", "right"), ("seconds lost", "right")
    ):  # fmt: skip
        table.add_column(heading, justify=justify)
    for resize in report.resizes:
        table.add_row(
            f"{resize.time_s:.1f} s",
            describe(resize),
            arrows((resize.old_size, resize.new_size)),
            f"{resize.step:,}",
            f"{resize.seconds:.2f}",
        )
    return table


def teacher_table(history: TeacherHistory) -> Table:
    """A table of what the job had of its teachers."""
    table = Table(title="Teachers", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("ready", "joined", "lost", "lead", "time waited", "without any"):
        table.add_column(heading, justify="right")
    most, lead, window = max(count for _, count in history.ready), *history.lead
    # At the start they come one after the other.
    least = min([most, *(count for time_s, count in history.ready if history.lost and time_s >= history.lost[0][0])])
    table.add_row(
        f"{least} to {most}", f"{len(history.joined)}", f"{len(history.lost)}",
        f"{lead:.1f} of {window:.1f}", f"{history.waited_share:.1%}", f"{history.shortages} times",
    )  # fmt: skip
    return table
