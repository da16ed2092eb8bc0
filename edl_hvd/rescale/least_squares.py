"""Nonlinear least squares in plain arithmetic, for problems of a few parameters.

Levenberg and Marquardt's method with Marquardt's scaling and a Jacobian of forward differences. No library does the
arithmetic, so that the result does not depend on the linear algebra kernels of the machine.
``tests/unit/rescale/test_least_squares.py`` compares it with SciPy and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_DIFFERENCE = 1e-5
_FIRST_DAMPING = 1e-2
_CONVERGED = 1e-12  # relative decrease of the error
_LARGEST_MOVE = 1.0  # of one parameter in one step


@dataclass(frozen=True)
class Minimum:
    """Where a descent ended.

    Attributes:
        error: Sum of the squared residuals.
        place: The parameters.
    """

    error: float
    place: tuple[float, ...]


def minimise(
    residuals: Callable[[Sequence[float]], Sequence[float]], start: Sequence[float], steps: int = 40
) -> Minimum:
    """A local minimum of the sum of the squared residuals.

    Every parameter moves by at most 1 in a step, so parameters should be scaled to about that, as logarithms are.

    Args:
        residuals: A smooth function of the parameters. It gives at least as many residuals as there are parameters, and
            no parameter leaves all of them unchanged.
        start: Parameters to begin with.
        steps: Largest number of steps.

    Returns:
        The best place met, at the latest after ``steps`` steps.

    >>> found = minimise(lambda place: [place[0] - 3.0, 10 * (place[1] - place[0] ** 2)], [1.0, 1.0])
    >>> [round(value, 6) for value in found.place]
    [3.0, 9.0]
    """
    place, damping = tuple(start), _FIRST_DAMPING
    now = residuals(place)
    error = _dot(now, now)
    for _ in range(steps):
        columns = [_derivative(residuals, place, now, number) for number in range(len(place))]
        products = [[_dot(one, other) for other in columns] for one in columns]
        for number, row in enumerate(products):
            row[number] *= 1 + damping
        changes = solve(products, [-_dot(column, now) for column in columns])
        there = tuple(
            value + min(max(change, -_LARGEST_MOVE), _LARGEST_MOVE)
            for value, change in zip(place, changes, strict=True)
        )
        then = residuals(there)
        error_then = _dot(then, then)
        if error_then < error:
            converged = error - error_then < _CONVERGED * error
            place, now, error, damping = there, then, error_then, damping / 4
            if converged:
                break
        else:
            damping *= 4
    return Minimum(error, place)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution x of ``matrix`` x = ``right`` by Gauss's elimination without an exchange of rows.

    Args:
        matrix: Symmetric and positive definite; without that, a pivot may be 0.
        right: As many numbers as the matrix has rows.

    >>> solve([[4.0, 2.0], [2.0, 3.0]], [8.0, 8.0])
    [1.0, 2.0]
    """
    table = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    count = len(table)
    for i in range(count):
        for j in range(i + 1, count):
            factor = table[j][i] / table[i][i]
            table[j] = [b - factor * a for a, b in zip(table[i], table[j], strict=True)]
    result = [0.0] * count
    for i in reversed(range(count)):
        known = sum(table[i][j] * result[j] for j in range(i + 1, count))
        result[i] = (table[i][count] - known) / table[i][i]
    return result


def _derivative(
    residuals: Callable[[Sequence[float]], Sequence[float]], place: Sequence[float], now: Sequence[float], number: int
) -> list[float]:
    """The derivatives of all residuals by one parameter."""
    moved = [*place]
    moved[number] += _DIFFERENCE
    return [(b - a) / _DIFFERENCE for a, b in zip(now, residuals(moved), strict=True)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
