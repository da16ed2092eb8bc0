"""Which batch makes the most progress per second: throughput times statistical efficiency.

After Pollux (Qiao et al., OSDI 2021, sections 3 and 4): with φ the gradient noise scale and M₀ the batch that the
script was tuned for, a sample of a batch of M is worth

    efficiency(M) = (φ + M₀) / (φ + M)

of one in a batch of M₀, provided that the learning rate follows as AdaScale has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from edl_hvd.rescale.throughput import ThroughputModel

_MOST_CANDIDATES = 512


def efficiency(noise_samples: float, base_samples: int, samples: float) -> float:
    """What a sample of a larger batch is worth.

    >>> efficiency(noise_samples=100.0, base_samples=20, samples=140)
    0.5

    Args:
        noise_samples: The gradient noise scale φ, in samples; may be infinite.
        base_samples: M₀.
        samples: M.
    """
    if math.isinf(noise_samples):
        return 1.0
    return (noise_samples + base_samples) / (noise_samples + samples)


@dataclass(frozen=True)
class BatchPlan:
    """How each worker divides its batch.

    Attributes:
        micro_batch: Samples per forward and backward pass.
        accumulation_steps: Micro-batches per worker and optimizer step.
    """

    micro_batch: int
    accumulation_steps: int

    @property
    def worker_batch(self) -> int:
        return self.micro_batch * self.accumulation_steps


@dataclass(frozen=True)
class Goodput:
    """What is expected of a plan.

    Attributes:
        plan: Plan that is judged.
        samples_per_s: Samples per second of the whole world.
        efficiency: Worth of a sample, relative to one of the script's own batch.
    """

    plan: BatchPlan
    samples_per_s: float
    efficiency: float

    @property
    def goodput(self) -> float:
        """In samples of the script's own batch, per second."""
        return self.samples_per_s * self.efficiency


def batch_plan(worker_batch: int, size: int, largest_micro_batch: int | None) -> BatchPlan:
    """As few micro-batches as fit: each costs a fixed time, and the last one hides the summing the better, the larger.

    A worker alone makes two, because the noise of a gradient shows only in the difference of two.

    >>> batch_plan(48, size=2, largest_micro_batch=32)
    BatchPlan(micro_batch=24, accumulation_steps=2)
    >>> batch_plan(48, size=1, largest_micro_batch=None)
    BatchPlan(micro_batch=24, accumulation_steps=2)

    Args:
        worker_batch: Samples per worker; where it is not a multiple of the parts, the micro-batch is rounded up.
        size: Workers.
        largest_micro_batch: What fits into memory, if that is less than any batch.
    """
    parts = -(-worker_batch // (largest_micro_batch or worker_batch))
    if size == 1 and worker_batch > 1:
        parts = max(parts, 2)
    return BatchPlan(-(-worker_batch // parts), parts)


def expected(
    model: ThroughputModel, noise_samples: float, base_samples: int, size: int, plan: BatchPlan, hosts: int = 1
) -> Goodput:
    """What a plan is worth. Arguments as in :func:`efficiency` and :class:`ThroughputModel`."""
    samples_per_s = model.samples_per_s(size, plan.micro_batch, plan.accumulation_steps, hosts)
    return Goodput(plan, samples_per_s, efficiency(noise_samples, base_samples, size * plan.worker_batch))


def best(
    model: ThroughputModel,
    noise_samples: float,
    base_samples: int,
    size: int,
    bounds: tuple[int, int],
    largest_micro_batch: int | None,
    hosts: int = 1,
    most_candidates: int = _MOST_CANDIDATES,
) -> Goodput:
    """The plan of the highest goodput.

    Args:
        model: How long steps take.
        noise_samples: φ.
        base_samples: M₀, over the whole world.
        size: Workers.
        bounds: The least and the most samples per worker.
        largest_micro_batch: As in :func:`batch_plan`.
        hosts: Hosts that the workers are on.
        most_candidates: Batches that are looked at, at most.
    """
    least, most = bounds
    plans = {batch_plan(batch, size, largest_micro_batch) for batch in _candidates(least, most, most_candidates)}
    fitting = [plan for plan in plans if least <= plan.worker_batch <= most]
    # Where no multiple of the parts lies within the bounds, the smallest batch is cut unevenly.
    options = sorted(fitting or [batch_plan(least, size, largest_micro_batch)], key=lambda plan: plan.worker_batch)
    return max(
        (expected(model, noise_samples, base_samples, size, plan, hosts) for plan in options),
        key=lambda option: option.goodput,
    )


def _candidates(least: int, most: int, count: int) -> Iterator[int]:
    """Every batch from the least to the most, or at most ``count`` of them in steps of equal ratio."""
    if most - least < count:
        yield from range(least, most + 1)
        return
    for number in range(count):
        yield round(least * (most / least) ** (number / (count - 1)))
