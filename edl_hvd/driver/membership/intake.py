"""The first half of a transition: what happened is taken in; see ``transition.py``."""

from __future__ import annotations

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.state import LIVE, RepeatedError, ScriptError, Slot, host_of
from edl_hvd.errors import ProgressLostError

UNUSABLE = 2  # what was asked for cannot be started, as for a wrong flag
_LONGEST_BACKOFF_S = 60.0
_PROGRESS_LOST = f"{ProgressLostError.__name__}:"
# How the text of such an error begins.
HOW_TO_TRAIN = (
    "under edlrun a script calls edl_hvd.init() and then a function decorated with @edl_hvd.elastic (one that calls "
    "Horovod's own hvd.init() has trained in a world of its own); docs/from_static_horovod.md shows what to change"
)


def apply(draft: Draft, event: events.MembershipEvent) -> None:
    if isinstance(event, events.News):
        slot = draft.slot(event.worker)
        # Late news of an earlier incarnation of this slot concerns nobody.
        if slot is None or slot.state == "empty" or slot.incarnation != event.incarnation:
            return
        if isinstance(event, events.Formed):
            draft.note_formed(event.worker, event.generation)
        elif isinstance(event, events.Ready):
            _note_ready(draft, event, slot)
        else:
            _apply_worker_event(draft, event, slot)
    elif isinstance(event, events.HostsFound):
        _list_hosts(draft, event)
    elif isinstance(event, events.DrainRequested):
        _drain(draft, event)
    elif isinstance(event, events.Deadlocked):
        world = draft.world
        if event.generation == world.generation and world.phase in ("running", "changing"):
            draft.end(1, event.reason)  # another world would come to the same place


def _list_hosts(draft: Draft, found: events.HostsFound) -> None:
    listed = {entry.host for entry in found.hosts}
    # One that was to go, and is gone, may come back under the same name.
    drains = {
        target: deadline_s
        for target, deadline_s in draft.membership.drains.items()
        if target.partition(":")[0] in listed or deadline_s > draft.now_s
    }
    deferred_drains = {
        target: until_s for target, until_s in draft.membership.deferred_drains.items() if target in drains
    }
    # Whoever lists hosts has heard of their end, too.
    staying = [entry for entry in draft.membership.hosts
               if entry.host not in listed and deferred_drains.get(entry.host, draft.now_s) > draft.now_s]  # fmt: skip
    draft.change(
        hosts=(*found.hosts, *staying),
        failed_preflight=found.failed_preflight,
        drains=drains,
        deferred_drains=deferred_drains,
    )


def _drain(draft: Draft, asked: events.DrainRequested) -> None:
    deadline_s = draft.now_s + asked.notice_s
    drains, deferred_drains = draft.membership.drains, dict(draft.membership.deferred_drains)
    if asked.deferred and (asked.target in deferred_drains or asked.target not in drains):
        until_s = deadline_s - draft.membership.rules.drain_lead_s
        deferred_drains[asked.target] = min(deferred_drains.get(asked.target, until_s), until_s)
    else:  # somebody wants it to be left now
        deferred_drains.pop(asked.target, None)
    deadline_s = min(drains.get(asked.target, deadline_s), deadline_s)
    draft.change(drains={**drains, asked.target: deadline_s}, deferred_drains=deferred_drains)


def _note_ready(draft: Draft, event: events.Ready, slot: Slot) -> None:
    is_alive = slot.state == "failing" and slot.raised is None  # only a connection had ended
    if is_alive or slot.state in ("starting", "ready", "member"):
        draft.set(event.worker, "ready", step=event.step, learning_generation=0, caught_up_generation=0)
        if slot.state == "member" and draft.world.phase in ("forming", "running"):
            draft.leave_world(event.worker)  # a collective of it has failed before anybody died


def _apply_worker_event(draft: Draft, event: events.News, slot: Slot) -> None:
    worker = event.worker
    if isinstance(event, events.CaughtUp):
        if slot.state == "ready":
            draft.set(worker, "ready", caught_up_generation=event.generation)
    elif isinstance(event, events.Raised):
        draft.set(worker, raised=ScriptError(event.step, event.error))
        if event.ends_job:
            draft.end(1, f"{worker} says that the job has to end: {event.error}")
            return
        # Nobody has ever made a step. Later the others may be well, and this one's host another.
        if event.hopeless and draft.membership.world.generation <= (slot.state == "member"):
            draft.end(1, f"the script of {worker} cannot be trained: {event.error}")
            return
        if slot.state == "member":  # its process may take seconds to end; the others need not wait for that
            draft.set(worker, "failing")
            draft.leave_world(worker)
    elif isinstance(event, events.Done):
        draft.set(worker, done=True)
        if draft.membership.finishing_s is None:
            draft.change(finishing_s=draft.now_s)
    elif isinstance(event, events.Exiting):
        if slot.state in ("ready", "member") and not slot.done:
            draft.set(worker, "failing")
            if slot.state == "member":
                draft.leave_world(worker)
    elif isinstance(event, events.Exited):
        _on_exit(draft, event, slot)
    elif isinstance(event, events.Lost) and slot.state != "dying":
        draft.kill(worker, event.reason)


