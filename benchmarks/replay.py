"""What two launchers make of the hosts of a spot market: a trace played to real workers, many times as fast.

    python benchmarks/replay.py TRACE [--speed 20] [--divide 12] [--launchers edlrun horovodrun] [--minutes M]

Jobs on this machine, one launcher after the other. A host of the trace is a name of the loopback interface with one
worker, a new name for each, so that nobody holds a lost host against a new one; at most four at once. In the moment in
which a host goes, its worker gets SIGKILL and the host leaves the list; nobody is told before. One that comes is added
to the list. Steps sleep instead of computing, so hosts do not take cores from each other; a worker trains on
the same number of samples per step, however many there are. Under ``edlrun`` the job writes a checkpoint every ten
minutes of the trace.

Goodput is samples that counted (those of a step that was done twice count once), by what the hosts that were there
could have done. That is measured with the same launcher, script and machine: samples per second of jobs that keep
their size. Time runs from the first step of the job to the end of the trace. A job that ends, or makes no step for
--stuck seconds, is started again at once, and what it had done counts as if it had come from a checkpoint that costs
nothing: stock Horovod has none, and loses its progress with its last worker.

A start takes as long as ever, all of torch included, and so does the Gloo timeout: at 20 times the speed both weigh 20
times as much.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from faults import save_faults
from harness import TOKEN, Job, command, environment, write_hosts
from training import Training

from edl_hvd.traces.text import read_trace
from edl_hvd.traces.trace import Trace

MOST_HOSTS = 4
POLL_S = 0.02
LOOK_S = 1.0
# At the files of all the workers that ever were, which takes time from the cores that they step on.
WORKER_BATCH = 8
# Nobody computes for long, so a step is mostly a sleep of 0.1 s; an epoch of two workers takes a minute.
STEP_S, SAMPLES = 0.1, 9600
CHECKPOINTS_S = 600.0
LAUNCHERS = {"edlrun": "edl_hvd", "horovodrun": "stock"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", metavar="TRACE", help="rows of milliseconds, add or remove, names; see docs/simulate.md"
    )
    parser.add_argument("--speed", type=float, default=20.0, help="seconds of the trace per second (default 20)")
    parser.add_argument(
        "--divide", type=int, default=12, help="hosts of the trace for each that is played (default 12)"
    )
    parser.add_argument("--from", dest="from_s", type=float, default=0.0, metavar="S", help="begin the trace there")
    parser.add_argument("--minutes", type=float, metavar="M", help="minutes of the trace (default: all)")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--measure", type=float, default=15.0, metavar="S", help="seconds at each size (default 15)")
    parser.add_argument("--stuck", type=float, default=60.0, metavar="S",
                        help="seconds without a step after which a job is started again (default 60)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the jobs' folders there")
    arguments = parser.parse_args()
    trace = with_names(read_part(arguments))
    sizes = sorted({count for _, _, count in trace.stretches()})
    print(f"{trace.end_s / 60:.0f} minutes of {min(sizes)} to {max(sizes)} hosts at {arguments.speed:g} times the "
          f"speed: {trace.end_s / arguments.speed / 60:.1f} minutes for each launcher", flush=True)  # fmt: skip
    print(f"{'launcher':12} {'samples':>9} {'possible':>9} {'goodput':>8} {'jobs':>5} {'longest pause':>14}   "
          f"samples/s of {', '.join(map(str, sizes))} hosts")  # fmt: skip
    goodputs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for launcher in arguments.launchers:
            folder = (arguments.keep or Path(scratch)).resolve() / launcher
            rates = {size: measure(launcher, size, folder / f"size-{size}", arguments) for size in sizes}
            seen = play(launcher, trace, folder, arguments)
            possible = sum(rates[count] * (until_s - from_s) / arguments.speed
                           for from_s, until_s, count in trace.stretches())  # fmt: skip
            goodputs[launcher] = seen.samples / possible
            paces = ", ".join(f"{rates[size]:.0f}" for size in sizes)
            print(f"{launcher:12} {seen.samples:9,.0f} {possible:9,.0f} {goodputs[launcher]:8.1%} {seen.jobs:5} "
                  f"{seen.longest_pause_s:12.1f} s   {paces}", flush=True)  # fmt: skip
    if len(goodputs) == 2:
        print(f"goodput of edlrun by that of horovodrun: {goodputs['edlrun'] / goodputs['horovodrun']:.2f}")


def read_part(arguments: argparse.Namespace) -> Trace:
    """The part of the trace that is asked for, divided."""
    whole = read_trace(arguments.trace)
    until_s = whole.end_s if arguments.minutes is None else arguments.from_s + 60 * arguments.minutes
    trace = whole.window(arguments.from_s, until_s).divided(arguments.divide)
    counts = [count for _, count in trace.counts]
    if max(counts) > MOST_HOSTS:
        sys.exit(f"the trace has {max(counts)} hosts at once, this machine plays {MOST_HOSTS}; give a larger --divide")
    if min(counts) == 0:
        sys.exit(
            "the trace has a time without any host, which no job survives; choose a part with --from and --minutes"
        )
    return trace


def with_names(trace: Trace) -> Trace:
    """Each host as a spelling of 127.0.0.1 of its own: leading zeros do not count."""
    names: dict[str, str] = {}
    changes = []
    for change in trace.changes:
        gone = tuple(names[host] for host in change.removed)
        for host in change.added:
            row, place = divmod(len(names), 8)
            names[host] = f"127.0.{'0' * (row + 1)}.{'0' * place}1"
        changes.append(type(change)(change.time_s, tuple(names[host] for host in change.added), gone))
    return Trace(tuple(changes))


# --- one job ---


@dataclass
class Running:
    """A launcher and its workers."""

    launcher: str
    hosts: tuple[str, ...]
    folder: Path
    speed: float
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        keeps = {"checkpoint": str(self.folder / "checkpoints"), "checkpoint_every": f"{CHECKPOINTS_S / self.speed:g}s"}
        training = Training(
            samples=SAMPLES, epochs=10**6, worker_batch=WORKER_BATCH, pause_s=STEP_S, optimizer="plain",
            extra=("long",), **(keeps if self.launcher == "edlrun" else {}),
        )  # fmt: skip
        job = Job(LAUNCHERS[self.launcher], self.entries, training=training, launcher=self.launcher)
        training.save(self.folder)
        save_faults(self.folder, ())
        write_hosts(self.folder, self.entries)
        with open(self.folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                command(job, self.folder), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment(job, self.folder, self.token), start_new_session=True, cwd=self.folder,
            )  # fmt: skip
        self.started_s = time.monotonic()

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(f"{host}:1" for host in self.hosts)

    def change(self, added: tuple[str, ...], removed: tuple[str, ...]) -> None:
        for pid, variables in self._processes():
            if any(f"HOROVOD_HOSTNAME={host}".encode() in variables for host in removed):
                _kill(pid)
        self.hosts = tuple(host for host in self.hosts if host not in removed) + added
        write_hosts(self.folder, self.entries)

    def steps(self) -> list[dict[str, Any]]:
        """What the workers have written about their steps so far, in order of time."""
        texts = (path.read_text() for path in self.folder.glob("trace/*.jsonl"))
        whole = (line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return sorted((line for line in map(json.loads, whole) if line["what"] == "step"), key=lambda line: line["t"])

    def quiet_s(self) -> float:
        """For how long no worker has written anything."""
        moments = [path.stat().st_mtime for path in self.folder.glob("trace/*.jsonl")]
        return time.time() - max(moments) if moments else time.monotonic() - self.started_s

    def stop(self) -> None:
        while pids := [pid for pid, _ in self._processes()]:
            for pid in pids:
                _kill(pid)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()

    def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:  # It has ended meanwhile, or belongs to somebody else.
                    continue
                if f"{TOKEN}={self.token}".encode() in variables:
                    yield int(entry.name), variables


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a child of one that was killed just now
        os.kill(pid, signal.SIGKILL)


def samples_of(steps: list[dict[str, Any]], from_s: float, until_s: float) -> int:
    """Samples of a job's steps within that time; one that was done again counts as it was done last."""
    last = {line["step"]: line for line in steps}
    return sum(line["size"] * WORKER_BATCH for line in last.values() if from_s <= line["t"] < until_s)


