"""Seconds from SIGKILL of a worker to the next step of all others: stock elastic Horovod, ``edl_hvd``, ``edlrun``.

    python benchmarks/recovery.py [--runs 3] [--kills 400] [--numbers 0 20] [--load 0] [--engines stock edl_hvd edlrun]
        [--device cuda]

Real runs of the fault tests' training on this machine. Under ``edlrun`` up to four workers on two hosts train, commit
after every step, and write a checkpoint every second; a member of the present world is killed at a random moment, up to
five seconds after the one before, that many times, while newcomers take the places of those that were killed. So kills
fall into steps, sums, commits, checkpoints and joins. Counted is the time until *every* survivor has completed its next
optimizer step. "A step" is the usual time between two in worlds of the size that goes on, which is part of it: with
half the workers it takes twice as long. A kill that another one follows before that is counted in a row of its own.
The row "no kill" has as many steps of the same jobs, chosen at random among those that nothing disturbed: what is
beyond a usual step there is the machine's.
``--numbers`` are MB of gradients; with 0 the network is tiny. ``--load`` lets that many processes compute beside them.
Ctrl-C ends it early, with the jobs that are over. Each job is checked: replicas alike, every sample counted once, no
committed step lost.

"stock" and "edl_hvd" run under ``horovodrun``: rank 1 is killed once in each run, at its seventh step. Horovod's Gloo
timeout stays at its default of 30 s.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "elastic"))

from chaos import SeededFault
from faults import kill
from harness import Job, Outcome, run
from judgement import judge
from loads import loaded
from training import Training

WORLDS = {
    "2 hosts x 1": ("localhost:1", "127.0.0.1:1"),
    "3 hosts x 1": ("localhost:1", "127.0.0.1:1", "127.1:1"),
    "2 hosts x 2": ("localhost:2", "127.0.0.1:2"),
}
ENGINES = ("stock", "edl_hvd", "edlrun")
KILLS_OF_A_JOB = 20
TOLD_S = 1.0
# Of a recovery that takes longer beyond a step, all that the workers and the driver did meanwhile is shown.
WORST = 8


@dataclass(frozen=True)
class Recovery:
    """From a death on.

    Attributes:
        size: Of the world that broke.
        seconds: Until the last survivor has completed its next step.
        formed_s: Until the last survivor has entered the next world; a part of it.
        step_s: What a step of that job usually takes in worlds of the size that goes on.
        is_struck_again: Another worker was killed meanwhile.
    """

    size: int
    seconds: float
    formed_s: float
    step_s: float
    is_struck_again: bool

    @property
    def beyond_s(self) -> float:
        return self.seconds - self.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind under horovodrun (default 3)")
    parser.add_argument("--kills", type=int, default=400, help="kills under edlrun, 20 in each job (default 400)")
    parser.add_argument("--numbers", type=int, nargs="+", default=[0, 20], help="MB of gradients (default 0 20)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the workers (default 0)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the models under edlrun")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    arguments = parser.parse_args()
    for name, hosts in WORLDS.items():
        for engine in arguments.engines:
            if engine != "edlrun":
                seconds = sorted(kill_one(engine, hosts) for _ in range(arguments.runs))
                every = ", ".join(f"{value:.2f}" for value in seconds)
                print(f"{name:<14}{engine:<10}median {statistics.median(seconds):.2f} s ({every})", flush=True)
    if "edlrun" in arguments.engines:
        found: list[Recovery] = []
        undisturbed: list[Recovery] = []
        with loaded(arguments.load), suppress(KeyboardInterrupt):
            for number, megabytes in zip(
                range(0, arguments.kills, KILLS_OF_A_JOB), itertools.cycle(arguments.numbers), strict=False
            ):
                outcome = kill_many(min(KILLS_OF_A_JOB, arguments.kills - number), megabytes, arguments.device)
                found += recoveries(outcome)
                undisturbed += undisturbed_steps(outcome)
                worst = max(one.beyond_s for one in found)
                print(f"{len(found)} kills, worst {worst:.2f} s beyond a step", file=sys.stderr, flush=True)
        show(found, undisturbed)


def show(found: list[Recovery], undisturbed: list[Recovery]) -> None:
    print(f"{len(found)} kills under edlrun; seconds until every survivor has completed its next step\n")
    print(f"{'workers':<10}{'kills':>6}{'a step':>9}{'median':>9}{'95 %':>8}{'99 %':>8}{'worst':>8}   beyond a step")
    again = [one for one in found if one.is_struck_again]
    single = [one for one in found if not one.is_struck_again]
    for size in sorted({one.size for one in single}):
        row(str(size), [one for one in single if one.size == size])
    row("all", single)
    if again:
        row("2 kills", again)
    row("no kill", random.SystemRandom().sample(undisturbed, min(len(single), len(undisturbed))))
    slowest = sorted(single, key=lambda one: one.beyond_s, reverse=True)[:WORST]
    every = ", ".join(f"{one.beyond_s:.2f} ({one.formed_s:.2f})" for one in slowest)
    print(f"the slowest, beyond a step (of which until the world had formed): {every}")


def row(name: str, found: list[Recovery]) -> None:
    step_s = statistics.median(one.step_s for one in found)
    beyond = sorted(one.beyond_s for one in found)
    shares = [beyond[min(int(share * len(beyond)), len(beyond) - 1)] for share in (0.5, 0.95, 0.99)]
    print(f"{name:<10}{len(found):>6}{step_s:>9.2f}" + "".join(f"{value:>9.2f}" for value in [*shares, beyond[-1]]))


def kill_one(engine: str, hosts: tuple[str, ...]) -> float:
    return train(Job(engine, hosts, faults=(kill(rank=1, step=7),), deadline_s=240)).seconds_to_next_step()


def random_kills(count: int) -> list[SeededFault]:
    """Kills of one member each, at random moments up to five seconds after the one before."""
    chance = random.SystemRandom()
    return [
        SeededFault("kill one", chance.getrandbits(30), step=3, after=number - 1 if number else None,
             delay_s=chance.uniform(0.3, 5.0))
        for number in range(count)
    ]  # fmt: skip


def kill_many(kills: int, megabytes: int, device: str) -> Outcome:
    faults = random_kills(kills)
    with tempfile.TemporaryDirectory() as checkpoints:
        training = Training(linger_s=1.0, checkpoint=checkpoints, checkpoint_every="1s", device=device)
        if megabytes:
            training = replace(training, hidden=int((megabytes * 1e6 / 4) ** 0.5), layers=2)
        # That many crashes within a minute would set a host aside, which is not what is measured.
        flags = ("--host-failures", "1000")
        hosts = WORLDS["2 hosts x 2"]
        return train(Job(hosts=hosts, faults=tuple(faults), training=training, flags=flags, launcher="edlrun"))


@dataclass(frozen=True)
class Step:
    """The next one of a survivor, in seconds of the trace's clock."""

    entered: float
    done: float
    size: int


