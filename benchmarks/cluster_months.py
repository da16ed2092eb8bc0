"""Months of a production cluster under several policies, in virtual time, with the planner itself.

    python benchmarks/cluster_months.py FOLDER OUT [--gpus 576,768,2048] [--laws pollux,0.85,0.6] [--stretch 4,1] [...]

FOLDER holds ``elasticflow/`` (traces of microsoft/elasticflow-traces) and ``pollux/profiles/`` of Pollux's artifact.
The traces say when a job came, how long it ran and on how many GPUs, but not how fast it would have been on others:
that is assumed, by a law of speed over GPUs. A number p is n^p; ``pollux`` draws one of Pollux's six applications for
each job, among those of its GPU-hours. Each play appends its row to OUT/months.csv; what is there already
is not played again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path

from result_rows import add_row, rows_of

from edl_hvd.simulator.cluster.play import EQUAL_COSTS, OWN_COSTS
from edl_hvd.simulator.cluster.policies.by_name import POLICIES
from edl_hvd.simulator.cluster.recorded import RecordedRow, RecordedWorkload, elastic, law_named, read_rows
from edl_hvd.simulator.cluster.recorded_play import RecordedPlay, play_recorded

HOST_GPUS = 8
PERIOD_S = 60.0
COSTS = {"own": OWN_COSTS.cost, "equal": EQUAL_COSTS.cost}
GANGS = ("fifo", "fifo-backfill", "tiresias")
KEY = ("trace", "gpus", "policy", "law", "stretch", "shrink", "costs", "seed")
ROW = (*KEY, "average_h", "median_h", "p99_h", "waited_s", "last_end_d", "changes", "used", "later", "decisions",
       "cpu_s")  # fmt: skip


def account(workload: RecordedWorkload, play: RecordedPlay) -> tuple[object, ...]:
    played = play.played
    durations = {job.name: job.duration_s for job in workload.jobs}
    times = sorted(job.completion_s for job in played.jobs)
    # Jobs that end more than a tenth and a start later after their submission than on the GPUs that they ran on.
    later = sum(job.completion_s > 1.1 * durations[job.name] + 90 for job in played.jobs) / len(times)
    return (
        round(played.average_s / 3600, 3), round(times[len(times) // 2] / 3600, 3), round(played.p99_s / 3600, 1),
        round(played.waited_s), round(played.makespan_s / 86400, 2), round(played.changes, 2), round(play.used, 3),
        round(later, 3), played.decisions,
    )  # fmt: skip


def table(rows: list[dict[str, str]]) -> None:
    fifo = {row["gpus"]: float(row["average_h"]) for row in rows if row["policy"] == "fifo"}
    print("| GPUs | policy | law | most | least | costs | mean completion, h | to FIFO | p99, h | "
          "until first GPUs, s | GPUs used | later than recorded | changes | decisions | processor s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = f"{float(row['average_h']) / fifo[row['gpus']]:.3f}" if row["gpus"] in fifo else "-"
        cells = [
            *(row[name] for name in ("gpus", "policy", "law", "stretch", "shrink", "costs", "average_h")), ratio,
            row["p99_h"], row["waited_s"], f"{float(row['used']):.0%}", f"{float(row['later']):.1%}",
            *(row[name] for name in ("changes", "decisions", "cpu_s")),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Mean completion times by that of FIFO, one panel per number of GPUs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = sorted({int(row["gpus"]) for row in rows})
    figure = Figure(figsize=(11, 1 + 3.4 * len(sizes)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, size in zip(figure.subplots(len(sizes), 1, squeeze=False)[:, 0], sizes, strict=True):
        own = [row for row in rows if int(row["gpus"]) == size]
        fifo = next(float(row["average_h"]) for row in own if row["policy"] == "fifo")
        texts = [
            row["policy"] + ("" if row["policy"] in GANGS else
                             f", {row['law']}, up to {row['stretch']}x" +
                             (f", at least {row['shrink']}x" if float(row["shrink"]) else "") +
                             (", equal costs" if row["costs"] == "equal" else ""))
            for row in own
        ]  # fmt: skip
        ratios = [float(row["average_h"]) / fifo for row in own]
        colours = [
            "0.6" if row["policy"] in GANGS else "tab:cyan" if row["stretch"] == "1" else "tab:blue" for row in own
        ]
        axes.barh(range(len(own)), ratios, color=colours)
        axes.set_yticks(range(len(own)), texts, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0.5, color="tab:red", linewidth=0.8, linestyle="--")
        for place, (ratio, row) in enumerate(zip(ratios, own, strict=True)):
            axes.text(ratio + 0.005, place, f"{row['average_h']} h", va="center", fontsize=8)
        axes.set_title(f"{size} GPUs: mean completion time, by that of FIFO", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, format="png")


def play(rows: list[RecordedRow], folder: Path, key: dict[str, str]) -> tuple[object, ...]:
    slots = int(key["gpus"])
    # Gangs do not look at the law: on the GPUs that they ask for all laws give the recorded duration.
    law = "1" if key["law"] == "-" else key["law"]
    law_of = law_named(law, folder / "pollux" / "profiles", int(key["seed"]))
    workload = elastic(
        key["trace"], rows, law_of, slots, HOST_GPUS, float(key["stretch"]), float(key["shrink"])
    )  # fmt: skip
    setting = replace(
        OWN_COSTS, hosts=slots // HOST_GPUS, host_slots=HOST_GPUS, period_s=PERIOD_S, cost=COSTS[key["costs"]]
    )
    begun_s = time.process_time()
    played = play_recorded(workload, POLICIES[key["policy"]](), setting)
    return (*account(workload, played), round(time.process_time() - begun_s, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trace", default="cluster04")
    parser.add_argument("--first", type=int, help="number of jobs that are played, from the first; all without it")
    parser.add_argument("--gpus", default="576,768,2048")
    parser.add_argument("--policies", default="fifo,fifo-backfill,tiresias,ranked")
    parser.add_argument("--laws", default="pollux,0.85,0.6")
    parser.add_argument("--stretch", default="4,1", help="most GPUs of a job, by those that it asked for")
    parser.add_argument("--shrink", default="0", help="fewest GPUs of a job, by those that it asked for")
    parser.add_argument("--costs", default="own")
    parser.add_argument("--seed", type=int, default=0, help="of the applications that are drawn")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "months.csv"
    rows = read_rows(given.folder / "elasticflow" / f"{given.trace}.csv")[: given.first]
    for gpus, policy, *assumed in itertools.product(
        given.gpus.split(","), given.policies.split(","), given.laws.split(","), given.stretch.split(","),
        given.shrink.split(","), given.costs.split(","),
    ):  # fmt: skip
        values = (given.trace, gpus, policy, *(("-", "1", "0", "own") if policy in GANGS else assumed), str(given.seed))
        key = dict(zip(KEY, values, strict=True))
        done = rows_of(path)
        if any(all(row[name] == key[name] for name in KEY) for row in done):
            continue
        row = (*key.values(), *play(rows, given.folder, key))
        add_row(path, ROW, row)
    table(rows_of(path))
    if given.picture:
        draw(rows_of(path), given.picture)


if __name__ == "__main__":
    main()
