"""Workloads of Pollux's artifact on one cluster under several policies, in virtual time.

    python benchmarks/cluster.py DATA OUT [--workloads 1,2,3,4,5,6] [--policies ranked,tiresias] [--costs equal,own]

DATA is a folder with ``workloads/`` and ``profiles/`` of the artifact. Each play appends its jobs to OUT/jobs.csv and
its sums to OUT/plays.csv; what is there already is not played again. At the end a table: known and blind apart, equal
and own costs apart, beside what the artifact published.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

from edl_hvd.simulator.cluster.jobs import Models
from edl_hvd.simulator.cluster.play import EQUAL_COSTS, OWN_COSTS, Played, play
from edl_hvd.simulator.cluster.policies.by_name import KNOWS, POLICIES
from edl_hvd.simulator.cluster.workload import read_workload

SETTINGS = {"equal": EQUAL_COSTS, "own": OWN_COSTS}
# Pollux's own results, workloads 1 to 6: mean and 99th percentile of completion times, and makespan, in seconds
# (simulator/results-jobload/pollux-1.0 of its artifact).
POLLUX = {1: (2088.76875, 41_818, 64_849), 2: (3322.94375, 49_042, 56_644), 3: (2188.49375, 14_635, 36_806),
          4: (2720.98125, 53_032, 64_694), 5: (2673.7, 53_515, 63_372), 6: (2446.13125, 38_771, 58_642)}  # fmt: skip
PLAYS = ("workload", "costs", "policy", "average_s", "p99_s", "makespan_s", "waited_s", "changes", "decisions", "cpu_s")
JOBS = ("workload", "costs", "policy", "job", "submitted_s", "waited_s", "completion_s", "changes", "gpu_s")


def append(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(header)
        writer.writerows(rows)


def done(path: Path) -> set[tuple[str, ...]]:
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["workload"], row["costs"], row["policy"]) for row in csv.DictReader(file)}


def record(out: Path, number: int, costs: str, played: Played, cpu_s: float) -> None:
    key = (number, costs, played.policy)
    append(out / "jobs.csv", JOBS, [
        (*key, job.name, job.submitted_s, job.waited_s, job.completion_s, job.changes, round(job.gpu_s))
        for job in played.jobs
    ])  # fmt: skip
    append(out / "plays.csv", PLAYS, [(
        *key, played.average_s, played.p99_s, played.makespan_s, round(played.waited_s, 1), round(played.changes, 2),
        played.decisions, round(cpu_s, 1),
    )])  # fmt: skip


def table(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    print("| costs | policy | is told | workloads | mean of averages, s | to Pollux | p99 | makespan | wait, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for costs, policy in sorted({(row["costs"], row["policy"]) for row in rows}):
        own = [row for row in rows if (row["costs"], row["policy"]) == (costs, policy)]
        numbers = sorted(int(row["workload"]) for row in own)
        sums = [sum(float(row[of]) for row in own) for of in ("average_s", "p99_s", "makespan_s")]
        published = [sum(POLLUX[number][of] for number in numbers) for of in range(3)]
        ratios = [f"{ours / theirs:.3f}" for ours, theirs in zip(sums, published, strict=True)]
        waited_s = sum(float(row["waited_s"]) for row in own) / len(own)
        print(f"| {costs} | {policy} | {KNOWS[policy]} | {','.join(map(str, numbers))} | {sums[0] / len(own):.1f} | "
              f"{' | '.join(ratios)} | {waited_s:.0f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", default="1,2,3,4,5,6")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--costs", default="equal,own")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for number in map(int, given.workloads.split(",")):
        workload = read_workload(given.data / "workloads" / f"workload-{number}.csv")
        models: Models = {}
        for costs in given.costs.split(","):
            for policy in given.policies.split(","):
                if (str(number), costs, policy) in done(given.out / "plays.csv"):
                    continue
                begun_s = time.process_time()
                played = play(workload, POLICIES[policy](), SETTINGS[costs], models=models)
                record(given.out, number, costs, played, time.process_time() - begun_s)
                print(f"workload {number}, {costs} costs, {policy}: {played.average_s:.1f} s", flush=True)
    table(given.out / "plays.csv")


if __name__ == "__main__":
    main()
