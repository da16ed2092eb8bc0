"""Everything that a fleet knows of its hosts, jobs and claims, as frozen values of plain fields.

A job goes waiting → starting → running → stopping → waiting again, stopped, complete or failed. Three lists of hosts
belong to it, and are different for a second or two whenever it is resized:

    share      what the planner gives it
    given      what its hosts file lists, which its ``edlrun`` reads
    occupied   where its workers are: as many slots of a host as the highest slot with a worker needs

A slot is free when no job has it in ``given`` or ``occupied``, and no claim holds it. See ``devices.py`` for its GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots, shown
from edl_hvd.json_values import TextEnum
from edl_hvd.planning.values import Curve, PlanRules, QueueRule
from edl_hvd.timings import Timing

MOST_WORKERS = 100_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
# Kubernetes' rule for the names of objects, so that a job can move there; it is a safe name of a folder, too.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_HIGHEST_PRIORITY = 1_000_000_000
# Kubernetes' bound for the priorities of users.


def check_name(name: str, what: str) -> None:
    """Check the name of a job, a family, a claim or a queue.

    Raises:
        UsageError: It is none.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} {shown(name)} is not usable; expected 1 to 63 small letters, digits, '-', '_' and '.', with a "
            "letter or digit at both ends, e.g. 'resnet50'"
        )


def check_priority(priority: int) -> None:
    """Check a priority.

    Raises:
        UsageError: It is none.
    """
    if abs(priority) > _HIGHEST_PRIORITY:
        raise UsageError(
            f"priority {shown(priority)} is not usable; expected {-_HIGHEST_PRIORITY} to {_HIGHEST_PRIORITY}"
        )


@dataclass(frozen=True)
class JobSpec:
    """What a user submitted.

    Attributes:
        name: Name of the job, one of its own in the fleet.
        command: What each worker runs.
        folder: Folder in which it runs.
        least: Fewest workers; with fewer the job waits.
        most: Most workers.
        priority: Jobs of a higher one get their least first, and may stop those of a lower one.
        queue: Group of jobs; the weight of a queue is divided among its jobs.
        preemptible: Whether a job of higher priority may stop it. It is resumed later.
        flags: More flags of ``edlrun``.
        variables: Environment variables as ``NAME=VALUE``, besides those of the daemon.
        retries: How often a run that failed is repeated, from the newest checkpoint.
        family: Name that jobs share which are alike, so that each begins with what the others have measured; empty:
            it is like no other.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    least: int
    most: int
    priority: int = 0
    queue: str = "default"
    preemptible: bool = True
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    retries: int = 0
    family: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "job name")
        if self.family:
            check_name(self.family, "family name")
        check_name(self.queue, "queue name")
        check_priority(self.priority)
        if not self.command or "\0" in "".join((*self.command, *self.flags, *self.variables, self.folder)):
            raise UsageError(
                f"job {self.name} has no command that can be run; expected the program and its arguments, e.g. "
                "'python train.py'"
            )
        if not 1 <= self.least <= MOST_WORKERS or not 1 <= self.most <= MOST_WORKERS:
            raise UsageError(
                f"job {self.name} asks for {shown(self.least)} to {shown(self.most)} workers; expected 1 to "
                f"{MOST_WORKERS} of both"
            )
        if self.least > self.most:
            raise UsageError(
                f"job {self.name} asks for at least {self.least} workers (--min) and at most {self.most} (--max); "
                "lower the one or raise the other"
            )
        if self.retries < 0:
            raise UsageError(f"job {self.name} has {self.retries} retries; expected at least 0")
        wrong = next((text for text in self.variables if not _VARIABLE.fullmatch(text)), None)
        if wrong is not None:
            raise UsageError(f"variable {shown(wrong)} of job {self.name} is not usable; expected NAME=VALUE")


class JobPhase(TextEnum):
    """Where a job of the fleet is between its submission and its end."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    COMPLETE = "complete"
    FAILED = "failed"

    @property
    def is_alive(self) -> bool:
        """Whether its ``edlrun`` runs, or is about to."""
        return self.keeps_slots or self is JobPhase.STOPPING

    @property
    def keeps_slots(self) -> bool:
        """Whether it is alive and nobody has told it to stop."""
        return self is JobPhase.STARTING or self is JobPhase.RUNNING

    @property
    def wants_slots(self) -> bool:
        """Whether the planner is to give it slots."""
        return self.keeps_slots or self is JobPhase.WAITING

    @property
    def is_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self is JobPhase.COMPLETE or self is JobPhase.FAILED

    @property
    def is_at_rest(self) -> bool:
        """Whether it has ended, or was stopped by its user."""
        return self.is_ended or self is JobPhase.STOPPED

    @property
    def can_resume(self) -> bool:
        """Whether its user can let it go on."""
        return self is JobPhase.STOPPED or self is JobPhase.FAILED


