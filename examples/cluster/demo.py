"""Three jobs and a service share four slots, and show that nothing was lost.

    python examples/cluster/demo.py            three minutes on two cores
    python examples/cluster/demo.py --short    fewer epochs

A first job trains on all slots. A second one starts while the first shrinks. A service takes two slots and gives them
back. The daemon is killed, and started again. A third job of higher priority stops one of the others, which goes on
from its checkpoint when that one is done. Meanwhile each job is trained once more, alone in one process. Then what
happened is read back for a table and the picture ``slots.png``. The exit code is 0 only if each promise was kept. How
long things took is shown; no promise depends on the machine's speed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from demos import (
    Promise,
    Stage,
    StageError,
    announce,
    demo_parser,
    digest_of,
    made_anew,
    play,
    program,
    show_promises,
)
from indices import whole_epochs
from slots import draw, slot_spans

from edl_hvd.errors import PlatformError
from edl_hvd.fleet.events import StartRun
from edl_hvd.fleet.messages import FleetView, JobRow, ViewRequest, call, is_served
from edl_hvd.fleet.replay import FleetDecision, decide_again
from edl_hvd.fleet.state import JobPhase, as_counts, total
from edl_hvd.fleet.store import read_fleet_history
from edl_hvd.fleet.turn import used

TRAIN = Path(__file__).resolve().with_name("train.py")
SLOTS = 4


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
        return [sys.executable, str(TRAIN), "--epochs", str(self.epochs), "--seed", str(self.seed),
                "--index-log", str(log)]  # fmt: skip


class FleetStage(Stage):
    """The daemon, and the commands that a user would type."""

    @property
    def state(self) -> Path:
        """The folder of the fleet."""
        return self.folder / "fleet"

    def serve(self) -> None:
        """Start the daemon."""
        words = ["fleet", "serve", "-H", f"localhost:{SLOTS}", "--state", str(self.state)]
        self.start("daemon", [program("edl-hvd"), *words])
        self.until("the daemon answers", lambda: is_served(self.state), "daemon")

    def close(self) -> None:
        """End all jobs, and then what else runs."""
        try:
            if self.processes and self.processes["daemon"].poll() is None:
                for name, row in self.jobs().items():
                    if row.job.pid:
                        self.ask("stop", name)
        finally:
            super().close()

    def ask(self, *words: str) -> str:
        """Run ``edl-hvd fleet WORDS``; what it prints."""
        split = words.index("--") if "--" in words else len(words)
        whole = [program("edl-hvd"), "fleet", *words[:split], "--state", str(self.state), *words[split:]]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StageError(f"edl-hvd fleet {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> dict[str, JobRow]:
        """All jobs by name. This process asks: a command for each look would take a core from the jobs."""
        try:
            view = call(self.state, ViewRequest())
        except PlatformError as error:
            raise StageError(f"{error}; see {self.log('daemon')}") from error
        assert isinstance(view, FleetView), view
        return {row.job.name: row for row in view.jobs}

    def until_jobs(self, what: str, hold: Callable[[dict[str, JobRow]], bool]) -> None:
        """Wait until something holds for the jobs, of which none may fail."""

        def holds() -> bool:
            jobs = self.jobs()
            self.notice("jobs", {name: (row.job.run, row.progress.step) for name, row in jobs.items()})
            for name, row in jobs.items():
                if row.job.phase is JobPhase.FAILED:
                    raise StageError(f"job {name} has failed: {row.job.why}\n{self.output(name)[-2000:]}")
            return hold(jobs)

        self.until(what, holds, "daemon")

    def output(self, job: str) -> str:
        """What a job has printed."""
        return (self.state / "jobs" / job / "output.log").read_text(errors="replace")

    def alone(self, job: DemoJob) -> None:
        """Train a job once more in one process that nothing happens to, without times of an accelerator."""
        self.start(f"{job.name}-alone", [*job.command(self.folder / "alone" / job.name), "--work", "0"])


def main() -> int:
    """Perform, print the table, and return the exit code."""
    options = demo_parser(__doc__, "runs/cluster").parse_args()
    folder = made_anew(options.output)
    part = 2 if options.short else 1
    jobs = (
        DemoJob("first", 44 // part, 1, ("--min", "1", "--max", "4")),
        DemoJob("second", 24 // part, 2, ("--min", "1", "--max", "4")),
        DemoJob("urgent", 6 // part, 3, ("--min", "3", "--max", "4", "--priority", "9")),
    )
    with closing(FleetStage(folder)) as stage:
        promises = perform(stage, jobs)
    decisions = list(decide_again(read_fleet_history(stage.state)))
    promises += check_history(decisions) + check_samples(jobs, folder) + check_weights(stage, jobs)
    draw(slot_spans(decisions), folder / "slots.png", SLOTS)
    return show_promises(promises, f"Picture  {folder / 'slots.png'}\nState    {stage.state}")


def perform(stage: FleetStage, jobs: tuple[DemoJob, ...]) -> list[Promise]:
    """From the first job's start to the last one's end; what was promised about it."""
    first, second, urgent = jobs

    def submit(job: DemoJob) -> None:
        stage.ask("submit", "--name", job.name, *job.flags, "--", *job.command(stage.folder / "indices" / job.name))

    def until_trains(job: DemoJob, workers: int) -> None:
        def hold(jobs: dict[str, JobRow]) -> bool:
            row = jobs[job.name]
            if row.job.phase is JobPhase.COMPLETE:
                raise StageError(f"job {job.name} is complete before its scene")
            return row.progress.workers >= workers and row.job.first_step_s is not None

        stage.until_jobs(f"job {job.name} trains with {workers} workers or more", hold)

    announce("The daemon starts, and the first job gets all four slots")
    stage.serve()
    submit(first)
    until_trains(first, SLOTS)

    announce("A second job comes; the first shrinks for it and trains on")
    submit(second)
    until_trains(second, 1)
    shared = stage.jobs()
    promises = [
        Promise(
            "the second job starts while the first trains on",
            f"first step after {shared['second'].job.first_step_s:.1f} s (the first one's: "
            f"{shared['first'].job.first_step_s:.1f} s), first job has {total(shared['first'].job.given)} slots",
            shared["first"].job.run == 1 and total(shared["first"].job.given) >= 1,
        )
    ]

    announce("A service needs two slots")
    began_s = time.monotonic()
    hosts = stage.ask("claim", "web", "--slots", "2").strip()
    claim_s = time.monotonic() - began_s
    there = sum(row.progress.workers for row in stage.jobs().values())
    promises.append(
        Promise("the service has its room, and no worker is on it", f"{claim_s:.1f} s: {hosts}; {there} workers stay",
                hosts == "localhost:2" and there <= 2)
    )  # fmt: skip

    announce("The daemon is killed, and another starts")
    before = {name: row.job.pid for name, row in stage.jobs().items()}
    stage.kill("daemon")
    stage.serve()
    after = {name: row.job.pid for name, row in stage.jobs().items()}
    alive = [Path(f"/proc/{pid}").exists() for pid in after.values()]
    promises.append(
        Promise("no job notices that the daemon was killed", f"processes {' '.join(map(str, after.values()))} go on",
                before == after and all(alive))
    )  # fmt: skip

    announce("The service gives its slots back")
    stage.ask("release", "web")
    stage.until_jobs("the two jobs have four slots",
                     lambda jobs: sum(total(row.job.given) for row in jobs.values()) == SLOTS)  # fmt: skip

    announce("An urgent job needs three slots: another saves a checkpoint and makes room")
    submit(urgent)
    until_trains(urgent, 3)
    stopped = [name for name, row in stage.jobs().items() if row.job.preemptions]

    announce("All jobs come to their end; meanwhile each is trained once more, alone in one process")
    for job in jobs:
        stage.alone(job)
    stage.until_jobs(
        "all jobs are complete", lambda jobs: all(row.job.phase is JobPhase.COMPLETE for row in jobs.values())
    )
    for name in [f"{job.name}-alone" for job in jobs]:
        stage.until_exit(name)
    final = {name: row.job for name, row in stage.jobs().items()}
    return [
        *promises,
        Promise("one job is stopped for the urgent one, and goes on", f"{' '.join(stopped)}, run "
                f"{max((final[name].run for name in stopped), default=0)}",
                len(stopped) == 1 and final[stopped[0]].run == 2),
        Promise("every job comes to its end", f"{len(final)} jobs with exit code 0",
                all(job.exit_code == 0 for job in final.values())),
    ]  # fmt: skip


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
    found = []
    for job in jobs:
        whole = whole_epochs(folder / "indices" / job.name)
        found.append(
            Promise(f"{job.name}: every sample once per epoch", f"{sum(whole)} of {job.epochs} epochs",
                    whole == [True] * job.epochs)
        )  # fmt: skip
    return found


def check_weights(stage: FleetStage, jobs: tuple[DemoJob, ...]) -> list[Promise]:
    """Whether the weights are those of one process that nothing happens to, bit for bit."""
    found = []
    for job in jobs:
        expected = digest_of(stage.log(f"{job.name}-alone").read_text())
        ours = digest_of(stage.output(job.name))
        found.append(
            Promise(f"{job.name}: the weights of an undisturbed run", f"{ours[:16]} and {expected[:16]}",
                    ours == expected != "")
        )  # fmt: skip
    return found


if __name__ == "__main__":
    play(main)
