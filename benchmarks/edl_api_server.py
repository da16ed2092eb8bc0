"""EDL's two experiments on a real API server: real scheduler, controller manager, Deployment and operator; puppet pods.

    KUBEBUILDER_ASSETS=FOLDER python benchmarks/edl_api_server.py OUT [--cases services,jobs] [--leave 2] [--short 3]

The cases, and the rows in OUT/seconds.csv and OUT/plays.csv, are those of ``edl_cases.py``.
What a kubelet does is done here: a pod runs START_S seconds after it is bound, and is gone ``--leave`` seconds after it
was asked to go, Nginx's after one. The scheduler and the controller manager may ask for 200 requests per second each,
as on large clusters: by default the controller manager makes 20 pods per second. Nginx is whole when the API server
has told of its last pod that it runs; in OUT/seconds.csv it is seen a second later at most.
``--short N`` divides all times by N, for a try.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kubernetes"))

from cluster import Cluster, free_ports, missing, wait_for
from edl_cases import (
    ARRIVAL_S,
    LEAST,
    MOST,
    NODE_CPU,
    NODES,
    PLAYS,
    SECONDS,
    SERVICE_CPU,
    SERVICE_LEAVES_S,
    START_S,
    STEP_S,
    STEPS,
    SYSTEM_CPU,
    TRAINER_CPU,
    WORK,
    completions,
    jain,
    write,
)

from edl_hvd.errors import EdlHvdError, ObjectExistsError, ObjectMissingError
from edl_hvd.kubernetes.parsing import requested

NAMESPACE = "edl"
BEAT_S = 15.0
REQUESTS_PER_S = 200
COSTS = (
    "case", "leave_s", "pods_created", "pods_deleted", "statuses", "writes", "reads", "writes_per_pod_change",
    "deleted_within_s_p50", "deleted_within_s_p99", "cpu_operator_s", "cpu_control_plane_s", "load",
)  # fmt: skip


@dataclass
class Puppet:
    """A pod as the API server told of it last."""

    path: str
    uid: str
    job: str
    role: str
    cpu: int
    is_bound: bool = False
    phase: str = "Pending"
    is_leaving: bool = False

    @property
    def is_service(self) -> bool:
        return not self.job and f"/namespaces/{NAMESPACE}/" in self.path


@dataclass
class Kubelets:
    """All kubelets: nodes that stay ready, pods that run and leave in time.

    Args:
        cluster: The control plane.
        start_s: Seconds from binding to running.
        leave_s: Seconds that a job's pod takes to leave.
        other_leave_s: The same for other pods.
    """

    cluster: Cluster
    start_s: float
    leave_s: float
    other_leave_s: float
    pods: dict[str, Puppet] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(6))
    ending: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    ran_s: float = 0.0  # when a pod of the service last began to run

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._known: set[str] = set()
        self._turned = threading.Condition()
        self._number = 0
        self._stream: Any = None

    def start(self) -> None:
        made = list(self.pool.map(self._register, range(NODES)))
        assert len(made) == NODES
        for body in (self._watch, self._keep_time):
            threading.Thread(target=body, daemon=True).start()

    def make_system(self) -> None:
        """Let a pod of the system run on each node."""

        def make(number: int) -> None:
            container = {"name": "main", "image": "i", "resources": {"requests": {"cpu": f"{SYSTEM_CPU}m"}}}
            spec = {
                "containers": [container],
                "nodeName": f"n{number:03d}",
                "priorityClassName": "system-node-critical",
            }
            meta = {"name": f"system-n{number:03d}", "namespace": "kube-system"}
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
            self.cluster.api.create("/api/v1/namespaces/kube-system/pods", made)

        list(self.pool.map(make, range(NODES)))
        wait_for("the system's pods", lambda: sum(pod.phase == "Running" for pod in list(self.pods.values())) >= NODES)

    def stop(self) -> None:
        """End at once: an API server waits for a minute for those who still watch."""
        self.ending.set()
        with self._turned:
            self._turned.notify_all()
        if self._stream is not None:
            with suppress(OSError):
                self._stream.fp.raw._sock.shutdown(socket.SHUT_RDWR)

    def _register(self, number: int) -> None:
        name = f"n{number:03d}"
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        with suppress(ObjectExistsError):
            self.cluster.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
        self._beat(name)

    def _beat(self, name: str) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        room = {"cpu": f"{NODE_CPU}m", "memory": "64Gi", "pods": "500"}
        ready = {"type": "Ready", "status": "True", "reason": "Puppet", "message": "", "lastHeartbeatTime": now,
                 "lastTransitionTime": now}  # fmt: skip
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.cluster.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self._after(BEAT_S, lambda: self._beat(name))

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        with self._turned:
            self._number += 1
            heapq.heappush(self._due, (time.monotonic() + seconds, self._number, what))
            self._turned.notify_all()

    def _keep_time(self) -> None:
        while not self.ending.is_set():
            with self._turned:
                wait_s = self._due[0][0] - time.monotonic() if self._due else 1.0
                if wait_s > 0:
                    self._turned.wait(wait_s)
                    continue
                what = heapq.heappop(self._due)[2]
            self.pool.submit(self._try, what)

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except ObjectMissingError:
            pass  # it has gone meanwhile
        except EdlHvdError as error:
            self.failures.append(str(error))
            self._after(1.0, what)

    def _watch(self) -> None:
        context = ssl._create_unverified_context()
        url = f"https://127.0.0.1:{self.cluster.port}/api/v1/pods?watch=true&allowWatchBookmarks=true"
        while not self.ending.is_set():
            request = urllib.request.Request(url, headers={"Authorization": "Bearer admin-token"})
            with suppress(OSError, ValueError, HTTPException):
                self._stream = urllib.request.urlopen(request, context=context)
                with self._stream:
                    for event in map(json.loads, self._stream):
                        if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                            self._see(event["type"], event["object"])
                        elif event["type"] == "ERROR":
                            break

    def _see(self, kind: str, item: dict[str, Any]) -> None:
        meta, spec, labels = item["metadata"], item["spec"], item["metadata"].get("labels") or {}
        uid = meta["uid"]
        if kind == "DELETED":
            self.pods.pop(uid, None)
            return
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        job = labels.get("edl-hvd.dev/job", "")
        pod = self.pods.get(uid)
        if pod is None:
            role = labels.get("edl-hvd.dev/role", "")
            pod = self.pods[uid] = Puppet(path, uid, job, role, requested(spec).get("cpu", 0))
        is_running = pod.phase == "Running"
        pod.is_bound, pod.phase = bool(spec.get("nodeName")), item["status"].get("phase", "Pending")
        if pod.is_service and pod.phase == "Running" and not is_running:
            self.ran_s = time.monotonic()
        if pod.is_bound and f"{uid} runs" not in self._known and not meta.get("deletionTimestamp"):
            self._known.add(f"{uid} runs")
            self._after(self.start_s, lambda: self._run(pod))
        if meta.get("deletionTimestamp") and not pod.is_leaving:
            pod.is_leaving = True
            self._after(self.leave_s if job else self.other_leave_s, lambda: self._remove(pod))

    def _run(self, pod: Puppet) -> None:
        if pod.is_leaving or pod.phase != "Pending":
            return
        ready = [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready", "ContainersReady")]
        self.cluster.api.patch(f"{pod.path}/status", {"status": {"phase": "Running", "conditions": ready}})

    def _remove(self, pod: Puppet) -> None:
        with suppress(ObjectExistsError):  # it has gone, and another one has its name
            self.cluster.api.delete(pod.path, pod.uid, 0)

    def finish(self, pod: Puppet) -> None:
        """Let a launcher end with exit code 0."""
        self._after(0.0, lambda: self._end(pod))

    def _end(self, pod: Puppet) -> None:
        end = {"exitCode": 0, "finishedAt": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        state = {"name": "main", "image": "i", "imageID": "", "restartCount": 0, "ready": False,
                 "state": {"terminated": end}}  # fmt: skip
        self.cluster.api.patch(f"{pod.path}/status", {"status": {"phase": "Succeeded", "containerStatuses": [state]}})


@dataclass
class Job:
    """A TrainingJob of the play."""

    name: str
    submitted_s: float
    left: float
    first_s: float | None = None
    ended_s: float | None = None
    had_least: bool = False


@dataclass
class Play:
    """One play, on a control plane of its own."""

    cluster: Cluster
    kubelets: Kubelets
    case: str
    leave_s: float
    short: float
    jobs: dict[str, Job] = field(default_factory=dict)
    rows: list[tuple[object, ...]] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    below: int = 0

    def scale_services(self, count: int) -> None:
        self.cluster.api.patch(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/nginx", {"spec": {"replicas": count}})

    def make_services(self) -> None:
        container = {"name": "nginx", "image": "nginx", "resources": {"requests": {"cpu": f"{SERVICE_CPU}m"}}}
        labels = {"app": "nginx"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        spec = {"replicas": STEPS[0], "selector": {"matchLabels": labels}, "template": template}
        made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "nginx"}, "spec": spec}
        self.cluster.api.create(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments", made)
        wait_for("Nginx", lambda: self.services() >= STEPS[0])

    def submit(self, number: int, now_s: float) -> None:
        name = f"job-{number:02d}"
        container = {"name": "main", "image": "i", "command": ["python", "t.py"],
                     "resources": {"requests": {"cpu": f"{TRAINER_CPU}m"}}}  # fmt: skip
        workers = {"min": LEAST, "max": MOST, "template": {"spec": {"containers": [container]}}}
        made = {"apiVersion": "edl-hvd.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name},
                "spec": {"workers": workers}}  # fmt: skip
        self.cluster.api.create(f"/apis/edl-hvd.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs", made)
        self.jobs[name] = Job(name, now_s, float("inf") if self.case == "services" else WORK)

    def services(self) -> int:
        pods = list(self.kubelets.pods.values())
        return sum(pod.is_service and pod.phase == "Running" and not pod.is_leaving for pod in pods)

    def run(self, tell: Callable[[str], None]) -> tuple[object, ...]:
        """Play it; the row of its sums."""
        count = 6 if self.case == "services" else 20
        if self.case == "services":
            self.make_services()
        begun_s, wanted, stepped_s, is_whole, before_s = time.monotonic(), 0, 0.0, True, 0.0
        if self.case == "services":
            wanted = STEPS[0]
        step, tick = 0, 0
        while True:
            # Seconds of the experiment.
            now_s = (time.monotonic() - begun_s) * self.short
            if self.case == "services" and now_s >= (step + 1) * STEP_S:
                step += 1
                if step == len(STEPS):
                    break
                if STEPS[step] > wanted:
                    is_whole = False
                wanted, stepped_s = STEPS[step], time.monotonic()
                self.scale_services(wanted)
            while len(self.jobs) < count and (self.case == "services" or now_s >= len(self.jobs) * ARRIVAL_S):
                self.submit(len(self.jobs), now_s)
            pods = list(self.kubelets.pods.values())
            used = sum(pod.cpu for pod in pods if pod.phase == "Running")
            trains = [pod for pod in pods if pod.job and pod.phase == "Running" and not pod.is_leaving]
            shares = Counter(pod.job for pod in trains if pod.role == "worker")
            launchers = {pod.job: pod for pod in trains if pod.role == "launcher"}
            alive = [job for job in self.jobs.values() if job.ended_s is None]
            for job in alive:
                has = shares[job.name]
                self.below += job.had_least and has < LEAST
                job.had_least |= has >= LEAST
                if job.name not in launchers or has < (1 if job.first_s is not None else LEAST):
                    continue
                if job.first_s is None:
                    job.first_s = now_s
                job.left -= has * (now_s - before_s)
                if job.left <= 0:
                    job.ended_s = now_s
                    self.kubelets.finish(launchers[job.name])
            running = self.services()
            if not is_whole and running >= wanted:
                self.whole_s.append(round((self.kubelets.ran_s - stepped_s) * self.short, 1))
                is_whole = True
            trained = [shares[job.name] for job in alive if job.first_s is not None]
            self.rows.append(
                (self.case, self.leave_s, "API server", "blind", round(now_s, 1), wanted, running,
                 sum(shares.values()), sum(job.first_s is None for job in alive), round(used / (NODES * NODE_CPU), 4),
                 round(jain(trained), 4), " ".join(str(shares[name]) for name in self.jobs))
            )  # fmt: skip
            if tick % 30 == 0:
                tell(f"{self.case}: second {now_s:.0f}, {sum(shares.values())} trainers, {running} services, "
                     f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
            if self.case == "jobs" and len(self.jobs) == count and all(j.ended_s is not None for j in alive):
                break
            before_s, tick = now_s, tick + 1
            time.sleep(max(0.0, begun_s + tick / self.short - time.monotonic()))
        if not is_whole:
            self.whole_s.append(-1)
        return self._sums(now_s)

    def _sums(self, end_s: float) -> tuple[object, ...]:
        jobs = list(self.jobs.values())
        waited = [(end_s if job.first_s is None else job.first_s) - job.submitted_s for job in jobs]
        first = max(job.first_s or 0.0 for job in jobs) + 2 * START_S
        last = min((job.ended_s for job in jobs if job.ended_s is not None), default=end_s)
        rows: list[Any] = self.rows
        plateau = [row[10] for row in rows if first <= row[4] < last] or [row[10] for row in rows]
        return (
            self.case, self.leave_s, "API server", "blind", round(statistics.mean(waited), 2),
            round(100 * statistics.mean(row[9] for row in rows), 2), round(statistics.mean(plateau), 4),
            " ".join(map(str, self.whole_s)), self.below, round(end_s),
            *completions([job.ended_s - job.submitted_s for job in jobs if job.ended_s is not None]), 0, 0.0,
        )  # fmt: skip


def cpu_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(port: int) -> dict[str, float]:
    """The operator's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if one[:1] != "#")}


