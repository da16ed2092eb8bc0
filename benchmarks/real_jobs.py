"""Real jobs on four slots, shared by the fleet and as gangs, with a claim, an urgent job and a daemon that is killed.

    python benchmarks/real_jobs.py runs/real-jobs [--epochs 8] [--claims 20] [--rounds 1] [--scenes two three]

In the scene "two", the second job is submitted when the first has made its first step. In the scene "three", a claim
of two slots is made and released after that, while the daemon is killed, and an urgent job comes; all at the same
seconds in each way. As gangs, each job runs with all of its workers or not at all: of three (then one slot of four is
idle, and the second job waits), or of four. The work of a step is waiting, so that it scales with the workers on any
machine; starting processes is not. In the scene "claims", a claim of two slots is made again and again while two jobs
train, and given back, and the daemon is killed after each.

Each job writes down its samples, and its weights are compared with those of one process that nothing happens to. A row
for each job is added to ``jobs.csv`` of the folder, and one for each claim and kill to ``events.csv``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/elastic", "tests/support", "examples/cluster", "examples")
sys.path[:0] = [str(REPOSITORY / folder) for folder in FOLDERS]

from demos import digest_of  # noqa: E402
from fleet_daemon import FleetDaemon  # noqa: E402
from indices import whole_epochs  # noqa: E402
from result_rows import add_row, rows_of  # noqa: E402

from edl_hvd.fleet.messages import (  # noqa: E402
    Agreed,
    ClaimRequest,
    FleetView,
    JobRow,
    ReleaseRequest,
    ViewRequest,
    call,
)
from edl_hvd.fleet.state import JobPhase, total  # noqa: E402

SLOTS = 4
TRAIN = REPOSITORY / "examples" / "cluster" / "train.py"
SHARED, GANGS_OF_3, GANGS_OF_4 = "shared, 1 to 4 each", "gangs of 3", "gangs of 4"
WAYS = {SHARED: (1, 4), GANGS_OF_3: (3, 3), GANGS_OF_4: (4, 4)}
SCENES = {"two": tuple(WAYS), "three": (SHARED, GANGS_OF_3)}
CLAIM_AFTER_S, CLAIM_S, URGENT_AFTER_S = 2.5, 1.5, 1.5
# For each epoch of the jobs.
CLAIM_GOAL_S, BACK_GOAL_S, ADOPTED_GOAL_S, SHARE_GOAL = 1.5, 3.0, 3.0, 0.8
HAS_SLOTS, GIVEN_BACK, ADOPTED = "claim has its slots", "jobs have its slots again", "jobs adopted by the next daemon"
JOB_COLUMNS = (
    "round", "scene", "way", "job", "epochs", "submitted_s", "first_step_s", "ended_s", "runs", "resizes",
    "preemptions", "whole_epochs", "weights", "weights_alone",
)  # fmt: skip
EVENT_COLUMNS = ("round", "scene", "way", "what", "seconds", "as_expected")


@dataclass(frozen=True)
class Play:
    """A scene, played in one way.

    Attributes:
        folder: Folder of the rows.
        number: Number of the round.
        scene: Name of the scene.
        way: A key of ``WAYS``.
        epochs: Epochs of the first and the second job.
    """

    folder: Path
    number: int
    scene: str
    way: str
    epochs: int

    def add_event(self, what: str, seconds: float, is_expected: bool) -> None:
        """Note what a claim or a kill was like."""
        row = (self.number, self.scene, self.way, what, round(seconds, 2), int(is_expected))
        add_row(self.folder / "events.csv", EVENT_COLUMNS, row)


class RealFleet:
    """A fleet of four slots whose jobs train digits.

    Args:
        daemon: The daemon.
        play: What is played.
    """

    def __init__(self, daemon: FleetDaemon, play: Play) -> None:
        self.daemon = daemon
        self._play = play
        self._epochs: dict[str, int] = {}

    def view(self) -> FleetView:
        """How the fleet stands, asked by this process: a command per question would be a load of its own."""
        reply = call(self.daemon.state, ViewRequest())
        assert isinstance(reply, FleetView), reply
        return reply

    def jobs(self) -> dict[str, JobRow]:
        """The jobs by name."""
        return {row.job.name: row for row in self.view().jobs}

    def until(self, holds: Callable[[dict[str, JobRow]], bool]) -> float:
        """Wait until something holds for the jobs; the seconds that it took."""
        began_s = time.monotonic()
        self.daemon.until(lambda: holds(self.jobs()))
        return time.monotonic() - began_s

    def submit(self, name: str, epochs: int, *flags: str) -> None:
        """Submit a training; its seed is its number."""
        least, most = WAYS[self._play.way]
        command = (*training(len(self._epochs), epochs), "--work", "0.2", "--index-log", str(self._indices(name)))
        flags = flags or ("--min", str(least), "--max", str(most))
        self.daemon.submit(name, *flags, command=command)
        self._epochs[name] = epochs

    def claim(self, name: str) -> None:
        """Make a claim of two slots, and wait until it has them."""
        reply = call(self.daemon.state, ClaimRequest(name, 2, 1000, None))
        assert isinstance(reply, Agreed), reply
        self.until(lambda jobs: self._whole_s(name) is not None)
        workers = sum(row.progress.workers for row in self.jobs().values())
        self._play.add_event(HAS_SLOTS, self._whole_s(name) or 0.0, workers <= SLOTS - 2)

    def release(self, name: str) -> None:
        """Give a claim back, and wait until the slots are given to jobs."""
        call(self.daemon.state, ReleaseRequest(name))
        least = SLOTS if self._play.way == SHARED else WAYS[self._play.way][0]
        waited_s = self.until(
            lambda jobs: (
                sum(total(row.job.given) for row in jobs.values()) >= least
                or all(row.job.phase is JobPhase.COMPLETE for row in jobs.values())
            )
        )
        self._play.add_event(GIVEN_BACK, waited_s, True)

    def kill(self) -> None:
        """Kill the daemon and start another."""
        before = self._processes()
        began_s = time.monotonic()
        self.daemon.kill()
        self.daemon.start()
        self._play.add_event(ADOPTED, time.monotonic() - began_s, self._processes() == before)

    def add_jobs(self) -> None:
        """Wait for the end of all jobs, and note what each was like."""
        self.until(lambda jobs: all(row.job.phase is JobPhase.COMPLETE for row in jobs.values()))
        begin_s = min(row.job.asked_s for row in self.jobs().values())
        for seed, (name, row) in enumerate(self.jobs().items()):
            job, epochs = row.job, self._epochs[name]
            output = (self.daemon.state / "jobs" / name / "output.log").read_text(errors="replace")
            seconds = (job.asked_s - begin_s, job.first_step_s or 0.0, job.served_until_s - begin_s)
            add_row(self._play.folder / "jobs.csv", JOB_COLUMNS, (
                self._play.number, self._play.scene, self._play.way, name, epochs,
                *(round(value, 1) for value in seconds), job.run, job.resizes, job.preemptions,
                sum(whole_epochs(self._indices(name))), digest_of(output)[:16], alone(seed, epochs),
            ))  # fmt: skip

    def _indices(self, name: str) -> Path:
        return self.daemon.folder / "indices" / name

    def _whole_s(self, claim: str) -> float | None:
        """Seconds until a claim had all of its slots, by the daemon's clock."""
        return next(one.whole_s for one in self.view().claims if one.name == claim)

    def _processes(self) -> dict[str, int]:
        return {name: row.job.pid for name, row in self.jobs().items()}


