"""Seconds for which training stops when a host joins: ``edlrun``, and the same worker under stock ``horovodrun``.

    python benchmarks/join.py [--runs 3] [--launchers edlrun horovodrun] [--sizes 10 1000]

Real runs of the fault tests' training on this machine. Counted is from the last step before the new world to the first
in it, on a worker that was there before; beside it the usual time between two steps. The state holds a table of so many
MB that no step moves ("still"), or a network with momentum, half of it weights ("trained").
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import add_host
from harness import Job, Outcome, run
from training import Training

HOSTS = ("localhost:1",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--launchers", nargs="+", choices=["edlrun", "horovodrun"], default=["edlrun", "horovodrun"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[10, 1000], help="MB of state (default 10 1000)")
    parser.add_argument("--kinds", nargs="+", choices=["still", "trained"], default=["still", "trained"])
    arguments = parser.parse_args()
    print("1 -> 2 workers, seconds without a step: median (all runs)\n")
    print(f"{'state':<20}{'launcher':<13}{'pause':>7}{'a step':>9}")
    for kind in arguments.kinds:
        for launcher in arguments.launchers:
            first = None
            for size_mb in arguments.sizes:
                outcomes = [measure(launcher, training_of(kind, size_mb)) for _ in range(arguments.runs)]
                seconds = sorted(outcome.pauses(2)[0] for outcome in outcomes)
                pause, step = statistics.median(seconds), statistics.median(step_s(outcome) for outcome in outcomes)
                every = ", ".join(f"{value:.2f}" for value in seconds)
                ratio = f"   {pause / first:.2f} times that of {arguments.sizes[0]} MB" if first else ""
                first = first or pause
                name = f"{size_mb} MB {kind}"
                print(f"{name:<20}{launcher:<13}{pause:>7.2f}{step:>9.3f}   ({every}){ratio}", flush=True)


def training_of(kind: str, size_mb: int) -> Training:
    training = Training(samples=240, epochs=1, until_size=2, pause_s=0.1, micro_batch=4)
    if kind == "still":
        return replace(training, ballast_mb=size_mb)
    # Weights and momentum of one square layer: 2 x 4 bytes x width^2.
    return replace(training, hidden=int((size_mb * 1e6 / 8) ** 0.5), layers=2)


def step_s(outcome: Outcome) -> float:
    """Median time between two steps of the worker that trains first."""
    first = outcome.lines("step")[0]["pid"]
    moments = [line["t"] for line in outcome.lines("step") if line["pid"] == first]
    return statistics.median(after - before for before, after in itertools.pairwise(moments))


def measure(launcher: str, training: Training) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(hosts=HOSTS, faults=(add_host("127.0.0.1:1", step=5),), training=training, launcher=launcher)
        outcome = run(job, Path(folder) / "job")
    if outcome.exit_code != 0:
        raise SystemExit(f"a run ended with exit code {outcome.exit_code}:\n{outcome.output[-4000:]}")
    return outcome


if __name__ == "__main__":
    main()