def quantile(numbers: dict[str, float], name: str, share: float) -> float:
    """The upper end of the bucket of a histogram that holds a quantile."""
    buckets = sorted(
        (float(key.partition('le="')[2].partition('"')[0]), value) for key, value in numbers.items()
        if key.startswith(f"{name}_bucket")
    )  # fmt: skip
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, value in buckets if total and value >= share * total), -1.0)


def play(case: str, leave_s: float, short: float) -> tuple[Play, tuple[object, ...], tuple[object, ...]]:
    """One play on a control plane of its own, and what the operator asked for meanwhile."""
    with tempfile.TemporaryDirectory(prefix="edl-") as folder:
        cluster = Cluster(Path(folder))
        kubelets = Kubelets(cluster, START_S / short, leave_s / short, SERVICE_LEAVES_S / short)
        operator: subprocess.Popen[bytes] | None = None
        try:
            cluster.start(REQUESTS_PER_S)
            cluster.install_operator()
            cluster.kubectl("create", "namespace", NAMESPACE)
            kubelets.start()
            wait_for("nodes without taints",
                     lambda: "node.kubernetes.io" not in cluster.kubectl("get", "nodes", "-o", "yaml"))  # fmt: skip
            kubelets.make_system()
            every = f"{round(500 / short)}ms"
            [port] = free_ports(1)
            operator = cluster.operator("--every", every, "--metrics-port", f"127.0.0.1:{port}")
            wait_for("the operator", lambda: answers(port))
            made = Play(cluster, kubelets, case, leave_s, short)
            sums = made.run(lambda text: print(text, flush=True))
            numbers = measured(port)
            done = {what: numbers.get(f'edl_hvd_operator_actions_total{{what="{what}"}}', 0.0)
                    for what in ("pod created", "pod deleted", "status written")}  # fmt: skip
            asked: Counter[str] = Counter()
            for name, value in numbers.items():
                if name.startswith("edl_hvd_operator_api_requests_total"):
                    asked[name.partition('verb="')[2].partition('"')[0]] += round(value)
            # A PUT renews the Lease.
            writes = asked["POST"] + asked["PATCH"] + asked["DELETE"]
            changes = done["pod created"] + done["pod deleted"]
            delays = "edl_hvd_operator_deletion_delay_seconds"
            costs = (
                case, leave_s, *map(round, done.values()), writes, asked["GET"],
                round(writes / changes, 2) if changes else 0, quantile(numbers, delays, 0.5),
                quantile(numbers, delays, 0.99), round(cpu_s(operator.pid), 1),
                round(sum(cpu_s(process.pid) for process in cluster.processes), 1), round(os.getloadavg()[0], 1),
            )  # fmt: skip
            for text in kubelets.failures[:5]:
                print(f"a kubelet's request failed: {text}", flush=True)
            return made, sums, costs
        finally:
            kubelets.stop()
            if operator is not None:
                operator.terminate()
                operator.wait(60)
            cluster.stop()


def answers(port: int) -> bool:
    try:
        return bool(measured(port))
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default="services,jobs")
    parser.add_argument("--leave", default="2", help="seconds for which a trainer's pod leaves")
    parser.add_argument("--short", type=float, default=1.0, metavar="N", help="divide all times by N")
    given = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    given.out.mkdir(parents=True, exist_ok=True)
    rows, sums, costs = [], [], []
    for case in given.cases.split(","):
        for leave_s in map(float, given.leave.split(",")):
            made, row, cost = play(case, leave_s, given.short)
            rows += made.rows
            sums.append(row)
            costs.append(cost)
            print(dict(zip(PLAYS, row, strict=True)), flush=True)
            print(dict(zip(COSTS, cost, strict=True)), flush=True)
    write(given.out / "seconds.csv", SECONDS, rows)
    write(given.out / "plays.csv", PLAYS, sums)
    write(given.out / "costs.csv", COSTS, costs)


if __name__ == "__main__":
    main()
