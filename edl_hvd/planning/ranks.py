"""What slots are worth to each job, in one currency.

With g a job's goodput over slots, n its fair share and x(s) = g(s) / g(n), s slots are worth

    weight · w · x(s)          to a job whose rest of work is known
    weight · (2 - 1 / x(s))    to one whose rest is not known, or that has no curve yet to divide it by

At the fair share both have the value ``weight`` and the same slope (the known ones in the mean), so they trade in one
currency. The second is the fairness of Pollux (Qiao et al., OSDI 2021: a power mean of speedups with exponent -1), term
by term. The w come from the order of the rests, R = left / g(n), longest first: of m jobs the k-th has

    w = (k^e - (k - 1)^e)^(1 - p) / mean,    e = 1 / (1 - p)

These are the weights with which the sum of w · s^p is largest at the shares of heSRPT (Berg et al., 2020), which are
optimal for the mean completion time of jobs that are all present and speed up by s^p.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.planning.values import Curve, JobAsk, PlanRules


def rank_weights(jobs: int, elasticity: float, favour_short: float = 1.0) -> list[float]:
    """Weights from the longest rest to the shortest, with a mean of 1.

    The largest sum of w · s^p over shares s of one cluster is at heSRPT's shares, (k / m)^e - ((k - 1) / m)^e:

    >>> p, m = 0.5, 3
    >>> weights = rank_weights(m, p)
    >>> best = [weight ** (1 / (1 - p)) for weight in weights]
    >>> [round(share / sum(best), 4) for share in best]
    [0.1111, 0.3333, 0.5556]
    >>> [round((k / m) ** 2 - ((k - 1) / m) ** 2, 4) for k in (1, 2, 3)]
    [0.1111, 0.3333, 0.5556]

    Args:
        jobs: Number of jobs m.
        elasticity: p, 0 to less than 1; with 0 all weights are 1 if jobs do not speed up.
        favour_short: Exponent of the weights.
    """
    exponent = 1 / (1 - elasticity)
    power = (1 - elasticity) * favour_short
    raw = [(k**exponent - (k - 1) ** exponent) ** power for k in range(1, jobs + 1)]
    mean = sum(raw) / jobs if jobs else 1.0
    return [weight / mean for weight in raw]


ASSUMED = Curve((1, 100_000), (1.0, 100_000.0))
"""The curve of a job that has none: linear; :func:`reach` says how far that is believed."""


def reach(ask: JobAsk) -> int:
    """Most slots that a job may get: without a curve, twice what it was seen with (Pollux's rule of exploration).

    >>> reach(JobAsk("a", most=8)), reach(JobAsk("a", most=8, seen=3)), reach(JobAsk("a", most=4, seen=3))
    (2, 6, 4)
    """
    return ask.most if ask.curves else min(ask.most, 2 * max(ask.seen, ask.least))


@dataclass(frozen=True)
class Worth:
    """What slots are worth to one job.

    Attributes:
        weight: Its weight; of a known rest, times its w.
        base: Goodput at the fair share, g(n).
        is_known: Whether its rest is known.
        rank: Place of its rest, 1 for the shortest; 0 if it is not known.
    """

    weight: float
    base: float
    is_known: bool
    rank: int = 0

    def of(self, goodput: float) -> float:
        """The worth of a goodput of more than 0.

        >>> Worth(weight=1.0, base=10.0, is_known=True).of(20.0), Worth(weight=1.0, base=10.0, is_known=False).of(20.0)
        (2.0, 1.5)
        """
        speedup = goodput / self.base
        return self.weight * speedup if self.is_known else self.weight * (2 - 1 / speedup)

    def of_each(self, goodput: Sequence[float]) -> list[float]:
        """The worth of each of several."""
        weight, base = self.weight, self.base
        if self.is_known:
            return [weight * (one / base) for one in goodput]
        return [weight * (2 - 1 / (one / base)) for one in goodput]


def fair_shares(asks: Sequence[JobAsk], slots: int, rules: PlanRules) -> list[float]:
    """The slots that each job would get if weights alone decided: a queue's part, divided among its jobs.

    >>> fair_shares([JobAsk("a"), JobAsk("b", weight=3.0)], slots=8, rules=PlanRules())
    [2.0, 6.0]
    """
    in_queue: defaultdict[str, float] = defaultdict(float)
    for ask in asks:
        in_queue[ask.queue] += ask.weight
    named = {rule.queue: rule.weight for rule in rules.queues}
    weights = {queue: named.get(queue, 1.0) for queue in in_queue} if named else dict(in_queue)
    total = sum(weights.values())
    return [slots * weights[ask.queue] / total * ask.weight / in_queue[ask.queue] for ask in asks]


def worths(asks: Sequence[JobAsk], curves: Sequence[Curve], slots: int, rules: PlanRules) -> list[Worth]:
    """What slots are worth to each of the jobs that share a number of slots.

    Args:
        asks: The jobs, in any order.
        curves: The curve of each.
        slots: Slots that they share.
        rules: Elasticity, preference for short jobs, and queues.
    """
    if not asks:
        return []
    fair = fair_shares(asks, slots, rules)
    mean = sum(fair) / len(fair)
    bases = [_fair_goodput(curve, max(share, 1.0)) for curve, share in zip(curves, fair, strict=True)]
    known = [
        (ask.left / base, ask.job, number)
        for number, (ask, base) in enumerate(zip(asks, bases, strict=True))
        if ask.left is not None and ask.curves
    ]
    known.sort(key=lambda entry: (-entry[0], entry[1]))
    ranked = {
        number: (weight, len(known) - place)
        for place, ((_, _, number), weight) in enumerate(
            zip(known, rank_weights(len(known), rules.elasticity, rules.favour_short), strict=True)
        )
    }
    found = []
    for number, (share, base) in enumerate(zip(fair, bases, strict=True)):
        weight, rank = ranked.get(number, (1.0, 0))
        found.append(Worth(weight * share / mean, base, number in ranked, rank))
    return found


def _fair_goodput(curve: Curve, slots: float) -> float:
    """The goodput of a number of slots that need not be whole."""
    whole = int(slots)
    low, high = curve.at(whole), curve.at(whole + 1)
    return low + (high - low) * (slots - whole)
