"""What the planner is asked: accepted, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.planning.values import Claim, Curve, JobAsk, PlanRules, Room


def test_a_curve_is_in_proportion_below_its_first_size_and_flat_beyond_its_last() -> None:
    curve = Curve((4, 8), (400.0, 600.0))
    assert [curve.at(slots) for slots in (0, 1, 3, 4, 5, 8, 80)] == [0.0, 100.0, 300.0, 400.0, 450.0, 600.0, 600.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Room("a", -1), "-1 slots"),
        (lambda: Claim("web", 0), "asks for 0 slots"),
        (lambda: Claim("web", 5, unit=2), "5 slots in units of 2"),
        (lambda: Curve((), ()), "sizes []"),
        (lambda: Curve((2, 1), (1.0, 2.0)), "sizes [2, 1]"),
        (lambda: Curve((1, 2), (1.0,)), "as many finite values"),
        (lambda: Curve((1,), (0.0,)), "above 0"),
        (lambda: Curve((1,), (float("nan"),)), "finite"),
        (lambda: JobAsk("a", least=4, most=2), "at least 4 and at most 2"),
        (lambda: JobAsk("a", least=3, most=4, unit=2), "3 to 4 slots in units of 2"),
        (lambda: JobAsk("a", least=0, most=4), "expected at least 1"),
        (lambda: JobAsk("a", weight=0.0), "weight of 0"),
        (lambda: PlanRules(elasticity=1.0), "elasticity 1"),
        (lambda: PlanRules(gain=-0.1), "gain -0.1"),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        make()
    assert says in str(refused.value)
    assert "expected" in str(refused.value)


def test_a_job_may_be_asked_to_hold_none() -> None:
    assert JobAsk("a", least=2, most=0).most == 0
