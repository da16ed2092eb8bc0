"""Three jobs and a service share four slots, and show that nothing was lost.

    python examples/cluster/demo.py            minutes on two cores
    python examples/cluster/demo.py --short    fewer epochs

A first job trains on all slots. A second one starts while the first shrinks. A service takes two slots and gives them
back. The daemon is killed, and started again. A third job of higher priority stops one of the others, which goes on
from its checkpoint when that one is done. Then what happened is read back for a table and the picture ``slots.png``.
The exit code is 0 only if each promise was kept. How long things took is shown; no promise depends on the machine's
speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slots import SlotSpan, draw, slot_spans

from edl_hvd.fleet.events import StartRun
from edl_hvd.fleet.replay import FleetDecision, decide_again
from edl_hvd.fleet.state import as_counts
from edl_hvd.fleet.store import read_fleet_history
from edl_hvd.fleet.turn import used

HERE = Path(__file__).resolve().parent
EDL_HVD = str(Path(sys.executable).with_name("edl-hvd"))
SLOTS = 4
SAMPLES, BATCH = 1797, 128
POLL_S = 0.1
PATIENCE_S = 300.0
# Longest wait for the next thing to happen: a worker starts within seconds, on a loaded machine within tens of them.


@dataclass(frozen=True)
class DemoJob:
    """A job of the demo.

    Attributes:
        name: Name of the job.
        epochs: Epochs that it trains.
        seed: Seed of its weights and its order of samples.
        flags: Flags of ``edl-hvd fleet submit``.
    """

    name: str
    epochs: int
    seed: int
    flags: tuple[str, ...]

    def command(self, log: Path) -> list[str]:
        """The training, as it runs with and without a fleet."""
        return [sys.executable, str(HERE / "train.py"), "--epochs", str(self.epochs), "--seed", str(self.seed),
                "--index-log", str(log)]  # fmt: skip


@dataclass(frozen=True)
class Promise:
    """One line of the table: what was promised, what was found, and whether it was kept."""

    what: str
    found: str
    is_kept: bool


class StageError(Exception):
    """The demo cannot go on."""


class Stage:
    """The daemon, and the commands that a user would type.

    Args:
        folder: Folder for everything that is left behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "fleet"
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self._daemon: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the daemon."""
        with open(self.folder / "daemon.log", "ab") as log:
            self._daemon = subprocess.Popen(
                [EDL_HVD, "fleet", "serve", "-H", f"localhost:{SLOTS}", "--state", str(self.state)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        self.until("the daemon answers", lambda: self._run("list").returncode == 0)

    def kill(self) -> None:
        """Kill the daemon, as a machine without memory would."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait(PATIENCE_S)

    def close(self) -> None:
        """End the daemon and all jobs."""
        if self._daemon is None:
            return
        if self._daemon.poll() is None:
            for name, job in self.jobs().items():
                if job["pid"]:
                    self._run("stop", name)
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(PATIENCE_S)

    def ask(self, *words: str) -> str:
        """Run ``edl-hvd fleet WORDS``; what it prints."""
        done = self._run(*words)
        if done.returncode:
            raise StageError(f"edl-hvd fleet {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs by name, with their progress."""
        rows = json.loads(self.ask("list", "--json"))["jobs"]
        return {row["job"]["spec"]["name"]: {**row["job"], "progress": row["progress"]} for row in rows}

    def until(self, what: str, holds: Callable[[], bool]) -> float:
        """Wait until something holds; the seconds that it took."""
        began_s = time.monotonic()
        while not holds():
            assert self._daemon is not None
            if self._daemon.poll() is not None:
                raise StageError(f"the daemon has ended: {(self.folder / 'daemon.log').read_text()[-2000:]}")
            if time.monotonic() - began_s > PATIENCE_S:
                raise StageError(f"this has not happened within {PATIENCE_S:.0f} s: {what}")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def output(self, job: str) -> str:
        """What a job has printed."""
        return (self.state / "jobs" / job / "output.log").read_text(errors="replace")

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        split = words.index("--") if "--" in words else len(words)
        whole = [EDL_HVD, "fleet", *words[:split], "--state", str(self.state), *words[split:]]
        return subprocess.run(whole, env=self._environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Three jobs and a service share four slots.")
    parser.add_argument("--short", action="store_true", help="fewer epochs")
    parser.add_argument("--output", type=Path, default=Path("runs/cluster"), help="folder, made anew")
    options = parser.parse_args()
    folder = options.output.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    part = 2 if options.short else 1
    jobs = (
        DemoJob("first", 60 // part, 1, ("--min", "1", "--max", "4")),
        DemoJob("second", 30 // part, 2, ("--min", "1", "--max", "4")),
        DemoJob("urgent", 8 // part, 3, ("--min", "3", "--max", "4", "--priority", "9")),
    )
    console = Console(highlight=False)
    stage = Stage(folder)
    try:
        promises = perform(stage, jobs, lambda text: console.print(f"[dim]{time.strftime('%H:%M:%S')}[/]  {text}"))
    except StageError as error:
        console.print(f"[bold red]FAILED[/] {error}", markup=True)
        return 1
    finally:
        stage.close()
    decisions = list(decide_again(read_fleet_history(stage.state)))
    promises += check_history(decisions)
    promises += check_samples(jobs, folder)
    console.print("Training each job once more, alone in one process, to compare the weights")
    promises += check_weights(stage, jobs, folder)
    return show(console, promises, slot_spans(decisions), folder)


def perform(stage: Stage, jobs: tuple[DemoJob, ...], announce: Callable[[str], None]) -> list[Promise]:
    """From the first job's start to the last one's end; what was promised about it."""
    first, second, urgent = jobs

    def submit(job: DemoJob) -> None:
        stage.ask("submit", "--name", job.name, *job.flags, "--", *job.command(stage.folder / "indices" / job.name))

    def trains(name: str, workers: int = 1) -> Callable[[], bool]:
        def holds() -> bool:
            job = stage.jobs()[name]
            if job["phase"] in ("complete", "failed"):
                raise StageError(f"job {name} is {job['phase']} before its scene: {job['why']}")
            return bool(job["progress"]["workers"] >= workers and job["first_step_s"] is not None)

        return holds

    announce("The daemon starts, and the first job gets all four slots")
    stage.serve()
    submit(first)
    stage.until("the first job trains on four slots", trains("first", SLOTS))

    announce("A second job comes; the first shrinks for it and trains on")
    submit(second)
    stage.until("the second job trains", trains("second"))
    shared = stage.jobs()
    promises = [
        Promise(
            "the second job starts while the first trains on",
            f"first step after {shared['second']['first_step_s']:.1f} s (the first one's: "
            f"{shared['first']['first_step_s']:.1f} s), first job has {total_given(shared['first'])} slots",
            shared["first"]["run"] == 1 and total_given(shared["first"]) >= 1,
        )
    ]

    announce("A service needs two slots")
    began_s = time.monotonic()
    hosts = stage.ask("claim", "web", "--slots", "2").strip()
    claim_s = time.monotonic() - began_s
    there = sum(job["progress"]["workers"] for job in stage.jobs().values())
    promises.append(
        Promise("the service has its room, and no worker is on it", f"{claim_s:.1f} s: {hosts}; {there} workers stay",
                hosts == "localhost:2" and there <= 2)
    )  # fmt: skip

    announce("The daemon is killed, and another starts")
    before = {name: job["pid"] for name, job in stage.jobs().items()}
    stage.kill()
    stage.serve()
    after = {name: job["pid"] for name, job in stage.jobs().items()}
    alive = [Path(f"/proc/{pid}").exists() for pid in after.values()]
    promises.append(
        Promise("no job notices that the daemon was killed", f"processes {' '.join(map(str, after.values()))} go on",
                before == after and all(alive))
    )  # fmt: skip

    announce("The service gives its slots back")
    stage.ask("release", "web")
    stage.until("the two jobs have four slots", lambda: sum(map(total_given, stage.jobs().values())) == SLOTS)

    announce("An urgent job needs three slots: another saves a checkpoint and makes room")
    submit(urgent)
    stage.until("the urgent job trains", trains("urgent", 3))
    stopped = [name for name, job in stage.jobs().items() if job["preemptions"]]

    announce("All jobs come to their end")
    stage.until("all jobs are complete", lambda: all(job["phase"] == "complete" for job in ended(stage).values()))
    final = stage.jobs()
    promises += [
        Promise("one job is stopped for the urgent one, and goes on", f"{' '.join(stopped)}, run "
                f"{max((final[name]['run'] for name in stopped), default=0)}",
                len(stopped) == 1 and final[stopped[0]]["run"] == 2),
        Promise("every job comes to its end", f"{len(final)} jobs with exit code 0",
                all(job["exit_code"] == 0 for job in final.values())),
    ]  # fmt: skip
    return promises


def ended(stage: Stage) -> dict[str, dict[str, Any]]:
    """All jobs, unless one has failed."""
    jobs = stage.jobs()
    for name, job in jobs.items():
        if job["phase"] == "failed":
            raise StageError(f"job {name} has failed: {job['why']}\n{stage.output(name)[-2000:]}")
    return jobs


def total_given(job: dict[str, Any]) -> int:
    """Slots that a job has been given."""
    return sum(entry["slots"] for entry in job["given"])


def check_history(decisions: list[FleetDecision]) -> list[Promise]:
    """What the daemons' history shows."""
    most = 0
    for decision in decisions:
        in_use: Counter[str] = Counter()
        for job in decision.fleet.jobs.values():
            in_use.update(used(job))
        for claim in decision.fleet.claims.values():
            in_use.update(as_counts(claim.granted))
        most = max(most, in_use.total())
    starts = sum(isinstance(action, StartRun) for decision in decisions for action in decision.actions)
    resizes = sum(job.resizes for job in decisions[-1].fleet.jobs.values())
    differing = sum(decision.differs for decision in decisions)
    return [
        Promise("no slot is ever given twice", f"at most {most} of {SLOTS} in use; {starts} starts, {resizes} resizes",
                most <= SLOTS),
        Promise("each decision can be made again", f"{len(decisions)} events, {differing} otherwise", differing == 0),
    ]  # fmt: skip


def check_samples(jobs: tuple[DemoJob, ...], folder: Path) -> list[Promise]:
    """Whether every sample was trained once in each epoch, by what the workers wrote down."""
    steps_per_epoch = -(-SAMPLES // BATCH)
    found = []
    for job in jobs:
        trained: dict[int, Counter[int]] = {}
        for path in (folder / "indices" / job.name).glob("*.jsonl"):
            for line in path.read_text().splitlines():
                noted = json.loads(line)
                trained.setdefault(noted["step"] // steps_per_epoch, Counter()).update(noted["indices"])
        whole = [epoch for epoch, counts in trained.items() if counts == Counter(range(SAMPLES))]
        found.append(
            Promise(f"{job.name}: every sample once per epoch", f"{len(whole)} of {job.epochs} epochs",
                    len(whole) == job.epochs == len(trained))
        )  # fmt: skip
    return found


def check_weights(stage: Stage, jobs: tuple[DemoJob, ...], folder: Path) -> list[Promise]:
    """Whether the weights are those of one process that nothing happens to, bit for bit."""
    found = []
    for job in jobs:
        words = [*job.command(folder / "alone" / job.name), "--work", "0"]
        alone = subprocess.run(words, capture_output=True, text=True, check=False)
        expected, ours = digest_of(alone.stdout), digest_of(stage.output(job.name))
        found.append(
            Promise(f"{job.name}: the weights of an undisturbed run", f"{ours[:16]} and {expected[:16]}",
                    ours == expected != "")
        )  # fmt: skip
    return found


def digest_of(output: str) -> str:
    """The digest of the weights that a training has printed last; empty if there is none."""
    digests = re.findall(r"weights sha256 ([0-9a-f]{64})", output)
    return digests[-1] if digests else ""


def show(console: Console, promises: list[Promise], spans: list[SlotSpan], folder: Path) -> int:
    """Print the table and draw the picture; the exit code."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("promise", "found", ""):
        table.add_column(name)
    for promise in promises:
        verdict = "[green]kept[/]" if promise.is_kept else "[bold red]BROKEN[/]"
        table.add_row(promise.what, promise.found, verdict)
    console.print(table)
    draw(spans, folder / "slots.png", SLOTS)
    console.print(f"Picture  {folder / 'slots.png'}\nState    {folder / 'fleet'}")
    broken = sum(not promise.is_kept for promise in promises)
    console.print("[bold green]Every promise was kept.[/]" if not broken else f"[bold red]{broken} were broken.[/]")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
