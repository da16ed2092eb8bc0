"""Rates and shares over the last ten seconds, from one thread to another."""

from __future__ import annotations

import pytest
from clocks import FakeClock

from edl_hvd.teacher_counts import AnswerCounts


def test_rates_and_shares_are_those_of_the_last_ten_seconds():
    clock = FakeClock()
    counts = AnswerCounts(clock)
    assert counts.look() is None, "nothing was asked for"
    for number in range(30):
        counts.begin()
        clock.sleep(0.25 if number < 10 else 0.0)
        counts.end(32, teachers=3, lead=number, window=40)
        clock.sleep(0.75 if number < 10 else 1.0)
    seen = counts.look()
    assert seen is not None
    assert (seen.teachers, seen.lead, seen.window) == (3, 29, 40)
    assert seen.samples_per_s == pytest.approx(32, rel=0.1)
    assert seen.waited_share == 0.0, "it waited a quarter of the time, but long ago"
    counts.begin()
    clock.sleep(10.0)
    seen = counts.look()
    assert seen is not None
    assert seen.waited_share == pytest.approx(0.5, abs=0.05), "it waits now"
    assert seen.samples_per_s == pytest.approx(16, rel=0.1)
    counts.forget()
    assert counts.look() is None
