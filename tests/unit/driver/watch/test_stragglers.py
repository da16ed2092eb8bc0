"""Who is slow, and who only had a bad moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edl_hvd.driver.watch.stragglers import Stragglers
from edl_hvd.protocol import Beat, StragglerFound


def train(
    seconds: dict[str, Callable[[int], float] | float],
    steps: int,
    batches: dict[str, int] | None = None,
    generation: int = 1,
    watch: Stragglers | None = None,
    every: int = 1,
) -> list[StragglerFound]:
    """What is found while workers take that long for a micro-batch, ``batches`` of which make their share of a step."""
    watch = watch or Stragglers()
    share = {worker: (batches or {}).get(worker, 1) for worker in seconds}
    computed = dict.fromkeys(seconds, 0.0)
    found = []
    for step in range(steps + 1):
        for worker, time_s in seconds.items():
            if step % every == 0:
                beat = Beat(generation, 1, 100 + step, 0, -1, "compute", 0.0, computed[worker], 2 * step, step,
                            share[worker] * step, 1.0)  # fmt: skip
                found += watch.heard(worker, beat, 1, len(seconds))
            computed[worker] += share[worker] * (time_s(step) if callable(time_s) else time_s)
    return found


def test_a_worker_that_is_four_times_slower_is_told_after_50_steps():
    assert train({"a": 0.1, "b": 0.4}, 49) == []
    [slow] = train({"a": 0.1, "b": 0.4}, 50)
    assert (slow.worker, slow.generation, slow.step) == ("b", 1, 150)
    assert (slow.compute_s, slow.median_s) == (pytest.approx(0.4), pytest.approx(0.1))


def test_it_is_told_again_once_in_50_steps():
    assert len(train({"a": 0.1, "b": 0.1, "c": 0.2}, 260)) == 5


@pytest.mark.parametrize(("factor", "told"), [(1.4, False), (1.6, True)])
def test_half_as_slow_again_is_the_limit(factor, told):
    assert bool(train({"a": 0.1, "b": 0.1, "c": 0.1 * factor}, 60)) == told


def test_one_long_pause_is_no_reason_to_call_a_worker_slow():
    assert train({"a": 0.1, "b": lambda step: 60.0 if step == 25 else 0.1}, 200) == []


def test_a_worker_that_was_dealt_more_is_not_slow():
    assert train({"a": 0.1, "b": 0.1, "c": 0.1}, 200, batches={"a": 3, "b": 1, "c": 0}) == []
    assert {slow.worker for slow in train({"a": 0.1, "b": 0.3}, 200, batches={"a": 3, "b": 1})} == {"b"}


def test_the_slow_half_of_four_is_told():
    assert {slow.worker for slow in train({"a": 0.1, "b": 0.1, "c": 0.2, "d": 0.3}, 60)} == {"c", "d"}


def test_fast_steps_that_beats_skip_are_counted_all_the_same():
    assert len(train({"a": 0.01, "b": 0.04}, 400, every=40)) == 2


def test_tiny_differences_are_noise():
    assert train({"a": 0.0001, "b": 0.0009}, 500) == []


def test_nobody_is_compared_with_itself_or_with_another_world():
    assert train({"a": 0.1}, 200) == []
    assert train({"a": 0.1, "b": 0.4}, 200, generation=2) == []


def test_a_new_world_begins_anew():
    watch = Stragglers()
    assert train({"a": 0.1, "b": 0.4}, 40, watch=watch) == []
    beat = Beat(2, 1, 0, 0, -1, "compute", 0.0, 0.0, 0, 0, 0, 1.0)
    assert watch.heard("a", beat, 2, 2) == []
    assert train({"a": 0.1, "b": 0.4}, 40, watch=watch) == []
