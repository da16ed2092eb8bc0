"""Services and training of a production cluster on the same hosts, in virtual time, with the planner itself.

    python benchmarks/cluster_services.py FOLDER OUT [--every 1,80] [--days 115-149] [--policies static,elastic,...]

FOLDER holds ``openb_node_list_all_node.csv`` and ``openb_pod_list_default.csv`` of alibaba/clusterdata
(cluster-trace-gpu-v2023). Pods that may be put off (BE) are jobs, the others (LS, Burstable, Guaranteed) are services.
A service runs from the moment at which it has its GPUs for as long as it was recorded. A job has the work of its
recorded run on the GPUs that it asked for; n GPUs are n^0.8 times as fast as one.

``static``: each job has as many GPUs as it asked for, and nothing takes them away; ``static-most``: as many as the
elastic ones may have. ``elastic``: from those that it asked for to ``--most`` times as many; services come first, and
stop jobs where they need their least. ``elastic-known``: the planner is told the rest of the work, too.
Room that a job gives is free after 2 s, newcomers start for 30 s, and a change of a job costs it 1 s.
Each play appends its row to OUT/services.csv; what is there already is not played again.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from edl_hvd.hosts import HostSlots
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, PlanRules, Room

LEAVE_S, START_S, CHANGE_S, LAW = 2.0, 30.0, 1.0, 0.8
DAY_S = 86_400
POLICIES = ("static", "static-most", "elastic", "elastic-known")
KEY = ("hosts", "gpus", "days", "policy", "most")
ROW = (
    *KEY, "services", "services_waited_s", "services_p99_s", "services_late", "services_longest_s", "jobs", "pending_s",
    "average_s", "p99_s", "used_by_services", "used_by_jobs", "stopped", "changes", "below_least_s", "plans", "cpu_s",
)  # fmt: skip


@dataclass(frozen=True)
class RecordedPod:
    """A pod of the trace that was scheduled and requests GPUs; a part of one counts as one."""

    name: str
    gpus: int
    at_s: float
    run_s: float
    is_service: bool


@dataclass
class Service:
    """A service that waits or runs."""

    pod: RecordedPod
    hosts: tuple[HostSlots, ...] = ()
    bound_s: float | None = None


@dataclass
class Job:
    """An elastic job: what the plan gives it, what starts, and what trains."""

    pod: RecordedPod
    least: int
    curve: Curve
    left: float
    planned: dict[str, int] = field(default_factory=dict)
    training: dict[str, int] = field(default_factory=dict)
    starting: list[tuple[float, str, int]] = field(default_factory=list)
    at_s: float = 0.0
    changed_s: float = -math.inf
    first_s: float | None = None
    changes: int = 0
    stopped: int = 0
    below_s: float = 0.0

    @property
    def speed(self) -> float:
        has = sum(self.training.values())
        return self.curve.at(has) if has >= self.least else 0.0

    def settle(self, now_s: float) -> None:
        """Count what was trained until now; ``at_s`` may lie ahead, while a change costs time."""
        if now_s > self.at_s:
            self.left -= self.speed * (now_s - self.at_s)
            if self.training and not self.speed:
                self.below_s += now_s - self.at_s
            self.at_s = now_s

    @property
    def ends_s(self) -> float:
        return self.at_s + max(0.0, self.left) / self.speed if self.speed else math.inf

    def there(self, host: str) -> int:
        """GPUs that it holds on a host, those of newcomers included."""
        return self.training.get(host, 0) + sum(count for _, name, count in self.starting if name == host)


class Play:
    """One policy on some hosts."""

    def __init__(self, hosts: dict[str, int], pods: list[RecordedPod], policy: str, most: int) -> None:
        self.hosts, self.policy, self.most = hosts, policy, most
        self.coming = sorted(pods, key=lambda pod: (-pod.at_s, pod.name))
        self.free = dict(hosts)
        self.services: dict[str, Service] = {}
        self.jobs: dict[str, Job] = {}
        self.ending: list[tuple[float, str]] = []
        self.leaving: list[tuple[float, str, int]] = []
        self.waits: list[float] = []
        self.done: list[tuple[Job, float]] = []
        self.used = {True: 0.0, False: 0.0}
        self.now_s, self.plans = 0.0, 0
        self.rules = PlanRules()

    def run(self) -> None:
        begins_s, ends_s = self.coming[-1].at_s, self.coming[0].at_s
        self.now_s = begins_s
        while self.coming or self.services or self.jobs:
            before_s, self.now_s = self.now_s, self._next_s()
            within_s = max(0.0, min(self.now_s, ends_s) - before_s)
            self.used[True] += within_s * sum(one.pod.gpus for one in self.services.values() if one.bound_s is not None)
            self.used[False] += within_s * sum(
                sum(job.training.values()) + sum(count for *_, count in job.starting) for job in self.jobs.values()
            )
            if self._happen():
                self._plan()
            self._bind()
        self.window_s = max(1.0, ends_s - begins_s)

    def _next_s(self) -> float:
        moments = [self.coming[-1].at_s] if self.coming else []
        moments += [heap[0][0] for heap in (self.ending, self.leaving) if heap]
        for job in self.jobs.values():
            moments += [job.ends_s, *(ready_s for ready_s, _, _ in job.starting)]
        found = min(moments, default=math.inf)
        if found == math.inf:
            waiting = sorted([*self.services, *self.jobs])
            raise SystemExit(f"{', '.join(waiting[:5])} wait for room that never comes, with {self.policy}")
        return max(self.now_s, found)

    def _happen(self) -> bool:
        """What happens at this moment; whether a plan follows from it."""
        is_news = False
        while self.leaving and self.leaving[0][0] <= self.now_s:
            _, host, count = heappop(self.leaving)
            self.free[host] += count
        while self.ending and self.ending[0][0] <= self.now_s:
            _, name = heappop(self.ending)
            for entry in self.services.pop(name).hosts:
                self.free[entry.host] += entry.slots
            is_news = True
        for name, job in list(self.jobs.items()):
            ready = [one for one in job.starting if one[0] <= self.now_s]
            if ready:
                job.settle(self.now_s)
                for _, host, count in ready:
                    job.training[host] = job.training.get(host, 0) + count
                job.starting = [one for one in job.starting if one[0] > self.now_s]
                job.at_s = self.now_s + (CHANGE_S if job.first_s is not None else 0.0)
                job.first_s = self.now_s if job.first_s is None and job.speed else job.first_s
            if job.ends_s <= self.now_s:
                self._give(job, {})
                self.done.append((job, self.now_s))
                del self.jobs[name]
                is_news = True
        while self.coming and self.coming[-1].at_s <= self.now_s:
            pod = self.coming.pop()
            if pod.is_service:
                self.services[pod.name] = Service(pod)
            else:
                self.jobs[pod.name] = self._job(pod)
            is_news = True
        return is_news

    def _job(self, pod: RecordedPod) -> Job:
        sizes = tuple(range(1, pod.gpus * self.most + 1))
        curve = Curve(sizes, tuple(size**LAW for size in sizes))
        least = pod.gpus * (self.most if self.policy == "static-most" else 1)
        return Job(pod, least, curve, pod.run_s * pod.gpus**LAW)

    def _plan(self) -> None:
        self.plans += 1
        is_elastic = self.policy.startswith("elastic")
        claims = [
            Claim(name, one.pod.gpus, one.pod.gpus, priority=int(is_elastic), asked_s=one.pod.at_s, holds=one.hosts)
            for name, one in self.services.items()
        ]  # fmt: skip
        for job in self.jobs.values():
            job.settle(self.now_s)
        asks = [
            JobAsk(
                name, preemptible=is_elastic, least=job.least,
                most=job.pod.gpus * self.most if is_elastic else job.least, curves=(job.curve,),
                left=max(0.0, job.left) if self.policy == "elastic-known" else None, asked_s=job.pod.at_s,
                changed_s=job.changed_s, change_s=CHANGE_S, start_s=START_S,
                holds=tuple(HostSlots(host, count) for host, count in sorted(job.planned.items())),
            )
            for name, job in self.jobs.items()
        ]  # fmt: skip
        rooms = [Room(host, slots) for host, slots in self.hosts.items()]
        made = plan(rooms, claims, asks, self.rules, self.now_s)
        reserved = {one.claim: one.hosts for one in made.reserved}
        for name, service in self.services.items():
            if service.bound_s is None:
                service.hosts = reserved.get(name, ())
            elif reserved[name] != service.hosts:
                raise SystemExit(f"the plan moves {name}, which runs")
        shares = {share.job: {entry.host: entry.slots for entry in share.hosts} for share in made.shares}
        for name, job in self.jobs.items():
            self._give(job, shares.get(name, {}))

    def _give(self, job: Job, planned: dict[str, int]) -> None:
        """Take from a job what the plan does not leave it; what is new to it begins in :meth:`_bind`."""
        if planned == job.planned:
            return
        job.settle(self.now_s)
        is_over, has = job.ends_s <= self.now_s, sum(job.training.values())
        for host in sorted({*job.training, *(name for _, name, _ in job.starting)}):
            over = job.there(host) - planned.get(host, 0)
            for one in [one for one in job.starting if one[1] == host]:
                if over > 0:  # newcomers go first; they come together
                    gone = min(over, one[2])
                    job.starting.remove(one)
                    if one[2] > gone:
                        job.starting.append((one[0], host, one[2] - gone))
                    over -= gone
                    heappush(self.leaving, (self.now_s + LEAVE_S, host, gone))
            if over > 0:
                job.training[host] -= over
                heappush(self.leaving, (self.now_s + LEAVE_S, host, over))
        job.training = {host: count for host, count in job.training.items() if count}
        if job.first_s is not None and not is_over:
            job.changes += 1
            job.stopped += not planned
            if sum(job.training.values()) != has:
                job.at_s = self.now_s + CHANGE_S
        job.planned, job.changed_s = planned, self.now_s

    def _bind(self) -> None:
        """Give the room that is free to services first, then to newcomers of jobs."""
        for name, service in self.services.items():
            if service.bound_s is None and service.hosts and all(
                self.free[entry.host] >= entry.slots for entry in service.hosts
            ):  # fmt: skip
                for entry in service.hosts:
                    self.free[entry.host] -= entry.slots
                service.bound_s = self.now_s
                self.waits.append(self.now_s - service.pod.at_s)
                heappush(self.ending, (self.now_s + service.pod.run_s, name))
        waiting: dict[str, int] = {}
        for service in self.services.values():
            for entry in service.hosts if service.bound_s is None else ():
                waiting[entry.host] = waiting.get(entry.host, 0) + entry.slots
        for job in self.jobs.values():
            for host, count in sorted(job.planned.items()):
                more = min(self.free[host] - waiting.get(host, 0), count - job.there(host))
                if more > 0:
                    self.free[host] -= more
                    job.starting.append((self.now_s + START_S, host, more))


def read_pods(path: Path, days: tuple[int, int]) -> list[RecordedPod]:
    """Pods that were created on these days, the last one included."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at_s = float(row["creation_time"])
            if not row["scheduled_time"] or row["num_gpu"] == "0" or not days[0] <= at_s // DAY_S <= days[1]:
                continue
            run_s = max(1.0, float(row["deletion_time"]) - float(row["scheduled_time"]))
            found.append(RecordedPod(row["name"], int(row["num_gpu"]), at_s, run_s, row["qos"] != "BE"))
    return found