@dataclass(frozen=True)
class FleetJob:
    """A job of the fleet.

    Attributes:
        spec: What was submitted; ``most`` as it was scaled last.
        asked_s: When it was submitted.
        phase: Where it is between its submission and its end.
        reason: Reason of the planner while it waits, as in the conditions of Kubernetes.
        why: A sentence for people: why it has this share, or none; or how it ended.
        share, given, occupied: See the module.
        devices: The GPUs that it has, one for each slot that is given or occupied.
        pid: Process number of its ``edlrun``; 0 for none.
        start_token: Names that process together with ``pid``; see ``process_identity.py``.
        run: Number of times that it was started.
        started_s: When its present or last ``edlrun`` was started.
        first_step_s: Seconds from the submission to the first step; ``None`` before it.
        changed_s: When its share was changed last.
        served_slot_s: Slots times seconds that it was given, up to ``served_until_s``.
        served_until_s: See ``served_slot_s``.
        waited_s: Seconds without a run that it wanted, before ``waits_since_s``.
        waits_since_s: Since when it waits; ``None`` while it does not.
        not_before_s: No new run before this moment.
        known_step: The furthest step that it is known to have reached; -1 for none.
        resizes: Number of changes of its given hosts while it ran.
        preemptions: Number of times that it was stopped for another.
        failures: Runs that failed, or whose ``edlrun`` was killed, since it last came further.
        is_stop_asked: Whether its user asked it to save and stop.
        curve: What it makes of a number of slots; ``None`` before it was measured.
        left: Work left, in units of the curve's goodput times seconds; ``None`` if it is not known.
        change_s: Seconds that a resize costs, as measured; ``None`` before the first.
        start_s: Seconds from its start to its first step, as measured; ``None`` before it.
        exit_code: How its ``edlrun`` ended; ``None`` before that, or if it was killed.
        timings: How long its steps took; kept of jobs that have a family.
    """

    spec: JobSpec
    asked_s: float
    phase: JobPhase = JobPhase.WAITING
    reason: str = ""
    why: str = ""
    share: tuple[HostSlots, ...] = ()
    given: tuple[HostSlots, ...] = ()
    occupied: tuple[HostSlots, ...] = ()
    devices: tuple[HostSlots, ...] = ()
    pid: int = 0
    start_token: str = ""
    run: int = 0
    started_s: float = 0.0
    first_step_s: float | None = None
    changed_s: float = 0.0
    served_slot_s: float = 0.0
    served_until_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    not_before_s: float = 0.0
    known_step: int = -1
    resizes: int = 0
    preemptions: int = 0
    failures: int = 0
    is_stop_asked: bool = False
    curve: Curve | None = None
    left: float | None = None
    change_s: float | None = None
    start_s: float | None = None
    exit_code: int | None = None
    timings: tuple[Timing, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def listed(self) -> tuple[HostSlots, ...]:
        """What its hosts file says: the hosts that it is given, with the devices of its slots."""
        devices = {entry.host: entry.devices for entry in self.devices}
        return tuple(replace(entry, devices=devices.get(entry.host, ())[: entry.slots]) for entry in self.given)

    @property
    def has_left(self) -> bool:
        """Whether it wants no slots any more, and none of its processes is there."""
        return self.phase.is_at_rest and not self.occupied

    def served_by(self, now_s: float) -> float:
        """Slots times seconds that it was given until now."""
        return self.served_slot_s + total(self.given) * max(0.0, now_s - self.served_until_s)

    def waited_by(self, now_s: float) -> float:
        """Seconds until now without a run that it wanted."""
        return self.waited_s + (0.0 if self.waits_since_s is None else max(0.0, now_s - self.waits_since_s))


@dataclass(frozen=True)
class HeldClaim:
    """Slots that others than jobs need, as a service does.

    Attributes:
        name: Name of the claim, one of its own in the fleet.
        slots: Number of slots.
        priority: Only the minimum of jobs with a higher one goes before it.
        asked_s: When it was made.
        until_s: When it ends by itself; ``None`` for never.
        share: Where the planner places it; empty while there is no room.
        why: Why there is no room, for people; empty where there is.
        granted: Slots that are free for it now.
        devices: Their GPUs.
        whole_s: Seconds from ``asked_s`` until all of them were free; ``None`` before.
    """

    name: str
    slots: int
    priority: int
    asked_s: float
    until_s: float | None = None
    share: tuple[HostSlots, ...] = ()
    why: str = ""
    granted: tuple[HostSlots, ...] = ()
    devices: tuple[HostSlots, ...] = ()
    whole_s: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "claim name")
        check_priority(self.priority)
        if not 1 <= self.slots <= MOST_WORKERS:
            raise UsageError(f"claim {self.name} asks for {shown(self.slots)} slots; expected 1 to {MOST_WORKERS}")


