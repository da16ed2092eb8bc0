"""When the membership is asked though nothing has happened, which the driver does every 0.05 s, and the host source."""

from __future__ import annotations

import math
from collections.abc import Iterator

from edl_hvd.driver.membership.state import Membership, host_of

TICK_S = 0.05
# As in ``driver/job.py``.


def next_tick_s(membership: Membership, now_s: float) -> float:
    """The first of the driver's ticks at which time alone may change something; infinity if there is none.

    Some of them change nothing: a bound is looked at for whoever it may concern, whether it does or not.
    """
    due_s = min((moment_s for moment_s in _moments(membership, now_s) if moment_s >= now_s), default=math.inf)
    if math.isinf(due_s):
        return due_s
    # Some bounds are over when they are reached, others when they are passed.
    return tick_after(max(now_s, tick_before(due_s)))


def next_poll_s(now_s: float, every_s: float, first_s: float) -> float:
    """When the host source is asked next, at this moment or later.

    >>> next_poll_s(60.0, 1.0, 0.5), next_poll_s(60.5, 1.0, 0.5)
    (60.5, 60.5)
    """
    return round(first_s + math.ceil((now_s - first_s) / every_s - 1e-6) * every_s, 6)


def tick_after(moment_s: float) -> float:
    """The first tick that is later.

    >>> tick_after(0.5), tick_after(0.52)
    (0.55, 0.55)
    """
    return round((math.floor(moment_s / TICK_S + 1e-6) + 1) * TICK_S, 6)


def tick_before(moment_s: float) -> float:
    """The last tick that is earlier.

    >>> tick_before(0.5), tick_before(0.52)
    (0.45, 0.5)
    """
    return round((math.ceil(moment_s / TICK_S - 1e-6) - 1) * TICK_S, 6)


def _moments(membership: Membership, now_s: float) -> Iterator[float]:
    rules, world = membership.rules, membership.world
    bounds = {
        "starting": (rules.start_s,),
        "ready": (rules.last_call_timeout_s, rules.follow_s),
        "dismissed": (rules.shutdown_timeout_s,),
        "failing": (rules.shutdown_timeout_s,),
    }
    listed = {entry.host for entry in membership.hosts}
    for worker, slot in membership.slots.items():
        for bound_s in bounds.get(slot.state, ()):
            yield slot.since_s + bound_s
        if world.phase == "changing" and slot.state != "member":
            yield slot.since_s + rules.regroup_s
        if slot.not_before_s >= now_s and slot.state == "empty" and host_of(worker) in listed:
            yield slot.not_before_s
    if world.phase != "running":
        yield world.since_s + rules.regroup_s
    elif membership.drains or not listed.issuperset(map(host_of, world.members)):
        yield world.since_s + rules.removal_notice_s
    yield from membership.drains.values()
    yield from membership.deferred_drains.values()
    yield from membership.quarantined.values()
    for since_s, bound_s in (
        (membership.below_min_since_s, rules.elastic_timeout_s),
        (membership.finishing_s, rules.regroup_s),
    ):
        if since_s is not None:
            yield since_s + bound_s
