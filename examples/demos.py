"""What the demos share: their flags, a stage of processes, a table of promises, and how they end."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
from rich.console import Console
from rich.table import Table

CONSOLE = Console(highlight=False)
POLL_S = 0.1
PATIENCE_S = 300.0
# Longest wait for the next thing to happen: a worker starts within seconds, on a loaded machine within tens of them.
END_S = 60.0


@dataclass(frozen=True)
class Promise:
    """One line of the table: what was promised, what was found, and whether it was kept."""

    what: str
    found: str
    is_kept: bool


class StageError(Exception):
    """The demo cannot go on."""


class Stage:
    """Processes of a demo by name; what each prints is in ``NAME.log``.

    Args:
        folder: Folder for everything that is left behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._noticed: dict[str, object] = {}
        self._changed_s = 0.0

    def start(self, name: str, words: Sequence[str], cwd: Path | None = None, **environment: str) -> None:
        """Start a process, which signals to this one do not reach."""
        # Several processes share this machine's cores; more threads than cores would slow all of them down.
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        """The file with what a process has printed."""
        return self.folder / f"{name}.log"

    def until(self, what: str, holds: Callable[[], bool], name: str) -> None:
        """Wait until something holds, while a process runs and what was noticed changes."""
        self._changed_s = time.monotonic()
        while not holds():
            code = self.processes[name].poll()
            if code is not None and not holds():
                tail = self.log(name).read_text(errors="replace")[-3000:]
                raise StageError(f"{name} has ended with exit code {code} before this: {what}\n{tail}")
            if time.monotonic() - self._changed_s > PATIENCE_S:
                raise StageError(f"this has not happened, and nothing else for {PATIENCE_S:.0f} s: {what}")
            time.sleep(POLL_S)

    def notice(self, name: str, progress: object) -> None:
        """Take down how far something is; patience begins anew when that has changed."""
        if self._noticed.get(name) != progress:
            self._noticed[name], self._changed_s = progress, time.monotonic()

    def until_exit(self, name: str) -> None:
        """Wait until a process has ended with exit code 0."""
        self.until("its exit code is 0", lambda: self.processes[name].poll() == 0, name)

    def kill(self, name: str) -> None:
        """SIGKILL to a process and to those that it has started in its session."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait(PATIENCE_S)

    def end(self, name: str) -> None:
        """Have a process end, and all that it has started."""
        process = self.processes[name]
        if process.poll() is not None:
            return
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in psutil.wait_procs(started, timeout=1)[1]:
            child.kill()

    def close(self) -> None:
        """End whatever runs, the newest first."""
        for name in reversed(self.processes):
            self.end(name)


def demo_parser(description: str | None, folder: str) -> argparse.ArgumentParser:
    """A parser with the flags that all demos have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_short = os.environ.get("SHORT") == "1"
    parser.add_argument("--short", action="store_true", default=is_short, help="fewer epochs [SHORT=1]")
    parser.add_argument("--output", type=Path, default=Path(folder), help=f"folder for all output [{folder}]")
    return parser


def made_anew(folder: Path) -> Path:
    """The folder's whole path; it exists, and is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder.resolve()


def program(name: str) -> str:
    """The path of a program of this environment."""
    return str(Path(sys.executable).with_name(name))


def announce(text: str) -> None:
    """Print what happens next, and when."""
    CONSOLE.print(f"[dim]{time.strftime('%H:%M:%S')}[/]  {text}")


def digest_of(output: str) -> str:
    """The digest of the weights that a training has printed last; empty if there is none."""
    digests = re.findall(r"weights sha256 ([0-9a-f]{64})", output)
    return digests[-1] if digests else ""


def show_promises(promises: Iterable[Promise], left: str) -> int:
    """Print the table, and what is left behind; the exit code."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("promise", "found", ""):
        table.add_column(heading)
    broken = 0
    for promise in promises:
        broken += not promise.is_kept
        table.add_row(promise.what, promise.found, "[green]kept[/]" if promise.is_kept else "[bold red]BROKEN[/]")
    CONSOLE.print(table)
    CONSOLE.print(left, soft_wrap=True)
    CONSOLE.print("[bold green]Every promise was kept.[/]" if not broken else f"[bold red]{broken} were broken.[/]")
    return 1 if broken else 0


def play(main: Callable[[], int]) -> NoReturn:
    """Run a demo and end with its exit code; on SIGTERM and Ctrl-C, what it has started ends, too."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except StageError as error:
        CONSOLE.print(f"FAILED {error}", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