def recoveries(outcome: Outcome) -> list[Recovery]:
    strikes = [(line["t"], int(line["injected"].split()[2])) for line in outcome.lines("fired")
               if line.get("injected", "").startswith("killed")]  # fmt: skip
    ends = {pid: moment for moment, pid in strikes}
    lines = defaultdict(list)
    for line in outcome.trace:
        if line["what"] in ("enter", "step"):
            lines[line["pid"]].append(line)
    usual_s = usual_steps(list(lines.values()))
    found = []
    for moment, victim in strikes:
        generation = max(line["generation"] for line in outcome.lines("enter") if line["t"] < moment)
        members = [pid for pid, own in lines.items()
                   if any(line["what"] == "enter" and line["generation"] == generation for line in own)]  # fmt: skip
        nexts = []
        for pid in members:
            found_next = next_step(lines[pid], moment)
            if pid != victim and found_next is not None:
                nexts.append(found_next)
            elif pid != victim and pid not in ends and not was_in_last_step(outcome, pid, moment):
                last = [f"{line['t'] - moment:+.2f} s: {line}" for line in outcome.trace if line["pid"] == pid][-5:]
                raise SystemExit(
                    f"a survivor, {pid}, has made no further step after the death of {victim} in generation "
                    f"{generation}; its last lines:\n"
                    + "\n".join(last)
                    + f"\nthe job's output:\n{outcome.output[-6000:]}"
                )
        if nexts:  # else all the others were killed before, or this was the last step of the training
            latest = max(nexts, key=lambda step: step.done)
            one = Recovery(
                len(members),
                seconds=latest.done - moment,
                formed_s=max(step.entered for step in nexts) - moment,
                step_s=usual_s.get(latest.size) or statistics.median(usual_s.values()),
                is_struck_again=any(moment < other < latest.done for other, _ in strikes),
            )
            found.append(one)
            if one.beyond_s > TOLD_S:
                tell(outcome, moment, latest.done)
    return found


