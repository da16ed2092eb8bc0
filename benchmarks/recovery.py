"""Seconds from SIGKILL of a worker to the next step of all others: stock elastic Horovod, ``edl_hvd``, ``edlrun``.

    python benchmarks/recovery.py [--runs 3] [--kills 20] [--engines stock edl_hvd edlrun]

Real runs of the fault tests' training on this machine. "stock" and "edl_hvd" run under ``horovodrun``: rank 1 is killed
once in each run, and Horovod's Gloo timeout stays at its default of 30 s. Under ``edlrun`` each rank of four workers is
killed in turn, whenever all four train, so many times in all; counted is the time until *every* survivor has completed
its next optimizer step, and the last line says how many steps were lost besides the one in flight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import kill
from harness import Job, Outcome, run
from judgement import judge
from timing import next_step, next_world
from training import Training

WORLDS = {
    "2 hosts x 1": ("localhost:1", "127.0.0.1:1"),
    "3 hosts x 1": ("localhost:1", "127.0.0.1:1", "127.1:1"),
    "2 hosts x 2": ("localhost:2", "127.0.0.1:2"),
}
ENGINES = ("stock", "edl_hvd", "edlrun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind under horovodrun (default 3)")
    parser.add_argument("--kills", type=int, default=20, help="kills under edlrun, four in each run (default 20)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    arguments = parser.parse_args()
    print("SIGKILL to next step, seconds: median, worst (all)\n")
    for name, hosts in WORLDS.items():
        for engine in arguments.engines:
            if engine != "edlrun":
                show(name, engine, [kill_one(engine, hosts) for _ in range(arguments.runs)])
    if "edlrun" in arguments.engines:
        pairs = [pair for _ in range(0, arguments.kills, 4) for pair in kill_each()][: arguments.kills]
        show("2 hosts x 2", "edlrun", [seconds for seconds, _ in pairs])
        print(f"steps lost beyond the one in flight: {max(lost for _, lost in pairs)}")


def show(name: str, engine: str, seconds: list[float]) -> None:
    every = ", ".join(f"{value:.2f}" for value in sorted(seconds))
    print(f"{name:<14}{engine:<10}{statistics.median(seconds):>8.2f}{max(seconds):>8.2f}   ({every})", flush=True)


def kill_one(engine: str, hosts: tuple[str, ...]) -> float:
    return train(Job(engine, hosts, faults=(kill(rank=1, step=7),), deadline_s=240)).seconds_to_next_step()


def kill_each() -> list[tuple[float, int]]:
    """Seconds and lost steps of four kills, one of each rank."""
    # In the world that just broke a worker may still begin a step or two; so only the tenth counts.
    kills = [kill(rank=rank, size=4, visit=10, after=rank - 1 if rank else None) for rank in range(4)]
    # Four crashes within a minute would set a host aside, which is not what is measured.
    flags = ("--host-failures", "100")
    training = Training(linger_s=1.0)
    job = Job(hosts=WORLDS["2 hosts x 2"], faults=tuple(kills), training=training, flags=flags, launcher="edlrun")
    outcome = train(job)
    return [recovery(outcome, line) for line in outcome.lines("fired")]


def recovery(outcome: Outcome, fired: dict[str, Any]) -> tuple[float, int]:
    """Seconds until the last survivor has completed its next step, and steps lost besides the one in flight."""
    struck = fired["t"]
    world = next_world(outcome, struck)
    in_flight = max(line["step"] for line in outcome.lines("step") if line["t"] <= struck)
    return next_step(outcome, world) - struck, max(in_flight - world[0]["step"], 0)


def train(job: Job) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(job, Path(folder) / "job")
    problem = "" if job.engine == "stock" else judge(job, outcome)
    if outcome.exit_code != 0 or problem:
        raise SystemExit(f"a run failed: {problem or outcome.exit_code}\n{outcome.output[-4000:]}")
    return outcome


if __name__ == "__main__":
    main()
