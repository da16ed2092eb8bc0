"""A fleet's hosts and jobs in virtual time: what a daemon would see, made up from a seed, and checks."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from edl_hvd.fleet import events
from edl_hvd.fleet.events import FleetAction, FleetEvent, event_as_json, read_action, read_event
from edl_hvd.fleet.state import Fleet, FleetJob, JobPhase, JobSpec, as_counts, as_hosts, total, used
from edl_hvd.fleet.turn import turn
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.values import Curve


@dataclass
class Process:
    """The ``edlrun`` of a job: where its workers are, and what it was told."""

    pid: int
    hosts: dict[str, int]
    workers: Counter[str] = field(default_factory=Counter)
    is_told: bool = False
    has_trained: bool = False


class World:
    """Plays events on a fleet, and carries out its actions after some random time.

    Args:
        seed: Seed of everything that is random.
        hosts: Hosts at the start.
    """

    def __init__(self, seed: int, hosts: tuple[HostSlots, ...]) -> None:
        self.random = random.Random(seed)
        self.fleet = Fleet()
        self.now_s = 0.0
        self.processes: dict[str, Process] = {}
        self.left_over: dict[str, Counter[str]] = {}
        self.history: list[tuple[float, FleetEvent, tuple[FleetAction, ...]]] = []
        self.starts = self.actions = 0
        self._pids = 0
        self._happened: deque[FleetEvent] = deque()
        self.happen(events.HostsListed(hosts))

    def happen(self, event: FleetEvent) -> None:
        """Let something happen; check what follows, and do it. What happens thereby comes after all of that."""
        self._happened.append(event)
        if len(self._happened) == 1:
            while self._happened:
                self._happen(self._happened[0])
                self._happened.popleft()

    def _happen(self, event: FleetEvent) -> None:
        before = self.fleet
        self.fleet, actions = turn(before, event, self.now_s)
        assert turn(before, event, self.now_s) == (self.fleet, actions), "the same question has the same answer"
        self.history.append((self.now_s, event, actions))
        assert read_event(json.loads(json.dumps(event_as_json(event)))) == event
        for action in actions:
            assert read_action(json.loads(json.dumps(event_as_json(action)))) == action
        self.check(before)
        for action in actions:
            self.actions += not isinstance(action, events.Tell)
            self._do(action)

    def check(self, before: Fleet) -> None:
        """What holds after every turn."""
        fleet = self.fleet
        used, was = usage(fleet), usage(before)
        for host, slots in used.items():
            assert slots <= max(as_counts(fleet.hosts).get(host, 0), was.get(host, 0)), f"{host} was given twice"
        for job in fleet.jobs.values():
            assert total(job.share) <= job.spec.most
            assert not (job.pid and not job.phase.is_alive), "a process belongs to a job that is alive"
            if job.phase.keeps_slots:
                assert job.given, "a hosts file is never empty"
            if not job.phase.is_alive:
                assert not job.given
            if job.phase is JobPhase.WAITING and not job.share and job.not_before_s <= self.now_s and fleet.hosts:
                assert job.why, f"{job.name} waits without a reason"
        for claim in fleet.claims.values():
            assert total(claim.granted) <= claim.slots
        assert fleet.planner_failures == 0
        self.check_devices(before)

    def check_devices(self, before: Fleet) -> None:
        """No GPU belongs to two, and a worker keeps its own for as long as it has its slot."""
        fleet = self.fleet
        lists = [*(job.devices for job in fleet.jobs.values()), *(one.devices for one in fleet.claims.values())]
        taken = Counter((entry.host, number) for one in lists for entry in one for number in entry.devices)
        assert set(taken.values()) <= {1}
        for job in fleet.jobs.values():
            has = {entry.host: entry.devices for entry in job.devices}
            assert {host: len(devices) for host, devices in has.items()} == used(job)
            earlier = before.jobs.get(job.name, job)
            had = {entry.host: entry.devices for entry in earlier.devices}
            for host, devices in has.items():
                stays = min(len(devices), len(had.get(host, ())))
                assert devices[:stays] == had.get(host, ())[:stays]
            assert [len(entry.devices) for entry in job.listed] == [entry.slots for entry in job.given]

    def _do(self, action: FleetAction) -> None:
        match action:
            case events.StartRun(name, hosts):
                assert name not in self.processes, f"{name} has two runs"
                assert total(hosts) >= self.fleet.jobs[name].spec.least
                self.starts += 1
                self._pids += 1
                self.processes[name] = Process(self._pids, as_counts(hosts))
                self.happen(events.RunStarted(name, self._pids, f"token {self._pids}"))
            case events.GiveHosts(name, hosts):
                assert hosts
                self.processes[name].hosts = as_counts(hosts)
            case events.EndRun(name):
                assert not self.processes[name].is_told, "a second signal would end it without a checkpoint"
                self.processes[name].is_told = True
            case events.KillRun(name):
                self.end(name, None)
            case events.RemoveFolder(name):
                assert name not in self.processes
                assert name not in self.left_over
                self.happen(events.FolderRemoved(name))

    # --- what the hosts and jobs do ---

    def pass_time(self) -> None:
        """Some time passes; workers start and leave, runs that were told to end do so."""
        self.now_s = round(self.now_s + self.random.choice((0.1, 0.5, 2.0)), 6)
        for name in list(self.processes):
            self._move_workers(name)
        for name in list(self.left_over):
            if self.random.random() < 0.5:
                del self.left_over[name]
                self.happen(events.RunObserved(name, ()))
        self.happen(events.TimePassed())

    def _move_workers(self, name: str) -> None:
        process = self.processes[name]
        if process.is_told and self.random.random() < 0.4:
            self.end(name, self.random.choice((75, 75, 75, 0, None)))
            return
        for host in sorted({*process.hosts, *process.workers}):
            if self.random.random() < 0.6:
                process.workers[host] = process.hosts.get(host, 0)
        process.has_trained = process.has_trained or (process.workers.total() > 0 and self.random.random() < 0.7)
        self.observe(name)

    def observe(self, name: str) -> None:
        """Let the daemon see a run as it is."""
        process, job = self.processes[name], self.fleet.jobs[name]
        occupied = as_hosts(process.workers)
        curve = None
        if process.has_trained and self.random.random() < 0.2:
            curve = Curve((1, 2, 4, 8), tuple(round(100 * n ** self.random.uniform(0.5, 1.0), 3) for n in (1, 2, 4, 8)))
        if occupied != job.occupied or curve is not None:
            left = self.random.choice((None, 1e4, 1e6))
            self.happen(
                events.RunObserved(name, occupied, int(self.now_s), process.has_trained, curve, left, change_s=0.3)
            )

    def end(self, name: str, code: int | None) -> None:
        """A run ends; its workers may stay for a while."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        if code is None and process.workers.total() and self.random.random() < 0.5:
            self.left_over[name] = process.workers
        else:
            self.happen(events.RunObserved(name, (), int(self.now_s)))
        self.happen(events.RunEnded(name, code, f"it ended with {code}", int(self.now_s)))

    def anything(self) -> None:
        """Something that users, hosts or jobs do."""
        draw, jobs = self.random.random(), list(self.fleet.jobs.values())
        if draw < 0.15:
            least = self.random.choice((1, 1, 2, 3))
            most = least + self.random.choice((0, 1, 3, 6))
            spec = JobSpec(
                f"job{len(jobs)}", ("python",), "/", least, most, priority=self.random.choice((0, 0, 0, 5)),
                queue=self.random.choice(("default", "vision")), preemptible=self.random.random() < 0.8,
            )  # fmt: skip
            self.happen(events.JobSubmitted(spec))
        elif draw < 0.22:
            for_s = self.random.choice((None, 3.0, 10.0))
            claim = f"claim{len(self.history)}"
            self.happen(events.SlotsClaimed(claim, self.random.randint(1, 4), self.random.choice((0, 1000)), for_s))
        elif draw < 0.27 and self.fleet.claims:
            self.happen(events.ClaimReleased(self.random.choice(sorted(self.fleet.claims))))
        elif draw < 0.32 and jobs:
            job = self.random.choice(jobs)
            self.happen(events.JobScaled(job.name, job.spec.least + self.random.choice((0, 1, 4))))
        elif draw < 0.36 and jobs:
            self.happen(events.JobStopAsked(self.random.choice(jobs).name))
        elif draw < 0.42 and jobs:
            self.happen(events.JobResumeAsked(self.random.choice(jobs).name))
        elif draw < 0.47 and self.processes:
            self.end(self.random.choice(sorted(self.processes)), self.random.choice((0, 75, 1, None)))
        elif draw < 0.52:
            self.change_hosts()
        elif draw < 0.56 and jobs:
            self.happen(events.JobDeleted(self.random.choice(jobs).name))

    def change_hosts(self) -> None:
        """A host comes, goes, or has another number of slots."""
        hosts = as_counts(self.fleet.hosts)
        name = self.random.choice("abcd")
        if name in hosts and len(hosts) > 1 and self.random.random() < 0.5:
            del hosts[name]
        else:
            hosts[name] = self.random.randint(1, 4)
        self.happen(events.HostsListed(as_hosts(hosts)))

    def settle(self) -> None:
        """Let everything come to rest: no event but time, until every share is carried out."""
        for name in list(self.left_over):
            del self.left_over[name]
            self.happen(events.RunObserved(name, ()))
        for _ in range(60):
            self.now_s = round(self.now_s + 2.0, 6)
            for name, process in list(self.processes.items()):
                if process.is_told:
                    self.end(name, 75)
                else:
                    process.workers = Counter(process.hosts)
                    self.observe(name)
            self.happen(events.TimePassed())

    def is_carried_out(self, job: FleetJob) -> bool:
        """Whether a job has what it was planned."""
        return job.given == job.share


def usage(fleet: Fleet) -> Counter[str]:
    """Slots by host that jobs and claims have: given, or still occupied."""
    found: Counter[str] = Counter()
    for job in fleet.jobs.values():
        given, occupied = as_counts(job.given), as_counts(job.occupied)
        for host in {**given, **occupied}:
            found[host] += max(given.get(host, 0), occupied.get(host, 0))
    for claim in fleet.claims.values():
        found.update(as_counts(claim.granted))
    return found
