"""Seconds from a notice to the next step without the worker that leaves, under ``edlrun``.

    python benchmarks/drains.py [--drains 100]

One job of three workers, each on a "host" of its own: names of this machine. A host is told to leave, in turn by
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
import time
from dataclasses import dataclass, field
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
    parser.add_argument("--drains", type=int, default=100, help="number of drains, 1 to 196 (default 100)")
    arguments = parser.parse_args()
    hosts = [f"127.{'0' * zeros}.{'0' * more}.1" for zeros in range(1, 15) for more in range(2, 16)]
    hosts = hosts[: arguments.drains + 2]
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        job = Job(
            hosts=tuple(f"{host}:1" for host in (STAYS, *hosts[:2])),
            faults=faults(place, hosts),
            training=Training(optimizer="plain", linger_s=1.0),
            flags=("--job-dir", str(place.job_dir)),
            launcher="edlrun",
        )
        outcome = run(job, place.folder / "job")
    problem = judge(job, outcome) or twice(outcome) or ("" if no_worker_failed(outcome) else "a worker failed")
    if problem:
        print(f"{problem}\n{outcome.output[-4000:]}")
        return 1
    seconds = [
        next_step(outcome, next_world(outcome, moment, without=f"{host}:0")) - moment for host, moment in place.notices
    ]
    for way, found in zip(WAYS, (seconds[::2], seconds[1::2]), strict=True):
        within = sum(value <= BOUND_S for value in found)
        print(
            f"{way:<14} {len(found)} times: median {statistics.median(found):.2f} s, worst {max(found):.2f} s, "
            f"{within} within {BOUND_S} s"
        )
    print("every sample counted once, no step was lost or done twice, every worker left with exit code 0")
    return 0


@dataclass
class Place:
    """Where the job runs, and which hosts were told to leave when."""

    folder: Path
    notices: list[tuple[str, float]] = field(default_factory=list)

    @property
    def job_dir(self) -> Path:
        return self.folder / "job-dir"

    def give_notice(self, host: str, newest: str) -> None:
        """To a host; not before the newest one trains."""
        while not any('"step"' in path.read_text() for path in self._traces(newest)):
            time.sleep(0.02)
        (trace,) = self._traces(host)
        moment = time.monotonic()
        if len(self.notices) % 2 == 0:
            said = ask(self.job_dir, {"what": "drain", "target": host, "notice_s": 120.0})
            assert said["ok"], said
        else:
            os.kill(int(trace.stem.rpartition(".")[2]), signal.SIGTERM)
        self.notices.append((host, moment))

    def _traces(self, host: str) -> list[Path]:
        return list((self.folder / "job" / "trace").glob(f"{host}.0.*.jsonl"))


def faults(place: Place, hosts: list[str]) -> tuple[Outside | HostChange, ...]:
    """One host leaves, and another one comes in its place."""
    found: list[Outside | HostChange] = []
    for old, newest, new in zip(hosts, hosts[1:], hosts[2:], strict=False):
        leave = functools.partial(place.give_notice, old, newest)
        found.append(Outside(leave, step=5, after=len(found) - 1 if found else None, delay_s=0.3))
        found.append(add_host(f"{new}:1", after=len(found) - 1))
    return tuple(found)


def twice(outcome: Outcome) -> str:
    """Whether anybody had to do a step again: it enters a world at a step that it had begun in the one before."""
    begun: dict[int, int] = {}
    again = 0
    for line in outcome.trace:
        if line["what"] == "step":
            begun[line["pid"]] = line["step"]
        elif line["what"] == "enter" and line["pid"] in begun:
            again += line["step"] <= begun[line["pid"]]
    return f"steps were done twice, {again} times" if again else ""


if __name__ == "__main__":
    sys.exit(main())
