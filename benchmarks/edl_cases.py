"""EDL's two experiments in virtual time, with the operator's own turns; and what EDL's raw rows say, read again.

    python benchmarks/edl_cases.py OUT [--edl FOLDER] [--cases services,jobs] [--leave 2,10,30] [--told blind,known]

Nodes, pods, the scheduler and kubelets are a model; what is decided about jobs is
:func:`edl_hvd.kubernetes.turn.decide` itself, once per virtual second.
133 nodes have 2,346 cores together, 17.64 each; a trainer takes 5, a pod of Nginx 3.
Each node has a pod of the system besides, of 0.372 cores: EDL counts all pods that run, and its rows of the second case
begin with 53.26 % where 400 pods of Nginx are 51.15 %.

``services``: 6 jobs of 2 to 60 trainers; Nginx has 400 pods, then 300, 200, 100, 200, 300 and 400, 90 s each.
``jobs``: 20 jobs of 2 to 60 trainers, submitted 10 s apart, each with the work of 60 trainers for 316 s.

``blind``: jobs say nothing of their work. ``known``: each says, once it has trained for 60 s, how its goodput grows
with its trainers, what a change costs and, where it has an end, what is left of its work; all of it is true.

A pod starts for 5 s and leaves for ``--leave`` seconds. OUT/seconds.csv has a row per virtual second, OUT/plays.csv one
per play.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edl_hvd.job_report import JobReport
from edl_hvd.kubernetes.parsing import read_job, requested
from edl_hvd.kubernetes.snapshot import (
    EXTRA_CLASS,
    FLOOR_CLASS,
    LAUNCHER,
    NODE_ANNOTATION,
    ROLE_LABEL,
    TIER_LABEL,
    WORKER,
    ClusterSnapshot,
    SeenNode,
    SeenPod,
)
from edl_hvd.kubernetes.turn import CreatePod, DeletePod, WriteStatus, decide

NODES, NODE_CPU = 133, 17_640
TRAINER_CPU, SERVICE_CPU, SYSTEM_CPU = 5_000, 3_000, 372
SYSTEM_PRIORITY = 2_000_001_000  # of system-node-critical
LEAST, MOST = 2, 60
START_S, SERVICE_LEAVES_S = 5, 1
STEPS, STEP_S = (400, 300, 200, 100, 200, 300, 400), 90
WORK = 60 * 316.0
# Trainer-seconds: with these, 20 jobs on 60 trainers each wait 308 s in the mean, as in EDL's rounds of that kind.
ARRIVAL_S = 10
PRIORITIES = {FLOOR_CLASS: 0, EXTRA_CLASS: -10}
EPOCH_S = 1_800_000_000
SERVICES = "web"  # their namespace
MEASURES_S, CHANGE_S = 60, 0.3
# Seconds of training after which a job that says something says it, and what it says that another size costs.
SECONDS = (
    "case", "leave_s", "placing", "told", "second", "services", "services_running", "trainers", "waiting_jobs",
    "utilisation", "jain", "trainers_by_job",
)  # fmt: skip
PLAYS = (
    "case", "leave_s", "placing", "told", "pending_s", "utilisation", "jain", "services_whole_s", "below_least",
    "makespan_s", "completion_s", "longest_s", "pods_started", "cpu_s",
)  # fmt: skip


@dataclass
class Pod:
    """A pod of the model."""

    seen: SeenPod
    cpu: int
    only_on: str = ""
    bound_s: int | None = None
    leaves_s: int | None = None


@dataclass
class Job:
    """A TrainingJob of the model."""

    item: dict[str, Any]
    submitted_s: int
    left: float
    first_s: int | None = None
    ended_s: int | None = None

    @property
    def uid(self) -> str:
        return str(self.item["metadata"]["uid"])


def training_job(name: str, now_s: int, work: float) -> Job:
    container = {
        "name": "main", "image": "i", "command": ["python", "t.py"],
        "resources": {"requests": {"cpu": f"{TRAINER_CPU}m"}},
    }  # fmt: skip
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(EPOCH_S + now_s))
    meta = {"name": name, "namespace": "n", "uid": name, "generation": 1, "resourceVersion": "1",
            "creationTimestamp": created}  # fmt: skip
    spec = {"workers": {"min": LEAST, "max": MOST, "template": {"spec": {"containers": [container]}}}}
    return Job({"metadata": meta, "spec": spec}, now_s, work)


@dataclass
class Cluster:
    """Nodes and pods; the scheduler and the kubelets in virtual time."""

    leave_s: int
    placing: str
    is_told: bool = False
    nodes: tuple[SeenNode, ...] = tuple(SeenNode(f"n{number:03d}", {"cpu": NODE_CPU}, True) for number in range(NODES))
    pods: dict[str, Pod] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=lambda: {f"n{number:03d}": NODE_CPU for number in range(NODES)})
    nominated: dict[str, int] = field(default_factory=dict)
    now_s: int = 0
    born: int = 0

    def __post_init__(self) -> None:
        for node in self.nodes:
            name = f"system-{node.name}"
            seen = SeenPod("kube-system", name, name, node.name, is_bound=True, phase="Running",
                           requests={"cpu": SYSTEM_CPU}, priority=SYSTEM_PRIORITY)  # fmt: skip
            self.pods[name] = Pod(seen, SYSTEM_CPU, bound_s=0)
            self.free[node.name] -= SYSTEM_CPU

    def add(self, pod: SeenPod, cpu: int, only_on: str = "") -> None:
        self.pods[pod.name] = Pod(pod, cpu, only_on)

    def remove(self, pod: Pod) -> None:
        del self.pods[pod.seen.name]
        if pod.bound_s is not None:
            self.free[pod.seen.node] += pod.cpu
        if pod.seen.nominated:
            self.nominated[pod.seen.nominated] -= pod.cpu

    def leave(self, pod: Pod) -> None:
        if pod.leaves_s is None:
            pod.leaves_s = self.now_s + (self.leave_s if pod.seen.job else SERVICE_LEAVES_S)
            pod.seen = replace(pod.seen, is_deleting=True)
            if pod.bound_s is None:
                self.remove(pod)

    def kubelets(self) -> None:
        for pod in list(self.pods.values()):
            if pod.leaves_s is not None and self.now_s >= pod.leaves_s:
                self.remove(pod)
            elif pod.bound_s is not None and pod.seen.phase == "Pending" and self.now_s >= pod.bound_s + START_S:
                pod.seen = replace(pod.seen, phase="Running")

    def schedule(self) -> None:
        """Pods by priority to a node where they fit, the emptiest or the fullest; else the least victims leave one."""
        waiting = [pod for pod in self.pods.values() if pod.bound_s is None and pod.leaves_s is None]
        for pod in sorted(waiting, key=lambda pod: (-pod.seen.priority, pod.seen.created_s, pod.seen.name)):
            if not self._bind(pod) and not pod.seen.nominated and pod.seen.priority >= 0:
                self._preempt(pod)

    def _bind(self, pod: Pod) -> bool:
        candidates = [pod.only_on] if pod.only_on else [pod.seen.nominated] if pod.seen.nominated else list(self.free)
        own = pod.cpu if pod.seen.nominated else 0
        rooms = {name: self.free[name] - self.nominated.get(name, 0) + own for name in candidates}
        fitting = [name for name in candidates if rooms[name] >= pod.cpu]
        node = (min if self.placing == "packed" else max)(fitting, key=rooms.__getitem__, default="")
        if not node:
            if pod.seen.unschedulable_s is None:
                pod.seen = replace(pod.seen, unschedulable_s=float(EPOCH_S + self.now_s))
            return False
        if pod.seen.nominated:
            self.nominated[node] -= pod.cpu
        self.free[node] -= pod.cpu
        pod.bound_s = self.now_s
        pod.seen = replace(pod.seen, node=node, is_bound=True, nominated="", unschedulable_s=None)
        return True

    def _preempt(self, pod: Pod) -> None:
        there: dict[str, list[Pod]] = {}
        for one in self.pods.values():
            if one.bound_s is not None and one.leaves_s is None and one.seen.priority < pod.seen.priority:
                there.setdefault(one.seen.node, []).append(one)
        leaving: dict[str, int] = {}
        for one in self.pods.values():
            if one.bound_s is not None and one.leaves_s is not None:
                leaving[one.seen.node] = leaving.get(one.seen.node, 0) + one.cpu
        best: tuple[int, str, list[Pod]] | None = None
        for node in [pod.only_on] if pod.only_on else sorted(self.free):
            room = self.free[node] + leaving.get(node, 0) - self.nominated.get(node, 0)
            victims: list[Pod] = []
            for one in sorted(there.get(node, []), key=lambda one: (one.seen.priority, -one.seen.created_s)):
                if room >= pod.cpu:
                    break
                victims.append(one)
                room += one.cpu
            if room >= pod.cpu and (best is None or (len(victims), node) < best[:2]):
                best = (len(victims), node, victims)
        if best is None:
            return
        _, node, victims = best
        for one in victims:
            self.leave(one)
        self.nominated[node] = self.nominated.get(node, 0) + pod.cpu
        pod.seen = replace(pod.seen, nominated=node)

    def operate(self) -> None:
        """One turn of the operator."""
        jobs = tuple(read_job(job.item) for job in self.jobs.values() if job.ended_s is None)
        pods = tuple(pod.seen for pod in self.pods.values())
        seen = ClusterSnapshot(jobs, self.nodes, pods, PRIORITIES, self.reports())
        for action in decide(seen, float(EPOCH_S + self.now_s)):
            if isinstance(action, WriteStatus):
                self.jobs[action.job.name].item["status"] = dict(action.status)
            elif isinstance(action, DeletePod):
                self.leave(self.pods[action.pod.name])
            elif action.manifest["metadata"]["name"] not in self.pods:
                self._create(action)

    def reports(self) -> dict[str, JobReport]:
        """What the jobs say."""
        sizes = tuple(range(1, MOST + 1))
        return {
            job.uid: JobReport(
                "training", self.running(job), self.now_s - job.first_s, sizes=sizes, goodput=tuple(map(float, sizes)),
                left=None if math.isinf(job.left) else max(0.0, job.left), change_s=CHANGE_S,
            )
            for job in self.jobs.values()
            if self.is_told and job.ended_s is None and job.first_s is not None
            and self.now_s - job.first_s >= MEASURES_S and self.has_launcher(job)
        }  # fmt: skip

    def _create(self, action: CreatePod) -> None:
        meta, spec = action.manifest["metadata"], action.manifest["spec"]
        requests = requested(spec)
        node = meta["annotations"].get(NODE_ANNOTATION, "")
        self.born += 1
        pod = SeenPod(
            "n", meta["name"], f"pod-{self.born}", node, created_s=float(EPOCH_S + self.now_s), requests=requests,
            priority=PRIORITIES[spec["priorityClassName"]], job=action.job.uid, role=meta["labels"][ROLE_LABEL],
            tier=meta["labels"].get(TIER_LABEL, ""),
        )  # fmt: skip
        self.add(pod, requests["cpu"], node)

    def running(self, job: Job) -> int:
        return sum(
            pod.seen.job == job.uid and pod.seen.role == WORKER and pod.seen.phase == "Running"
            and pod.leaves_s is None for pod in self.pods.values()
        )  # fmt: skip

    def has_launcher(self, job: Job) -> bool:
        return any(
            pod.seen.job == job.uid and pod.seen.role == LAUNCHER and pod.seen.phase == "Running"
            for pod in self.pods.values()
        )

    def services(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.seen.namespace == SERVICES and pod.leaves_s is None]

    def scale_services(self, count: int) -> None:
        there = self.services()
        for number in range(count - len(there)):
            self.born += 1
            name = f"nginx-{self.born}-{number}"
            self.add(
                SeenPod(SERVICES, name, name, requests={"cpu": SERVICE_CPU}, created_s=float(EPOCH_S + self.now_s)),
                SERVICE_CPU,
            )
        # As Kubernetes chooses: waiting ones first, then the newest.
        there.sort(key=lambda pod: (pod.seen.phase == "Running", -pod.seen.created_s, pod.seen.name))
        for pod in there[: max(0, len(there) - count)]:
            self.leave(pod)

    def utilisation(self) -> float:
        used = sum(pod.cpu for pod in self.pods.values() if pod.seen.phase == "Running")
        return used / (NODES * NODE_CPU)


def jain(numbers: list[int]) -> float:
    """1 for equal shares, 1/n if one has all."""
    return sum(numbers) ** 2 / (len(numbers) * sum(number**2 for number in numbers)) if any(numbers) else 1.0


@dataclass
class Account:
    """What is kept of a play."""

    rows: list[tuple[object, ...]] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)
    jain: list[float] = field(default_factory=list)
    whole_s: list[int] = field(default_factory=list)
    below: int = 0


def play(
    case: str, leave_s: int, placing: str, told: str, tell: Callable[[str], None]
) -> tuple[Account, tuple[object, ...]]:
    """One play: its rows, and its sums."""
    cluster, account, begun_s = Cluster(leave_s, placing, told == "known"), Account(), time.process_time()
    count = 6 if case == "services" else 20
    if case == "services":
        cluster.scale_services(STEPS[0])
        for _ in range(START_S + 2):
            cluster.schedule()
            cluster.now_s += 1
            cluster.kubelets()
        cluster.now_s = 0
    wanted, stepped_s, is_whole, had_least = STEPS[0] if case == "services" else 0, 0, True, set()
    while True:
        now_s = cluster.now_s
        if case == "services" and now_s % STEP_S == 0 and now_s < len(STEPS) * STEP_S:
            target = STEPS[now_s // STEP_S]
            if target > wanted:
                stepped_s, is_whole = now_s, False
            wanted = target
            cluster.scale_services(wanted)
        number = len(cluster.jobs)
        if number < count and (case == "services" or now_s >= number * ARRIVAL_S):
            for name in range(number, count if case == "services" else number + 1):
                job = training_job(f"job-{name:02d}", now_s, float("inf") if case == "services" else WORK)
                cluster.jobs[job.uid] = job
        cluster.kubelets()
        cluster.schedule()
        cluster.operate()
        cluster.schedule()
        alive = [job for job in cluster.jobs.values() if job.ended_s is None]
        shares = {job.uid: cluster.running(job) for job in alive}
        for job in alive:
            if not cluster.has_launcher(job) or shares[job.uid] < (1 if job.first_s is not None else LEAST):
                continue
            if job.first_s is None:
                job.first_s = now_s
            job.left -= shares[job.uid]
            if job.left <= 0:
                job.ended_s = now_s
                for pod in [pod for pod in cluster.pods.values() if pod.seen.job == job.uid]:
                    cluster.leave(pod)
        had_least |= {uid for uid, has in shares.items() if has >= LEAST}
        account.below += sum(uid in had_least and has < LEAST for uid, has in shares.items())
        running = sum(pod.seen.phase == "Running" for pod in cluster.services())
        if not is_whole and running >= wanted:
            account.whole_s.append(now_s - stepped_s)
            is_whole = True
        trained = [has for job, has in ((job, shares[job.uid]) for job in alive) if job.first_s is not None]
        account.utilisation.append(cluster.utilisation())
        account.jain.append(jain(trained))
        account.rows.append(
            (case, leave_s, placing, told, now_s, wanted, running, sum(shares.values()),
             sum(job.first_s is None for job in alive), round(account.utilisation[-1], 4), round(account.jain[-1], 4),
             " ".join(str(shares.get(job.uid, 0)) for job in cluster.jobs.values()))
        )  # fmt: skip
        cluster.now_s += 1
        if now_s % 60 == 0:
            trainers = sum(shares.values())
            what = f"{case}, {placing}, {told}, leave {leave_s} s"
            tell(f"{what}: second {now_s}, {trainers} trainers, {running} services")
        is_over = cluster.now_s >= len(STEPS) * STEP_S if case == "services" else (
            len(cluster.jobs) == count and all(job.ended_s is not None for job in cluster.jobs.values())
        )  # fmt: skip
        if is_over:
            break
    # The plateau of shares: from the last job's first step, until the first job ends.
    jobs = list(cluster.jobs.values())
    waited = [cluster.now_s - job.submitted_s if job.first_s is None else job.first_s - job.submitted_s for job in jobs]
    first = max(job.first_s or 0 for job in jobs) + 2 * START_S
    last = min((job.ended_s for job in jobs if job.ended_s is not None), default=cluster.now_s)
    plateau = account.jain[first:last] or account.jain[first:]
    if not is_whole:
        account.whole_s.append(-1)
    sums = (
        case, leave_s, placing, told, round(statistics.mean(waited), 2),
        round(100 * statistics.mean(account.utilisation), 2), round(statistics.mean(plateau), 4),
        " ".join(map(str, account.whole_s)), account.below, cluster.now_s,
        *completions([job.ended_s - job.submitted_s for job in jobs if job.ended_s is not None]),
        cluster.born, round(time.process_time() - begun_s, 1),
    )  # fmt: skip
    return account, sums


def completions(found: list[float]) -> tuple[object, object]:
    """Mean and largest time from the submission to the end; empty where jobs have none."""
    return (round(statistics.mean(found), 1), round(max(found), 1)) if found else ("", "")


def write(path: Path, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def print_edl(folder: Path) -> None:
    """What EDL measured: the means over its rounds, and how its services fared."""
    for case, number in (("jobs", 1), ("services", 2)):
        for switch in ("OFF", "ON"):
            rounds = sorted(folder.glob(f"case{number}-mnist-{switch}-*"))
            means = [line.split("|") for one in rounds for line in
                     (one / "mnist-case1-result.csv").read_text().splitlines() if line.startswith("AVG|")]  # fmt: skip
            pending, used = (statistics.mean(float(row[place]) for row in means) for place in (2, 4))
            print(f"EDL, {case}, controller {switch}: {len(means)} rounds, pending {pending:.1f} s, utilisation "
                  f"{used:.2f} %{lags(rounds) if number == 2 else ''}")  # fmt: skip


def lags(rounds: list[Path]) -> str:
    """From the first row in which services grow until they are whole, by step: the medians. Rows are 3 to 4 s apart."""
    found: dict[int, list[float | None]] = {target: [] for target in STEPS[4:]}
    for one in rounds:
        rows = [tuple(map(float, line.split("|"))) for line in (one / "mnist-case2-result.csv").read_text().splitlines()
                if line[:1].isdigit() and line.count("|") == 3 and "," not in line]  # fmt: skip
        lowest = min(range(len(rows)), key=lambda place: (abs(rows[place][1] - min(STEPS)), -place))
        for target, whole_s in found.items():
            before = target - 100
            grows = next((row[0] for row in rows[lowest:] if before < row[1] <= target), None)
            whole = next((row[0] for row in rows[lowest:] if row[1] >= target), None)
            whole_s.append(None if grows is None or whole is None else whole - grows)
    texts = []
    for target, values in found.items():
        known = [value for value in values if value is not None]
        median = f"{statistics.median(known):.0f} s" if known else "never"
        texts.append(f"{target} after {median} ({len(known)} of {len(values)} rounds)")
    return "; services whole: " + ", ".join(texts)


def draw(accounts: list[Account], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1 + 2.2 * len(accounts)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(accounts), 1, squeeze=False)[:, 0]
    for axes, account in zip(panels, accounts, strict=True):
        rows: list[Any] = account.rows
        seconds = [row[4] for row in rows]
        if rows[0][5]:
            axes.plot(seconds, [row[5] for row in rows], color="0.7", drawstyle="steps-post", label="services wanted")
            axes.plot(seconds, [row[6] for row in rows], color="tab:orange", label="services that run")
        axes.plot(seconds, [row[7] for row in rows], color="tab:blue", label="trainers that run")
        used = axes.twinx()
        used.plot(seconds, [100 * row[9] for row in rows], color="tab:green", linewidth=0.8)
        used.set_ylabel("cores used, %", color="tab:green")
        used.set_ylim(0, 100)
        case, leave_s, placing, told = rows[0][:4]
        axes.set_title(f"{case}: pods leave for {leave_s} s, {placing}, {told}", loc="left", fontsize=10)
        axes.set_ylabel("pods")
        axes.legend(loc="lower right", fontsize=8)
    panels[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--edl", type=Path, metavar="FOLDER", help="EDL's raw rows, to be read again")
    parser.add_argument("--cases", default="services,jobs")
    parser.add_argument("--leave", default="2,10,30", help="seconds for which a trainer's pod leaves")
    parser.add_argument("--placing", default="spread,packed",
                        help="how the scheduler chooses nodes: the emptiest, its default, or the fullest")  # fmt: skip
    parser.add_argument("--told", default="blind,known", help="what jobs say of their work: nothing, or all of it")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.edl:
        print_edl(given.edl)
    accounts, sums = [], []
    for case in given.cases.split(","):
        for leave_s in map(int, given.leave.split(",")):
            for placing, told in itertools.product(given.placing.split(","), given.told.split(",")):
                account, row = play(case, leave_s, placing, told, lambda text: print(text, flush=True))
                accounts.append(account)
                sums.append(row)
                print(dict(zip(PLAYS, row, strict=True)), flush=True)
    write(given.out / "seconds.csv", SECONDS, (row for account in accounts for row in account.rows))
    write(given.out / "plays.csv", PLAYS, sums)
    if given.picture:
        draw(accounts, given.picture)


if __name__ == "__main__":
    main()
