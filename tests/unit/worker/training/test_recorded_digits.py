from __future__ import annotations

import math
import random

import pytest
import torch

from edl_hvd.worker.training.recorded import RecordedValues


def mean_of(values: list[float]) -> float:
    recorded = RecordedValues()
    for value in values:
        recorded.add("loss", torch.tensor(value, dtype=torch.float64), 3.0, 0)
    recorded.take_alone(1)
    return recorded.means["loss"]


def test_a_mean_has_the_digits_of_a_float64() -> None:
    numbers = random.Random(3)
    for _ in range(2000):
        values = [numbers.uniform(-2, 2) * 10 ** numbers.uniform(-3, 6) for _ in range(4)]
        largest = max(map(abs, values))
        assert mean_of(values) == pytest.approx(math.fsum(values) / 4, abs=1e-14 * largest + 2.0**-47)


@pytest.mark.parametrize("value", [0.0, -1e20, 3e30, 2.0**48, math.inf, -math.inf])
def test_large_numbers_keep_the_digits_of_a_float32(value: float) -> None:
    assert mean_of([value]) == pytest.approx(value, rel=1e-6)


def test_a_mean_with_nan_is_nan() -> None:
    assert math.isnan(mean_of([1.0, math.nan]))
