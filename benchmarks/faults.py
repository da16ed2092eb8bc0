"""What becomes of a job when something goes wrong: stock ``horovodrun``, ``edlrun``, ``torchrun`` where it can happen.

    python benchmarks/faults.py [--cases kill crash …] [--launchers horovodrun edlrun torchrun] [--runs 1]

Real jobs on this machine, one at a time. A number is the seconds from the fault to the next step; with * those that a
worker that was there before spent without a step while hosts changed; with ** the longest time between two steps of
anybody. A job counts as recovered only if it ends with exit code 0, all its workers hold the same weights, every sample
counted once per epoch and no process is left; anything else is told in words. Where nothing can be timed, "well" means
that. ``torchrun`` restarts all workers from a snapshot; counted is to the first step that is new.

A job that hangs costs its deadline, so all of it takes a quarter of an hour. The exit code is 1 if a row of ``edlrun``
has not recovered.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from fault_cases import CASES, Case, Place, next_new_step, torchrun_job
from harness import Job, JobStuckError, Outcome, run
from judgement import aborts, judge_restarts

LAUNCHERS = ("horovodrun", "edlrun", "torchrun")
WIDTHS = {"event": 43, "horovodrun": 25, "edlrun": 18, "torchrun": 18, "ratio": 6}
WELL = "well"
# A job that was ended because of its deadline and trained until then.
STILL_TRAINING_S = 5.0


@dataclass(frozen=True)
class Result:
    """What became of one job, or of several.

    Attributes:
        recovered: Whether it did.
        seconds: What was measured, if anything was.
        words: What else is to be told.
    """

    recovered: bool
    seconds: float | None = None
    words: str = ""

    def __str__(self) -> str:
        number = [] if self.seconds is None else [f"{self.seconds:.2f}"]
        return " ".join([*number, *([self.words] if self.words else [])]) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--runs", type=int, default=1, help="jobs of each kind; the median counts (default 1)")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S",
                        help="seconds without success after which a job is stuck (default 60)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the jobs' folders there")
    arguments = parser.parse_args()
    print_row({name: name for name in WIDTHS})
    print("-" * (sum(WIDTHS.values()) + 2 * len(WIDTHS) - 2))
    lost = 0
    for case in (case for case in CASES if case.name in arguments.cases):
        results = {}
        for launcher in arguments.launchers:
            if launcher != "torchrun" or case.torchrun:
                runs = [measure(case, launcher, arguments, number) for number in range(arguments.runs)]
                results[launcher] = together(runs)
        lost += not results.get("edlrun", Result(True)).recovered
        print_row({"event": case.event, **{name: str(result) for name, result in results.items()},
                   "ratio": ratio(results)})  # fmt: skip
    return int(lost > 0)


def measure(case: Case, launcher: str, arguments: argparse.Namespace, number: int) -> Result:
    """Run one job in a folder of its own."""
    with contextlib.ExitStack() as more:
        if arguments.keep:
            parent = arguments.keep.resolve() / f"{case.name}.{launcher}.{number}"
            parent.mkdir(parents=True)
        else:
            parent = Path(more.enter_context(tempfile.TemporaryDirectory()))
        place = Place(launcher, parent / "job", more, arguments.deadline)
        job = torchrun_job(place, case) if launcher == "torchrun" else case.job(place)
        try:
            outcome = run(job, place.folder)
        except JobStuckError as error:
            (parent / "stuck.txt").write_text(str(error))
            return Result(False, words=stuck(job, place.folder))
        return torchrun_result(outcome) if launcher == "torchrun" else result_of(case, place, job, outcome)


def result_of(case: Case, place: Place, job: Job, outcome: Outcome) -> Result:
    if wrong := case.judge(place, job, outcome):
        return Result(False, words=wrong)
    if case.seconds is None:
        return Result(True, words=aborts(outcome) or WELL)
    return Result(True, case.seconds(outcome), aborts(outcome))


def torchrun_result(outcome: Outcome) -> Result:
    wrong, twice = judge_restarts(outcome)
    return Result(False, words=wrong) if wrong else Result(True, next_new_step(outcome), f"({twice} steps twice)")


def stuck(job: Job, folder: Path) -> str:
    """What a job did that had to be ended."""
    files = list((folder / "trace").glob("*.jsonl"))
    quiet_s = time.time() - max((path.stat().st_mtime for path in files), default=0.0)
    what = "trains on, but does not act on it" if quiet_s < STILL_TRAINING_S else "stuck"
    return f"{what} for {job.deadline_s:g} s"


def together(results: list[Result]) -> Result:
    """The median; or what was said most often of jobs that did not recover."""
    lost = [result for result in results if not result.recovered]
    if lost:
        words, count = Counter(result.words for result in lost).most_common(1)[0]
        return Result(False, words=words if len(results) == 1 else f"{count} of {len(results)}: {words}")
    seconds = [result.seconds for result in results if result.seconds is not None]
    return Result(True, statistics.median(seconds) if seconds else None, results[-1].words)


def ratio(results: dict[str, Result]) -> str:
    """Stock Horovod's seconds by ours."""
    theirs, ours = (results.get(name, Result(False)).seconds for name in ("horovodrun", "edlrun"))
    return f"{theirs / ours:.1f}" if theirs is not None and ours else ""


def print_row(cells: dict[str, str]) -> None:
    """One row; long words run over several lines."""
    columns = [textwrap.wrap(cells.get(name, ""), width) or [""] for name, width in WIDTHS.items()]
    for number in range(max(map(len, columns))):
        words = [column[number] if number < len(column) else "" for column in columns]
        line = "  ".join(f"{word:<{width}}" for word, width in zip(words, WIDTHS.values(), strict=True))
        print(line.rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
