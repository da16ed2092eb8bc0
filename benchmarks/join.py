"""Seconds for which training stops when hosts join: ``edlrun``, and the same worker under stock ``horovodrun``.

    python benchmarks/join.py [--runs 3] [--launchers edlrun horovodrun] [--worlds 1-2 2-4 3-4] [--sizes 10 1000]
                              [--kinds still trained] [--start-up 20]

Real runs of the fault tests' training on this machine; newcomers wait for so many seconds more before they import
anything. Counted is from the last step before the new world to the first in it, on a worker that was there before;
beside it the usual time between two steps. Two hosts that come at once may join one after the other; then both
pauses count. The state holds a table of so many MB that no step moves ("still"), or a network with momentum, half of it
weights ("trained"); beside either stand BatchNorm's running statistics, which each worker has of its own.
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

from faults import HostChange, pause
from harness import Job, Outcome, run
from training import Training

# Hosts at the start, and those that come.
WORLDS = {
    "1-2": (("localhost:1",), ("127.0.0.1:1",)),
    "2-4": (("localhost:1", "127.0.0.1:1"), ("127.1:1", "127.0.1:1")),
    "3-4": (("localhost:1", "127.0.0.1:1", "127.1:1"), ("127.0.1:1",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--launchers", nargs="+", choices=["edlrun", "horovodrun"], default=["edlrun", "horovodrun"])
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[10, 1000], help="MB of state (default 10 1000)")
    parser.add_argument("--kinds", nargs="+", choices=["still", "trained"], default=["still", "trained"])
    parser.add_argument("--start-up", type=float, default=20, help="seconds that a newcomer takes besides (default 20)")
    arguments = parser.parse_args()
    print("seconds without a step: median (all runs)\n")
    print(f"{'workers':<9}{'state':<16}{'launcher':<12}{'pause':>7}{'a step':>9}")
    for world, kind, launcher in itertools.product(arguments.worlds, arguments.kinds, arguments.launchers):
        first = None
        for size_mb in arguments.sizes:
            outcomes = [measure(launcher, world, kind, size_mb, arguments.start_up) for _ in range(arguments.runs)]
            seconds = sorted(pause_of(outcome) for outcome in outcomes)
            stop_s, step = statistics.median(seconds), statistics.median(step_s(outcome) for outcome in outcomes)
            every = ", ".join(f"{value:.2f}" for value in seconds)
            ratio = f"   {stop_s / first:.2f} times that of {arguments.sizes[0]} MB" if first else ""
            first = first or stop_s
            row = f"{world:<9}{f'{size_mb} MB {kind}':<16}{launcher:<12}{stop_s:>7.2f}{step:>9.3f}"
            print(f"{row}   ({every}){ratio}", flush=True)


def pause_of(outcome: Outcome) -> float:
    """Of whoever was there before, over all worlds after the first in which there was a step."""
    generations = {line["generation"] for line in outcome.lines("enter")} - {1}
    return sum(max(outcome.pauses(generation), default=0.0) for generation in generations)


def training_of(kind: str, size_mb: int) -> Training:
    training = Training(samples=240, epochs=1, pause_s=0.1, micro_batch=4, extra=("statistics",))
    if kind == "still":
        return replace(training, ballast_mb=size_mb)
    # Weights and momentum of one square layer: 2 x 4 bytes x width^2.
    return replace(training, hidden=int((size_mb * 1e6 / 8) ** 0.5), layers=2)


def step_s(outcome: Outcome) -> float:
    """Median time between two steps of the worker that trains first."""
    first = outcome.lines("step")[0]["pid"]
    moments = [line["t"] for line in outcome.lines("step") if line["pid"] == first]
    return statistics.median(after - before for before, after in itertools.pairwise(moments))


def measure(launcher: str, world: str, kind: str, size_mb: int, start_up_s: float) -> Outcome:
    hosts, newcomers = WORLDS[world]
    starts = [pause(start_up_s, worker=host.replace(":1", ":0"), at="start") for host in newcomers]
    faults = (HostChange(add=newcomers, step=5), *(starts if start_up_s else []))
    training = replace(training_of(kind, size_mb), until_size=len(hosts) + len(newcomers))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Job(hosts=hosts, faults=faults, training=training, launcher=launcher), Path(folder) / "job")
    if outcome.exit_code != 0:
        raise SystemExit(f"a run ended with exit code {outcome.exit_code}:\n{outcome.output[-4000:]}")
    return outcome


if __name__ == "__main__":
    main()
