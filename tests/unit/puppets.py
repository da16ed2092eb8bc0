"""Workers that exist in virtual time only: they do what the membership orders, and what a test's chance decides."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from edl_hvd.driver.happenings import (
    Action,
    AskChange,
    Dismiss,
    Done,
    DrainAsked,
    End,
    Exited,
    Formed,
    Happening,
    HostsFound,
    Kill,
    Lost,
    Publish,
    Raised,
    Ready,
    Spawn,
    Tick,
    to_json,
)
from edl_hvd.driver.membership import Rules, advance, begin
from edl_hvd.hosts import HostSlots


@dataclass
class Puppet:
    """One process. ``generation`` is 0 outside a world."""

    life: int
    state: str = "starting"
    generation: int = 0
    formed: bool = False
    step: int = -1
    change: bool = False
    broken: bool = False


class Stage:
    """A membership and its puppets; checks after each happening what always has to hold."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.membership = begin(rules, 0.0)
        self.puppets: dict[str, Puppet] = {}
        self.step = 0
        self.generation = 0
        self.end: End | None = None
        self.history: list[str] = []
        self.events = 0

    def happen(self, happening: Happening) -> None:
        self.events += 1
        self.history.append(json.dumps({"at_s": self.now_s, **to_json(happening)}))
        if isinstance(happening, Exited):
            puppet = self.puppets.get(happening.worker)
            if puppet is not None and puppet.life == happening.life:
                del self.puppets[happening.worker]
        self.membership, actions = advance(self.membership, happening, self.now_s)
        for action in actions:
            self._obey(action)

    def _obey(self, action: Action) -> None:
        assert self.end is None, f"something is done after the end: {action}"
        if isinstance(action, Spawn):
            assert action.worker not in self.puppets, f"two processes in one slot: {action}"
            self.puppets[action.worker] = Puppet(action.life)
        elif isinstance(action, Publish):
            self._obey_publish(action)
        elif isinstance(action, AskChange):
            assert action.generation == self.generation
            for puppet in self.puppets.values():
                puppet.change = puppet.change or puppet.generation == action.generation
        elif isinstance(action, (Dismiss, Kill)):
            assert self.puppets[action.worker].life == action.life
            if isinstance(action, Dismiss):
                self._obey_dismiss(action)
            else:
                self.puppets[action.worker].state = "dying"
        elif isinstance(action, End):
            self.end = action

    def _obey_publish(self, publish: Publish) -> None:
        assert publish.generation == self.generation + 1
        needed = self.rules.min_np if self.generation else self.rules.num_proc
        assert len(set(publish.members)) == len(publish.members) >= needed
        assert len(publish.members) <= self.rules.max_np + 1, "one more than allowed may be there to hand the state on"
        self.generation = publish.generation
        for member in publish.members:
            puppet = self.puppets[member]
            assert puppet.state == "ready", f"{member} is {puppet.state}, and yet a member"
            puppet.state, puppet.generation, puppet.formed, puppet.change = "member", publish.generation, False, False
            puppet.broken = False

    def _obey_dismiss(self, dismiss: Dismiss) -> None:
        puppet = self.puppets[dismiss.worker]
        assert puppet.state != "member", "a member is asked to leave, not sent away"
        if puppet.step >= 0 and not dismiss.save and self.membership.finishing_s is None:
            others = [other for name, other in self.puppets.items() if name != dismiss.worker]
            assert any(other.step >= 0 for other in others), "the only holder of the state was sent away"
        puppet.state = "dismissed"

    # --- what puppets do ---

    def be_ready(self, worker: str) -> None:
        puppet = self.puppets[worker]
        puppet.state, puppet.generation, puppet.change, puppet.broken = "ready", 0, False, False
        self.happen(Ready(worker, puppet.life, puppet.step))

    def form(self, worker: str) -> None:
        puppet = self.puppets[worker]
        puppet.formed = True
        members = [other for other in self.puppets.values() if other.generation == self.generation]
        if all(other.formed for other in members):
            self.step += 1
            for other in members:
                other.step = self.step  # the state is level now
        self.happen(Formed(worker, puppet.life, puppet.generation))

    def exit(self, worker: str, clean: bool = False) -> None:
        puppet = self.puppets[worker]
        for other in self.puppets.values():
            other.broken = other.broken or other.generation == puppet.generation > 0
        self.happen(Exited(worker, puppet.life, clean, "exit code 0" if clean else "killed by SIGKILL"))

    def move_on(self, worker: str) -> None:
        """The next thing that a worker in good health does."""
        puppet = self.puppets[worker]
        if puppet.state == "starting":
            self.be_ready(worker)
        elif puppet.state in ("dismissed", "dying"):
            self.exit(worker, clean=puppet.state == "dismissed")
        elif puppet.state == "member":
            if puppet.broken:
                self.be_ready(worker)
            elif not puppet.formed:
                self.form(worker)
            elif puppet.change:
                self.be_ready(worker)

    def settle(self, seconds: float = 30.0) -> None:
        """Let everybody do what they do in good health, for a while."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.end is None:
            for worker in list(self.puppets):
                if worker in self.puppets:
                    self.move_on(worker)
            self.now_s += 0.25
            self.happen(Tick())

    @property
    def running(self) -> list[str]:
        """Members of the world that trains."""
        return [name for name, puppet in self.puppets.items() if puppet.state == "member" and puppet.formed]


HOSTS = ("a", "b", "c")


def strike(stage: Stage, chance: random.Random) -> None:
    """Let one thing happen that may happen in a real job."""
    kind = chance.choices(
        ("move", "time", "kill", "clean", "raise", "hosts", "lost", "drain", "done"),
        (40, 25, 8, 1, 4, 6, 3, 1, 0.2),
    )[0]
    workers = sorted(stage.puppets)
    if kind == "time" or (not workers and kind != "hosts"):
        stage.now_s += chance.choice((0.01, 0.3, 1.0, 5.0, 20.0))
        stage.happen(Tick())
    elif kind == "hosts":
        found = [host for host in HOSTS if chance.random() < 0.7]
        stage.happen(HostsFound(tuple(HostSlots(host, chance.randint(1, 2)) for host in found)))
    elif kind == "drain":
        stage.happen(DrainAsked(chance.choice((*HOSTS, *workers)), chance.choice((0.0, 10.0, 120.0))))
    else:
        _strike_worker(stage, chance, kind, chance.choice(workers))


def _strike_worker(stage: Stage, chance: random.Random, kind: str, worker: str) -> None:
    puppet = stage.puppets[worker]
    if kind == "move":
        stage.move_on(worker)
    elif kind in ("kill", "clean"):
        stage.exit(worker, clean=kind == "clean")
    elif kind == "raise" and puppet.state == "member":
        stage.happen(Raised(worker, puppet.life, stage.step, chance.choice(("ValueError: x", "OSError: y"))))
        stage.exit(worker)
    elif kind == "lost":
        stage.happen(Lost(worker, puppet.life, "it said nothing"))
    elif kind == "done" and puppet.state == "member" and puppet.formed:
        stage.happen(Done(worker, puppet.life))
