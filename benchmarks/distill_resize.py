"""What a change of the world costs a job that learns from teachers: their work, and the time of its workers.

    python benchmarks/distill_resize.py [--rounds 5] [--kills 20] [--rows distill_resize.csv]

Jobs with teachers and jobs without take turns, the same training otherwise: up to four workers on two hosts under
``edlrun``, of which one is killed (SIGKILL) at a random moment, up to five seconds after the one before, while
newcomers take the places of those that were killed. So each kill brings two new worlds. Teachers are processes that
sleep. Every answer is compared with the right one, and each job is checked as in ``recovery.py``.

Counted is what each worker had given to teachers when its world ended, or itself, and which of that no step of the
final history has used; and what a survivor asks for again although its next world deals it the same micro-batch. The
teachers count by themselves what they compute. Timed is, from a kill on, the time until the last survivor is in the
next world, and until it has made a step there, less a usual one; and the time without training when a worker joins.
A row of the CSV file holds a job; the tables are made of all its rows.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from fleet import Fleet
from harness import Job, Outcome
from recovery import WORLDS, random_kills, recoveries, train
from result_rows import add_row, rows_of
from teacher_work import PORT, computed_samples, counted_teacher, teacher_work
from training import Training

TEACHERS, ANSWER_S = 6, 0.03
# They answer 200 micro-batches a second; a step of some 0.06 s takes four.
PAUSE_S, SAMPLES, MICRO_BATCH = 0.05, 960, 2
COLUMNS = (
    "round", "with_teachers", "load", "kills", "step_s", "formed_s", "beyond_s", "joined_s", "asked", "counted",
    "computed", "thrown", "undone", "windows", "stayed", "again", "answered_again",
)  # fmt: skip
Row = dict[str, str]
MOST_AGAIN, MOST_MORE_S = 0.1, 0.05


def main() -> None:
    """Run the jobs that the file lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default 5)")
    parser.add_argument("--kills", type=int, default=20, help="kills in each job (default 20)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="in an epoch (default %(default)s)")
    parser.add_argument("--rows", type=Path, default=Path("distill_resize.csv"))
    arguments = parser.parse_args()
    rounds = len(rows_of(arguments.rows)) // 2
    for number in range(rounds, rounds + arguments.rounds):
        for with_teachers in (False, True) if number % 2 else (True, False):
            add_row(arguments.rows, COLUMNS, measure(number, with_teachers, arguments))
    show(rows_of(arguments.rows))


def measure(number: int, with_teachers: bool, arguments: argparse.Namespace) -> Sequence[object]:
    """The row of one job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcome = play(folder, with_teachers, arguments.kills, arguments.samples)
        work, computed = teacher_work(outcome.trace), computed_samples(folder) // MICRO_BATCH
    found = [one for one in recoveries(outcome) if not one.is_struck_again]
    joins = [
        event["downtime_s"] for event in outcome.events if event["event"] == "resized" and event["cause"] == "change"
    ]
    return (
        number, int(with_teachers), f"{os.getloadavg()[0]:.1f}", arguments.kills,
        f"{statistics.median([one.step_s for one in found] or [0.0]):.3f}", _list([one.formed_s for one in found]),
        _list([one.beyond_s for one in found]), _list(joins), work.asked, work.counted, computed,
        " ".join(str(share.thrown) for share in work.shares), " ".join(str(share.undone) for share in work.shares),
        " ".join(str(share.window) for share in work.shares), work.stayed, work.again, work.answered_again,
    )  # fmt: skip


def play(folder: Path, with_teachers: bool, kills: int, samples: int) -> Outcome:
    """Run one job to its end. The teachers are there without being asked, too."""
    faults = random_kills(kills)
    training = Training(
        samples=samples, micro_batch=MICRO_BATCH, pause_s=PAUSE_S, linger_s=1.0, loader_workers=1,
        extra=("distill",) if with_teachers else (),
    )  # fmt: skip
    teachers = Fleet(folder)
    try:
        for number in range(TEACHERS):
            teachers.start(counted_teacher(folder / f"computed-{number}", ANSWER_S), max_batch=MICRO_BATCH, wait=False)
        teachers.await_all()
        # That many crashes within a minute would set a host aside, which is not what is measured.
        flags = ("--host-failures", "1000", "--teachers", teachers.source)
        return train(
            Job(hosts=WORLDS["2 hosts x 2"], faults=tuple(faults), training=training, flags=flags, launcher="edlrun",
                environment={PORT: str(teachers.port)})
        )  # fmt: skip
    finally:
        teachers.close()


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _values(rows: Sequence[Row], column: str) -> list[float]:
    return [float(value) for row in rows for value in row[column].split()]


# --- the tables ---


def show(rows: Sequence[Row]) -> None:
    """Print the tables."""
    kinds = {kind: [row for row in rows if row["with_teachers"] == kind] for kind in ("0", "1")}
    loads = [float(row["load"]) for row in rows]
    kills = sum(int(row["kills"]) for row in rows)
    print(f"{kills} kills in {len(rows)} jobs; load {min(loads):.1f} to {max(loads):.1f}\n")
    print("| seconds | teachers | of them | median | 95 % | worst | more, of the medians | range of the rounds |")
    print("|---|---|---|---|---|---|---|---|")
    names = {
        "formed_s": "from a kill until all survivors are in the next world",
        "beyond_s": "from a kill until they have made a step, less a usual one",
        "joined_s": "without training when a worker joins",
    }
    for column, name in names.items():
        for kind, what in (("0", "no"), ("1", "yes")):
            values = sorted(_values(kinds[kind], column)) or [math.nan]
            high = values[min(int(0.95 * len(values)), len(values) - 1)]
            more = _differences(kinds, column) if kind == "1" else []
            shown = f"{_more(kinds, column):+.3f} | {min(more):+.3f} to {max(more):+.3f}" if more else "|"
            print(f"| {name} | {what} | {len(values)} | {statistics.median(values):.3f} | {high:.3f} "
                  f"| {values[-1]:.3f} | {shown} |")  # fmt: skip
    print()
    show_work(kinds["1"], kinds)


def _more(kinds: dict[str, list[Row]], column: str) -> float:
    return _middle(kinds["1"], column) - _middle(kinds["0"], column)


def _middle(rows: Sequence[Row], column: str) -> float:
    return statistics.median(_values(rows, column) or [math.nan])


def _differences(kinds: dict[str, list[Row]], column: str) -> list[float]:
    """By how much the median is larger with teachers, in each round."""
    pairs = zip(kinds["0"], kinds["1"], strict=False)
    return [_middle([row], column) - _middle([before], column) for before, row in pairs]


def show_work(rows: Sequence[Row], kinds: dict[str, list[Row]]) -> None:
    """Print what became of the teachers' work, and the goals."""

    def total(column: str) -> int:
        return sum(int(row[column]) for row in rows)

    thrown, undone, windows = (_values(rows, column) for column in ("thrown", "undone", "windows"))
    parts = [(lost - undo) / window for lost, undo, window in zip(thrown, undone, windows, strict=True)]
    asked, counted, computed = total("asked"), total("counted"), total("computed")
    print(f"{asked:,} micro-batches asked, {computed:,} computed by the teachers, {counted:,} used; "
          f"at {len(parts)} ends of a worker's world {statistics.mean(thrown):.1f} thrown away in the mean, "
          f"{max(thrown):.0f} at most, of which {max(undone):.0f} at most of the step that broke off, "
          f"windows of {min(windows):.0f} to {max(windows):.0f}\n")  # fmt: skip
    stayed, again = total("stayed"), total("again")
    print("| goal | | measured | worst |\n|---|---|---|---|")
    print(f"| teachers' work thrown away when a world changes, of a worker's window | at most 1 "
          f"| {statistics.median(parts):.2f}, {_kept(max(parts) <= 1)} | {max(parts):.2f} |")  # fmt: skip
    print(f"| asked again by a survivor that is dealt it again | at most 10 % "
          f"| {again / max(1, stayed):.1%} of {stayed:,}, {_kept(again <= MOST_AGAIN * stayed)} | |")  # fmt: skip
    for column, name in (("formed_s", "a world forms again"), ("beyond_s", "all survivors have made a step")):
        more_s, worst_s = _more(kinds, column), max(_differences(kinds, column))
        print(f"| {name}, more than without teachers | at most 50 ms "
              f"| {1000 * more_s:+.0f} ms, {_kept(more_s <= MOST_MORE_S)} | {1000 * worst_s:+.0f} ms |")  # fmt: skip


def _kept(is_kept: bool) -> str:
    return "kept" if is_kept else "missed"


if __name__ == "__main__":
    main()
