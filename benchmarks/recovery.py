"""Seconds from SIGKILL of a worker to the next step of the others: stock elastic Horovod and ``edl_hvd``.

    python benchmarks/recovery.py [--runs 3] [--engines stock edl_hvd] [--rank 1]

Real runs of the fault tests' training under ``horovodrun`` on this machine, with two, three and four workers.
Horovod's Gloo timeout stays at its default of 30 s. One run takes 5 to 60 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import kill
from harness import Job, run

WORLDS = {
    "2 hosts x 1": ("localhost:1", "127.0.0.1:1"),
    "3 hosts x 1": ("localhost:1", "127.0.0.1:1", "127.1:1"),
    "2 hosts x 2": ("localhost:2", "127.0.0.1:2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--engines", nargs="+", choices=["stock", "edl_hvd"], default=["stock", "edl_hvd"])
    parser.add_argument("--rank", type=int, default=1, help="rank of the worker that is killed (default 1)")
    arguments = parser.parse_args()
    print(f"SIGKILL of rank {arguments.rank} to next step, seconds: median (all runs)\n")
    for name, hosts in WORLDS.items():
        for engine in arguments.engines:
            seconds = sorted(measure(engine, hosts, arguments.rank) for _ in range(arguments.runs))
            every = ", ".join(f"{value:.2f}" for value in seconds)
            print(f"{name:<14}{engine:<10}{statistics.median(seconds):>8.2f}   ({every})", flush=True)


def measure(engine: str, hosts: tuple[str, ...], rank: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(engine, hosts, faults=(kill(rank=rank, step=7),), deadline_s=240)
        outcome = run(job, Path(folder) / "job")
    if outcome.exit_code != 0:
        raise SystemExit(f"a run ended with exit code {outcome.exit_code}:\n{outcome.output[-4000:]}")
    return outcome.seconds_to_next_step()


if __name__ == "__main__":
    main()
