"""The planner in the place of Sia's policies, on several kinds of GPUs."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from edl_hvd.planning.values import Curve

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: some benchmarks have names of modules that tests import
kinds = import_module("cluster_kinds")

HOSTS = {"slow": [4, 4], "fast": [2]}
JOB = kinds.KindJob(
    (Curve((1, 2, 4), (1.0, 1.9, 3.5), "slow"), Curve((1, 2), (5.0, 9.0), "fast")),
    submitted_s=0.0, changed_s=float("-inf"), restart_s=30.0,
)  # fmt: skip


def test_each_job_is_on_one_kind_and_stays_where_nothing_is_gained() -> None:
    jobs = {f"j{number}": replace(JOB, submitted_s=float(number)) for number in range(4)}
    given = kinds.decide(jobs, HOSTS, {}, now_s=60.0)
    assert given.keys() == jobs.keys()
    for kind, each in HOSTS.items():
        for host, gpus in enumerate(each):
            assert sum(places.count(host) for of, places in given.values() if of == kind) <= gpus
    assert any(kind == "fast" for kind, _ in given.values())
    again = kinds.decide({name: replace(job, changed_s=60.0) for name, job in jobs.items()}, HOSTS, given, now_s=120.0)
    assert again == given


# What the benchmark uses of the artifact, which is no part of this repository.
STAND_IN = {
    "simulator_config.py": """
cluster_nnodes, cluster_ngpus_per_node = {"slow": 2, "fast": 1}, {"slow": 4, "fast": 2}
cluster_max_physical_nnodes, gavel_default_policy = cluster_nnodes, ""
""",
    "sia.py": """
import numpy

def get_restart_penalty(name):
    return 30

class SiaPolicy:
    def __init__(self, **settings):
        self.speeds = {"slow": 1.0, "fast": 5.0}

    def populate_valid_configs(self, hosts, gpus, most):
        self.cluster_ordering = list(hosts)
        self.configs = {kind: (numpy.array([1, 1]), numpy.array([1, 2])) for kind in hosts}

    def _compute_goodputs_v2(self, job, kind, nodes, gpus):
        return self.speeds[kind] * gpus if job.is_known else self.speeds[kind]

    def optimize(self, jobs, nodes, holds):
        return {name: ("slow", [number % 2]) for number, name in enumerate(jobs)}
""",
    "gavel.py": """
from sia import SiaPolicy

class GavelPolicy(SiaPolicy):
    def __init__(self, interval, policy):
        super().__init__()
        assert interval == 360
""",
    "pandas.py": """
import csv

def read_csv(path):
    return list(csv.DictReader(open(path)))
""",
    "cluster.py": """
from types import SimpleNamespace

class Cluster:
    def __init__(self, rows, policy, hosts, gpus, max_physical_nodes):
        self.policy, self.current_time, self.allocations, self.logs = policy, 0, {}, []
        app = SimpleNamespace(max_epochs=1, init_batch_size=2, get_progress=lambda epoch: 3000.0)
        self.jobs = [SimpleNamespace(
            name=row["name"], submission_time=int(row["time"]), completion_time=None, num_restarts=0, progress=0.0,
            attained_service=0, reference_app=app, is_known=False) for row in rows]
        self.nodes = {kind: {n: SimpleNamespace(resources={"nvidia.com/gpu": gpus[kind]}) for n in range(count)}
                      for kind, count in hosts.items()}

    def disable_bsz_tuning(self):
        self.fixed = True

    def all_complete(self):
        return all(job.completion_time for job in self.jobs)

    def step(self, seconds):
        self.current_time += seconds
        for job in self.jobs:
            kind, gpus = self.allocations.get(job.name, ("slow", []))
            job.progress += seconds * len(gpus) * self.policy.speeds[kind]
            job.attained_service += seconds * len(gpus)
            job.is_known = job.is_known or bool(gpus)
            if job.progress >= 3000.0 and not job.completion_time:
                job.completion_time = self.current_time
        alive = {job.name: SimpleNamespace(max_replicas={kind: 1 + job.is_known for kind in self.nodes},
                                           creation_timestamp=job.submission_time, is_known=job.is_known)
                 for job in self.jobs if not job.completion_time and job.submission_time <= self.current_time}
        held = {name: one for name, one in self.allocations.items() if name in alive}
        self.allocations = self.policy.optimize(alive, self.nodes, held) if alive else {}
        self.logs.append(self.current_time)
""",
    "workloads/saturn/workload-1.csv": "name,time\na,0\nb,50\nc,100\n",
}


def test_each_play_adds_its_row_once(tmp_path: Path) -> None:
    """With what stands in for the artifact: three jobs of 3000 s on a slow GPU each."""
    for name, text in STAND_IN.items():
        path = tmp_path / "artifact" / "sia-simulator" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(BENCHMARKS / "cluster_kinds.py"), "artifact", "runs/kinds", "--workloads", "1"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "", "what is there already is not played again"
    with (tmp_path / "runs" / "kinds" / "kinds.csv").open(newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == kinds.POLICIES
    assert {row["jobs"] for row in rows.values()} == {"3"}
    assert float(rows["ranked-blind"]["average_h"]) < float(rows["sia"]["average_h"]), "the fast GPUs are used"


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "cluster_kinds.py"), str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sia.py is not there; expected a copy of siasosp23/artifacts" in done.stderr
