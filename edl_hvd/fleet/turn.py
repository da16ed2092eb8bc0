"""What follows from what happens to a fleet: pure, total, and the same every time.

An event changes what is known; then, where it may matter, the planner says who gets which slots; then as much of that
is carried out as the slots that are free now allow. What is taken away is taken at once. What is given waits until the
workers that were there have ended: until then their slots are occupied, and no slot has two workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edl_hvd.fleet import events
from edl_hvd.fleet.devices import numbered
from edl_hvd.fleet.events import FleetAction, FleetEvent
from edl_hvd.fleet.planned import planned
from edl_hvd.fleet.state import Fleet, FleetJob, HeldClaim, JobPhase, as_counts, as_hosts, shown_hosts, total, used
from edl_hvd.planning.values import Plan
from edl_hvd.values import count

SAVED = 75
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# Before a run that came no further is repeated: doubles each time.
_MOST_DOUBLINGS = 6
# Later ones are no longer; no float holds what a thousand make.
_MOST_KILLED = 5
# Runs of one job that came no further, after which another is no remedy.
_MOST_PLANNER_FAILURES = 3
_ASKED = "its user asked it to stop"


@dataclass
class FleetDraft:
    """A fleet that is being changed, and what is to be done about it."""

    fleet: Fleet
    now_s: float
    actions: list[FleetAction] = field(default_factory=list)

    def put(self, job: FleetJob) -> None:
        self.fleet = replace(self.fleet, jobs={**self.fleet.jobs, job.name: job})

    def tell(self, about: str, text: str) -> None:
        self.actions.append(events.Tell(about, text))

    @property
    def jobs(self) -> list[FleetJob]:
        return list(self.fleet.jobs.values())

    @property
    def claims(self) -> list[HeldClaim]:
        return list(self.fleet.claims.values())


def turn(fleet: Fleet, event: FleetEvent, now_s: float) -> tuple[Fleet, tuple[FleetAction, ...]]:
    """The fleet after an event, and what is to be done.

    An event about a job or a claim that is not there, or that means nothing to it as it stands, changes nothing: the
    daemon refuses such requests before (see ``answers.py``), and processes end when they like.

    Args:
        fleet: The fleet before it.
        event: What happened.
        now_s: When, on the fleet's clock, which goes on while no daemon runs.
    """
    draft = FleetDraft(fleet, now_s)
    is_urgent = _take_in(draft, event)
    is_urgent = _end_claims(draft) or is_urgent
    _kill_late(draft)
    if is_urgent or isinstance(event, events.TimePassed):
        _make_plan(draft)
    _carry_out(draft)
    draft.fleet = numbered(draft.fleet)
    return draft.fleet, tuple(draft.actions)


# --- what an event changes ---


def _take_in(draft: FleetDraft, event: FleetEvent) -> bool:
    """Change what is known; whether a plan has to follow at once."""
    before = draft.fleet
    match event:
        case events.RulesGiven(rules):
            draft.fleet = replace(before, rules=rules)
        case events.HostsListed(hosts):
            draft.fleet = replace(before, hosts=tuple(sorted(hosts)))
        case events.JobSubmitted(spec):
            if spec.name not in before.jobs:
                draft.put(FleetJob(spec, asked_s=draft.now_s, waits_since_s=draft.now_s))
        case events.SlotsClaimed(name, slots, priority, for_s):
            if name not in before.claims:
                until_s = None if for_s is None else draft.now_s + for_s
                claim = HeldClaim(name, slots, priority, asked_s=draft.now_s, until_s=until_s)
                draft.fleet = replace(before, claims={**before.claims, name: claim})
        case events.ClaimReleased(name):
            draft.fleet = replace(before, claims={key: one for key, one in before.claims.items() if key != name})
        case events.JobDeleted(name):
            job = before.jobs.get(name)
            if job is not None and job.has_left:
                jobs = {key: one for key, one in before.jobs.items() if key != name}
                draft.fleet = replace(before, jobs=jobs, removing=(*before.removing, name))
                draft.tell(name, "is deleted")
                draft.actions.append(events.RemoveFolder(name))
        case events.FolderRemoved(name):
            draft.fleet = replace(before, removing=tuple(one for one in before.removing if one != name))
        case events.TimePassed():
            pass
        case _:
            job = before.jobs.get(event.job)
            if job is None:
                return False
            if isinstance(event, events.RunObserved):
                return _observe(draft, job, event)
            draft.put(_after(draft, job, event))
    return draft.fleet != before and not isinstance(event, events.RunStarted)


def _after(draft: FleetDraft, job: FleetJob, event: FleetEvent) -> FleetJob:
    """The job after something that happens to it alone."""
    match event:
        case events.JobScaled(_, most):
            return replace(job, spec=replace(job.spec, most=max(most, job.spec.least)))
        case events.JobStopAsked():
            if job.phase is JobPhase.WAITING:
                return _resting(replace(job, is_stop_asked=True), JobPhase.STOPPED, _ASKED, draft.now_s)
            if job.phase.keeps_slots:
                draft.actions.append(events.EndRun(job.name))
                return replace(
                    job, phase=JobPhase.STOPPING, is_stop_asked=True, share=(), changed_s=draft.now_s, why=_ASKED
                )
            return replace(job, is_stop_asked=job.is_stop_asked or job.phase is JobPhase.STOPPING)
        case events.JobResumeAsked():
            if job.phase.can_resume:
                return replace(
                    job, phase=JobPhase.WAITING, is_stop_asked=False, failures=0, not_before_s=0.0, exit_code=None,
                    reason="", why="its user asked it to go on", waits_since_s=draft.now_s,
                )  # fmt: skip
            return replace(job, is_stop_asked=False) if job.phase is JobPhase.STOPPING else job
        case events.RunStarted(_, pid, start_token):
            if job.phase not in (JobPhase.STARTING, JobPhase.STOPPING) or job.pid:
                return job
            phase = JobPhase.RUNNING if job.phase is JobPhase.STARTING else job.phase
            return replace(job, phase=phase, pid=pid, start_token=start_token)
        case events.RunEnded():
            return _ended(draft, job, event) if job.phase.is_alive else job
    return job


def _observe(draft: FleetDraft, job: FleetJob, seen: events.RunObserved) -> bool:
    """Take in how a run stands; whether a plan has to follow at once."""
    new = replace(job, occupied=seen.occupied, known_step=max(job.known_step, seen.known_step))
    if job.phase.is_alive:
        if seen.curve is not None:
            new = replace(new, curve=seen.curve)
        new = replace(new, timings=seen.timings or job.timings)
        new = replace(new, left=seen.left, change_s=job.change_s if seen.change_s is None else seen.change_s)
        if seen.has_trained:
            new = replace(
                new,
                first_step_s=draft.now_s - job.asked_s if job.first_step_s is None else job.first_step_s,
                start_s=draft.now_s - job.started_s if not _has_trained(job) else job.start_s,
                failures=0 if new.known_step > job.known_step else job.failures,
            )
    draft.put(new)
    return job.curve is None and new.curve is not None


def _has_trained(job: FleetJob) -> bool:
    return job.start_s is not None and job.first_step_s is not None


def _ended(draft: FleetDraft, job: FleetJob, event: events.RunEnded) -> FleetJob:
    """The job after the end of its run, whatever that was."""
    came_further = event.known_step > job.known_step
    job = replace(
        _served(job, draft.now_s), pid=0, start_token="", given=(), share=(), changed_s=draft.now_s,
        known_step=max(job.known_step, event.known_step), exit_code=event.code,
        failures=0 if came_further else job.failures,
    )  # fmt: skip
    if event.code == 0:
        draft.tell(job.name, "is complete")
        return replace(job, phase=JobPhase.COMPLETE, reason="", why="training is complete", left=0.0)
    if job.is_stop_asked:
        draft.tell(job.name, "has stopped, as its user asked")
        return _resting(job, JobPhase.STOPPED, _ASKED, draft.now_s)
    if job.phase is JobPhase.STOPPING:
        draft.tell(job.name, "has made room, and waits")
        return replace(job, phase=JobPhase.WAITING, preemptions=job.preemptions + 1, waits_since_s=draft.now_s)
    if event.code == SAVED and came_further:
        draft.tell(job.name, f"saved and ended by itself, and is resumed: {event.how}")
        return replace(job, phase=JobPhase.WAITING, why=event.how, waits_since_s=draft.now_s)
    failures = job.failures + 1
    most = _MOST_KILLED if event.code in (None, SAVED) else job.spec.retries
    if failures > most:
        draft.tell(job.name, f"has failed: {event.how}")
        return _resting(replace(job, failures=failures), JobPhase.FAILED, event.how, draft.now_s)
    pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(failures - 1, _MOST_DOUBLINGS))
    draft.tell(job.name, f"is repeated in {pause_s:.0f} s from its newest checkpoint: {event.how}")
    return replace(
        job, phase=JobPhase.WAITING, failures=failures, not_before_s=draft.now_s + pause_s, why=event.how,
        waits_since_s=draft.now_s,
    )  # fmt: skip


def _resting(job: FleetJob, phase: JobPhase, why: str, now_s: float) -> FleetJob:
    """A job that wants no slots any more."""
    return replace(job, phase=phase, reason="", why=why, share=(), waited_s=job.waited_by(now_s), waits_since_s=None)


# --- what time changes ---


def _end_claims(draft: FleetDraft) -> bool:
    """End claims whose time is over; whether there were any."""
    over = [one.name for one in draft.claims if one.until_s is not None and draft.now_s >= one.until_s]
    if over:
        draft.fleet = replace(
            draft.fleet,
            claims={name: one for name, one in draft.fleet.claims.items() if name not in over},
        )
        for name in over:
            draft.tell(name, "gives its slots back: its time is over")
    return bool(over)


def _kill_late(draft: FleetDraft) -> None:
    late_s = draft.now_s - draft.fleet.rules.kill_after_s
    for job in draft.jobs:
        if job.phase is JobPhase.STOPPING and job.pid and job.changed_s <= late_s:
            draft.tell(job.name, "did not end when it was told to, and is killed")
            draft.actions.append(events.KillRun(job.name))
            draft.put(replace(job, changed_s=draft.now_s))  # and once more, should that not be enough


# --- the plan ---


def _make_plan(draft: FleetDraft) -> None:
    """Ask the planner, and note what it says. Should it fail, the last plan stands."""
    fleet = draft.fleet
    try:
        plan = planned(fleet, draft.now_s)
    except Exception as error:  # a fault in the plan must not stop the jobs that run
        failures = fleet.planner_failures + 1
        draft.fleet = replace(fleet, planner_failures=failures)
        if failures <= _MOST_PLANNER_FAILURES:
            draft.tell("", f"no plan could be made, and the last one stands: {type(error).__name__}: {error}")
        return
    draft.fleet = replace(fleet, planner_failures=0, lacking=plan.lacking)
    _note_claims(draft, plan)
    shares = {share.job: share for share in plan.shares}
    waiting = {one.job: one for one in plan.waiting}
    for job in draft.jobs:
        if not job.phase.wants_slots:
            continue
        if (share := shares.get(job.name)) is not None:
            hosts = tuple(sorted(share.hosts))
            changed_s = draft.now_s if hosts != job.share else job.changed_s
            if (hosts, share.why, "") != (job.share, job.why, job.reason):
                draft.put(replace(job, share=hosts, why=share.why, reason="", changed_s=changed_s))
        elif job.phase is JobPhase.WAITING:
            one = waiting.get(job.name)
            if one is not None and ((), one.reason.value, one.why) != (job.share, job.reason, job.why):
                draft.put(replace(job, share=(), reason=one.reason.value, why=one.why))
        else:
            one = waiting.get(job.name)
            why = "its slots are needed by others" if one is None else one.why
            draft.tell(job.name, f"saves and stops: {why}")
            draft.actions.append(events.EndRun(job.name))
            draft.put(
                replace(
                    job, phase=JobPhase.STOPPING, share=(), changed_s=draft.now_s, why=why,
                    reason="" if one is None else one.reason.value,
                )
            )  # fmt: skip


def _note_claims(draft: FleetDraft, plan: Plan) -> None:
    placed = {one.claim: one.hosts for one in plan.reserved}
    waits = {one.claim: one.why for one in plan.waiting_claims}
    claims = {}
    for name, claim in draft.fleet.claims.items():
        share = tuple(sorted(placed.get(name, ())))
        claims[name] = replace(claim, share=share, why=waits.get(name, ""))
    draft.fleet = replace(draft.fleet, claims=claims)


# --- carrying it out ---


def _carry_out(draft: FleetDraft) -> None:
    """As much of the shares as the free slots allow. Jobs that ended take no time: there may be thousands."""
    before = draft.fleet.jobs
    names = [name for name, job in before.items() if job.phase.wants_slots]
    for name in names:
        if (job := draft.fleet.jobs[name]).phase.keeps_slots:
            _take_away(draft, job)
    for claim in draft.claims:
        _shrink_claim(draft, claim)
    free = free_slots(draft.fleet)
    for claim in draft.claims:
        _grant(draft, claim, free)
    for name in names:
        job = draft.fleet.jobs[name]
        if job.phase.keeps_slots and job.share:
            _add(draft, job, free)
        elif job.phase is JobPhase.WAITING and job.share:
            _start(draft, job, free)
    for name in names:
        if before[name].phase.keeps_slots and (job := draft.fleet.jobs[name]).phase.keeps_slots:
            _give(draft, before[name], job)


def _take_away(draft: FleetDraft, job: FleetJob) -> None:
    """Take what is given beyond the share at once.

    A hosts file cannot be empty: a job that moves keeps its least until there is room for it elsewhere.
    """
    if not job.share or job.given == job.share:
        return
    share, given = as_counts(job.share), as_counts(job.given)
    kept = {host: min(slots, share.get(host, 0)) for host, slots in given.items()}
    lacking = min(job.spec.least, total(job.given)) - sum(kept.values())
    listed = as_counts(draft.fleet.hosts)
    for host, slots in sorted(given.items()):
        more = max(0, min(lacking, min(slots, listed.get(host, 0)) - kept[host]))
        kept[host] += more
        lacking -= more
    if sum(kept.values()):
        draft.put(replace(job, given=as_hosts(kept)))


def _add(draft: FleetDraft, job: FleetJob, free: dict[str, int]) -> None:
    """Give what the share has beyond what is given, as far as it is free."""
    if job.given == job.share:
        return
    share, given, occupied = as_counts(job.share), as_counts(job.given), as_counts(job.occupied)
    for host, slots in share.items():
        had = given.get(host, 0)
        # Its own workers that leave a slot may have it again.
        own = max(had, occupied.get(host, 0)) - had
        more = min(slots - had, own + max(0, free.get(host, 0)))
        if more > 0:
            given[host] = had + more
            free[host] = free.get(host, 0) - max(0, more - own)
    moved = {host: min(slots, share.get(host, 0)) for host, slots in given.items()}
    if sum(moved.values()) >= min(job.spec.least, total(job.share)):
        given = moved  # what it kept while it moved
    draft.put(replace(job, given=as_hosts(given)))


def _give(draft: FleetDraft, before: FleetJob, job: FleetJob) -> None:
    """Tell a job that runs of its other hosts."""
    if job.given == before.given:
        return
    draft.actions.append(events.GiveHosts(job.name, job.given))
    had, has = total(before.given), total(job.given)
    draft.tell(
        job.name, f"moves to {shown_hosts(job.given)}" if had == has else f"{had} → {count(has, 'slot')}: {job.why}"
    )
    served_slot_s = before.served_by(draft.now_s)
    draft.put(
        replace(
            job, served_slot_s=served_slot_s, served_until_s=draft.now_s, resizes=job.resizes + 1,
        )
    )  # fmt: skip


def _start(draft: FleetDraft, job: FleetJob, free: dict[str, int]) -> None:
    """Start a job as soon as its least is free; the rest follows."""
    if draft.now_s < job.not_before_s or job.occupied:
        return
    hosts = {host: min(slots, max(0, free.get(host, 0))) for host, slots in as_counts(job.share).items()}
    if sum(hosts.values()) < job.spec.least:
        return
    for host, slots in hosts.items():
        free[host] -= slots
    given = as_hosts(hosts)
    draft.actions.append(events.StartRun(job.name, given))
    draft.tell(job.name, f"{'starts' if job.run == 0 else 'goes on'} on {count(total(given), 'slot')}: {job.why}")
    draft.put(
        replace(
            job, phase=JobPhase.STARTING, given=given, run=job.run + 1, started_s=draft.now_s, start_s=None,
            served_until_s=draft.now_s, waited_s=job.waited_by(draft.now_s), waits_since_s=None,
            exit_code=None,
        )
    )  # fmt: skip


def _shrink_claim(draft: FleetDraft, claim: HeldClaim) -> None:
    share = as_counts(claim.share)
    kept = as_hosts({host: min(slots, share.get(host, 0)) for host, slots in as_counts(claim.granted).items()})
    if kept != claim.granted:
        _put_claim(draft, replace(claim, granted=kept))


def _grant(draft: FleetDraft, claim: HeldClaim, free: dict[str, int]) -> None:
    granted = as_counts(claim.granted)
    for host, slots in as_counts(claim.share).items():
        more = min(slots - granted.get(host, 0), max(0, free.get(host, 0)))
        if more > 0:
            granted[host] = granted.get(host, 0) + more
            free[host] -= more
    hosts = as_hosts(granted)
    if hosts == claim.granted:
        return
    claim = replace(claim, granted=hosts)
    if total(hosts) == claim.slots and claim.whole_s is None:
        claim = replace(claim, whole_s=draft.now_s - claim.asked_s)
        draft.tell(claim.name, f"has its {count(total(hosts), 'slot')} after {claim.whole_s:.1f} s")
    _put_claim(draft, claim)


def _put_claim(draft: FleetDraft, claim: HeldClaim) -> None:
    draft.fleet = replace(draft.fleet, claims={**draft.fleet.claims, claim.name: claim})


def free_slots(fleet: Fleet) -> dict[str, int]:
    """Slots by host that no job and no claim has, below zero where a host has shrunk."""
    free = as_counts(fleet.hosts)
    for job in fleet.jobs.values():
        if job.given or job.occupied:
            _subtract(free, used(job))
    for claim in fleet.claims.values():
        _subtract(free, as_counts(claim.granted))
    return free


def _subtract(free: dict[str, int], counts: Mapping[str, int]) -> None:
    for host, slots in counts.items():
        free[host] = free.get(host, 0) - slots


def _served(job: FleetJob, now_s: float) -> FleetJob:
    return replace(job, served_slot_s=job.served_by(now_s), served_until_s=now_s)
