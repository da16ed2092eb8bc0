"""A workload of Pollux's artifact with another load, period or cost of a change, under several policies.

    python benchmarks/cluster_sweeps.py DATA OUT [--workloads 6] [--policies ranked,tiresias] [--picture FILE.png]

DATA is a folder with ``workloads/`` and ``profiles/`` of the artifact. One of three is varied at a time, from the
artifact's costs: load 1, a decision per 60 s, 30 s without progress per change. Load 2 is the same jobs, submitted in
half the time. A start costs 30 s, and as much as a change where that costs more. Each play appends its row to
OUT/sweeps.csv; what is there already is not played again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from result_rows import add_row, rows_of

from edl_hvd.simulator.cluster.jobs import Models, ResizeCost
from edl_hvd.simulator.cluster.play import EQUAL_COSTS, Setting, play
from edl_hvd.simulator.cluster.policies.by_name import POLICIES
from edl_hvd.simulator.cluster.workload import Workload, read_workload

LOADS = "0.5,1,1.5,2"
PERIODS = "30,60,120,240,480"
COSTS = "0.3,1,5,30,120"
ROW = ("workload", "varied", "value", "policy", "average_s", "p99_s", "makespan_s", "waited_s", "changes", "decisions",
       "cpu_s")  # fmt: skip
TITLES = {"load": "load", "period": "seconds between two decisions", "cost": "seconds without progress per change"}


def variants(given: argparse.Namespace) -> Iterator[tuple[str, float, float, Setting]]:
    """What is varied, its value, the load and the setting."""
    for load in map(float, given.loads.split(",")):
        yield "load", load, load, EQUAL_COSTS
    for period_s in map(float, given.periods.split(",")):
        yield "period", period_s, 1.0, replace(EQUAL_COSTS, period_s=period_s)
    for change_s in map(float, given.costs.split(",")):
        yield "cost", change_s, 1.0, replace(EQUAL_COSTS, cost=ResizeCost(change_s, max(30.0, change_s)))


def compressed(workload: Workload, load: float) -> Workload:
    """The same jobs, submitted in 1 / load of the time."""
    return replace(workload, jobs=tuple(replace(job, time_s=int(job.time_s / load)) for job in workload.jobs))


def mean_h(rows: list[dict[str, str]], varied: str, value: str, policy: str) -> float | None:
    """Mean over the workloads of the mean completion time."""
    key = (varied, value, policy)
    found = [float(row["average_s"]) for row in rows if (row["varied"], row["value"], row["policy"]) == key]
    return sum(found) / len(found) / 3600 if found else None


def table(rows: list[dict[str, str]]) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    print("mean completion time, h")
    print(f"| varied | value | {' | '.join(policies)} |")
    print(f"|---|---|{'---|' * len(policies)}")
    for varied, value in dict.fromkeys((row["varied"], row["value"]) for row in rows):
        means = [mean_h(rows, varied, value, policy) for policy in policies]
        print(f"| {varied} | {value} | {' | '.join('-' if mean is None else f'{mean:.3f}' for mean in means)} |")


def draw(rows: list[dict[str, str]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (varied, title) in zip(panels, TITLES.items(), strict=True):
        values = sorted({row["value"] for row in rows if row["varied"] == varied}, key=float)
        for policy in dict.fromkeys(row["policy"] for row in rows):
            means = [mean_h(rows, varied, value, policy) for value in values]
            axes.plot([float(value) for value in values], means, marker="o", markersize=3, label=policy)
        if varied != "load":
            axes.set_xscale("log")
        axes.set_xticks([float(value) for value in values], values)
        axes.minorticks_off()
        axes.set_xlabel(title)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean completion time, h")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", default="6")
    parser.add_argument("--policies", default="ranked,ranked-blind,max-min,afs-l,tiresias")
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--periods", default=PERIODS)
    parser.add_argument("--costs", default=COSTS)
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "sweeps.csv"
    for number in map(int, given.workloads.split(",")):
        workload = read_workload(given.data / "workloads" / f"workload-{number}.csv")
        models: Models = {}
        played: dict[tuple[str, float, Setting], tuple[object, ...]] = {}
        for varied, value, load, setting in variants(given):
            for policy in given.policies.split(","):
                done = rows_of(path)
                if any((row["workload"], row["varied"], float(row["value"]), row["policy"])
                       == (str(number), varied, value, policy) for row in done):  # fmt: skip
                    continue
                if (policy, load, setting) not in played:
                    begun_s = time.process_time()
                    result = play(compressed(workload, load), POLICIES[policy](), setting, models=models)
                    played[policy, load, setting] = (
                        round(result.average_s, 1), result.p99_s, result.makespan_s, round(result.waited_s, 1),
                        round(result.changes, 2), result.decisions, round(time.process_time() - begun_s, 1),
                    )  # fmt: skip
                row = (number, varied, f"{value:g}", policy, *played[policy, load, setting])
                add_row(path, ROW, row)
    table(rows_of(path))
    if given.picture:
        draw(rows_of(path), given.picture)


if __name__ == "__main__":
    main()
