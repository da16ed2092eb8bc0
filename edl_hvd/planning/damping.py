"""Which changes are worth their cost.

What has to change changes at once: a least that is missing, a claim, a host that is gone, slots that nobody uses.
Anything else has to pay. There is one threshold, on the gain of the whole; with two of them, one to give and one to
take back, shares go back and forth between both.
"""

from __future__ import annotations

from edl_hvd.planning.values import JobAsk, PlanRules

_MOST_CHANGES_PER_HORIZON = 10
# A change of a tenth of the horizon or more is expected to last in proportion: slow changes are made rarely.


def kept_part(change_s: float, horizon_s: float) -> float:
    """The part of its goodput that a change leaves a job, over the time in which it has to pay.

    >>> kept_part(0.0, 60.0), round(kept_part(1.5, 60.0), 3), kept_part(30.0, 60.0)
    (1.0, 0.975, 0.9)

    Args:
        change_s: Seconds without progress that the change costs.
        horizon_s: Time in which cheap changes have to pay, in seconds; ten times the cost, where that is longer.
    """
    return 1 - change_s / max(horizon_s, _MOST_CHANGES_PER_HORIZON * change_s)


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
