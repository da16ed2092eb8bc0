"""A made-up trace in the format of ElasticFlow's: jobs of a busy cluster, the same ones each time."""

from __future__ import annotations

import random
from pathlib import Path


def write_trace(path: Path, jobs: int, seed: int = 0, gap_s: float = 200.0) -> Path:
    """A trace of jobs that come at random moments and run for minutes to hours, most of them on one GPU."""
    dice = random.Random(seed)
    rows, time_s = ["job_id,submission_time,duration,num_gpu"], 0.0
    for number in range(jobs):
        time_s += dice.expovariate(1 / gap_s)
        gpus = dice.choices((1, 2, 4, 8, 16, 32), (60, 10, 10, 10, 6, 4))[0]
        rows.append(f"job-{number:05d},{int(time_s)},{int(600 + dice.expovariate(1 / 4000))},{gpus}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path