def _on_exit(draft: Draft, exited: events.Exited, slot: Slot) -> None:
    worker = exited.worker
    draft.set(worker, "empty", done=False, raised=None, step=-1)
    if slot.state == "member" and not slot.done:
        draft.leave_world(worker)
    if slot.state == "terminating" or (slot.done and exited.clean):
        return
    if draft.membership.finishing_s is not None:
        # The training is complete and saved; only an error of the script's own still counts.
        if slot.done:
            draft.end(1, f"{worker} failed after the training was complete: {exited.how}")
        return
    _note_crash(draft, worker, slot, exited)


def _note_crash(draft: Draft, worker: str, slot: Slot, exited: events.Exited) -> None:
    rules, membership = draft.membership.rules, draft.membership
    proved = draft.now_s - slot.started_s > rules.backoff_reset_s
    pause_s = rules.backoff_s if proved or not slot.backoff_s else slot.backoff_s
    draft.set(worker, not_before_s=draft.now_s + pause_s, backoff_s=min(2 * pause_s, _LONGEST_BACKOFF_S))
    host = host_of(worker)
    recent = [at_s for at_s in membership.failures.get(host, ()) if draft.now_s - at_s <= rules.failure_window_s]
    recent.append(draft.now_s)
    if len(recent) >= rules.host_failures:
        draft.change(quarantined={**membership.quarantined, host: draft.now_s + rules.cooldown_s})
        draft.act(events.QuarantineHost(host, rules.cooldown_s, exited.how))
        recent = []
    draft.change(failures={**membership.failures, host: tuple(recent)})
    if slot.state == "starting" and membership.world.generation == 0:
        _note_startup_failure(draft, exited)
    elif slot.raised is not None:
        _note_error(draft, worker, slot.raised)
    elif slot.state != "starting":
        draft.change(script_error=None)


def _note_startup_failure(draft: Draft, exited: events.Exited) -> None:
    """Nothing has ever trained. When nobody gets to the training function, nobody will."""
    rules, worker, how = draft.membership.rules, exited.worker, exited.how
    if not exited.began and not rules.hosts_are_fixed:
        return  # it is quarantined; one that has just been switched on lets nobody in yet
    if exited.clean and not draft.membership.having("ready"):
        draft.end(1, f"{worker} ended with exit code 0 without a call of its training function; {HOW_TO_TRAIN}")
        return
    starts = draft.membership.startup_failures + 1
    draft.change(startup_failures=starts)
    if starts < rules.same_error_limit or draft.membership.having("ready"):
        return
    if exited.began:
        draft.end(1, f"{starts} workers ended before they reached the training function, {worker} with {how}")
    elif not draft.membership.having("starting"):
        draft.end(UNUSABLE, f"no worker could be started, {worker} because {how}")


def _note_error(draft: Draft, worker: str, raised: ScriptError) -> None:
    """The same error of all, or again and again, is the script's; another try would not help."""
    if not raised.error.startswith(_PROGRESS_LOST):
        draft.change(script_error=raised)
    elif (cause := draft.membership.script_error) is not None and not _may_hold_state(draft):
        draft.end(
            1,
            f"step {cause.step} failed: {cause.error}; no worker and no checkpoint holds the training, so it is not "
            "tried again; correct the script",
        )
        return
    before = draft.membership.repeated
    workers = (*before.workers, worker) if before is not None and before.raised == raised else (worker,)
    draft.change(repeated=RepeatedError(raised, workers))
    members = draft.membership.world.members
    if len(set(workers)) > 1 and set(workers) >= set(members):
        draft.end(1, f"every worker failed at step {raised.step}: {raised.error}")
    elif len(workers) >= draft.membership.rules.same_error_limit:
        draft.end(1, f"step {raised.step} failed {len(workers)} times in a row: {raised.error}")


def _may_hold_state(draft: Draft) -> bool:
    """Whether a worker that is still there may hold the training state, after one has found that nobody has it."""
    slots = (draft.membership.slots[worker] for worker in draft.membership.having(*LIVE))
    return any(
        slot.state != "starting" and not (slot.raised is not None and slot.raised.error.startswith(_PROGRESS_LOST))
        for slot in slots
    )
