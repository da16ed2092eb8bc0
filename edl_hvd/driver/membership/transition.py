"""A transition of the membership: a pure function of what has happened, which says what is to be done about it.

It does no I/O and reads no clock, so that tests drive it through any number of histories in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.draft import Draft
from edl_hvd.driver.membership.intake import HOW_TO_TRAIN, apply
from edl_hvd.driver.membership.state import EMPTY, LIVE, Membership, PublishedWorld, host_of

SAVED = 75  # EX_TEMPFAIL: "run me again"


def transition(
    membership: Membership, event: events.MembershipEvent, now_s: float
) -> tuple[Membership, tuple[events.Action, ...]]:
    """The next membership and what is to be done. Total: it accepts anything in any state.

    Args:
        membership: The one before.
        event: What has happened.
        now_s: When; never earlier than at the call before.
    """
    return transition_together(membership, (event,), now_s)


def transition_together(
    membership: Membership, news: Sequence[events.MembershipEvent], now_s: float
) -> tuple[Membership, tuple[events.Action, ...]]:
    """:func:`transition` for several events of one moment, with one decision after the last of them.

    The result is that of one call per event where nothing would be decided before the last, as for the same message
    of every member of a world. A simulated change of a world of 64 takes 2 decisions so, and not 128.

    Args:
        membership: The one before.
        news: What has happened, in order.
        now_s: When; never earlier than at the call before.
    """
    if membership.end is not None:
        return membership, ()
    draft = Draft(membership, now_s)
    for event in news:
        apply(draft, event)
    _decide(draft)
    return draft.membership, tuple(draft.actions)


def _decide(draft: Draft) -> None:
    if draft.membership.end is not None:
        return
    _enforce_bounds(draft)
    if draft.membership.finishing_s is not None:
        _finish(draft)
        return
    _spawn(draft)
    if draft.membership.having("member"):
        _resize_if_needed(draft)
    else:
        _form_world(draft)


def _enforce_bounds(draft: Draft) -> None:
    rules, world = draft.membership.rules, draft.membership.world
    for worker in draft.membership.having("starting"):
        if draft.age(worker) > rules.start_s:
            how = f"; {HOW_TO_TRAIN}" if world.generation == 0 else ""
            draft.kill(worker, f"it was not ready {rules.start_s:.0f} s after its start{how}")
    for worker in draft.membership.having("terminating", "failing"):
        if draft.age(worker) > rules.shutdown_timeout_s:
            slot = draft.membership.slots[worker]
            event = "its error" if slot.raised is not None else "the end of its first thread"
            event = "being asked to exit" if slot.state == "terminating" else event
            draft.kill(worker, f"it did not end within {rules.shutdown_timeout_s:.0f} s of {event}")
    members = draft.membership.having("member")
    if world.phase == "running" or not members:
        return
    since_s = world.since_s
    if world.phase == "changing":  # its steps may be long, but once one has left, the others follow
        left = [draft.membership.slots[name].since_s for name in set(world.members).difference(members)]
        if not left:
            return
        since_s = max(world.since_s, min(left))
    if draft.now_s - since_s > rules.regroup_s:
        for worker in members:
            if world.phase != "forming" or worker not in world.formed:
                draft.kill(worker, f"it was stuck for {rules.regroup_s:.0f} s while the others waited for it")


def _finish(draft: Draft) -> None:
    membership = draft.membership
    assert membership.finishing_s is not None
    late = draft.now_s - membership.finishing_s > membership.rules.regroup_s
    for worker in membership.having("starting", "ready"):
        draft.shut_down(worker)
    if late:
        for worker in membership.having("member", "terminating", "failing"):
            draft.kill(worker, "it did not end although the training is complete")
    if not draft.membership.having(*LIVE):
        draft.end(0)


def _spawn(draft: Draft) -> None:
    membership = draft.membership
    wanted = membership.wanted(draft.now_s)
    having = membership.having
    present = {*having("starting"), *having("ready"), *having("member")}.intersection(wanted)
    # Those who are about to leave do not count: their successors have to start before they can go.
    alive = sum(not membership.is_to_go(worker) for worker in present) if membership.drains else len(present)
    room = membership.rules.max_np + membership.rules.spares - alive
    for worker in wanted if room > 0 and len(present) < len(wanted) else ():
        slot = membership.slots.get(worker, EMPTY)
        if room > 0 and slot.state == "empty" and slot.not_before_s <= draft.now_s:
            room -= 1
            draft.set(
                worker,
                "starting",
                incarnation=slot.incarnation + 1,
                started_s=draft.now_s,
                step=-1,
                done=False,
                raised=None,
            )
            draft.act(events.Spawn(worker, slot.incarnation + 1))


def _resize_if_needed(draft: Draft) -> None:
    """There is a world; should it change?"""
    membership, rules, now_s = draft.membership, draft.membership.rules, draft.now_s
    wanted = set(membership.wanted(now_s))
    running = membership.world.phase == "running"
    # One that has just left a world may be the only one to hold the state, until the next one runs.
    for worker in membership.having("starting", "ready") if running else membership.having("starting"):
        if worker not in wanted:
            draft.shut_down(worker)
    if not running:
        return
    members = membership.having("member")
    leavers = [worker for worker in members if worker not in wanted]
    stayers = len(members) - len(leavers)
    room = rules.max_np - stayers
    _let_follow(draft, room, members)
    newcomers = [worker for worker in draft.membership.having("ready") if _can_join(draft, worker)]
    if leavers:
        if stayers or newcomers or _is_time(draft, leavers, wanted):
            draft.request_resize()
    elif newcomers and room > 0:
        others = len(draft.membership.having("starting", "ready")) > len(newcomers)
        settled = now_s - min(membership.slots[worker].since_s for worker in newcomers) >= rules.last_call_timeout_s
        if settled or not others or len(newcomers) >= room:
            draft.request_resize()


def _let_follow(draft: Draft, room: int, members: list[str]) -> None:
    """Newcomers take the state over while the world trains; nobody waits for that."""
    membership = draft.membership
    generation = membership.world.generation
    for worker in membership.having("ready")[:room]:
        slot = membership.slots[worker]
        if slot.step < 0 and slot.learning_generation != generation:
            near = [member for member in members if host_of(member) == host_of(worker)]
            draft.set(worker, "ready", learning_generation=generation)
            draft.act(events.ReceiveState(worker, generation, (near or members)[-1]))


def _can_join(draft: Draft, worker: str) -> bool:
    """It need not be given the state while the others wait, or cannot be spared that."""
    slot, generation = draft.membership.slots[worker], draft.membership.world.generation
    late = slot.learning_generation == generation and draft.age(worker) > draft.membership.rules.follow_s
    return slot.step >= 0 or slot.caught_up_generation == generation or late


def _is_time(draft: Draft, leavers: list[str], wanted: set[str]) -> bool:
    """Nobody else holds the state. Leave now: no other worker can come, or the notice is nearly over?"""
    return not wanted or draft.now_s >= min(_deadline_s(draft, worker) for worker in leavers)


def _deadline_s(draft: Draft, worker: str) -> float:
    """When a worker that is to leave has to be gone."""
    told_s = _told_deadline_s(draft, worker)
    rules = draft.membership.rules
    return draft.membership.world.since_s + rules.removal_notice_s if told_s is None else told_s


def _told_deadline_s(draft: Draft, worker: str) -> float | None:
    """The same, if somebody has said so."""
    drains = draft.membership.drains
    return min((drains[what] for what in (worker, host_of(worker)) if what in drains), default=None)


def _form_world(draft: Draft) -> None:
    """There is no world; can there be one?"""
    wanted = set(draft.membership.wanted(draft.now_s))
    for worker in draft.membership.having("starting"):
        if worker not in wanted:  # it holds nothing, and its slot may be somebody else's from now on
            draft.shut_down(worker)
    membership = draft.membership
    ready = membership.having("ready")
    leavers = [worker for worker in ready if worker not in wanted]
    able = _exclude_unsynced(draft, [worker for worker in ready if worker in wanted])
    holders = [worker for worker in leavers if membership.slots[worker].step >= 0]
    handing_on: list[str] = []
    if able and not any(membership.slots[worker].step >= 0 for worker in able):
        handing_on = sorted(holders, key=lambda worker: membership.slots[worker].step)[-1:]
    if len(able) + len(handing_on) >= _needed(draft) and _have_settled(draft, able):
        for worker in leavers:
            if worker not in handing_on:
                draft.shut_down(worker)
        _publish(draft, able, handing_on)
        return
    if not wanted and not membership.having("starting"):
        _drain_all(draft, holders, leavers)
    _check_elastic_timeout(draft, able)


def _exclude_unsynced(draft: Draft, able: list[str]) -> list[str]:
    """Leave out workers without state if enough workers have it; those left out follow the new world and join later.

    A spare is not left out: it is there to take a lost worker's place at once.
    """
    membership = draft.membership
    if not membership.world.generation or membership.rules.spares:
        return able
    regular = membership.world.phase == "changing"
    synced = [worker for worker in able if membership.slots[worker].step >= 0 or (regular and _can_join(draft, worker))]
    holds = any(membership.slots[worker].step >= 0 for worker in synced)
    return synced if holds and len(synced) >= _needed(draft) else able


def _needed(draft: Draft) -> int:
    membership, rules = draft.membership, draft.membership.rules
    if membership.world.generation:
        return rules.min_np
    is_short = any(membership.quarantined.get(entry.host, draft.now_s) > draft.now_s
                   or entry.host in membership.failed_preflight for entry in membership.hosts)  # fmt: skip
    # A host that nobody can reach, or nobody should, does not keep all others from starting, once these are ready.
    enough = is_short and not membership.having("starting")
    return rules.min_np if enough else rules.num_proc


def _have_settled(draft: Draft, able: list[str]) -> bool:
    """The very first world waits a moment for the others that started with it; no later one waits."""
    membership = draft.membership
    if membership.world.generation or not membership.having("starting") or len(able) >= membership.rules.max_np:
        return True
    return (
        draft.now_s - max(membership.slots[worker].since_s for worker in able) >= membership.rules.last_call_timeout_s
    )


def _drain_all(draft: Draft, holders: list[str], leavers: list[str]) -> None:
    """Nobody can come any more: the freshest saves, all go."""
    freshest = max(holders, key=lambda worker: draft.membership.slots[worker].step, default=None)
    for worker in leavers:
        until_s = _told_deadline_s(draft, worker)
        left_s = None if until_s is None else max(0.0, until_s - draft.now_s)
        draft.shut_down(worker, save=worker == freshest, left_s=left_s)
    if draft.membership.drains and draft.membership.hosts and not draft.membership.having(*LIVE):
        draft.end(SAVED, "every host is left; run it again to go on")


def _check_elastic_timeout(draft: Draft, able: list[str]) -> None:
    membership, rules = draft.membership, draft.membership.rules
    starting = membership.having("starting")
    on_their_way = len(able) + len(starting) >= _needed(draft)
    if membership.below_min_since_s is None or (
        on_their_way and not any(membership.slots[w].backoff_s for w in starting)
    ):
        draft.change(below_min_since_s=draft.now_s)  # a first start has its own bound
    elif draft.now_s - membership.below_min_since_s > rules.elastic_timeout_s and membership.end is None:
        draft.end(
            1,
            f"fewer than {_needed(draft)} workers were ready for {rules.elastic_timeout_s:.0f} s; see their output "
            "and what discovery reports; --elastic-timeout sets how long to wait",
        )


def _publish(draft: Draft, able: list[str], handing_on: list[str]) -> None:
    rules, world = draft.membership.rules, draft.membership.world
    if rules.reset_limit is not None and world.generation > rules.reset_limit:
        draft.end(1, f"the world has changed more than {rules.reset_limit} times, the limit that --reset-limit sets")
        return
    # Who was there before comes first; whole hosts stay together, because ranks of one host talk fastest.
    before = {worker: place for place, worker in enumerate(world.members)}
    last = len(before)
    chosen = sorted(able, key=lambda worker: before.get(worker, last))[: rules.max_np]
    chosen = [*handing_on, *chosen]  # one more than allowed, for as long as it takes to hand the state on
    hosts: dict[str, list[str]] = {}
    for worker in chosen:
        hosts.setdefault(host_of(worker), []).append(worker)
    members = tuple(worker for host in hosts.values() for worker in host)
    generation = world.generation + 1
    draft.set_all(members, "member")
    draft.change(world=PublishedWorld(generation, members, "forming", draft.now_s), below_min_since_s=None)
    draft.act(events.Publish(generation, members))
