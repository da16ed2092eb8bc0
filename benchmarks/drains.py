"""Seconds from a notice to the next step without the worker that leaves, under ``edlrun``.

    python benchmarks/drains.py [--drains 100]

One job of three workers, each on a "host" of its own on this machine. A host is told to leave, in turn by
``edl-hvd drain`` and by SIGTERM to its worker, another comes in its place, and so on. Counted is the time until every
worker that stays has completed its next step. A sample that does not count once, a step that is lost or done twice, or
a worker that leaves with another exit code than 0 makes the exit code 1.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import HostChange, Outside, add_host
from harness import Job, Outcome, run
from invariants import no_worker_failed
from judgement import judge
from timing import next_step, next_world
from training import Training

from edl_hvd.driver.job_folder.requests import ask

STAYS = "localhost"
WAYS = ("edl-hvd drain", "SIGTERM")
BOUND_S = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drains", type=int, default=100, help="number of drains (default 100)")
    arguments = parser.parse_args()
    hosts = [f"127.0.1.{number + 1}" for number in range(arguments.drains + 2)]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            hosts=tuple(f"{host}:1" for host in (STAYS, *hosts[:2])),
            faults=faults(hosts, Path(folder)),
            training=Training(optimizer="plain"),
            flags=("--job-dir", f"{folder}/job-dir"),
            launcher="edlrun",
        )
        outcome = run(job, Path(folder) / "job")
    problem = judge(job, outcome) or twice(outcome) or ("" if no_worker_failed(outcome) else "a worker failed")
    if problem:
        print(f"{problem}\n{outcome.output[-4000:]}")
        return 1
    notices = [line["t"] for line in outcome.lines("fired") if line["worker"] == "outside"]
    seconds = [
        next_step(outcome, next_world(outcome, moment, without=f"{host}:0")) - moment
        for host, moment in zip(hosts, notices, strict=False)
    ]
    for way, found in zip(WAYS, (seconds[::2], seconds[1::2]), strict=True):
        within = sum(value <= BOUND_S for value in found)
        print(
            f"{way:<14} {len(found)} times: median {statistics.median(found):.2f} s, worst {max(found):.2f} s, "
            f"{within} within {BOUND_S} s"
        )
    print("every sample counted once, no step was lost or done twice, every worker left with exit code 0")
    return 0


def faults(hosts: list[str], folder: Path) -> tuple[Outside | HostChange, ...]:
    """A host leaves when three train, and another one comes in its place."""
    found: list[Outside | HostChange] = []
    for number, (old, new) in enumerate(zip(hosts, hosts[2:], strict=False)):
        leave = functools.partial((drain, terminate)[number % 2], old, folder)
        found.append(Outside(leave, step=5, size=3, after=len(found) - 1 if found else None, delay_s=0.3))
        found.append(add_host(f"{new}:1", after=len(found) - 1))
    return tuple(found)


def drain(host: str, folder: Path) -> None:
    said = ask(folder / "job-dir", {"what": "drain", "target": host, "notice_s": 120.0})
    assert said["ok"], said


def terminate(host: str, folder: Path) -> None:
    (trace,) = (folder / "job" / "trace").glob(f"{host}.0.*.jsonl")
    os.kill(int(trace.stem.rpartition(".")[2]), signal.SIGTERM)


def twice(outcome: Outcome) -> str:
    """Whether anybody has done a step more than once."""
    done = [(line["pid"], line["step"]) for line in outcome.lines("step")]
    return "" if len(done) == len(set(done)) else f"{len(done) - len(set(done))} steps were done twice"


if __name__ == "__main__":
    sys.exit(main())