def read_hosts(path: Path, every: int) -> dict[str, int]:
    """GPUs of every Nth host that has any."""
    with path.open(newline="") as file:
        found = [(row["sn"], int(row["gpu"])) for row in csv.DictReader(file) if row["gpu"] != "0"]
    return dict(found[::every])


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def account(play: Play) -> tuple[object, ...]:
    gpus = sum(play.hosts.values())
    times = [ended_s - job.pod.at_s for job, ended_s in play.done]
    pending = [(job.first_s or 0.0) - job.pod.at_s for job, _ in play.done]
    jobs = [job for job, _ in play.done]
    used = [round(play.used[kind] / gpus / play.window_s, 4) for kind in (True, False)]
    late = sum(wait_s > 8 for wait_s in play.waits) / max(1, len(play.waits))
    return (
        len(play.waits), round(statistics.mean(play.waits), 2), round(quantile(play.waits, 0.99), 1), round(late, 4),
        round(max(play.waits), 1), len(jobs), round(statistics.mean(pending), 1), round(statistics.mean(times), 1),
        round(quantile(times, 0.99)), *used, sum(job.stopped for job in jobs),
        round(statistics.mean(job.changes for job in jobs), 2), round(sum(job.below_s for job in jobs), 1), play.plans,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", default="1,80", help="every Nth host that has GPUs is there")
    parser.add_argument("--days", default="115-149", help="first and last day of the pods that come")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--most", type=int, default=4, help="most GPUs of a job, by those that it asked for")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    first, last = map(int, given.days.split("-"))
    pods = read_pods(given.folder / "openb_pod_list_default.csv", (first, last))
    path = given.out / "services.csv"
    rows: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    for every in map(int, given.every.split(",")):
        hosts = read_hosts(given.folder / "openb_node_list_all_node.csv", every)
        for policy in given.policies.split(","):
            key = (len(hosts), sum(hosts.values()), given.days, policy, given.most)
            if any(tuple(row[name] for name in KEY) == tuple(map(str, key)) for row in rows):
                continue
            begun_s, play = time.process_time(), Play(hosts, pods, policy, given.most)
            play.run()
            row = (*key, *account(play), round(time.process_time() - begun_s, 1))
            rows.append({name: str(value) for name, value in zip(ROW, row, strict=True)})
            print(rows[-1], flush=True)
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ROW, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
