"""Who is a member of the world, as one frozen value.

A slot goes empty → starting → ready → member → ready → …; from member to failing when its script has raised an error
or its process begins to end, from anywhere to terminating or dying, and back to empty when its process has ended. A
world goes forming → running → changing (agreed) or broken (a member died) and is over when nobody is a member any more;
then the next one is published. What always holds:

- a slot never has two processes;
- a world is published only when each of its members is ready, and has at least ``min_np`` of them;
- whoever holds the training state is not sent away before somebody else has it, while there is time for that;
- every wait has a bound, and the job ends in success, in a stated failure, or saved because all its hosts were left.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from edl_hvd.driver.membership.events import End
from edl_hvd.hosts import HostSlots
from edl_hvd.json_values import formerly

SlotState: TypeAlias = Literal["empty", "starting", "ready", "member", "failing", "terminating", "dying"]
WorldPhase: TypeAlias = Literal["forming", "running", "changing", "broken"]
LIVE: tuple[SlotState, ...] = ("starting", "ready", "member", "failing", "terminating", "dying")
_FEW = 4
# Workers that a sorted list takes in one by one; for more of them it is made anew.


@dataclass(frozen=True)
class Rules:
    """What the user allows, and the bounds of every wait.

    Attributes:
        num_proc: Workers that the first world needs.
        min_np: Workers that every later world needs.
        max_np: Most workers of a world.
        spares: Workers kept ready beside it.
        last_call_timeout_s: Time that a newcomer which could join waits for others that are starting, to join together.
        drain_lead_s: Time before the end of a host that is to go at which its workers leave.
        follow_s: Longest time for a newcomer to catch up; after it, it joins while the others wait.
        start_s: Longest start of a worker, from its process to its first readiness.
        regroup_s: Longest time for members to leave a broken world, or to form a new one.
        shutdown_timeout_s: Longest time for a worker that was asked to exit to end; it may write a checkpoint.
        elastic_timeout_s: Longest time without a world.
        removal_notice_s: How long a worker may stay on a host that discovery no longer lists, when nobody
            else holds the state.
        backoff_s: Pause before a crashed worker is started again; doubles with each crash, up to a minute.
        backoff_reset_s: Time after which a running worker has proved itself: its slot's pause starts small again.
        host_failures: Crashes within ``failure_window_s`` after which a host is quarantined for ``cooldown_s``.
        same_error_limit: Times the same error at the same step is met before it counts as the script's.
        reset_limit: Most worlds after the first, or ``None``.
        hosts_are_fixed: There will never be others than those that were named.
    """

    num_proc: int
    min_np: int
    max_np: int
    spares: int = 0
    last_call_timeout_s: float = field(default=0.5, metadata=formerly("settle_s"))
    # Hosts of one scale-up come within a second of each other; waiting costs nobody anything, they train on.
    drain_lead_s: float = field(default=10.0, metadata=formerly("leave_s"))
    # The next commit takes a step; a host that goes before it costs no more than one that nobody announced.
    follow_s: float = 600.0
    # Some hundred gigabytes over a slow network.
    start_s: float = 1800.0
    # Reading an image folder of a million files over a network takes minutes.
    regroup_s: float = 60.0
    # Twice Gloo's timeout, within which Horovod lets go of anything.
    shutdown_timeout_s: float = field(default=600.0, metadata=formerly("farewell_s"))
    # A last checkpoint of some gigabytes over a slow network.
    elastic_timeout_s: float = 600.0
    # Horovod's own default.
    removal_notice_s: float = 60.0
    # A worker's start; the host is often dead already, which its processes show by themselves.
    backoff_s: float = 1.0
    backoff_reset_s: float = field(default=60.0, metadata=formerly("steady_s"))
    host_failures: int = 3
    failure_window_s: float = 600.0
    cooldown_s: float = 60.0
    same_error_limit: int = 3
    reset_limit: int | None = None
    hosts_are_fixed: bool = False


class ScriptError(NamedTuple):
    """An error of a training function, and the step at which it was raised; a list of both in JSON."""

    step: int
    error: str


@dataclass(frozen=True)
class RepeatedError:
    """An error that workers have met one after the other, each as often as it is named."""

    raised: ScriptError
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Slot:
    """One worker's place on a host, and the process in it.

    Attributes:
        state: "empty" or one of ``LIVE``.
        incarnation: Counts the processes of the slot.
        since_s: When the state was entered.
        started_s: When the process was started.
        step: What it held when it last was ready.
        learning_generation: Generation of the world whose state it was told to take over; 0 for none.
        caught_up_generation: Generation of the world with which it has caught up; 0 for none.
        done: Its training function returned.
        raised: The error of its training function, or ``None``.
        not_before_s: No new process before this moment.
        backoff_s: The pause after the next crash.
    """

    state: SlotState = "empty"
    incarnation: int = 0
    since_s: float = 0.0
    started_s: float = 0.0
    step: int = -1
    learning_generation: int = 0
    caught_up_generation: int = 0
    done: bool = False
    raised: ScriptError | None = None
    not_before_s: float = 0.0
    backoff_s: float = 0.0


EMPTY = Slot()


@dataclass(frozen=True)
class PublishedWorld:
    """The last world published."""

    generation: int = 0
    members: tuple[str, ...] = ()
    phase: WorldPhase = "broken"
    since_s: float = 0.0
    formed: frozenset[str] = frozenset()

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts of the members."""
        return _hosts_of(self.members)


