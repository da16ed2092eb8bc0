"""What a fleet answers to a request, and what happens to it thereby. Pure; accepts anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TypeAlias

from edl_hvd.errors import UsageError
from edl_hvd.fleet import events, messages
from edl_hvd.fleet.events import FleetEvent
from edl_hvd.fleet.messages import REQUESTS, Agreed, FleetReply, FleetRequest, PlannedShare, PlanView, Refused
from edl_hvd.fleet.planned import planned, unit_of
from edl_hvd.fleet.state import MOST_WORKERS, Fleet, FleetJob, HeldClaim, JobPhase, JobSpec, total
from edl_hvd.json_values import read_fields, show
from edl_hvd.values import count

LONGEST_CLAIM_S = 366 * 86_400.0


@dataclass(frozen=True)
class Verdict:
    """What is answered to a request.

    Attributes:
        reply: What is said.
        event: What happens to the fleet thereby, or ``None``.
    """

    reply: FleetReply
    event: FleetEvent | None = None


Changing: TypeAlias = (
    messages.SubmitRequest
    | messages.ScaleRequest
    | messages.StopRequest
    | messages.ResumeRequest
    | messages.DeleteRequest
    | messages.ClaimRequest
    | messages.ReleaseRequest
)


def read_request(line: bytes) -> FleetRequest | Refused:
    """The request that a line holds, or why it holds none."""
    try:
        fields = json.loads(line)
        what = fields.pop("what", None) if isinstance(fields, dict) else None
        if not isinstance(what, str) or what not in REQUESTS:
            raise UsageError(f"its 'what' is {show(what)}; expected an object with one of {', '.join(REQUESTS)}")
        return read_fields(REQUESTS[what], fields)
    except UsageError as error:
        return Refused(str(error))
    except (ValueError, RecursionError):
        return Refused("that is no JSON; expected one object in one line")


def decide(fleet: Fleet, request: Changing) -> Verdict:
    """What to say to a request that changes something, and what follows from it."""
    match request:
        case messages.SubmitRequest(spec):
            return _submit(fleet, spec)
        case messages.ClaimRequest():
            return _claim(fleet, request)
        case messages.ReleaseRequest(name):
            if name not in fleet.claims:
                return _refuse(f"there is no claim {show(name)}; {_names('claims', list(fleet.claims))}")
            return Verdict(Agreed(f"{name} has given its slots back"), events.ClaimReleased(name))
        case (
            messages.ScaleRequest(name)
            | messages.StopRequest(name)
            | messages.ResumeRequest(name)
            | messages.DeleteRequest(name)
        ):
            job = fleet.jobs.get(name)
            if job is None:
                return _refuse(f"there is no job {show(name)}; {_names('jobs', list(fleet.jobs))}")
            return _change(job, request)


def _change(
    job: FleetJob,
    request: messages.ScaleRequest | messages.StopRequest | messages.ResumeRequest | messages.DeleteRequest,
) -> Verdict:
    name = job.name
    match request:
        case messages.ScaleRequest(_, most):
            if job.phase.is_ended:
                return _refuse(f"job {name} is {job.phase}, so it gets no slots; submit another")
            if not job.spec.least <= most <= MOST_WORKERS:
                return _refuse(
                    f"job {name} cannot have at most {count(most, 'slot')}; expected {job.spec.least}, its minimum, to "
                    f"{MOST_WORKERS}; 'edl-hvd fleet stop {name}' takes all"
                )
            return Verdict(Agreed(f"{name} gets at most {count(most, 'slot')}"), events.JobScaled(name, most))
        case messages.StopRequest():
            if job.phase.is_at_rest:
                return _refuse(f"job {name} is {job.phase} already; see 'edl-hvd fleet show {name}'")
            how = "is stopped" if job.phase is JobPhase.WAITING else "saves a checkpoint and stops"
            return Verdict(Agreed(f"{name} {how}; go on with: edl-hvd fleet resume {name}"), events.JobStopAsked(name))
        case messages.ResumeRequest():
            if job.phase.can_resume or (job.phase is JobPhase.STOPPING and job.is_stop_asked):
                return Verdict(Agreed(f"{name} goes on as soon as there is room"), events.JobResumeAsked(name))
            return _refuse(f"job {name} is {job.phase}; expected one that was stopped or has failed")
        case messages.DeleteRequest():
            if job.has_left:
                return Verdict(Agreed(f"{name} is deleted"), events.JobDeleted(name))
            if job.phase.is_at_rest:
                return _refuse(f"job {name} is {job.phase}, and some of its workers are still ending; try again")
            return _refuse(f"job {name} is {job.phase}; stop it first: edl-hvd fleet stop {name}")


def _submit(fleet: Fleet, spec: JobSpec) -> Verdict:
    if spec.name in fleet.jobs:
        job = fleet.jobs[spec.name]
        return _refuse(
            f"there is a job {spec.name} already, which is {job.phase}; give another --name, or see 'edl-hvd fleet "
            f"show {spec.name}'"
        )
    if spec.name in fleet.removing:
        return _refuse(f"the folder of a deleted job {spec.name} is not removed yet; try again, or give another --name")
    if fleet.hosts and (problem := never_fits(fleet, spec)):
        return _refuse(problem)
    if problem := _over_limit(fleet, spec):
        return _refuse(problem)
    return Verdict(Agreed(f"{spec.name} is submitted"), events.JobSubmitted(spec))


def never_fits(fleet: Fleet, spec: JobSpec) -> str:
    """Why a job can never run on the hosts as they are; empty if it can."""
    unit = unit_of(fleet)
    whole = sum(entry.slots // unit * unit for entry in fleet.hosts)
    if spec.least <= whole:
        return ""
    hosts = "whole hosts" if unit > 1 else "hosts"
    return (
        f"job {spec.name} needs at least {count(spec.least, 'slot')}, and all {hosts} of the fleet together have "
        f"{whole}; lower --min, or add hosts to the source first"
    )


def _over_limit(fleet: Fleet, spec: JobSpec) -> str:
    """Why the limit of its queue never holds a job; empty if it can."""
    unit = unit_of(fleet)
    least = -(-spec.least // unit) * unit
    limit = next((rule.limit for rule in fleet.rules.queues if rule.queue == spec.queue), None)
    if limit is None or least <= limit:
        return ""
    return (
        f"job {spec.name} needs at least {count(least, 'slot')}, and all jobs of queue {spec.queue!r} together may "
        f"have {limit}; lower --min, or give another --queue"
    )


def _claim(fleet: Fleet, request: messages.ClaimRequest) -> Verdict:
    if request.claim in fleet.claims:
        return _refuse(f"there is a claim {request.claim} already; release it first, or give another name")
    if request.for_s is not None and not 0 < request.for_s <= LONGEST_CLAIM_S:
        return _refuse(f"a claim for {request.for_s:g} s is not usable; expected more than 0 s, and at most a year")
    try:
        HeldClaim(request.claim, request.slots, request.priority, asked_s=0.0)
    except UsageError as error:
        return _refuse(str(error))
    if fleet.hosts and request.slots > total(fleet.hosts):
        return _refuse(
            f"claim {request.claim} needs {count(request.slots, 'slot')}, and all hosts of the fleet together have "
            f"{total(fleet.hosts)}; ask for less"
        )
    event = events.SlotsClaimed(request.claim, request.slots, request.priority, request.for_s)
    return Verdict(Agreed(f"{request.claim} waits for {count(request.slots, 'slot')}"), event)


def what_if(fleet: Fleet, request: messages.PlanRequest, now_s: float) -> PlanView | Refused:
    """What the planner would do."""
    jobs, claims = dict(fleet.jobs), dict(fleet.claims)
    for spec in request.jobs:
        if spec.name in jobs:
            return Refused(f"there is a job {spec.name} already; give the job that is to be tried another name")
        jobs[spec.name] = FleetJob(spec, asked_s=now_s)
    for one in request.claims:
        if one.claim in claims:
            return Refused(f"there is a claim {one.claim} already; give the claim that is to be tried another name")
        try:
            claims[one.claim] = HeldClaim(one.claim, one.slots, one.priority, asked_s=now_s)
        except UsageError as error:
            return Refused(str(error))
    tried = replace(fleet, hosts=request.hosts or fleet.hosts, jobs=jobs, claims=claims)
    plan = planned(tried, now_s)
    found = []
    for share in plan.shares:
        has = total(jobs[share.job].given)
        found.append(PlannedShare(share.job, "job", has, total(share.hosts), share.hosts, share.why))
    for waiting in plan.waiting:
        why = f"{waiting.reason.value}: {waiting.why}"
        found.append(PlannedShare(waiting.job, "job", total(jobs[waiting.job].given), 0, (), why))
    reserved = {one.claim: one for one in plan.reserved}
    waits = {one.claim: f"; {one.reason.value}: {one.why}" for one in plan.waiting_claims}
    for claim in claims.values():
        hosts = reserved[claim.name].hosts if claim.name in reserved else ()
        why = f"{total(hosts)} of {count(claim.slots, 'slot')}, priority {claim.priority}{waits.get(claim.name, '')}"
        found.append(PlannedShare(claim.name, "claim", total(claim.granted), total(hosts), hosts, why))
    return PlanView(tuple(found), plan.lacking)


def _names(what: str, names: list[str]) -> str:
    return f"the {what} are {', '.join(names[:20])}{' ...' * (len(names) > 20)}" if names else f"there are no {what}"


def _refuse(problem: str) -> Verdict:
    return Verdict(Refused(problem))