@contextmanager
def real_fleet(play: Play) -> Iterator[RealFleet]:
    """A fleet in a folder of its own, without jobs."""
    with tempfile.TemporaryDirectory() as folder, FleetDaemon(Path(folder), hosts=(f"localhost:{SLOTS}",)) as daemon:
        yield RealFleet(daemon, play)


def training(seed: int, epochs: int) -> tuple[str, ...]:
    """The command of a training."""
    return (sys.executable, str(TRAIN), "--epochs", str(epochs), "--seed", str(seed))


@cache
def alone(seed: int, epochs: int) -> str:
    """The weights that a training has in one process that nothing happens to."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = (*training(seed, epochs), "--work", "0")
    return digest_of(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the rows; there are some: they are kept")
    parser.add_argument("--epochs", type=int, default=8, help="of each job, 15 steps each (default 8)")
    parser.add_argument("--claims", type=int, default=20, help="claims and kills, one after the other (default 20)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each way (default 1)")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES), help="beside the claims (all)")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    first = 1 + max((int(row["round"]) for row in rows_of(folder / "events.csv")), default=0)
    for number in range(first, first + arguments.rounds):  # side by side: the machine may be busy at one time only
        for scene in arguments.scenes:
            for way in SCENES[scene]:
                perform(Play(folder, number, scene, way, arguments.epochs))
        claims(Play(folder, number, "claims", SHARED, 10_000), arguments.claims)
    for line in verdicts(folder):
        print(line)


def perform(play: Play) -> None:
    """Play a scene from the first submission to the end of all jobs."""
    with real_fleet(play) as fleet:
        fleet.submit("first", play.epochs)
        fleet.until(lambda jobs: jobs["first"].job.first_step_s is not None)
        fleet.submit("second", play.epochs)
        if play.scene == "three":
            time.sleep(CLAIM_AFTER_S * play.epochs)
            fleet.claim("web")
            fleet.kill()
            time.sleep(CLAIM_S * play.epochs)
            fleet.release("web")
            time.sleep(URGENT_AFTER_S * play.epochs)
            fleet.submit("urgent", max(1, play.epochs // 4), "--min", "3", "--max", str(WAYS[play.way][1]),
                         "--priority", "9")  # fmt: skip
            fleet.until(lambda jobs: jobs["urgent"].job.first_step_s is not None)
            fleet.kill()
        fleet.add_jobs()


def claims(play: Play, count: int) -> None:
    """Claims and kills beside two jobs that train."""
    with real_fleet(play) as fleet:
        for name in ("first", "second"):
            fleet.submit(name, play.epochs)
        for number in range(count):
            fleet.until(lambda jobs: sum(row.progress.workers for row in jobs.values()) == SLOTS)
            fleet.claim(f"web{number}")
            fleet.release(f"web{number}")
            fleet.kill()


def verdicts(folder: Path) -> Iterator[str]:
    """What all rows say beside the goals."""
    jobs, events = rows_of(folder / "jobs.csv"), rows_of(folder / "events.csv")
    for scene in {row["scene"]: None for row in jobs}:
        ends = {way: statistics.median(makespans(jobs, scene, way)) for way in SCENES[scene]}
        for way in ends:
            firsts = {row["job"]: row["first_step_s"] for row in jobs if (row["scene"], row["way"]) == (scene, way)}
            share = f", shared takes {ends[SHARED] / ends[way]:.2f} of it (goal {SHARE_GOAL})" if way != SHARED else ""
            yield f"{scene}, {way}: {ends[way]:.1f} s, first steps after {firsts} s{share}"
    kept = sum(row["whole_epochs"] == row["epochs"] and row["weights"] == row["weights_alone"] for row in jobs)
    yield (f"{kept} of {len(jobs)} jobs with each sample once per epoch and the weights of one process; "
           f"{sum(int(row['resizes']) for row in jobs)} resizes")  # fmt: skip
    for what, goal_s in ((HAS_SLOTS, CLAIM_GOAL_S), (GIVEN_BACK, BACK_GOAL_S), (ADOPTED, ADOPTED_GOAL_S)):
        rows = [row for row in events if (row["scene"], row["what"]) == ("claims", what)]
        found = sorted(float(row["seconds"]) for row in rows)
        yield (f"{what}, {len(rows)} times: median {statistics.median(found):.2f} s, worst {found[-1]:.2f} s; "
               f"{sum(one <= goal_s for one in found)} within {goal_s} s; "
               f"{sum(row['as_expected'] == '1' for row in rows)} as expected")  # fmt: skip


def makespans(jobs: list[dict[str, str]], scene: str, way: str) -> list[float]:
    """Seconds until the end of all jobs, of each round."""
    rounds: dict[str, float] = {}
    for row in jobs:
        if (row["scene"], row["way"]) == (scene, way):
            rounds[row["round"]] = max(rounds.get(row["round"], 0.0), float(row["ended_s"]))
    return list(rounds.values())


if __name__ == "__main__":
    main()
