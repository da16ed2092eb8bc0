"""Run the driver's own membership and host watch on a trace, in virtual time, with simulated workers.

The code that ``edlrun`` runs decides which workers start and join, and how long a world waits. ``Costs`` says how long
each thing takes. A host has one worker, which dies with its host; there is no other fault.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from edl_hvd.discovery.watch import TrustedHosts
from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.events import Action, MembershipEvent
from edl_hvd.driver.membership.state import Membership, Rules, SlotState, begin, host_of
from edl_hvd.driver.membership.transition import transition_together
from edl_hvd.hosts import HostSlots
from edl_hvd.simulator.costs import Costs
from edl_hvd.simulator.timeline import Timeline
from edl_hvd.simulator.virtual_time import (
    EventQueue,
    HostNames,
    SimulatedWorker,
    next_poll_s,
    tick_after,
    tick_before,
)
from edl_hvd.traces.trace import HostChange, Trace

Advance: TypeAlias = Callable[[Membership, Sequence[MembershipEvent], float], tuple[Membership, tuple[Action, ...]]]

UNREACHABLE_S = 10.0
# ssh's ConnectTimeout (``driver/workers/ssh.py``): a host that is gone does not answer.
REST_S = 60.0
# Longer than the membership remembers a failure: the pause before a restart is at most a minute.


def next_tick_s(membership: Membership, now_s: float) -> float:
    """The first of the driver's ticks at which time alone may change something; infinity if there is none.

    Some of these ticks change nothing: a bound counts for every slot whose state may have it.
    """
    due_s = min((moment_s for moment_s in _moments(membership, now_s) if moment_s >= now_s), default=math.inf)
    if math.isinf(due_s):
        return due_s
    # Some bounds end when they are reached, others when they are passed.
    return tick_after(max(now_s, tick_before(due_s)))


def _moments(membership: Membership, now_s: float) -> list[float]:
    rules, world, slots = membership.rules, membership.world, membership.slots
    moments = [
        *membership.drains.values(),
        *membership.deferred_drains.values(),
        *membership.quarantined.values(),
    ]
    bounds: dict[SlotState, tuple[float, ...]] = {
        "starting": (rules.start_s,),
        "ready": (rules.last_call_timeout_s, rules.follow_s),
        "terminating": (rules.shutdown_timeout_s,),
        "failing": (rules.shutdown_timeout_s,),
    }
    for worker in membership.having(*bounds):
        slot = slots[worker]
        moments += [slot.since_s + bound_s for bound_s in bounds[slot.state]]
    for worker in membership.having("empty"):
        not_before_s = slots[worker].not_before_s
        if not_before_s >= now_s and host_of(worker) in membership.listed_hosts:
            moments.append(not_before_s)
    if world.phase == "changing":
        moments += [slot.since_s + rules.regroup_s for slot in slots.values() if slot.state != "member"]
    if world.phase != "running":
        moments.append(world.since_s + rules.regroup_s)
    elif membership.drains or not world.hosts <= membership.listed_hosts:
        moments.append(world.since_s + rules.removal_notice_s)
    if membership.below_min_since_s is not None:
        moments.append(membership.below_min_since_s + rules.elastic_timeout_s)
    if membership.finishing_s is not None:
        moments.append(membership.finishing_s + rules.regroup_s)
    return moments


class DriverSimulation:
    """Simulation of one job over a whole trace. A run that ends because hosts lack is followed by another.

    Args:
        trace: When hosts come and go.
        costs: How long things take.
        rules: Rules of the membership, as flags of ``edlrun`` set them.
        timeline: Timeline that the run writes.
        poll_s: Seconds between two polls of the host source.
        first_poll_s: Moment of the first poll.
        notice_s: Seconds between a preemption notice and the end of a host; 0 for no notices.
        advance: Function by which the membership handles events.
        timer: Function that returns the next moment at which time alone may change something.
        tell: Function that is given the share of the trace that is done, from 0 to 1, now and then.

    Attributes:
        runs: Number of times that the job was started.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        rules: Rules,
        timeline: Timeline,
        poll_s: float = 1.0,
        first_poll_s: float = 0.0,
        notice_s: float = 0.0,
        advance: Advance = transition_together,
        timer: Callable[[Membership, float], float] = next_tick_s,
        tell: Callable[[float], None] = lambda done: None,
    ) -> None:
        self._trace, self._costs, self._rules, self._timeline = trace, costs, rules, timeline
        self._poll_s, self._notice_s, self._advance, self._timer = poll_s, notice_s, advance, timer
        self._first_poll_s, self._tell_progress = first_poll_s, tell
        self._now_s = 0.0
        self._queue = EventQueue()
        self._names = HostNames(rules.failure_window_s + rules.cooldown_s + REST_S + notice_s)
        self._leaving: set[str] = set()
        self._polls: set[float] = set()
        self._worlds = 0
        self.runs = 0
        self._begin()
        self._removals: dict[str, list[float]] = {}  # moments at which each host goes
        for change in trace.changes:
            for host in change.removed:
                self._removals.setdefault(host, []).append(change.time_s)
            self._queue.schedule(change.time_s, lambda change=change: self._change_hosts(change))  # type: ignore[misc]

    def run(self) -> None:
        """Run the whole trace; call it once."""
        end_s = self._trace.end_s
        while (moment_s := min(self._queue.next_s, self._tick_s)) < end_s:
            self._tell_progress(moment_s / end_s)
            if self._queue.next_s <= self._tick_s:
                self._look_just_before(moment_s)
                self._now_s = moment_s
                self._queue.pop()()
            else:
                self._now_s = moment_s
                self._handle(events.Tick())
        self._now_s = end_s
        self._stop_training(lost=False)
        if all(simulated.step < 0 for simulated in self._workers.values()):
            self._timeline.restarted()  # nobody is left who holds what was done since the newest checkpoint

    # --- the run ---

    def _begin(self) -> None:
        self.runs += 1
        self._membership = begin(self._rules, self._now_s)
        self._trusted = TrustedHosts()
        self._workers: dict[str, SimulatedWorker] = {}
        self._training_s: float | None = None
        self._size = 0
        self._broken = False
        self._end: events.End | None = None
        self._waits_for_hosts = True
        self._tick_s = math.inf
        if self._names.given:
            self._plan_poll()

    def _look_just_before(self, moment_s: float) -> None:
        """Tick just before a moment: without a world, each tick moves the beginning of the elastic timeout."""
        tick_s = tick_before(moment_s)
        idle = self._training_s is None and self._membership.below_min_since_s is not None and not self._waits_for_hosts
        if idle and tick_s > self._now_s:
            self._now_s = tick_s
            self._handle(events.Tick())

    def _handle(self, *arrived: MembershipEvent) -> None:
        self._membership, actions = self._advance(self._membership, arrived, self._now_s)
        if self._membership.world.phase == "broken":
            self._stop_training(lost=True)
        for action in actions:
            self._do(action)
        if self._end is not None:
            self._begin()
        elif not self._waits_for_hosts:
            self._tick_s = self._timer(self._membership, self._now_s)

    def _in(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule an event, which is dropped if the run has ended by then."""
        run = self.runs
        self._queue.schedule(self._now_s + delay_s, lambda: act() if self.runs == run else None)

    # --- hosts ---

    def _change_hosts(self, change: HostChange) -> None:
        gone = {self._names.take_back(host, self._now_s) for host in change.removed}
        self._leaving -= gone
        for host in change.added:
            self._names.give(host, self._now_s)
            self._plan_notice(host)
        if change.added or change.removed:
            self._plan_poll()
        dead = {
            worker: simulated.incarnation
            for worker, simulated in self._workers.items() if gone and host_of(worker) in gone
        }  # fmt: skip
        for worker, incarnation in dead.items():  # the driver handles one exit after the other
            self._exit(worker, incarnation, "its host is gone")

    def _plan_poll(self) -> None:
        """Schedule the next poll and the one after it: a host is gone when two answers say so."""
        next_s = next_poll_s(self._now_s, self._poll_s, self._first_poll_s)
        for moment_s in (next_s, round(next_s + self._poll_s, 6)):
            if moment_s not in self._polls:
                self._polls.add(moment_s)
                self._queue.schedule(moment_s, self._poll)

    def _poll(self) -> None:
        self._polls.discard(self._now_s)
        known = self._trusted.hosts
        listed = [name for name in self._names.given if name not in self._leaving or known]
        self._trusted, _ = self._trusted.answered(tuple(_host(name) for name in listed), self._now_s)
        if self._trusted.hosts != known:
            if self._waits_for_hosts:  # as edlrun does before it begins
                self._membership = begin(self._rules, self._now_s)
                self._waits_for_hosts = False
            self._handle(events.HostsFound(self._trusted.hosts))

    def _plan_notice(self, host: str) -> None:
        """Schedule the preemption notice of a host that has just come."""
        removals = self._removals.get(host, []) if self._notice_s else []
        place = bisect.bisect_right(removals, self._now_s)
        gone_s = removals[place] if place < len(removals) else None
        if gone_s is not None:
            name = self._names.of(host)
            assert name is not None
            self._queue.schedule(max(self._now_s, gone_s - self._notice_s), lambda: self._tell(name, gone_s))

    def _tell(self, name: str, gone_s: float) -> None:
        self._leaving.add(name)
        self._handle(events.DrainRequested(name, gone_s - self._now_s, deferred=True))

    # --- what the driver orders ---

    def _do(self, action: Action) -> None:
        match action:
            case events.Spawn(worker, incarnation):
                self._workers[worker] = SimulatedWorker(incarnation)
                if host_of(worker) in self._names.given:
                    self._in(self._costs.start_s, lambda: self._be_ready(worker, incarnation))
                else:
                    self._in(
                        UNREACHABLE_S, lambda: self._exit(worker, incarnation, "it could not be reached", began=False)
                    )
            case events.ReceiveState(worker, generation, _):
                self._workers[worker].learning_generation = generation
                incarnation = self._workers[worker].incarnation
                self._in(self._costs.follow_s, lambda: self._catch_up(worker, incarnation, generation))
            case events.Publish(generation, members):
                self._gather(generation, members)
            case events.RequestResize(generation):
                self._queue.schedule(self._next_commit_s(), lambda: self._leave(generation))
            case events.NotifyPeerLost(generation, _):
                if not self._broken:
                    self._broken = True
                    self._in(0.0, lambda: self._leave(generation))
            case events.ShutDownWorker(worker, incarnation, save, _):
                how = "exit code 0"
                act = self._save if save else self._exit
                self._in(self._costs.write_s if save else 0.0, lambda: act(worker, incarnation, how, clean=True))
            case events.Kill(worker, incarnation, reason):
                self._in(0.0, lambda: self._exit(worker, incarnation, reason))
            case events.End():
                self._end = action

    def _is_current(self, worker: str, incarnation: int) -> bool:
        return worker in self._workers and self._workers[worker].incarnation == incarnation

    def _be_ready(self, worker: str, incarnation: int) -> None:
        if self._is_current(worker, incarnation):
            self._handle(events.Ready(worker, incarnation, -1))

    def _catch_up(self, worker: str, incarnation: int, generation: int) -> None:
        world = self._membership.world
        whole = world.generation == generation and world.phase in ("running", "changing")
        if whole and self._is_current(worker, incarnation) and self._workers[worker].learning_generation == generation:
            self._workers[worker].caught_up_generation = generation
            self._handle(events.CaughtUp(worker, incarnation, generation))

    def _exit(self, worker: str, incarnation: int, how: str, clean: bool = False, began: bool = True) -> None:
        if self._is_current(worker, incarnation):
            del self._workers[worker]
            self._handle(events.Exited(worker, incarnation, clean, how, began))

    def _save(self, worker: str, incarnation: int, how: str, clean: bool) -> None:
        if self._is_current(worker, incarnation):
            self._timeline.saved(self._now_s)
            self._exit(worker, incarnation, how, clean)

    # --- worlds ---

    def _gather(self, generation: int, members: tuple[str, ...]) -> None:
        workers = [self._workers[worker] for worker in members]
        pause_s = self._costs.recover_s if self._broken else self._costs.resize_s
        if all(simulated.step < 0 for simulated in workers):
            self._timeline.restarted()
            pause_s += self._costs.restore_s if self._timeline.has_checkpoint else 0.0
        elif any(simulated.step < 0 and simulated.caught_up_generation != generation - 1 for simulated in workers):
            pause_s += self._costs.follow_s  # the others wait while the newcomer receives the state
        self._broken = False
        for simulated in workers:
            simulated.member = True
        self._in(pause_s, lambda: self._form(generation))

    def _form(self, generation: int) -> None:
        world = self._membership.world
        if world.generation == generation and world.phase == "forming":
            self._worlds += 1
            members = [(worker, self._workers[worker]) for worker in world.members]
            for _, simulated in members:
                simulated.step = self._worlds
            self._training_s = self._now_s
            self._size = len(world.members)
            self._handle(*[events.Formed(worker, simulated.incarnation, generation) for worker, simulated in members])

    def _next_commit_s(self) -> float:
        assert self._training_s is not None
        steps = math.ceil((self._now_s - self._training_s) / self._costs.step_s - 1e-6)
        return self._training_s + max(1, steps) * self._costs.step_s

    def _leave(self, generation: int) -> None:
        """All remaining members leave the world, at the same commit."""
        if self._membership.world.generation != generation:
            return
        self._stop_training(lost=False)
        members = {worker: simulated for worker, simulated in self._workers.items() if simulated.member}
        for simulated in members.values():
            simulated.member, simulated.learning_generation, simulated.caught_up_generation = False, 0, 0
        if members:
            self._handle(
                *[events.Ready(worker, simulated.incarnation, simulated.step) for worker, simulated in members.items()]
            )

    def _stop_training(self, lost: bool) -> None:
        """Record the training of the present world; one that breaks loses the step in flight."""
        if self._training_s is None:
            return
        lost_s = math.fmod(self._now_s - self._training_s, self._costs.step_s) if lost else 0.0
        self._timeline.trained(self._training_s, self._now_s, self._size, lost_s)
        self._training_s = None


@functools.cache
def _host(name: str) -> HostSlots:
    return HostSlots(name, 1)
