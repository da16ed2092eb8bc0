"""The first half of a turn: what happened is taken in."""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.driver.membership import happenings
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.state import Slot, host_of

UNUSABLE = 2  # what was asked for cannot be started, as for a wrong flag
_LONGEST_BACKOFF_S = 60.0
HOW_TO_TRAIN = (
    "under edlrun a script calls edl_hvd.init() and then a function decorated with @edl_hvd.elastic (one that calls "
    "Horovod's own hvd.init() has trained in a world of its own); docs/from_static_horovod.md shows what to change"
)


def take(draft: Draft, happening: happenings.Happening) -> None:
    if isinstance(happening, happenings.HostsFound):
        _list_hosts(draft, happening)
    elif isinstance(happening, happenings.DrainAsked):
        _drain(draft, happening)
    elif isinstance(happening, happenings.Deadlocked):
        world = draft.world
        if happening.generation == world.generation and world.phase in ("running", "changing"):
            draft.end(1, happening.reason)  # another world would come to the same place
    elif isinstance(happening, happenings.News):
        slot = draft.slot(happening.worker)
        # Late news of an earlier life of this slot concerns nobody.
        if slot is not None and slot.state != "empty" and slot.life == happening.life:
            _hear(draft, happening, slot)


def _list_hosts(draft: Draft, found: happenings.HostsFound) -> None:
    listed = {entry.host for entry in found.hosts}
    # One that was to go, and is gone, may come back under the same name.
    drains = {
        target: deadline_s
        for target, deadline_s in draft.membership.drains.items()
        if target.partition(":")[0] in listed or deadline_s > draft.now_s
    }
    stays = {target: until_s for target, until_s in draft.membership.stays.items() if target in drains}
    # Whoever lists hosts has heard of their end, too.
    staying = [entry for entry in draft.membership.hosts
               if entry.host not in listed and stays.get(entry.host, draft.now_s) > draft.now_s]  # fmt: skip
    draft.change(hosts=(*found.hosts, *staying), unfit=found.unfit, drains=drains, stays=stays)


def _drain(draft: Draft, asked: happenings.DrainAsked) -> None:
    deadline_s = draft.now_s + asked.notice_s
    drains, stays = draft.membership.drains, dict(draft.membership.stays)
    if asked.stays and (asked.target in stays or asked.target not in drains):
        until_s = deadline_s - draft.membership.rules.leave_s
        stays[asked.target] = min(stays.get(asked.target, until_s), until_s)
    else:  # somebody wants it to be left now
        stays.pop(asked.target, None)
    deadline_s = min(drains.get(asked.target, deadline_s), deadline_s)
    draft.change(drains={**drains, asked.target: deadline_s}, stays=stays)


def _hear(draft: Draft, happening: happenings.News, slot: Slot) -> None:
    worker = happening.worker
    if isinstance(happening, happenings.Ready) and slot.state in ("starting", "ready", "member"):
        draft.set(worker, "ready", step=happening.step, follows=0, warm=0)
        if slot.state == "member" and draft.world.phase in ("forming", "running"):
            draft.leave_world(worker)  # a collective of it has failed before anybody died
    elif isinstance(happening, happenings.Warm):
        if slot.state == "ready":
            draft.set(worker, "ready", warm=happening.generation)
    elif isinstance(happening, happenings.Formed):
        _note_formed(draft, worker, happening.generation)
    elif isinstance(happening, happenings.Raised):
        draft.set(worker, raised=(happening.step, happening.error))
        # Nobody has ever made a step. Later the others may be well, and this one's host another.
        if happening.hopeless and draft.membership.world.generation <= (slot.state == "member"):
            draft.end(1, f"the script of {worker} cannot be trained: {happening.error}")
            return
        if slot.state == "member":  # its process may take seconds to end; the others need not wait for that
            draft.set(worker, "failing")
            draft.leave_world(worker)
    elif isinstance(happening, happenings.Done):
        draft.set(worker, done=True)
        if draft.membership.finishing_s is None:
            draft.change(finishing_s=draft.now_s)
    elif isinstance(happening, happenings.Exited):
        _bury(draft, happening, slot)
    elif isinstance(happening, happenings.Lost) and slot.state != "dying":
        draft.kill(worker, happening.reason)