@functools.lru_cache(maxsize=8)
def _hosts_of(members: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(host_of, members))


@dataclass(frozen=True)
class Membership:
    """Everything the driver knows of its job.

    Attributes:
        rules: What the user allows.
        hosts: The trusted list.
        failed_preflight: Hosts of it that were looked at and found too bad to have workers.
        slots: By worker name, in the order in which they were first seen.
        world: The last one published.
        drains: What is to be left (host or worker), and until when.
        deferred_drains: How long workers of these may stay all the same, as long as there are others.
        failures: Moments of the crashes of each host.
        quarantined: Quarantined hosts, and until when.
        startup_failures: Workers that ended before they were ready, or could not be started on hosts that are fixed,
            while there was no world yet.
        repeated: The error met last, or ``None``.
        script_error: The script's own error met last, unless a worker was lost without one since; else ``None``.
        below_min_since_s: Since when there has been no world, or ``None``.
        finishing_s: Since when a worker's training is complete, or ``None``.
        end: How the job ended, or ``None``.
    """

    rules: Rules
    hosts: tuple[HostSlots, ...] = ()
    failed_preflight: tuple[str, ...] = ()
    slots: Mapping[str, Slot] = field(default_factory=dict)
    world: PublishedWorld = field(default_factory=PublishedWorld)
    drains: Mapping[str, float] = field(default_factory=dict)
    deferred_drains: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, float] = field(default_factory=dict)
    startup_failures: int = 0
    repeated: RepeatedError | None = None
    script_error: ScriptError | None = None
    below_min_since_s: float | None = None
    finishing_s: float | None = None
    end: End | None = None

    def having(self, *states: SlotState) -> list[str]:
        """Names of the workers in these states, in order."""
        by_state = self._by_state
        if len(states) == 1:
            return by_state[states[0]].copy() if states[0] in by_state else []
        found = [by_state[state] for state in states if state in by_state]
        if len(found) < 2:
            return found[0].copy() if found else []
        return [worker for worker, slot in self.slots.items() if slot.state in states]

    @functools.cached_property
    def _by_state(self) -> Mapping[SlotState, list[str]]:
        found: dict[SlotState, list[str]] = {}
        for worker, slot in self.slots.items():
            if slot.state in found:
                found[slot.state].append(worker)
            else:
                found[slot.state] = [worker]
        return found

    def wanted(self, now_s: float) -> list[str]:
        """Slots that may have a worker: on listed hosts that are fit and not left.

        On one that is quarantined, or is to go and stays while there are others, those that have one.
        """
        if not (self.failed_preflight or self.drains or self.quarantined):
            return self._listed.copy()
        named = [
            (f"{entry.host}:{number}", entry.host)
            for entry in self.hosts
            if entry.host not in self.failed_preflight
            for number in range(entry.slots)
        ]
        present = set(self.having("starting", "ready", "member"))
        wanted = {
            worker
            for worker, host in named
            if host not in self.drains and worker not in self.drains
            if self.quarantined.get(host, now_s) <= now_s or worker in present
        }
        if self.deferred_drains and not wanted.isdisjoint(self.having("member")):
            wanted.update(worker for worker in self.having("ready", "member") if self.stays_until_s(worker) > now_s)
        return [worker for worker, _ in named if worker in wanted]

    @functools.cached_property
    def _listed(self) -> list[str]:
        return [f"{entry.host}:{number}" for entry in self.hosts for number in range(entry.slots)]

    @functools.cached_property
    def listed_hosts(self) -> frozenset[str]:
        """Names of the trusted hosts."""
        return frozenset(entry.host for entry in self.hosts)

    def is_to_go(self, worker: str) -> bool:
        """It, or its host, is drained, now or later."""
        return worker in self.drains or host_of(worker) in self.drains

    def stays_until_s(self, worker: str) -> float:
        """How long it may stay although it is to go; minus infinity if it may not, or is not to go."""
        targets = [target for target in (worker, host_of(worker)) if target in self.drains]
        return min((self.deferred_drains.get(target, -math.inf) for target in targets), default=-math.inf)

    def changed(self, changes: Mapping[str, Any], moved: Collection[str] | None = None) -> Membership:
        """``replace``, which keeps what was derived from the fields that stay.

        Args:
            changes: New values by the name of the field.
            moved: Workers whose state may have changed, in new slots that lack none; ``None`` for any.
        """
        if not changes.keys() <= _MEMBERSHIP_FIELDS:
            raise TypeError(f"a membership has no such fields as {', '.join(changes)}")
        after = with_changes(self, changes)
        derived = after.__dict__
        if "hosts" in changes:
            derived.pop("_listed", None)
            derived.pop("listed_hosts", None)
        if "slots" in changes:
            by_state = derived.pop("_by_state", None)
            if len(after.slots) > len(self.slots):
                derived.pop("_places", None)
            elif by_state is not None and moved is not None and len(moved) <= _FEW:
                derived["_by_state"] = after._regrouped(by_state, self.slots, moved)
        return after

    def _regrouped(
        self, by_state: Mapping[SlotState, list[str]], before: Mapping[str, Slot], moved: Collection[str]
    ) -> Mapping[SlotState, list[str]]:
        found = dict(by_state)
        for worker in moved:
            left, entered = before[worker].state, self.slots[worker].state
            if left != entered:
                found[left] = [other for other in found[left] if other != worker]
                found[entered] = found.get(entered, []).copy()
                bisect.insort(found[entered], worker, key=self._places.__getitem__)
        return {state: workers for state, workers in found.items() if workers}

    @functools.cached_property
    def _places(self) -> Mapping[str, int]:
        return {worker: place for place, worker in enumerate(self.slots)}


_Frozen = TypeVar("_Frozen", Slot, Membership)
_SLOT_FIELDS = len(fields(Slot))
_MEMBERSHIP_FIELDS = frozenset(entry.name for entry in fields(Membership))


def with_changes(value: _Frozen, changes: Mapping[str, Any]) -> _Frozen:
    """``replace`` in a quarter of its time: each change of a world of N members changes 3 N slots.

    The copy also has all that the value has derived from its fields.
    """
    copy = object.__new__(type(value))
    fields_of_copy = copy.__dict__
    fields_of_copy.update(value.__dict__)
    fields_of_copy.update(changes)
    if type(value) is Slot and len(fields_of_copy) > _SLOT_FIELDS:
        raise TypeError(f"a slot has no such fields as {', '.join(changes)}")
    return copy


@functools.lru_cache(maxsize=4096)
def host_of(worker: str) -> str:
    """``b`` of ``b:0``."""
    return worker.rpartition(":")[0]


def begin(rules: Rules, now_s: float) -> Membership:
    """The membership of a job that has just started."""
    return replace(Membership(rules), below_min_since_s=now_s)
