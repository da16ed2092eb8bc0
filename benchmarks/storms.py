"""How many jobs survive a storm of faults: ``edlrun``, and stock ``horovodrun`` with stock elastic Horovod.

    python benchmarks/storms.py [--seeds 100] [--first 0] [--launchers edlrun horovodrun]

A storm is five faults of six kinds (kill, stop, add, remove, drain, discovery failing in several ways), chosen by its
seed, on two to four workers of this machine; see tests/elastic/chaos.py. A job survives if it ends with exit code 0,
all its workers hold the same weights, and every sample counted once per epoch. One that does nothing for the deadline
is stuck. Under ``edlrun`` the job writes checkpoints, which stock Horovod lacks; no fault takes the last worker.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from chaos import START, seeded_faults
from harness import Job, JobStuckError, run
from judgement import judge
from training import Training


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="number of storms (default 100)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--launchers", nargs="+", choices=["edlrun", "horovodrun"], default=["edlrun", "horovodrun"])
    parser.add_argument("--deadline", type=float, default=120, help="seconds without a fault or an end (default 120)")
    arguments = parser.parse_args()
    failures = 0
    for launcher in arguments.launchers:
        ends = Counter[str]()
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            end = weather(launcher, seed, arguments.deadline)
            ends[end or "survived"] += 1
            if end:
                print(f"{launcher}  seed {seed}: {end}", flush=True)
        print(f"{launcher}: {ends['survived']} of {arguments.seeds} survived", flush=True)
        for end, count in ends.most_common():
            print(f"    {count:>4}  {end}", flush=True)
        failures += launcher == "edlrun" and ends["survived"] < arguments.seeds
    return int(failures > 0)


def weather(launcher: str, seed: int, deadline_s: float) -> str:
    """Run one job through its storm; what became of it, empty if it survived."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoints") if launcher == "edlrun" else None
        training = Training(checkpoint=checkpoint, checkpoint_every="10 steps", linger_s=0.5, optimizer="plain")
        engine = "edl_hvd" if launcher == "edlrun" else "stock"
        job = Job(
            engine, START, faults=seeded_faults(seed), training=training, launcher=launcher, deadline_s=deadline_s
        )
        try:
            return judge(job, run(job, Path(folder) / "job"))
        except JobStuckError:
            return "stuck"


if __name__ == "__main__":
    sys.exit(main())
