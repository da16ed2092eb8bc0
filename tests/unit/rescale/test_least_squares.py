"""The fit of a few parameters gives what NumPy's linear algebra and SciPy's optimiser give."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy
import pytest

from edl_hvd.rescale.least_squares import minimise, solve

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_system_is_solved_as_numpy_solves_it(seed: int) -> None:
    chance = numpy.random.default_rng(seed)
    count = int(chance.integers(1, 8))
    factor = chance.normal(size=(count, count))
    matrix, right = factor @ factor.T + 0.1 * numpy.eye(count), chance.normal(size=count)
    found = solve(matrix.tolist(), right.tolist())
    assert found == pytest.approx(numpy.linalg.solve(matrix, right), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_problem_has_the_solution_of_numpys_lstsq(seed: int) -> None:
    chance = numpy.random.default_rng(seed)
    count = int(chance.integers(1, 6))
    matrix, right = chance.normal(size=(3 * count, count)), chance.normal(size=3 * count)
    expected, [error], _, _ = numpy.linalg.lstsq(matrix, right, rcond=None)
    found = minimise(lambda place: (matrix @ numpy.asarray(place) - right).tolist(), [0.0] * count)
    assert found.place == pytest.approx(expected, abs=1e-5)
    assert found.error == pytest.approx(error, rel=1e-8)


def rosenbrock(place: Sequence[float]) -> list[float]:
    return [10 * (place[1] - place[0] ** 2), 1 - place[0]]


def powell(place: Sequence[float]) -> list[float]:
    """Singular at its minimum, where all parameters are 0."""
    a, b, c, d = place
    return [a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2]


def helical_valley(place: Sequence[float]) -> list[float]:
    """Fletcher and Powell's; its minimum is at (1, 0, 0)."""
    a, b, c = place
    return [10 * (c - 10 * math.atan2(b, a) / (2 * math.pi)), 10 * (math.hypot(a, b) - 1), c]


@pytest.mark.parametrize(
    ("residuals", "start", "place", "close"),
    [
        (rosenbrock, [-1.2, 1.0], [1, 1], 1e-6),
        (powell, [3.0, -1.0, 0.0, 1.0], [0, 0, 0, 0], 0.02),
        (helical_valley, [-1.0, 0.5, 0.0], [1, 0, 0], 1e-6),
    ],
)
def test_problems_with_known_answers_are_solved(
    residuals: Callable[[Sequence[float]], list[float]], start: list[float], place: list[float], close: float
) -> None:
    found = minimise(residuals, start, steps=200)
    assert found.place == pytest.approx(place, abs=close)
    assert found.error == sum(value**2 for value in residuals(found.place))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_decay_measured_with_noise_is_fitted_as_scipy_fits_it(seed: int) -> None:
    from scipy.optimize import least_squares

    chance = numpy.random.default_rng(seed)
    times = numpy.linspace(0, 3, 25)
    height, rate, floor = chance.uniform(1, 3), chance.uniform(0.5, 2), chance.uniform(0, 1)
    measured = height * numpy.exp(-rate * times) + floor + chance.normal(scale=0.02, size=times.size)

    def residuals(place: Sequence[float]) -> list[float]:
        there = place[0] * numpy.exp(-place[1] * times) + place[2] - measured
        return [float(value) for value in there]

    expected = least_squares(residuals, [1.5, 1.0, 0.5], xtol=1e-12, ftol=1e-12)
    found = minimise(residuals, [1.5, 1.0, 0.5])
    assert found.place == pytest.approx(expected.x, rel=1e-3, abs=1e-3)
    assert found.error == pytest.approx(2 * expected.cost, rel=1e-6)
