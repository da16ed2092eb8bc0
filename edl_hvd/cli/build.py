"""``edl-hvd build-horovod``: flags and progress."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from edl_hvd.build.builder import Observer, Outcome, Wheel, build_horovod, make_wheel, prove
from edl_hvd.build.plan import BuildOptions, BuildPlan
from edl_hvd.settings import cache_folder, process_environment


class _Screen(Observer):
    """Progress of the build: a line for each finished stage, and on a terminal a live line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._live.add_task("", visible=False)
        self._name = ""
        self._start_s = 0.0
        self._quarters = 0

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finish(failed=kind is not None)
        self._live.stop()

    def decided(self, plan: BuildPlan) -> None:
        self._finish()
        table = Table.grid(padding=(0, 1))
        for subject, choice in plan.remarks:
            table.add_row(" ", f"[dim]{subject}[/]", escape(choice))
        self._console.print(table)

    def stage(self, name: str) -> None:
        self._finish()
        self._live.start()
        self._name, self._start_s, self._quarters = name, time.monotonic(), 0
        self._live.reset(self._task, description=escape(name), total=None, visible=True)

    def progress(self, percent: int) -> None:
        if self._console.is_terminal:
            self._live.update(self._task, total=100, completed=percent)
        elif percent // 25 > self._quarters:
            # A log shows progress without a line for each file.
            self._quarters = percent // 25
            self._console.print(f"  [dim]{escape(self._name)}: {percent} %[/]")

    def _finish(self, failed: bool = False) -> None:
        if self._name:
            mark = "[red]✗[/]" if failed else "[green]✓[/]"
            seconds = time.monotonic() - self._start_s
            self._console.print(f"{mark} {escape(f'{self._name:<44}')} [dim]{seconds:6.1f} s[/]")
            self._live.update(self._task, visible=False)
        self._name = ""


@click.command("build-horovod")
@click.option(
    "--with-nccl/--without-nccl", "nccl", default=None, help="Build GPU collectives. [default: if there is a GPU]"
)
@click.option(
    "--with-mpi/--without-mpi", "mpi", default=None, help="Build MPI besides Gloo. [default: if there is mpicxx]"
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile N files at once. [default: by processors and memory]",
)
@click.option(
    "--cache/--no-cache", default=True, show_default=True, help="Reuse a wheel that was built from the same inputs."
)
@click.option(
    "--wheel",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Install nothing; put the wheel into DIR, for hosts of the same kind.",
)
@click.option("--check-only", is_flag=True, help="Build nothing; only test the installed Horovod.")
def build_command(
    nccl: bool | None, mpi: bool | None, jobs: int | None, cache: bool, wheel: Path | None, check_only: bool
) -> None:
    """Build and install Horovod 0.28.1 for the installed torch.

    Two processes then make an allreduce, to test it. HOROVOD_* variables are passed to Horovod's build.

    \b
    Examples:
      edl-hvd build-horovod
      edl-hvd build-horovod --with-nccl --jobs 8
      edl-hvd build-horovod --wheel wheels/
      edl-hvd build-horovod --check-only

    Documents: docs/build.md.
    """
    console = Console(highlight=False)
    environ = process_environment()
    with _Screen(console) as screen:
        if check_only and wheel is not None:
            raise click.UsageError("--check-only builds nothing, so there is no wheel; leave one of them out")
        if wheel is not None:
            made = make_wheel(BuildOptions(nccl, mpi, jobs), environ, cache_folder(), cache, screen, wheel)
        elif check_only:
            outcome = prove(environ, screen)
        else:
            outcome = build_horovod(BuildOptions(nccl, mpi, jobs), environ, cache_folder(), cache, screen)
    if wheel is not None:
        console.print(_say_wheel(made), soft_wrap=True)
        return
    console.print(_summary(outcome, check_only), soft_wrap=True)


def _say_wheel(made: Wheel) -> str:
    origin = "from the cache" if made.reused else "compiled"
    path = shlex.quote(str(made.path))
    return (
        f"{escape(str(made.path))} ({origin}); on hosts of the same kind, see {escape(made.facts.name)} beside it: "
        f"pip install {escape(path)} && edl-hvd build-horovod --check-only"
    )


def _summary(outcome: Outcome, check_only: bool) -> str:
    parts = [name for name, there in (("Gloo", outcome.horovod.gloo), ("MPI", outcome.horovod.mpi),
                                      ("NCCL", outcome.horovod.nccl)) if there]  # fmt: skip
    origin = "" if check_only else " (wheel from the cache)" if outcome.reused else " (compiled)"
    proof = ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in outcome.allreduce_s.items())
    return f"Horovod {outcome.horovod.version} with {', '.join(parts)} works{origin}; allreduce over {proof}"