@dataclass(frozen=True)
class FleetRules:
    """What the user of the daemon allows.

    Attributes:
        queues: Weights and limits of queues; those that are not named weigh 1 and have no limit.
        whole_hosts: Whether a host belongs to one job at a time.
        favour_short: How far jobs with little work left go first, 0 (not at all) to 1 (see ``PlanRules``).
        kill_after_s: Seconds after which an ``edlrun`` that was told to save and end is killed.
    """

    queues: tuple[QueueRule, ...] = ()
    whole_hosts: bool = False
    favour_short: float = PlanRules.favour_short
    kill_after_s: float = 660.0
    # Longer than edlrun itself gives a last checkpoint of some gigabytes over a slow network (600 s).


@dataclass(frozen=True)
class Fleet:
    """Everything at one moment.

    Attributes:
        rules: What the user of the daemon allows.
        hosts: Hosts of the source.
        jobs: By name, in the order in which they were submitted; those that ended, too.
        claims: By name.
        lacking: Slots that more hosts would be used for, by the last plan.
        planner_failures: Plans in a row that failed.
        removing: Names of deleted jobs whose folders may still be there.
    """

    rules: FleetRules = FleetRules()
    hosts: tuple[HostSlots, ...] = ()
    jobs: Mapping[str, FleetJob] = field(default_factory=dict)
    claims: Mapping[str, HeldClaim] = field(default_factory=dict)
    lacking: int = 0
    planner_failures: int = 0
    removing: tuple[str, ...] = ()


def total(hosts: tuple[HostSlots, ...]) -> int:
    """Number of slots of hosts.

    >>> total((HostSlots("a", 2), HostSlots("b", 1)))
    3
    """
    return sum(entry.slots for entry in hosts)


def as_counts(hosts: tuple[HostSlots, ...]) -> dict[str, int]:
    """Slots by host."""
    return {entry.host: entry.slots for entry in hosts}


def used(job: FleetJob) -> dict[str, int]:
    """Slots by host that a job has: given, or still occupied."""
    given, occupied = as_counts(job.given), as_counts(job.occupied)
    return {host: max(given.get(host, 0), occupied.get(host, 0)) for host in {**given, **occupied}}


def as_hosts(counts: Mapping[str, int]) -> tuple[HostSlots, ...]:
    """The hosts that have slots, sorted."""
    return tuple(HostSlots(host, slots) for host, slots in sorted(counts.items()) if slots > 0)


def shown_hosts(hosts: tuple[HostSlots, ...]) -> str:
    """Hosts for people.

    >>> shown_hosts((HostSlots("a", 2), HostSlots("b", 1)))
    'a:2 b:1'
    """
    return " ".join(map(str, hosts))
