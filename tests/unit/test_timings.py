"""How long steps took: kept, pooled, and given to other jobs as a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.errors import SettingsError, UsageError
from edl_hvd.settings import family_timings
from edl_hvd.timings import Timing, pooled, read_timings, timings_text

COUNTS = st.integers(1, 5)
TIMINGS = st.lists(
    st.builds(Timing, COUNTS, COUNTS, COUNTS, st.floats(1e-3, 10), COUNTS, st.integers(1, 2)), max_size=60
)  # fmt: skip


@given(TIMINGS)
def test_what_is_written_is_read(measured: list[Timing]) -> None:
    assert read_timings(timings_text(measured)) == tuple(measured)


@given(TIMINGS, st.integers(1, 40))
def test_a_pool_has_each_plan_once_and_loses_no_world_before_another_is_down_to_one(
    measured: list[Timing], most: int
) -> None:
    pool = pooled(measured, most)
    last = {timing.plan: timing for timing in measured}
    assert len(pool) == min(most, len(last))
    assert all(last[timing.plan] == timing for timing in pool)
    worlds = {(timing.size, timing.hosts) for timing in measured}
    kept = {(timing.size, timing.hosts) for timing in pool}
    assert kept == worlds or len(pool) == len(kept) == most


@pytest.mark.parametrize(
    "text",
    ["seven", "[7]", "[[1, 8, 1]]", "[[1, 8, 1, 0.0]]", "[[0, 8, 1, 0.1]]", "[[1, 8, 1, null]]", "{}x", "[" * 5000,
     "[[1.5, 8, 1, 0.1]]", '[[1, 8, 1, "0.1"]]', "[[1, 8, 1, NaN]]"],
)  # fmt: skip
def test_a_text_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"are no timings of steps; expected rows of"):
        read_timings(text)
    with pytest.raises(SettingsError, match="EDL_HVD_FAMILY_TIMINGS is set by a fleet or an operator"):
        family_timings({"EDL_HVD_FAMILY_TIMINGS": text})
    assert family_timings({}) == ()
