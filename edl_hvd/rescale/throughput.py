"""How long an optimizer step takes, as a function of how its batch is divided; fitted to steps that were measured.

The model is that of Pollux (Qiao et al., OSDI 2021, section 4.1). With m samples per micro-batch, a micro-batches per
worker and W workers,

    gradient(m) = α + β m        sync(W) = 0 for W = 1,  κ + λ (W - 2) else
    step(W, m, a) = (a - 1) gradient(m) + (gradient(m)^γ + sync(W)^γ)^(1/γ)

because only the last micro-batch's backward pass overlaps with the summing of gradients: γ = 1 is no overlap, and the
larger γ, the nearer to the longer of the two. The fit minimises the squared error of the logarithms, so that it is
relative, over the logarithms of the parameters, which keeps them positive: Levenberg and Marquardt's method, in plain
arithmetic, so it gives the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = 40  # of the fit, from each place it begins at; it is through after ten or so
_PULL = 1e-3  # towards that place: what no measurement says anything about stays there
_LARGEST_OVERLAP = 10.0  # the paper's bounds of γ: 1 to 10
_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Timing:
    """What was measured of one division of the batch.

    Attributes:
        size: Workers, W.
        micro_batch: Samples per micro-batch, m.
        parts: Micro-batches per worker and step, a.
        step_s: Seconds per optimizer step.
        windows: From how many spans of steps that was taken.
    """

    size: int
    micro_batch: int
    parts: int
    step_s: float
    windows: int = 1

    @property
    def division(self) -> tuple[int, int, int]:
        return self.size, self.micro_batch, self.parts

    def as_list(self) -> list[float]:
        return [self.size, self.micro_batch, self.parts, self.step_s, self.windows]


def with_timing(timings: Sequence[Timing], new: Timing) -> tuple[Timing, ...]:
    """The timings with one more; of a division known already the geometric mean, the later ones weighing more.

    >>> with_timing([Timing(2, 8, 1, 1.0)], Timing(2, 8, 1, 4.0))
    (Timing(size=2, micro_batch=8, parts=1, step_s=2.0, windows=2),)
    """
    known = next((timing for timing in timings if timing.division == new.division), None)
    if known is None:
        return (*timings, new)
    share = max(1 / (known.windows + 1), 0.25)  # hosts and data change: what was measured long ago fades
    step_s = known.step_s ** (1 - share) * new.step_s**share
    merged = Timing(*known.division, step_s, known.windows + 1)
    return tuple(merged if timing is known else timing for timing in timings)


@dataclass(frozen=True)
class ThroughputModel:
    """See the module.

    Attributes:
        micro_batch_s: α, seconds per micro-batch, whatever its size.
        sample_s: β, seconds per sample of a micro-batch.
        sync_s: κ, seconds to sum the gradients over two workers.
        sync_worker_s: λ, seconds more for each further one.
        overlap: γ.

    >>> model = ThroughputModel(micro_batch_s=0.1, sample_s=0.01, sync_s=0.4, overlap=2.0)
    >>> round(model.step_s(size=2, micro_batch=20, parts=3), 3)
    1.1
    """

    micro_batch_s: float
    sample_s: float
    sync_s: float = 0.0
    sync_worker_s: float = 0.0
    overlap: float = 1.0

    def step_s(self, size: int, micro_batch: int, parts: int) -> float:
        """Seconds per optimizer step."""
        gradient_s = self.micro_batch_s + self.sample_s * micro_batch
        sync_s = self.sync_s + self.sync_worker_s * (size - 2) if size > 1 else 0.0
        longer_s, shorter_s = max(gradient_s, sync_s), min(gradient_s, sync_s)
        together_s: float = longer_s * (1 + (shorter_s / longer_s) ** self.overlap) ** (1 / self.overlap)
        return (parts - 1) * gradient_s + together_s

    def samples_per_s(self, size: int, micro_batch: int, parts: int) -> float:
        """The samples per second of the whole world."""
        return size * micro_batch * parts / self.step_s(size, micro_batch, parts)


def fit(timings: Iterable[Timing]) -> ThroughputModel:
    """The model that is nearest to what was measured.

    What has not been seen is taken as free, as Pollux does: without a step of several workers summing costs nothing,
    and without one of more than two, nothing more than with two.

    Args:
        timings: At least one.
    """
    known = list(timings)
    shortest = min(known, key=lambda timing: timing.step_s / timing.parts)
    part_s = shortest.step_s / shortest.parts
    found: list[tuple[float, list[float]]] = []
    for fixed in (0.1, 0.5, 0.9):  # the valley is curved: begin on either side of it
        for sync in (0.05, 0.5):
            gradient_s = part_s * (1 - sync)
            start = [
                math.log(gradient_s * fixed),
                math.log(gradient_s * (1 - fixed) / shortest.micro_batch),
                math.log(part_s * sync),
                math.log(part_s * sync / 10),
                0.0,
            ]
            found.append(_descend(known, start))
    return _model(known, min(found)[1])


def _model(timings: Sequence[Timing], place: Sequence[float]) -> ThroughputModel:
    largest = max(timing.size for timing in timings)
    micro_batch_s, sample_s, sync_s, sync_worker_s = (math.exp(min(max(value, -60.0), 60.0)) for value in place[:4])
    overlap = 1 + (_LARGEST_OVERLAP - 1) / (1 + math.exp(-min(max(place[4], -60.0), 60.0)))
    return ThroughputModel(
        micro_batch_s, sample_s, sync_s if largest > 1 else 0.0, sync_worker_s if largest > 2 else 0.0, overlap
    )


def _descend(timings: Sequence[Timing], start: Sequence[float]) -> tuple[float, list[float]]:
    """Levenberg-Marquardt: the squared error where it ends, and that place."""

    def residuals(place: Sequence[float]) -> list[float]:
        model = _model(timings, place)
        errors = [
            math.sqrt(timing.windows) * math.log(model.step_s(*timing.division) / timing.step_s) for timing in timings
        ]
        return errors + [_PULL * (value - begun) for value, begun in zip(place, start, strict=True)]

    place, damping = list(start), 1e-2
    now = residuals(place)
    error = sum(value * value for value in now)
    for _ in range(_STEPS):
        columns = []
        for number in range(len(place)):
            moved = [*place]
            moved[number] += _DIFFERENCE
            columns.append([(b - a) / _DIFFERENCE for a, b in zip(now, residuals(moved), strict=True)])
        step = _solve(
            [[_dot(a, b) * (1 + damping * (a is b)) for b in columns] for a in columns],
            [-_dot(column, now) for column in columns],
        )
        there = [value + min(max(change, -1.0), 1.0) for value, change in zip(place, step, strict=True)]
        then = residuals(there)
        error_then = sum(value * value for value in then)
        if error_then < error:
            through = error - error_then < 1e-12 * error
            place, now, error, damping = there, then, error_then, damping / 4
            if through:
                break
        else:
            damping *= 4
    return error, place


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _solve(rows: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination for a positive definite matrix, which needs no exchange of rows."""
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
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
