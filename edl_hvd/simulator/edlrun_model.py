"""This project on a trace: the driver's own membership and host watch in virtual time, with workers that are puppets.

Who is started, who joins, who is waited for and for how long is decided by the code that ``edlrun`` runs. How long
something takes is told by ``Costs``. A host has one worker, which dies with its host; nothing else goes wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from edl_hvd.discovery.watch import TrustedHosts
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.events import Action, MembershipEvent
from edl_hvd.driver.membership.state import Membership, Rules, begin, host_of
from edl_hvd.driver.membership.turn import advance_together
from edl_hvd.hosts import HostSlots
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.timeline import Course
from edl_hvd.simulator.virtual_time import Agenda, Names, Puppet
from edl_hvd.simulator.timers import next_poll_s, next_tick_s, tick_before
from edl_hvd.traces.trace import Change, Trace

Turn: TypeAlias = Callable[[Membership, Sequence[MembershipEvent], float], tuple[Membership, tuple[Action, ...]]]

UNREACHABLE_S = 10.0
# ssh's ConnectTimeout (``driver/workers/ssh.py``): nobody answers where a host was.
REST_S = 60.0
# Beyond all that the membership remembers: a pause before a restart is at most a minute.


class Theatre:
    """One job from the first moment of a trace to its last. A run that ends, for want of hosts, is followed by another.

    Args:
        trace: When hosts come and go.
        costs: How long things take.
        rules: What the user of ``edlrun`` gives.
        course: Written while the job is played.
        poll_s: Time between two questions to the host source.
        first_poll_s: When the first one is put.
        notice_s: How long before it goes a host is known to go; 0: it just goes.
        turn: How the membership takes in what happens.
        timer: When it has to be asked again though nothing happens.

    Attributes:
        runs: How often the job was started.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        rules: Rules,
        course: Course,
        poll_s: float = 1.0,
        first_poll_s: float = 0.0,
        notice_s: float = 0.0,
        turn: Turn = advance_together,
        timer: Callable[[Membership, float], float] = next_tick_s,
    ) -> None:
        self._trace, self._costs, self._rules, self._course = trace, costs, rules, course
        self._poll_s, self._notice_s, self._advance, self._timer = poll_s, notice_s, turn, timer
        self._first_poll_s = first_poll_s
        self._now_s = 0.0
        self._agenda = Agenda()
        self._names = Names(rules.failure_window_s + rules.cooldown_s + REST_S + notice_s)
        self._leaving: set[str] = set()
        self._polls: set[float] = set()
        self._worlds = 0
        self.runs = 0
        self._begin()
        for change in trace.changes:
            self._agenda.plan(change.time_s, lambda change=change: self._change_hosts(change))  # type: ignore[misc]

    def play(self) -> None:
        """From the beginning to the end; once."""
        end_s = self._trace.end_s
        while (moment_s := min(self._agenda.next_s, self._tick_s)) < end_s:
            if self._agenda.next_s <= self._tick_s:
                self._look_just_before(moment_s)
                self._now_s = moment_s
                self._agenda.take()()
            else:
                self._now_s = moment_s
                self._turn(events.Tick())
        self._now_s = end_s
        self._stop_training(lost=False)

    # --- the run ---

    def _begin(self) -> None:
        self.runs += 1
        self._membership = begin(self._rules, self._now_s)
        self._trusted = TrustedHosts()
        self._puppets: dict[str, Puppet] = {}
        self._training_s: float | None = None
        self._size = 0
        self._broken = False
        self._end: events.End | None = None
        self._waits_for_hosts = True
        self._tick_s = math.inf
        if self._names.given:
            self._plan_poll()

    def _look_just_before(self, moment_s: float) -> None:
        """Without a world, each tick moves on the moment from which the driver counts how long there is none."""
        tick_s = tick_before(moment_s)
        idle = self._training_s is None and self._membership.below_min_since_s is not None and not self._waits_for_hosts
        if idle and tick_s > self._now_s:
            self._now_s = tick_s
            self._turn(events.Tick())

    def _turn(self, *news: MembershipEvent) -> None:
        self._membership, actions = self._advance(self._membership, news, self._now_s)
        if self._membership.world.phase == "broken":
            self._stop_training(lost=True)
        for action in actions:
            self._do(action)
        if self._end is not None:
            self._begin()
        elif not self._waits_for_hosts:
            self._tick_s = self._timer(self._membership, self._now_s)

    def _in(self, delay_s: float, act: Callable[[], None]) -> None:
        """Later, unless the run has ended by then."""
        run = self.runs
        self._agenda.plan(self._now_s + delay_s, lambda: act() if self.runs == run else None)

    # --- hosts ---

    def _change_hosts(self, change: Change) -> None:
        gone = {self._names.take_back(host, self._now_s) for host in change.removed}
        self._leaving -= gone
        for host in change.added:
            self._names.give(host, self._now_s)
            self._plan_notice(host)
        if change.added or change.removed:
            self._plan_poll()
        dead = {worker: puppet.life for worker, puppet in self._puppets.items() if host_of(worker) in gone}
        for worker, life in dead.items():  # the driver hears of one after the other
            self._exit(worker, life, "its host is gone")

    def _plan_poll(self) -> None:
        """Now or at the next question, and once more: a host is gone when two answers say so."""
        next_s = next_poll_s(self._now_s, self._poll_s, self._first_poll_s)
        for moment_s in (next_s, round(next_s + self._poll_s, 6)):
            if moment_s not in self._polls:
                self._polls.add(moment_s)
                self._agenda.plan(moment_s, self._poll)

    def _poll(self) -> None:
        self._polls.discard(self._now_s)
        known = self._trusted.hosts
        listed = [name for name in self._names.given if name not in self._leaving or known]
        self._trusted, _ = self._trusted.answered(tuple(_host(name) for name in listed), self._now_s)
        if self._trusted.hosts != known:
            if self._waits_for_hosts:  # as edlrun does before it begins
                self._membership = begin(self._rules, self._now_s)
                self._waits_for_hosts = False
            self._turn(events.HostsFound(self._trusted.hosts))

    def _plan_notice(self, host: str) -> None:
        """Of a host that has just come: when it will be known to go."""
        removals = (change.time_s for change in self._trace.changes if host in change.removed)
        gone_s = next((time_s for time_s in removals if time_s > self._now_s), None) if self._notice_s else None
        if gone_s is not None:
            name = self._names.of(host)
            assert name is not None
            self._agenda.plan(max(self._now_s, gone_s - self._notice_s), lambda: self._tell(name, gone_s))

    def _tell(self, name: str, gone_s: float) -> None:
        self._leaving.add(name)
        self._turn(events.DrainAsked(name, gone_s - self._now_s, stays=True))

    # --- what the driver orders ---

    def _do(self, action: Action) -> None:
        match action:
            case events.Spawn(worker, life):
                self._puppets[worker] = Puppet(life)
                if host_of(worker) in self._names.given:
                    self._in(self._costs.start_s, lambda: self._be_ready(worker, life))
                else:
                    self._in(UNREACHABLE_S, lambda: self._exit(worker, life, "it could not be reached", began=False))
            case events.Follow(worker, generation, _):
                self._puppets[worker].follows = generation
                life = self._puppets[worker].life
                self._in(self._costs.follow_s, lambda: self._catch_up(worker, life, generation))
            case events.Publish(generation, members):
                self._gather(generation, members)
            case events.AskChange(generation):
                self._agenda.plan(self._next_commit_s(), lambda: self._leave(generation))
            case events.TellGone(generation, _):
                if not self._broken:
                    self._broken = True
                    self._in(0.0, lambda: self._leave(generation))
            case events.Dismiss(worker, life, save, _):
                how = "exit code 0"
                act = self._save if save else self._exit
                self._in(self._costs.write_s if save else 0.0, lambda: act(worker, life, how, clean=True))
            case events.Kill(worker, life, reason):
                self._in(0.0, lambda: self._exit(worker, life, reason))
            case events.End():
                self._end = action

    def _is_current(self, worker: str, life: int) -> bool:
        return worker in self._puppets and self._puppets[worker].life == life

    def _be_ready(self, worker: str, life: int) -> None:
        if self._is_current(worker, life):
            self._turn(events.Ready(worker, life, -1))

    def _catch_up(self, worker: str, life: int, generation: int) -> None:
        world = self._membership.world
        whole = world.generation == generation and world.phase in ("running", "changing")
        if whole and self._is_current(worker, life) and self._puppets[worker].follows == generation:
            self._puppets[worker].warm = generation
            self._turn(events.Warm(worker, life, generation))

    def _exit(self, worker: str, life: int, how: str, clean: bool = False, began: bool = True) -> None:
        if self._is_current(worker, life):
            del self._puppets[worker]
            self._turn(events.Exited(worker, life, clean, how, began))

    def _save(self, worker: str, life: int, how: str, clean: bool) -> None:
        if self._is_current(worker, life):
            self._course.saved(self._now_s)
            self._exit(worker, life, how, clean)

    # --- worlds ---

    def _gather(self, generation: int, members: tuple[str, ...]) -> None:
        puppets = [self._puppets[worker] for worker in members]
        pause_s = self._costs.recover_s if self._broken else self._costs.resize_s
        if all(puppet.step < 0 for puppet in puppets):
            self._course.fell_back()
            pause_s += self._costs.restore_s if self._course.has_checkpoint else 0.0
        elif any(puppet.step < 0 and puppet.warm != generation - 1 for puppet in puppets):
            pause_s += self._costs.follow_s  # the others wait while it is given the state
        self._broken = False
        for puppet in puppets:
            puppet.member = True
        self._in(pause_s, lambda: self._form(generation))

    def _form(self, generation: int) -> None:
        world = self._membership.world
        if world.generation == generation and world.phase == "forming":
            self._worlds += 1
            for worker in world.members:
                self._puppets[worker].step = self._worlds
            self._training_s = self._now_s
            self._size = len(world.members)
            lives = {worker: self._puppets[worker].life for worker in world.members}
            self._turn(*(events.Formed(worker, life, generation) for worker, life in lives.items()))

    def _next_commit_s(self) -> float:
        assert self._training_s is not None
        steps = math.ceil((self._now_s - self._training_s) / self._costs.step_s - 1e-6)
        return self._training_s + max(1, steps) * self._costs.step_s

    def _leave(self, generation: int) -> None:
        """All who are left of the world, at the same commit."""
        if self._membership.world.generation != generation:
            return
        self._stop_training(lost=False)
        members = {worker: puppet for worker, puppet in self._puppets.items() if puppet.member}
        for puppet in members.values():
            puppet.member, puppet.follows, puppet.warm = False, 0, 0
        if members:
            self._turn(*(events.Ready(worker, puppet.life, puppet.step) for worker, puppet in members.items()))

    def _stop_training(self, lost: bool) -> None:
        """Of a world that breaks, the step in flight is lost."""
        if self._training_s is None:
            return
        lost_s = math.fmod(self._now_s - self._training_s, self._costs.step_s) if lost else 0.0
        self._course.trained(self._training_s, self._now_s, self._size, lost_s)
        self._training_s = None


@functools.cache
def _host(name: str) -> HostSlots:
    return HostSlots(name, 1)