def tell(outcome: Outcome, moment: float, until: float) -> None:
    """Show what the workers and the driver did from a kill to the next step, on stderr."""
    ahead_s = time.time() - time.monotonic()  # of the events' clock
    lines = [(line["t"], line) for line in outcome.trace] + [(line["time"] - ahead_s, line) for line in outcome.events]
    print("a slow one, in seconds since its kill:", file=sys.stderr)
    for at, line in sorted(lines, key=lambda pair: pair[0]):
        if moment - 0.5 <= at <= until + 0.1:
            print(f"  {at - moment:+.3f} {line}", file=sys.stderr)


def undisturbed_steps(outcome: Outcome) -> list[Recovery]:
    """The steps of all workers before which nobody was killed, and no world was left."""
    lines = defaultdict(list)
    for line in outcome.trace:
        lines[line["pid"]].append(line)
    found = []
    for size, gaps in gaps_by_size(list(lines.values())).items():
        usual_s = statistics.median(gaps)
        found += [Recovery(size, gap, 0.0, usual_s, is_struck_again=False) for gap in gaps]
    return found


def usual_steps(workers: list[list[dict[str, Any]]]) -> dict[int, float]:
    """The median seconds between the beginnings of two steps, by the size of the world."""
    return {size: statistics.median(gaps) for size, gaps in gaps_by_size(workers).items()}


def gaps_by_size(workers: list[list[dict[str, Any]]]) -> dict[int, list[float]]:
    """The seconds between the beginnings of two steps in one world, by its size."""
    gaps: defaultdict[int, list[float]] = defaultdict(list)
    for lines in workers:
        size = 0
        begun: dict[str, Any] | None = None  # the step that was begun last, in this world
        for line in lines:
            if line["what"] == "enter":
                size, begun = int(line["size"]), None
            elif line["what"] != "step":
                continue
            elif begun is None or line["step"] != begun["step"]:
                if begun is not None:
                    gaps[size].append(line["t"] - begun["t"])
                begun = line
    return dict(gaps)


def next_step(lines: list[dict[str, Any]], moment: float) -> Step | None:
    """The first step that a worker has completed in a world that it has entered after a moment."""
    entered = None
    for line in lines:
        if line["t"] > moment and line["what"] == "enter":
            entered = line
        elif entered is not None and line["what"] == "step" and line["step"] > entered["step"]:
            return Step(entered["t"], line["t"], entered["size"])
    return None


def was_in_last_step(outcome: Outcome, pid: int, moment: float) -> bool:
    """Whether a survivor did the last step of the training in the world that it entered next."""
    own = [line for line in outcome.trace if line["pid"] == pid and line["t"] > moment]
    entered = [line["step"] for line in own if line["what"] == "enter"]
    return any(line["what"] == "end" and line["step"] <= step + 1 for line in own for step in entered[:1])


def train(job: Job) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(job, Path(folder) / "job")
    problem = "" if job.engine == "stock" else judge(job, outcome)
    if outcome.exit_code != 0 or problem:
        raise SystemExit(f"a run failed: {problem or outcome.exit_code}\n{outcome.output[-4000:]}")
    return outcome


if __name__ == "__main__":
    main()
