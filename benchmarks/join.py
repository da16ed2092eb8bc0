"""Seconds for which training stops when hosts join: ``edlrun``, and the same worker under stock ``horovodrun``.

    python benchmarks/join.py [--runs 3] [--launchers edlrun horovodrun] [--worlds 1-2 2-4 3-4] [--sizes 10 1000]
                              [--kinds still trained] [--layers 1] [--start-up 20]

Real runs of the fault tests' training on this machine; newcomers wait for N seconds more before they import
anything. Counted is the pause: from the start of the last micro-batch before the new world to the start of the first in
it, on a worker that was there before. Any two steps have this distance, of which the pause is one; so beside it stands
the distance that is usual in the world before, whose step the pause holds, and in the world after. Two hosts that come
at once may join one after the other; then both pauses count, and two steps. The state holds a table of N MB that
no step moves ("still"), or a network with momentum, half of it weights ("trained"); beside either stand BatchNorm's
running statistics, which each worker has of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    parser.add_argument("--layers", type=int, default=1, help="layers of the trained network (default 1)")
    parser.add_argument("--start-up", type=float, default=20, help="seconds that a newcomer takes besides (default 20)")
    arguments = parser.parse_args()
    print("seconds without a step: median (all runs)\n")
    print(f"{'workers':<9}{'state':<16}{'launcher':<12}{'pause':>7}{'before':>9}{'after':>8}{'beyond':>8}")
    for world, kind, launcher in itertools.product(arguments.worlds, arguments.kinds, arguments.launchers):
        for size_mb in arguments.sizes:
            joins = [
                join_of(measure(launcher, world, training_of(kind, size_mb, arguments.layers), arguments.start_up))
                for _ in range(arguments.runs)
            ]
            row = f"{world:<9}{f'{size_mb} MB {kind}':<16}{launcher:<12}"
            pause_s, before_s, after_s, beyond_s = (
                statistics.median(values) for values in zip(*(one.columns for one in joins), strict=True)
            )
            every = ", ".join(f"{one.beyond_s:.2f}" for one in sorted(joins, key=lambda one: one.beyond_s))
            print(f"{row}{pause_s:>7.2f}{before_s:>9.3f}{after_s:>8.3f}{beyond_s:>8.2f}   ({every})", flush=True)


@dataclass(frozen=True)
class Join:
    """Pauses of one run, of whoever was there before.

    Attributes:
        pause_s: Sum over all worlds after the first in which there was a step.
        steps_s: Sum of a usual step of the world before each of them.
        before_s: A usual step of the first world.
        after_s: A usual step of the last world.
    """

    pause_s: float
    steps_s: float
    before_s: float
    after_s: float

    @property
    def beyond_s(self) -> float:
        return self.pause_s - self.steps_s

    @property
    def columns(self) -> tuple[float, float, float, float]:
        return self.pause_s, self.before_s, self.after_s, self.beyond_s


def join_of(outcome: Outcome) -> Join:
    usual = usual_steps_s(outcome)
    first, last = min(usual), max(usual)
    pause_s = steps_s = 0.0
    before = first
    for generation in sorted(usual):
        if generation != first:
            pause_s += max(outcome.pauses(generation), default=0.0)
            steps_s += usual[before]
            before = generation
    return Join(pause_s, steps_s, usual[first], usual[last])


def usual_steps_s(outcome: Outcome) -> dict[int, float]:
    """By generation: median seconds from the start of a step's last micro-batch to that of the next step's first."""
    found: dict[int, list[float]] = {}
    worlds: dict[int, int] = {}
    latest: dict[int, dict[str, Any]] = {}
    for line in outcome.trace:
        if line["what"] == "enter":
            worlds[line["pid"]] = line["generation"]
            latest.pop(line["pid"], None)
        elif line["what"] == "step":
            before = latest.get(line["pid"])
            if before and before["step"] != line["step"]:
                found.setdefault(worlds[line["pid"]], []).append(line["t"] - before["t"])
            latest[line["pid"]] = line
    return {generation: statistics.median(seconds) for generation, seconds in found.items()}


def training_of(kind: str, size_mb: int, layers: int) -> Training:
    training = Training(samples=240, epochs=1, pause_s=0.1, micro_batch=4, extra=("statistics",))
    if kind == "still":
        return replace(training, ballast_mb=size_mb)
    # Weights and momentum of a square layer: 2 x 4 bytes x width^2.
    return replace(training, hidden=int((size_mb * 1e6 / layers / 8) ** 0.5), layers=layers + 1)


def measure(launcher: str, world: str, training: Training, start_up_s: float) -> Outcome:
    hosts, newcomers = WORLDS[world]
    starts = [pause(start_up_s, worker=host.replace(":1", ":0"), at="start") for host in newcomers]
    faults = (HostChange(add=newcomers, step=5), *(starts if start_up_s else []))
    training = replace(training, until_size=len(hosts) + len(newcomers))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(
            Job(hosts=hosts, faults=faults, training=training, launcher=launcher, deadline_s=600), Path(folder) / "job"
        )
    if outcome.exit_code != 0:
        raise SystemExit(f"a run ended with exit code {outcome.exit_code}:\n{outcome.output[-4000:]}")
    return outcome


if __name__ == "__main__":
    main()
