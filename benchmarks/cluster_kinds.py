"""Workloads on three kinds of GPUs in Sia's own simulator: its policies, and the planner in their place.

    python benchmarks/cluster_kinds.py ARTIFACT OUT [--workloads 1,2,...] [--policies gavel,sia,ranked-blind,ranked]

ARTIFACT is a copy of siasosp23/artifacts (Sia, SOSP 2023), which has the simulator, profiles of the applications on
six kinds of GPUs, and the workloads "saturn": 160 jobs each for 24 T4, 24 RTX 2080 Ti and 16 A100. Jobs, their models,
costs of a restart (25 to 250 s by application) and rounds are its own; ``gavel`` and ``sia`` are its policies, with the
settings of its README. The planner gets what ``sia`` gets: the goodput that a job's model expects of each kind, which
for a kind on which the job has not run is that of another one times the ratio of their speeds with one GPU; no job may
have more than twice the GPUs that it has had. ``ranked`` is told the rest of the work besides.

It runs with the artifact's packages: "numpy<2" "pandas<2" "scipy<1.12" autograd cvxpy cylp ecos psutil rich.
Each play appends its row to OUT/kinds.csv; what is there already is not played again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edl_hvd.hosts import HostSlots
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Curve, JobAsk, PlanRules, Room

POLICIES = ("gavel", "sia", "ranked-blind", "ranked")
PERIOD_S = {"gavel": 360}  # of its README; 60 for the others
KEY = ("workload", "policy")
ROW = (*KEY, "jobs", "average_h", "p99_h", "makespan_h", "restarts", "gpu_h", "decision_ms", "wall_s")

Given = dict[str, tuple[str, list[int]]]
"""For each job its kind of GPUs, and the number of a host of this kind for each of its GPUs."""


@dataclass(frozen=True)
class KindJob:
    """A job as a round begins.

    Attributes:
        curves: Goodput over GPUs, for each kind.
        submitted_s: Moment of its submission.
        changed_s: Moment of its last change.
        restart_s: Seconds that a change costs it.
        left: Rest of its work; ``None``: not told.
    """

    curves: tuple[Curve, ...]
    submitted_s: float
    changed_s: float
    restart_s: float
    left: float | None = None


def decide(jobs: Mapping[str, KindJob], hosts: Mapping[str, Sequence[int]], holds: Given, now_s: float) -> Given:
    """What the planner gives each job that has any GPUs from now on.

    Args:
        jobs: The jobs that have come and not ended.
        hosts: GPUs of each host, by kind.
        holds: What the jobs have.
        now_s: The moment.
    """
    rooms = [
        Room(f"{kind}.{number}", gpus, kind=kind) for kind, each in hosts.items() for number, gpus in enumerate(each)
    ]
    asks = []
    for name, job in jobs.items():
        kind, gpus = holds.get(name, ("", []))
        held = tuple(HostSlots(f"{kind}.{number}", count) for number, count in sorted(Counter(gpus).items()))
        most = max(len(gpus), *(curve.sizes[-1] for curve in job.curves))
        asks.append(
            JobAsk(
                name, most=most, curves=job.curves, left=job.left, asked_s=job.submitted_s, changed_s=job.changed_s,
                holds=held, change_s=job.restart_s, start_s=job.restart_s,
            )
        )  # fmt: skip
    found: Given = {}
    for share in plan(rooms, [], asks, PlanRules(), now_s).shares:
        places = [entry.host.rpartition(".") for entry in share.hosts for _ in range(entry.slots)]
        found[share.job] = places[0][0], [int(number) for _, _, number in places]
    return found


def planner_policy(artifact: Any, is_told: bool) -> Any:
    """The planner as a policy of the artifact.

    Args:
        artifact: Its module ``sia``.
        is_told: Whether the planner knows the rest of the work.
    """

    class Planner(artifact.SiaPolicy):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(project_throughputs=True, share_max_replicas=True)
            self.cluster: Any = None
            self.changed_s: dict[str, float] = {}
            self.decide_s, self.decisions = 0.0, 0

        def _curves(self, job: Any) -> tuple[Curve, ...]:
            most = max(job.max_replicas.values())
            found = []
            for kind in self.cluster_ordering:
                nodes, gpus = self.configs[kind]
                fitting = gpus <= most
                goodput = self._compute_goodputs_v2(job, kind, nodes[fitting], gpus[fitting])
                # Before the first step, the speed with one GPU is all that is known.
                values = list(goodput) if hasattr(goodput, "__len__") else [float(goodput) * n for n in gpus[fitting]]
                pairs = [(int(n), float(v)) for n, v in zip(gpus[fitting], values, strict=True) if v > 0]
                if pairs:
                    found.append(Curve(tuple(n for n, _ in pairs), tuple(v for _, v in pairs), kind))
            return tuple(found)

        def optimize(self, jobs: Any, nodes: Any, holds: Given) -> Given:
            now_s = float(self.cluster.current_time)
            seen = {
                name: KindJob(
                    self._curves(job), float(job.creation_timestamp), self.changed_s.get(name, float("-inf")),
                    float(artifact.get_restart_penalty(name)), self._left(name) if is_told else None,
                )
                for name, job in jobs.items()
            }  # fmt: skip
            hosts = {kind: [node.resources["nvidia.com/gpu"] for node in each.values()] for kind, each in nodes.items()}
            begun_s = time.process_time()
            given = decide(seen, hosts, holds, now_s)
            self.decide_s += time.process_time() - begun_s
            self.decisions += 1
            self.changed_s.update({name: now_s for name, one in given.items() if holds.get(name) != one})
            return given

        def _left(self, name: str) -> float:
            job = next(job for job in self.cluster.jobs if job.name == name)
            app = job.reference_app
            return float(max(0.0, app.get_progress(app.max_epochs) - job.progress) * app.init_batch_size)

    return Planner()


def play(artifact: Path, workload: int, policy: str) -> dict[str, object]:
    """One workload under one policy, to its end; its row."""
    sys.path.insert(0, str(artifact))
    os.chdir(artifact)
    names = ("cluster", "gavel", "pandas", "sia", "simulator_config")
    warnings.simplefilter("ignore", FutureWarning)  # pandas says it of each append
    clusters, gavel, pandas, sia, config = map(import_module, names)
    config.sia_solver_verbose = False
    hosts = config.cluster_nnodes
    gpus = {kind: config.cluster_ngpus_per_node[kind] for kind in hosts}
    if policy == "gavel":
        chosen = gavel.GavelPolicy(PERIOD_S[policy], policy=config.gavel_default_policy)
    elif policy == "sia":
        chosen = sia.SiaPolicy(
            p_fairness=-0.5, lambda_a=0.01, lambda_n=1.1, project_throughputs=True, share_max_replicas=True
        )
    else:
        chosen = planner_policy(sia, is_told=policy == "ranked")
    chosen.populate_valid_configs(hosts, gpus, config.cluster_max_physical_nnodes)
    rows = pandas.read_csv(f"workloads/saturn/workload-{workload}.csv")
    made = clusters.Cluster(rows, chosen, hosts, gpus, max_physical_nodes=config.cluster_max_physical_nnodes)
    chosen.cluster = made
    if policy == "gavel":
        made.disable_bsz_tuning()
    begun_s = time.monotonic()
    while not made.all_complete():
        made.step(PERIOD_S.get(policy, 60))
        del made.logs[:-1]
    took = sorted(job.completion_time - job.submission_time for job in made.jobs)
    decisions = getattr(chosen, "decisions", 0)
    return {
        "workload": workload, "policy": policy, "jobs": len(took), "average_h": sum(took) / len(took) / 3600,
        "p99_h": round(took[int(0.99 * len(took))] / 3600, 3),
        "makespan_h": max(job.completion_time for job in made.jobs) / 3600,
        "restarts": round(sum(job.num_restarts for job in made.jobs) / len(took), 2),
        "gpu_h": round(sum(job.attained_service for job in made.jobs) / 3600, 1),
        "decision_ms": round(1000 * chosen.decide_s / decisions, 1) if decisions else "",
        "wall_s": round(time.monotonic() - begun_s),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", default="1,2,3,4,5,6,7,8,9,10")
    parser.add_argument("--policies", default=",".join(POLICIES))
    given = parser.parse_args()
    simulator = (given.artifact / "sia-simulator").resolve()
    if not (simulator / "sia.py").is_file():
        parser.error(f"{simulator}/sia.py is not there; expected a copy of siasosp23/artifacts")
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out.resolve() / "kinds.csv"
    known: set[tuple[str, ...]] = set()
    if table.exists():
        with table.open(newline="") as file:
            known = {tuple(row[name] for name in KEY) for row in csv.DictReader(file)}
    for policy in given.policies.split(","):
        for workload in given.workloads.split(","):
            if (workload, policy) in known:
                continue
            with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):  # the simulator says a good deal
                row = play(simulator, int(workload), policy)
            with table.open("a", newline="") as file:
                writer = csv.DictWriter(file, ROW, lineterminator="\n")
                if not file.tell():
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
