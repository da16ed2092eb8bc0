"""Workers that exist in virtual time only: they do what the membership orders, and what a test's chance decides."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.history import Decision, Recorder, read_history, replay
from edl_hvd.driver.membership.state import Rules, begin
from edl_hvd.hosts import HostSlots


@dataclass
class FakeWorker:
    """One process. ``generation`` is 0 outside a world."""

    incarnation: int
    state: str = "starting"
    generation: int = 0
    follows: int = 0
    formed: bool = False
    step: int = -1
    change: bool = False
    broken: bool = False


class FakeJob:
    """A membership and its workers; checks after each event what always has to hold.

    Attributes:
        lived: Everything that happened, ticks without consequence as well.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.membership = begin(rules, 0.0)
        self.workers: dict[str, FakeWorker] = {}
        self.step = 0
        self.generation = 0
        self.end: events.End | None = None
        self.lived: list[Decision] = []
        self._script = io.StringIO()
        self._recorder = Recorder(self._script, self.membership)

    def handle(self, event: events.MembershipEvent) -> None:
        if isinstance(event, events.Exited):
            fake = self.workers.get(event.worker)
            if fake is not None and fake.incarnation == event.incarnation:
                del self.workers[event.worker]
        self.membership, actions = self._recorder.transition(self.membership, event, self.now_s)
        self.lived.append(Decision(self.now_s, event, actions, self.membership, actions))
        for action in actions:
            self._obey(action)

    def _obey(self, action: events.Action) -> None:
        assert self.end is None, f"something is done after the end: {action}"
        if isinstance(action, events.Spawn):
            assert action.worker not in self.workers, f"two processes in one slot: {action}"
            self.workers[action.worker] = FakeWorker(action.incarnation)
        elif isinstance(action, events.Publish):
            self._obey_publish(action)
        elif isinstance(action, events.ReceiveState):
            assert action.generation == self.generation
            assert self.workers[action.donor].generation == self.generation, "the donor is a member"
            assert self.workers[action.worker].state == "ready"
            self.workers[action.worker].follows = action.generation
        elif isinstance(action, events.RequestResize):
            assert action.generation == self.generation
            for fake in self.workers.values():
                fake.change = fake.change or fake.generation == action.generation
        elif isinstance(action, (events.ShutDownWorker, events.Kill)):
            assert self.workers[action.worker].incarnation == action.incarnation
            if isinstance(action, events.ShutDownWorker):
                self._obey_shut_down(action)
            else:
                self.workers[action.worker].state = "dying"
        elif isinstance(action, events.End):
            self.end = action

    def _obey_publish(self, publish: events.Publish) -> None:
        assert publish.generation == self.generation + 1
        out = self.membership.quarantined or self.membership.failed_preflight
        needed = self.rules.min_np if self.generation or out else self.rules.num_proc
        assert len(set(publish.members)) == len(publish.members) >= needed
        assert len(publish.members) <= self.rules.max_np + 1, "one more than allowed may be there to hand the state on"
        self.generation = publish.generation
        for member in publish.members:
            fake = self.workers[member]
            assert fake.state == "ready", f"{member} is {fake.state}, and yet a member"
            fake.state, fake.generation, fake.formed, fake.change = "member", publish.generation, False, False
            fake.broken = False

    def _obey_shut_down(self, asked: events.ShutDownWorker) -> None:
        fake = self.workers[asked.worker]
        assert fake.state != "member", "a member is asked to leave, not sent away"
        if fake.step >= 0 and not asked.save and self.membership.finishing_s is None:
            others = [other for name, other in self.workers.items() if name != asked.worker]
            assert any(other.step >= 0 for other in others), "the only holder of the state was sent away"
        fake.state = "terminating"

    # --- what workers do ---

    def be_ready(self, worker: str) -> None:
        fake = self.workers[worker]
        fake.state, fake.generation, fake.change, fake.broken = "ready", 0, False, False
        self.handle(events.Ready(worker, fake.incarnation, fake.step))

    def form(self, worker: str) -> None:
        fake = self.workers[worker]
        fake.formed = True
        members = [other for other in self.workers.values() if other.generation == self.generation]
        if all(other.formed for other in members):
            self.step += 1
            for other in members:
                other.step = self.step  # the state is level now
        self.handle(events.Formed(worker, fake.incarnation, fake.generation))

    def fail(self, worker: str, step: int, error: str) -> None:
        """Its script raises an error; its process ends later."""
        fake = self.workers[worker]
        self._break_world(fake)
        fake.state, fake.generation = "failing", 0
        self.handle(events.Raised(worker, fake.incarnation, step, error))

    def _break_world(self, fake: FakeWorker) -> None:
        for other in self.workers.values():
            other.broken = other.broken or other.generation == fake.generation > 0

    def begin_to_end(self, worker: str) -> None:
        """Its process is killed, and has ended once its memory has been freed."""
        fake = self.workers[worker]
        self._break_world(fake)
        fake.state, fake.generation, fake.step = "failing", 0, -1
        self.handle(events.Exiting(worker, fake.incarnation))

    def exit(self, worker: str, clean: bool = False) -> None:
        fake = self.workers[worker]
        self._break_world(fake)
        self.handle(events.Exited(worker, fake.incarnation, clean, "exit code 0" if clean else "killed by SIGKILL"))

    def move_on(self, worker: str) -> None:
        """The next thing that a worker in good health does."""
        fake = self.workers[worker]
        if fake.state == "starting":
            self.be_ready(worker)
        elif fake.state == "ready" and fake.follows:
            follows, fake.follows = fake.follows, 0
            self.handle(events.CaughtUp(worker, fake.incarnation, follows))
        elif fake.state in ("failing", "terminating", "dying"):
            self.exit(worker, clean=fake.state == "terminating")
        elif fake.state == "member":
            if fake.broken:
                self.be_ready(worker)
            elif not fake.formed:
                self.form(worker)
            elif fake.change:
                self.be_ready(worker)

    def settle(self, seconds: float = 30.0) -> None:
        """Let everybody do what they do in good health, for a while."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.end is None:
            for worker in list(self.workers):
                if worker in self.workers:
                    self.move_on(worker)
            self.now_s += 0.25
            self.handle(events.Tick())

    @property
    def history(self) -> str:
        """What ``edl-hvd replay`` runs again."""
        self._recorder.flush()
        return self._script.getvalue()

    @property
    def running(self) -> list[str]:
        """Members of the world that trains."""
        return [name for name, fake in self.workers.items() if fake.state == "member" and fake.formed]


@contextlib.contextmanager
def kept_if_it_fails(job: FakeJob, path: Path) -> Iterator[None]:
    """A failure inside leaves the job's history in a file, and shows it."""
    try:
        yield
    except BaseException:
        path.write_text(job.history)
        print(f"to run this history again: edl-hvd replay {path}\n{job.history}")
        raise


