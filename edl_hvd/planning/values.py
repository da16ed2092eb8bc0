"""What the planner is asked, and what it answers: frozen values.

Whoever runs many jobs makes :class:`Room`, :class:`Claim` and :class:`JobAsk` of what it sees, calls
the planner, and carries out the :class:`Plan`. Times are seconds of one clock of the caller's choice; goodput is in
units of the caller's choice, the same within one job.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots


@dataclass(frozen=True)
class Room:
    """A host, and how many of its slots jobs may use.

    >>> Room("a", slots=8, others=3).left
    5

    Attributes:
        host: Name as in ``HostSlots``; small letters.
        slots: Slots of the host that can be allocated at all, 0 or more.
        others: Slots that something holds there which is neither a job nor a claim of this plan. Pods that are being
            deleted count until they are gone.
        kind: Kind of its accelerators; jobs with a curve for this kind may run there.
        zone: Zone of its network; a job that spans hosts is placed within one where that is possible.
        is_open: Whether it may be given to a job anew. Shares on a host that is not open stay until it is drained.
    """

    host: str
    slots: int
    others: int = 0
    kind: str = ""
    zone: str = ""
    is_open: bool = True

    def __post_init__(self) -> None:
        if self.slots < 0 or self.others < 0:
            raise UsageError(
                f"room of host {self.host!r} has {self.slots} slots, {self.others} of others; expected 0 or more"
            )

    @property
    def left(self) -> int:
        """Slots for jobs and claims of this plan, at least 0."""
        return max(0, self.slots - self.others)


@dataclass(frozen=True)
class Claim:
    """Room that something other than a job needs: a service, another user.

    A claim is satisfied before any job gets more than its least. It takes slots that nobody holds, then what jobs hold
    above their least, then, from jobs of a lower priority that are preemptible, the rest. Where all of that is not
    enough it takes nothing (:class:`WaitingClaim`).

    Attributes:
        claim: Name, unique among claims.
        slots: Slots that it needs, all or none, on hosts of one kind; at least 1.
        unit: Slots that have to be on one host together, a divisor of ``slots``.
        priority: Rank among claims and jobs; the larger goes first.
        asked_s: Moment of the claim.
        holds: Where it lies already: what an earlier plan has set aside for it. This stays.
    """

    claim: str
    slots: int
    unit: int = 1
    priority: int = 0
    asked_s: float = 0.0
    holds: tuple[HostSlots, ...] = ()

    def __post_init__(self) -> None:
        if self.slots < 1 or self.unit < 1 or self.slots % self.unit:
            raise UsageError(
                f"claim {self.claim!r} asks for {self.slots} slots in units of {self.unit}; expected at least 1, and a "
                "multiple of the unit"
            )


@dataclass(frozen=True)
class Curve:
    """What a job makes of a number of slots.

    >>> curve = Curve(sizes=(1, 2, 4), goodput=(100.0, 190.0, 340.0))
    >>> curve.at(0), curve.at(2), curve.at(3), curve.at(8)
    (0.0, 190.0, 265.0, 340.0)

    Attributes:
        sizes: Numbers of slots, at least 1, rising.
        goodput: Progress per second with each of them, more than 0.
        kind: Kind of accelerators that it was measured on, as ``Room.kind``.
    """

    sizes: tuple[int, ...]
    goodput: tuple[float, ...]
    kind: str = ""

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip((0, *self.sizes), self.sizes, strict=False))
        usable = all(math.isfinite(value) and value > 0 for value in self.goodput)
        if not self.sizes or len(self.sizes) != len(self.goodput) or not rising or not usable:
            raise UsageError(
                f"a curve of sizes {list(self.sizes)} and goodput {list(self.goodput)} is not usable; expected sizes "
                "of at least 1 that rise, and as many finite values above 0"
            )

    def at(self, slots: int) -> float:
        """Progress per second: between two sizes on the line between them, below the first in proportion.

        Beyond the last size it does not grow: what nobody has measured is not counted on.
        """
        if slots <= 0:
            return 0.0
        place = bisect_left(self.sizes, slots)
        if place == len(self.sizes):
            return self.goodput[-1]
        size, value = self.sizes[place], self.goodput[place]
        if size == slots:
            return value
        below, low = (self.sizes[place - 1], self.goodput[place - 1]) if place else (0, 0.0)
        return low + (value - low) * (slots - below) / (size - below)


@dataclass(frozen=True)
class JobAsk:
    """What a job wants, holds and is worth.

    Attributes:
        job: Name, unique among jobs.
        queue: Queue whose weight and limit it shares; see :class:`QueueRule`.
        priority: Rank for its least; the larger goes first.
        weight: Its part of its queue's slots, in proportion to that of other jobs; more than 0.
        preemptible: Whether a job of a higher priority may stop it, to be resumed later.
        least: Fewest slots that it runs with; at least 1.
        most: Most slots that it makes use of; 0 while it is asked to hold none.
        unit: Slots that go together on one host: those of a pod, or of a host. ``least`` and ``most`` are multiples.
        curves: Goodput over slots, one for each kind of hosts that it may run on; all its slots are on one kind, which
            plans may change. None: it may run on any host, and counts as linear up to twice the larger of ``seen`` and
            ``least``.
        left: Work left, in the curves' goodput times seconds; ``None``: not known.
        served_slot_s: Slot-seconds that it has had; ranked shares do not look at it, other policies do.
        asked_s: Moment at which it first asked; a job that was preempted keeps it.
        changed_s: Moment at which its share last changed.
        holds: Slots that it holds, or is about to hold by the last plan.
        floor: The part of ``holds`` that it gives away last, because its least runs there.
        change_s: Seconds without progress that another number of slots costs it, by its own measurements.
        start_s: Seconds without progress that its start costs. Where that is more than ``change_s``, workers on new
            slots start for that long while the others train on. A move to another kind of hosts costs a start, too.
        seen: Most slots that it has trained with for a minute. The caller keeps it, so that a plan that is carried
            out does not at once lead to the next.
    """

    job: str
    queue: str = ""
    priority: int = 0
    weight: float = 1.0
    preemptible: bool = True
    least: int = 1
    most: int = 1
    unit: int = 1
    curves: tuple[Curve, ...] = ()
    left: float | None = None
    served_slot_s: float = 0.0
    asked_s: float = 0.0
    changed_s: float = -math.inf
    holds: tuple[HostSlots, ...] = ()
    floor: tuple[HostSlots, ...] = ()
    change_s: float = 0.0
    start_s: float = 0.0
    seen: int = 0

    def __post_init__(self) -> None:
        if self.unit < 1 or self.least < 1 or self.least % self.unit or self.most % self.unit:
            raise UsageError(
                f"job {self.job!r} asks for {self.least} to {self.most} slots in units of {self.unit}; expected at "
                "least 1, and multiples of the unit"
            )
        if self.most and self.most < self.least:
            raise UsageError(
                f"job {self.job!r} asks for at least {self.least} and at most {self.most} slots; expected a most of "
                f"{self.least} or more, or 0 while it shall hold none"
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(f"job {self.job!r} has a weight of {self.weight:g}; expected a number above 0")

    @property
    def held(self) -> int:
        """Slots that it holds."""
        return sum(entry.slots for entry in self.holds)


@dataclass(frozen=True)
class QueueRule:
    """What a queue may have.

    Attributes:
        queue: Name.
        weight: Its part of the slots, in proportion to other queues that have jobs; more than 0.
        limit: Most slots of its jobs together; ``None``: no limit.
    """

    queue: str
    weight: float = 1.0
    limit: int | None = None


@dataclass(frozen=True)
class PlanRules:
    """How slots are shared.

    Attributes:
        patience_s: Seconds after which a waiting job comes before running ones of its priority that have lost a part
            of their least.
        elasticity: Exponent p of the speedup n^p in the weights of known rests, 0 to less than 1. 0: equal shares.
        favour_short: Exponent of these weights: 1 as in heSRPT, 0 no preference for short jobs. heSRPT's shares are the
            best if no job comes later. As jobs come, the longest ones stay last for all of that time; weights that
            differ less let them end earlier.
        horizon_s: Seconds over which a change has to pay: a change of c seconds costs c / max(horizon_s, 10 c) of a
            share's value, and a start of s seconds beside it s / max(horizon_s, 10 s) of what the new slots bring.
        gain: Part by which the total value has to grow before shares are changed that need not be; 0.02 is 2 %.
        settle: How many times its ``change_s`` a job's share stays, before it is changed without need.
        may_span_together: Whether two jobs that both span hosts may lie on one host. Their traffic shares its network.
        queues: Weights and limits of queues; those that are not named weigh 1 and have no limit.
    """

    patience_s: float = 600.0
    elasticity: float = 0.8
    favour_short: float = 0.7
    horizon_s: float = 60.0
    gain: float = 0.02
    settle: float = 20.0
    may_span_together: bool = False
    queues: tuple[QueueRule, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.elasticity < 1:
            raise UsageError(f"elasticity {self.elasticity:g} is not usable; expected 0 or more, and less than 1")
        if self.gain < 0 or self.settle < 0 or self.horizon_s <= 0:
            raise UsageError(
                f"gain {self.gain:g}, settle {self.settle:g} and horizon {self.horizon_s:g} s are not usable; expected "
                "0 or more, and a horizon above 0"
            )


@dataclass(frozen=True)
class Share:
    """What a job gets.

    Attributes:
        job: Name.
        hosts: Slots, by host, sorted by name.
        floor: The part of ``hosts`` that is its least. The rest is extra: claims and the least of other jobs take it.
        why: A sentence.
    """

    job: str
    hosts: tuple[HostSlots, ...]
    floor: tuple[HostSlots, ...]
    why: str

    @property
    def slots(self) -> int:
        """Slots on all its hosts."""
        return sum(entry.slots for entry in self.hosts)


class WaitReason(Enum):
    """Why a job has no slots; the values are reasons as in conditions of Kubernetes."""

    ROOM = "WaitsForRoom"
    PRIORITY = "WaitsForHigherPriority"
    QUEUE_LIMIT = "QueueLimit"
    NEVER_FITS = "NeverFits"
    SCALED_TO_ZERO = "ScaledToZero"


@dataclass(frozen=True)
class WaitingJob:
    """A job that gets nothing.

    Attributes:
        job: Name.
        reason: What it waits for.
        why: A sentence.
        is_stopped: Whether it holds slots now, and has to save a checkpoint and leave.
    """

    job: str
    reason: WaitReason
    why: str
    is_stopped: bool = False


@dataclass(frozen=True)
class WaitingClaim:
    """A claim that would have no room even if every job stopped that may be stopped for it.

    It takes nothing, and jobs that it can stop start meanwhile. Those that it could not stop, of its own priority or
    not preemptible, are held back while it waits for jobs. If it waits for other claims, or for others on the hosts, it
    would have no room without jobs either, and holds back none.

    Attributes:
        claim: Name.
        reason: ``NEVER_FITS`` if the hosts would be too small without anything on them, ``ROOM`` otherwise.
        why: A sentence.
    """

    claim: str
    reason: WaitReason
    why: str


@dataclass(frozen=True)
class Reserved:
    """Room that is set aside for a claim.

    Attributes:
        claim: Name.
        hosts: Slots, by host, sorted by name.
        is_free: Whether no job holds any of them now; otherwise jobs have to leave first.
    """

    claim: str
    hosts: tuple[HostSlots, ...]
    is_free: bool


@dataclass(frozen=True)
class Plan:
    """Who gets what.

    Attributes:
        shares: Jobs that get slots, sorted by name.
        waiting: All other jobs, sorted by name.
        yielded: Names of claims whose room is whole and free now, sorted.
        lacking: Slots that more hosts would be used for: by claims and jobs that wait, and by jobs that would grow.
        reserved: Claims that have room set aside, free or not yet, sorted by name.
        changes: Number of jobs whose share differs from what they hold.
        waiting_claims: All claims that are not in ``reserved``, sorted by name.
    """

    shares: tuple[Share, ...] = ()
    waiting: tuple[WaitingJob, ...] = ()
    yielded: tuple[str, ...] = ()
    lacking: int = 0
    reserved: tuple[Reserved, ...] = ()
    changes: int = 0
    waiting_claims: tuple[WaitingClaim, ...] = ()
