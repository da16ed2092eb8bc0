"""The model that a job makes of its own steps, and the batch that it chooses by it.

After Pollux (Qiao et al., OSDI 2021, section 4.1, and its artifact). With m samples per GPU and pass on n GPUs of h
hosts, and a passes per step,

    pass = alpha + beta m
    sync = host + host_more (n - 2) on several hosts, gpu + gpu_more (n - 2) on one
    step = (a - 1) pass + (pass^gamma + sync^gamma)^(1 / gamma)

The fit minimises the squared error of the logarithms with bounds (L-BFGS-B), with the gradient written out. What no
step has shown is taken as free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from edl_hvd.simulator.cluster.blas import one_blas_thread
from edl_hvd.simulator.cluster.profiles import GradientStatistics, StepTime

_FREE = 1e-8
_BATCHES = 50
# Global batches that are tried, in steps of equal ratio.


@dataclass(frozen=True)
class MeasuredStep:
    """A configuration in which steps were measured.

    Attributes:
        hosts: Number of hosts.
        gpus: Number of GPUs.
        local_batch: Samples per GPU and pass.
    """

    hosts: int
    gpus: int
    local_batch: int


@dataclass(frozen=True)
class StepModel:
    """The seven parameters of the model; see the module."""

    alpha: float
    beta: float
    host: float
    host_more: float
    gpu: float
    gpu_more: float
    gamma: float

    def step_s(self, hosts: Any, gpus: Any, local_batch: Any, passes: Any) -> Any:
        """Seconds per optimizer step; numbers, or arrays of one shape."""
        compute = numpy.log(self.alpha + self.beta * local_batch)
        sync = numpy.log(_sync(numpy.asarray(self.as_array()), hosts, gpus))
        longer = numpy.maximum(compute, sync)
        both = longer + numpy.log(
            numpy.exp(self.gamma * (compute - longer)) + numpy.exp(self.gamma * (sync - longer))
        ) / self.gamma  # fmt: skip
        return (passes - 1) * numpy.exp(compute) + numpy.exp(both)

    def as_array(self) -> list[float]:
        """The parameters in the order of their names above."""
        return [self.alpha, self.beta, self.host, self.host_more, self.gpu, self.gpu_more, self.gamma]


def _sync(parameters: Any, hosts: Any, gpus: Any) -> Any:
    more = numpy.maximum(gpus - 2, _FREE)
    between, within = hosts > 1, gpus > 1
    base = numpy.where(between, parameters[2], numpy.where(within, parameters[4], _FREE))
    return base + numpy.where(between, parameters[3], numpy.where(within, parameters[5], _FREE)) * more


def fit(steps: dict[MeasuredStep, StepTime]) -> StepModel:
    """The model that is nearest to what was measured.

    Args:
        steps: At least one.
    """
    with one_blas_thread():
        from scipy.optimize import minimize

    hosts = numpy.array([step.hosts for step in steps])
    gpus = numpy.array([step.gpus for step in steps])
    local_batch = numpy.array([step.local_batch for step in steps], dtype=float)
    compute_s = numpy.array([time.compute_s for time in steps.values()])
    step_s = numpy.array([time.step_s for time in steps.values()])
    start, least, most = [1e-1, 1e-2] * 3 + [1.001], [_FREE] * 6 + [1.0], [numpy.inf] * 6 + [10.0]
    fixed: dict[int, float] = {}
    if len({step.local_batch for step in steps}) == 1:
        fixed[0] = float(compute_s.mean()) / 2
    if not (hosts > 1).any():
        fixed[2] = fixed[3] = _FREE
    if not ((hosts == 1) & (gpus > 1)).any():
        fixed[4] = fixed[5] = _FREE
    if not (gpus > 2).any():
        fixed[3] = fixed[5] = _FREE
    for place, value in fixed.items():
        start[place] = least[place] = most[place] = value
    measured = _Measured(hosts, gpus, local_batch, compute_s, step_s)
    bounds = list(zip(least, most, strict=True))
    found = minimize(measured.error, numpy.array(start), jac=True, method="L-BFGS-B", bounds=bounds).x
    if not (hosts > 1).any():
        # Between hosts it is not faster than within one.
        found[2], found[3] = max(found[2], 1.1 * found[4]), max(found[3], 1.1 * found[5])
    return StepModel(*(float(value) for value in found))


class _Measured:
    """What is fitted: arrays with one entry per configuration."""

    def __init__(self, hosts: Any, gpus: Any, local_batch: Any, compute_s: Any, step_s: Any) -> None:
        self.local_batch, self.count = local_batch, len(local_batch)
        self.log_compute, self.log_step = numpy.log(compute_s), numpy.log(step_s)
        more = numpy.maximum(gpus - 2, _FREE)
        between, within = hosts > 1, (hosts == 1) & (gpus > 1)
        # Seconds of summing are this matrix times the four parameters of it.
        self.of_sync = numpy.stack([between, between * more, within, within * more], axis=1).astype(float)
        self.alone = numpy.where(between | within, 0.0, _FREE + _FREE * more)

    def error(self, parameters: Any) -> tuple[float, Any]:
        """What is minimised, and its gradient: roots of mean squares, and two terms that keep the model simple."""
        alpha, beta, host, host_more, gpu, gpu_more, gamma = parameters.tolist()
        compute = alpha + beta * self.local_batch
        sync = self.of_sync @ parameters[2:6] + self.alone
        log_compute, log_sync = numpy.log(compute), numpy.log(sync)
        longer = numpy.maximum(log_compute, log_sync)
        first, second = numpy.exp(gamma * (log_compute - longer)), numpy.exp(gamma * (log_sync - longer))
        both = first + second
        log_step = longer + numpy.log(both) / gamma
        part = first / both

        compute_error, by_compute = self._root_mean_square(log_compute - self.log_compute)
        step_error, by_step = self._root_mean_square(log_step - self.log_step)
        through_compute = (by_compute + by_step * part) / compute
        through_sync = by_step * (1 - part) / sync
        through_gamma = by_step @ (part * log_compute + (1 - part) * log_sync - log_step) / gamma
        gradient = numpy.array(
            [
                through_compute.sum(),
                through_compute @ self.local_batch,
                *(through_sync @ self.of_sync),
                through_gamma + 2e-3 * (gamma - 1),
            ]
        )
        total = compute_error + step_error + 1e-3 * (gamma - 1) ** 2
        for place, base, slope in ((2, host, host_more), (4, gpu, gpu_more)):
            ratio = slope / base
            total += 1e-2 * ratio**2
            gradient[place] -= 2e-2 * ratio**2 / base
            gradient[place + 1] += 2e-2 * ratio / base
        return total, gradient

    def _root_mean_square(self, difference: Any) -> tuple[float, Any]:
        """The root of the mean square, and its derivative by each difference."""
        value = math.sqrt(difference @ difference / self.count)
        return value, difference / (self.count * value) if value else numpy.zeros(self.count)


@dataclass(frozen=True)
class BatchBounds:
    """What limits a job's batch.

    Attributes:
        base: The script's own global batch.
        largest: Largest global batch.
        smallest_local: Smallest batch per GPU and pass.
        largest_local: Largest one.
    """

    base: int
    largest: int
    smallest_local: int
    largest_local: int


@dataclass(frozen=True)
class BestBatch:
    """The batch of the highest goodput on some GPUs.

    Attributes:
        goodput: Samples of the script's own batch per second.
        local_batch: Samples per GPU and pass.
        passes: Passes per step.
    """

    goodput: float
    local_batch: int
    passes: int


def best_batches(
    model: StepModel, noise: GradientStatistics, bounds: BatchBounds, sizes: Sequence[tuple[int, int]]
) -> list[BestBatch]:
    """The best batch for each of several numbers of hosts and GPUs.

    A GPU alone that makes more than the script's own batch does so in two passes, because the noise of a gradient shows
    only in the difference of two.

    Args:
        model: How long steps take.
        noise: Gradient statistics.
        bounds: What limits the batch.
        sizes: Pairs of hosts and GPUs.
    """
    hosts = numpy.array([size[0] for size in sizes])
    gpus = numpy.array([size[1] for size in sizes])
    smallest = numpy.maximum(bounds.base, bounds.smallest_local * gpus)
    local = numpy.geomspace(smallest, bounds.largest, _BATCHES) / gpus
    passes = numpy.ceil(local / bounds.largest_local - 1e-8)
    alone = (gpus == 1) & (local > bounds.base + 1e-8)
    passes = numpy.where(alone, numpy.maximum(passes, 2), passes).astype(int)
    per_pass = numpy.ceil(local / passes - 1e-8).astype(int)
    batch = gpus * per_pass * passes
    scale = batch / bounds.base
    spread = noise.variance / scale + noise.square
    efficiency = numpy.where(spread > 0, (noise.variance + noise.square) / spread, 1.0) / scale
    goodput = batch / model.step_s(hosts, gpus, per_pass, passes) * efficiency
    usable = (bounds.smallest_local <= per_pass) & (per_pass <= bounds.largest_local)
    goodput = numpy.where(usable, goodput, 0.0)
    best = goodput.argmax(axis=0)
    return [
        BestBatch(float(goodput[row, column]), int(per_pass[row, column]), int(passes[row, column]))
        for column, row in enumerate(best)
    ]