def check_replay(lived: list[Decision], path: Path) -> None:
    """The same decisions and memberships throughout; what the record leaves out is time that changed nothing."""
    history = read_history(path)
    membership = begin(history.rules, 0.0)
    remaining = iter(lived)
    for decision in replay(history):
        for moment in remaining:
            if moment == decision:
                break
            assert is_idle(moment), f"not replayed: {moment}"
        else:
            raise AssertionError(f"replayed, but it never happened: {decision}")
        membership = decision.membership
        assert list(membership.slots) == list(moment.membership.slots)
    assert all(map(is_idle, remaining))
    assert membership == lived[-1].membership


def is_idle(decision: Decision) -> bool:
    return isinstance(decision.event, events.Tick) and not decision.actions


HOSTS = ("a", "b", "c")


EVERYWHERE = events.HostsFound(tuple(HostSlots(host, 2) for host in HOSTS))


def random_job(chance: random.Random) -> FakeJob:
    """A job of up to five workers that outlives many failures."""
    num_proc = chance.randint(1, 3)
    rules = Rules(num_proc, chance.randint(1, num_proc), chance.randint(num_proc, 5), spares=chance.randint(0, 1))
    return FakeJob(replace(rules, host_failures=5, elastic_timeout_s=3000, same_error_limit=5))


def run_at_random(job: FakeJob, chance: random.Random, injections: int) -> None:
    """From the first hosts on; in the end there are all hosts again."""
    job.handle(EVERYWHERE)
    for _ in range(injections):
        if job.end is None:
            inject(job, chance)
    job.handle(EVERYWHERE)


def inject(job: FakeJob, chance: random.Random) -> None:
    """Let one thing happen that may happen in a real job."""
    kind = chance.choices(
        ("move", "time", "kill", "ends", "clean", "raise", "hosts", "lost", "drain", "done"),
        (40, 25, 4, 4, 1, 4, 6, 3, 1, 0.2),
    )[0]
    workers = sorted(job.workers)
    if kind == "time" or (not workers and kind != "hosts"):
        job.now_s += chance.choice((0.01, 0.3, 1.0, 5.0, 20.0))
        job.handle(events.Tick())
    elif kind == "hosts":
        found = [host for host in HOSTS if chance.random() < 0.7]
        failed_preflight = tuple(host for host in found if chance.random() < 0.1)
        job.handle(events.HostsFound(tuple(HostSlots(host, chance.randint(1, 2)) for host in found), failed_preflight))
    elif kind == "drain":
        target, notice_s = chance.choice((*HOSTS, *workers)), chance.choice((0.0, 10.0, 120.0))
        job.handle(events.DrainRequested(target, notice_s, deferred=chance.random() < 0.5))
    else:
        _inject_into_worker(job, chance, kind, chance.choice(workers))


def _inject_into_worker(job: FakeJob, chance: random.Random, kind: str, worker: str) -> None:
    fake = job.workers[worker]
    if kind == "move":
        job.move_on(worker)
    elif kind in ("kill", "clean"):
        job.exit(worker, clean=kind == "clean")
    elif kind == "ends":
        job.begin_to_end(worker)
    elif kind == "raise" and fake.state == "member":
        job.fail(worker, job.step, chance.choice(("ValueError: x", "OSError: y")))
    elif kind == "lost":
        job.handle(events.Lost(worker, fake.incarnation, "it said nothing"))
    elif kind == "done" and fake.state == "member" and fake.formed:
        job.handle(events.Done(worker, fake.incarnation))
