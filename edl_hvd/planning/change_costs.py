"""Which changes are worth their cost.

What has to change changes at once: a least that is missing, a claim, a host that is gone, slots that nobody uses.
Anything else has to pay. There is one threshold, on the gain of the whole; with two of them, one to give and one to
take back, shares go back and forth between both.
"""

from __future__ import annotations

from edl_hvd.planning.values import JobAsk, PlanRules

_MOST_CHANGES_PER_HORIZON = 10
# A change of a tenth of the horizon or more is expected to last in proportion: slow changes are made rarely.


def after_change(goodput: float, change_s: float, horizon_s: float, left: float | None) -> float:
    """What a change leaves of a goodput, in the mean over the time in which the change has to pay.

    That time is not longer than the job lasts: its last seconds are no time to wait for a change.

    >>> after_change(100.0, 1.5, 60.0, left=None), after_change(100.0, 30.0, 60.0, left=None)
    (97.5, 90.0)
    >>> after_change(100.0, 30.0, 60.0, left=100.0 * 30.0), after_change(100.0, 30.0, 60.0, left=0.0)
    (50.0, 0.0)

    Args:
        goodput: Progress per second with the new share; more than 0.
        change_s: Seconds without progress that the change costs.
        horizon_s: Time in which cheap changes have to pay, in seconds; ten times the cost, where that is longer.
        left: Work that is left; ``None``: not known.
    """
    if not change_s:
        return goodput
    kept = goodput * (1 - change_s / max(horizon_s, _MOST_CHANGES_PER_HORIZON * change_s))
    return kept if left is None else min(kept, left * goodput / (left + change_s * goodput))


def starting_part(start_s: float, change_s: float, horizon_s: float, rest_s: float) -> float:
    """The part of the gain of more slots that is lost while workers start on them.

    The others train on meanwhile, and the new slots do nothing. Where a change costs as much as a start, all start
    anew, and :func:`after_change` has counted that already.

    >>> [starting_part(start_s=31.0, change_s=1.0, horizon_s=300.0, rest_s=rest_s) for rest_s in (400.0, 60.0, 20.0)]
    [0.0967741935483871, 0.5, 1.0]
    >>> starting_part(start_s=30.0, change_s=30.0, horizon_s=300.0, rest_s=400.0)
    0.0

    Args:
        start_s: Seconds that a start takes.
        change_s: Seconds without progress that the change costs; these are counted elsewhere.
        horizon_s: Time in which quick starts have to pay, in seconds; ten times the start, where that is longer.
        rest_s: Time for which the job will use the new slots.
    """
    idle_s = start_s - change_s
    if idle_s <= 0:
        return 0.0
    pays_s = min(max(horizon_s, _MOST_CHANGES_PER_HORIZON * start_s), rest_s)
    return idle_s / pays_s if pays_s > idle_s else 1.0


def is_settling(ask: JobAsk, rules: PlanRules, now_s: float) -> bool:
    """Whether the share of a job has changed so recently that only need may change it."""
    return now_s - ask.changed_s < rules.settle * ask.change_s


def pays(gain: float, weights: float, rules: PlanRules) -> bool:
    """Whether shares are changed that need not be.

    Args:
        gain: Growth of the sum of worths.
        weights: That sum, if each job had its fair share.
        rules: The threshold.
    """
    return gain > rules.gain * weights
