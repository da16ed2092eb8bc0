"""What the planner is asked about a fleet, and its answer. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from edl_hvd.fleet.state import Fleet, FleetJob
from edl_hvd.hosts import HostSlots
from edl_hvd.planning.family import FamilyMember, first_curve
from edl_hvd.planning.plan import plan
from edl_hvd.planning.values import Claim, Curve, JobAsk, Plan, PlanRules, Room

_CHANGE_S, _START_S = 1.0, 10.0
# Before a job has measured its own: a resize takes some 0.3 s and two steps, a start the time to import torch.
_LATE_S = 10.0
# Workers leave within a second or two, mostly.


def planned(fleet: Fleet, now_s: float) -> Plan:
    """The plan for a fleet as it stands."""
    return plan(rooms_of(fleet), claims_of(fleet), asks_of(fleet, now_s), rules_of(fleet), now_s)


def rooms_of(fleet: Fleet) -> tuple[Room, ...]:
    """A room for each host. Slots of workers that are leaving count as free: the plan is carried out as they go."""
    return tuple(Room(entry.host, entry.slots) for entry in fleet.hosts)


def claims_of(fleet: Fleet) -> tuple[Claim, ...]:
    """A claim for each of the fleet's."""
    return tuple(
        Claim(one.name, one.slots, priority=one.priority, asked_s=one.asked_s, holds=one.share)
        for one in fleet.claims.values()
    )


def asks_of(fleet: Fleet, now_s: float) -> tuple[JobAsk, ...]:
    """What each job asks for that wants slots now."""
    unit = unit_of(fleet)
    curves = _family_curves(fleet)
    wanted = (job for job in fleet.jobs.values() if job.phase.wants_slots and job.not_before_s <= now_s)
    return tuple(_ask(job, unit, now_s, curves) for job in wanted)


def _family_curves(fleet: Fleet) -> dict[str, Curve]:
    """The curve of each family's jobs that have none of their own, for families of which some job has one."""
    members: defaultdict[str, list[FamilyMember]] = defaultdict(list)
    for job in fleet.jobs.values():
        if job.spec.family:
            members[job.spec.family].append(FamilyMember(job.asked_s, job.curve))
    found = {family: first_curve(those) for family, those in members.items()}
    return {family: curve for family, curve in found.items() if curve is not None}


def members_of(fleet: Fleet, family: str) -> tuple[FamilyMember, ...]:
    """What the jobs of a family have measured, also those that have ended, from the oldest to the newest."""
    return tuple(
        FamilyMember(job.asked_s, job.curve, job.timings)
        for job in fleet.jobs.values() if family and job.spec.family == family
    )  # fmt: skip


def unit_of(fleet: Fleet) -> int:
    """Slots that go together: those of the largest host where each belongs to one job, else 1."""
    return max((entry.slots for entry in fleet.hosts), default=1) if fleet.rules.whole_hosts else 1


def rules_of(fleet: Fleet) -> PlanRules:
    """How slots are shared."""
    return PlanRules(favour_short=fleet.rules.favour_short, queues=fleet.rules.queues)


def _holds(job: FleetJob, now_s: float) -> tuple[HostSlots, ...]:
    """What a job holds, or is about to hold by the last plan.

    Two jobs that are to change places on full hosts wait for each other. What has not come about after some time is
    planned anew from what is.
    """
    is_late = job.given and job.given != job.share and now_s - job.changed_s > _LATE_S
    return job.given if is_late else job.share


def prior(most: int) -> Curve:
    """The curve of a job where neither it nor one of its family has a measured one: n slots make n^0.8 of one.

    So slots that nobody else can use are used at once, and jobs of which nothing is known share evenly. The exponent is
    the planner's elasticity.

    >>> prior(6).sizes
    (1, 2, 4, 6)
    """
    sizes = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
    return Curve(tuple(sizes), tuple(size**PlanRules.elasticity for size in sizes))


def _ask(job: FleetJob, unit: int, now_s: float, curves: Mapping[str, Curve]) -> JobAsk:
    spec = job.spec
    curve = job.curve or curves.get(spec.family) or prior(spec.most)
    least = -(-spec.least // unit) * unit
    return JobAsk(
        job=spec.name,
        queue=spec.queue,
        priority=spec.priority,
        preemptible=spec.preemptible,
        least=least,
        most=max(least, spec.most // unit * unit),
        unit=unit,
        curves=(curve,),
        left=job.left if job.curve is not None else None,
        served_slot_s=job.served_by(now_s),
        asked_s=job.asked_s,
        changed_s=job.changed_s,
        holds=_holds(job, now_s),
        change_s=_CHANGE_S if job.change_s is None else job.change_s,
        start_s=_START_S if job.start_s is None else job.start_s,
    )
