"""What jobs of one family have measured, for those that have not yet. Pure.

Jobs of a family are alike: their user says so. A new one begins with what the others know of their steps
(:func:`shared_timings`), and counts by the curve of one of them until it has its own (:func:`first_curve`).
Without that, each job finds out again on how many slots it is how fast, which costs 2 % of the mean completion time
in docs/cluster_experiments.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edl_hvd.planning.values import Curve
from edl_hvd.timings import Timing, pooled

_MOST_MEMBERS = 1000
# Some 50 ms, once for each start of a job.


@dataclass(frozen=True)
class FamilyMember:
    """What one job has measured.

    Attributes:
        began_s: When it was submitted.
        curve: Its goodput by slots; ``None`` before it was measured.
        timings: How long its steps took.
    """

    began_s: float
    curve: Curve | None
    timings: tuple[Timing, ...] = ()


def first_curve(members: Iterable[FamilyMember]) -> Curve | None:
    """The curve that reaches furthest, of several the newest; ``None`` where nobody has one.

    >>> short, long = Curve((1, 2), (10.0, 19.0)), Curve((1, 2, 4), (9.0, 18.0, 30.0))
    >>> first_curve([FamilyMember(0.0, long), FamilyMember(9.0, short)]).sizes
    (1, 2, 4)
    """
    known = [(one.curve.sizes[-1], one.began_s, one.curve) for one in members if one.curve is not None]
    return max(known, key=lambda entry: entry[:2])[2] if known else None


def shared_timings(members: Sequence[FamilyMember]) -> tuple[Timing, ...]:
    """What a new job is given: the timings of the newest members, by :func:`~edl_hvd.timings.pooled`.

    Args:
        members: From the oldest to the newest.
    """
    return pooled(timing for one in members[-_MOST_MEMBERS:] for timing in one.timings)
