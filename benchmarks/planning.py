"""The planner: how long a decision takes, and whether any of many random clusters breaks a rule.

    python benchmarks/planning.py                    decisions for 1,000 hosts and 500 jobs, 10,000 and 2,000, on one
                                                     kind of hosts and on three
    python benchmarks/planning.py --fleets 200000    random clusters: rules, order of the input, plans carried out
    python benchmarks/planning.py --quiet 10000      ticks in which nothing happens

Times are seconds of processor time of one process, the least of --repeats. A decision from nothing places all jobs; a
quiet one finds that nothing is to be changed; in the third, a hundredth of the jobs has just ended and as many have
come.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from random_clusters import Question, broken_rules, carried_out, question_with_services, random_question, shuffled

from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Curve, JobAsk, Plan, PlanRules, Room

SIZES = ((1_000, 500), (10_000, 2_000))
KINDS: tuple[Mapping[str, float], ...] = ({"": 1.0}, {"a100": 1.0, "rtx": 0.5, "t4": 0.25})
NOW_S = 10_000.0


def large_cluster(hosts: int, jobs: int, kinds: Mapping[str, float]) -> tuple[list[Room], list[JobAsk]]:
    """Hosts of 8 slots, and jobs of up to 256 of them; half of the jobs know their rest.

    Args:
        hosts: Number of hosts.
        jobs: Number of jobs.
        kinds: Speed of each kind of hosts, which some jobs profit from more than others.
    """
    dice, favours = random.Random(0), random.Random(1)
    asks = []
    for number in range(jobs):
        power, most = dice.uniform(0.6, 0.98), dice.choice((8, 32, 128, 256))
        sizes = tuple(size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256) if size <= most)
        favour = favours.uniform(0.0, 1.5)
        curves = tuple(
            Curve(sizes, tuple(100 * speed**favour * size**power for size in sizes), kind)
            for kind, speed in kinds.items()
        )
        left, asked_s = dice.choice((None, dice.uniform(1e3, 1e7))), dice.uniform(0, NOW_S)
        change_s = dice.choice((0.25, 30.0))
        name = f"j{number:05d}"
        asks.append(JobAsk(name, most=most, curves=curves, left=left, asked_s=asked_s, change_s=change_s, start_s=10.0))
    names = list(kinds)
    return [Room(f"h{number:05d}", 8, kind=names[number % len(names)]) for number in range(hosts)], asks


def least_s(rooms: list[Room], asks: list[JobAsk], repeats: int) -> tuple[float, Plan]:
    times = []
    for _ in range(repeats):
        begun_s = time.process_time()
        found = plan(rooms, [], asks, PlanRules(), NOW_S)
        times.append(time.process_time() - begun_s)
    return min(times), found


def time_decisions(repeats: int) -> None:
    print("| hosts x 8 | kinds | jobs | from nothing, ms | quiet, ms | 1 % of the jobs changed, ms | shares changed |")
    print("|---|---|---|---|---|---|---|")
    for (hosts, jobs), kinds in itertools.product(SIZES, KINDS):
        rooms, asks = large_cluster(hosts, jobs, kinds)
        first_s, first = least_s(rooms, asks, repeats)
        held = {share.job: share.hosts for share in first.shares}
        asks = [replace(ask, holds=held.get(ask.job, ())) for ask in asks]
        quiet_s, quiet = least_s(rooms, asks, repeats)
        assert quiet.changes == 0
        gone = set(random.Random(1).sample(range(jobs), jobs // 100))
        new = [replace(asks[number], job=f"n{number:05d}", holds=(), asked_s=NOW_S) for number in sorted(gone)]
        asks = [ask for number, ask in enumerate(asks) if number not in gone] + new
        changed_s, changed = least_s(rooms, asks, repeats)
        times = " | ".join(f"{1e3 * one_s:.0f}" for one_s in (first_s, quiet_s, changed_s))
        print(f"| {hosts:,} | {len(kinds)} | {jobs:,} | {times} | {changed.changes} |")


def faults_of(seed: int) -> list[str]:
    """What is wrong with the plans of one random cluster, without and with services on it."""
    alone, beside = random_question(seed), question_with_services(seed)
    faults = [f"seed {seed}: {wrong}" for wrong in _faults(alone, seed)]
    return faults + [f"seed {seed} with services: {wrong}" for wrong in _faults(beside, seed)]


def _faults(question: Question, seed: int) -> list[str]:
    answer = question.answer()
    wrong = broken_rules(question, answer)
    if shuffled(question, seed).answer() != answer:
        wrong.append("the order of the input changes the plan")
    again = carried_out(question, answer).answer()
    if again.changes or {one.job: one.hosts for one in again.shares} != {one.job: one.hosts for one in answer.shares}:
        wrong.append("the plan of a plan that was carried out changes something")
    return wrong


def try_fleets(count: int, first: int) -> int:
    with Pool(2) as pool:
        found = [
            wrong for faults in pool.imap_unordered(faults_of, range(first, first + count), chunksize=500)
            for wrong in faults
        ]  # fmt: skip
    print(f"{count:,} random clusters from seed {first}: {len(found)} faults")
    print("\n".join(sorted(found)[:20]))
    return len(found)


def try_quiet(ticks: int) -> int:
    """Ticks of a settled cluster, of one second each."""
    for seed in range(1_000):
        question = random_question(seed)
        if len(question.asks) >= 5 and len(question.rooms) >= 4 and question.rules.settle:
            break
    question = replace(question, asks=tuple(replace(ask, changed_s=-math.inf) for ask in question.asks))
    settled = carried_out(question, question.answer())
    changes = sum(replace(settled, now_s=settled.now_s + tick).answer().changes for tick in range(ticks))
    print(f"{ticks:,} quiet ticks: {changes} changes")
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, help="number of random clusters")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--quiet", type=int, help="number of quiet ticks")
    parser.add_argument("--repeats", type=int, default=3, help="of each decision that is timed")
    given = parser.parse_args()
    faults = 0
    if given.fleets:
        faults += try_fleets(given.fleets, given.seed)
    if given.quiet:
        faults += try_quiet(given.quiet)
    if not (given.fleets or given.quiet):
        time_decisions(given.repeats)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