# --- what is measured ---


def measure(launcher: str, size: int, folder: Path, arguments: argparse.Namespace) -> float:
    """Samples per second of a job that keeps its size."""
    hosts = tuple(f"127.0.0.{'0' * number}1" for number in range(size))
    job = Running(launcher, hosts, folder, arguments.speed)
    try:
        while not (steps := [line for line in job.steps() if line["size"] == size]):
            check(job, arguments.stuck)
            time.sleep(10 * POLL_S)
        # Two seconds in which pages are read for the first time do not count.
        from_s = steps[0]["t"] + 2.0
        time.sleep(max(0.0, from_s + arguments.measure - time.monotonic()))
        return samples_of(job.steps(), from_s, from_s + arguments.measure) / arguments.measure
    finally:
        job.stop()


def check(job: Running, stuck_s: float) -> None:
    if job.process.poll() is not None or job.quiet_s() > stuck_s:
        sys.exit(f"{job.launcher} with {len(job.hosts)} hosts does not train; its output is:\n"
                 + (job.folder / "output.txt").read_text()[-4000:])  # fmt: skip


@dataclass
class Seen:
    """What came of a trace: samples that counted, jobs that it took, longest time between two steps of anybody."""

    samples: int
    jobs: int
    longest_pause_s: float


def play(launcher: str, trace: Trace, folder: Path, arguments: argparse.Namespace) -> Seen:
    """Play the whole trace."""
    first, *changes = trace.changes
    job = Running(launcher, first.added, folder / "job-1", arguments.speed)
    jobs = [job]
    try:
        while not (steps := job.steps()):
            check(job, arguments.stuck)
            time.sleep(10 * POLL_S)
        began_s = steps[0]["t"]
        end_s, look_s = began_s + trace.end_s / arguments.speed, began_s
        while (now_s := time.monotonic()) < end_s:
            while changes and now_s >= began_s + changes[0].time_s / arguments.speed:
                change = changes.pop(0)
                job.change(change.added, change.removed)
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                if job.process.poll() is not None or job.quiet_s() > arguments.stuck:
                    job.stop()
                    job = Running(launcher, job.hosts, folder / f"job-{len(jobs) + 1}", arguments.speed)
                    jobs.append(job)
            time.sleep(POLL_S)
    finally:
        job.stop()
    moments = [began_s, *(line["t"] for one in jobs for line in one.steps() if began_s <= line["t"] < end_s), end_s]
    pause_s = max(after - before for before, after in itertools.pairwise(moments))
    return Seen(sum(samples_of(one.steps(), began_s, end_s) for one in jobs), len(jobs), pause_s)


if __name__ == "__main__":
    main()