def _note_formed(draft: Draft, worker: str, generation: int) -> None:
    world = draft.world
    if world.generation == generation and worker in world.members:
        world = replace(world, formed=world.formed | {worker})
        draft.change(world=world)
        if world.phase == "forming" and world.formed >= set(world.members):
            draft.set_phase("running")


def _bury(draft: Draft, exited: happenings.Exited, slot: Slot) -> None:
    worker = exited.worker
    draft.set(worker, "empty", done=False, raised=None, step=-1)
    if slot.state == "member" and not slot.done:
        draft.leave_world(worker)
    if slot.state == "dismissed" or (slot.done and exited.clean):
        return
    if draft.membership.finishing_s is not None:
        # The training is complete and saved; only an error of the script's own still counts.
        if slot.done:
            draft.end(1, f"{worker} failed after the training was complete: {exited.how}")
        return
    _note_crash(draft, worker, slot, exited)


def _note_crash(draft: Draft, worker: str, slot: Slot, exited: happenings.Exited) -> None:
    rules, membership = draft.membership.rules, draft.membership
    proved = draft.now_s - slot.born_s > rules.steady_s
    pause_s = rules.backoff_s if proved or not slot.backoff_s else slot.backoff_s
    draft.set(worker, not_before_s=draft.now_s + pause_s, backoff_s=min(2 * pause_s, _LONGEST_BACKOFF_S))
    host = host_of(worker)
    recent = [at_s for at_s in membership.failures.get(host, ()) if draft.now_s - at_s <= rules.failure_window_s]
    recent.append(draft.now_s)
    if len(recent) >= rules.host_failures:
        draft.change(aside={**membership.aside, host: draft.now_s + rules.cooldown_s})
        draft.act(happenings.SetAside(host, rules.cooldown_s, exited.how))
        recent = []
    draft.change(failures={**membership.failures, host: tuple(recent)})
    if slot.state == "starting" and membership.world.generation == 0:
        _note_false_start(draft, exited)
    elif slot.raised is not None:
        _note_error(draft, worker, *slot.raised)


def _note_false_start(draft: Draft, exited: happenings.Exited) -> None:
    """Nothing has ever trained. When nobody gets to the training function, nobody will."""
    rules, worker, how = draft.membership.rules, exited.worker, exited.how
    if not exited.began and not rules.hosts_are_fixed:
        return  # it is set aside; one that has just been switched on lets nobody in yet
    if exited.clean and not draft.membership.having("ready"):
        draft.end(1, f"{worker} ended with exit code 0 without a call of its training function; {HOW_TO_TRAIN}")
        return
    starts = draft.membership.false_starts + 1
    draft.change(false_starts=starts)
    if starts < rules.same_error_limit or draft.membership.having("ready"):
        return
    if exited.began:
        draft.end(1, f"{starts} workers ended before they reached the training function, {worker} with {how}")
    elif not draft.membership.having("starting"):
        draft.end(UNUSABLE, f"no worker could be started, {worker} because {how}")


def _note_error(draft: Draft, worker: str, step: int, error: str) -> None:
    """The same error of all, or again and again, is the script's; another try would not help."""
    known_step, known_error, workers = draft.membership.repeated
    workers = (*workers, worker) if (step, error) == (known_step, known_error) else (worker,)
    draft.change(repeated=(step, error, workers))
    members = draft.membership.world.members
    if len(set(workers)) > 1 and set(workers) >= set(members):
        draft.end(1, f"every worker failed at step {step}: {error}")
    elif len(workers) >= draft.membership.rules.same_error_limit:
        draft.end(1, f"step {step} failed {len(workers)} times in a row: {error}")
