"""How long an optimizer step takes, as a function of how its batch is divided; fitted to steps that were measured.

The model is that of Pollux (Qiao et al., OSDI 2021, section 4.1). With m samples per micro-batch, a micro-batches per
worker and W workers,

    gradient(m) = α + β m        sync(W) = 0 for W = 1,  κ + λ (W - 2) else
    step(W, m, a) = (a - 1) gradient(m) + (gradient(m)^γ + sync(W)^γ)^(1/γ)

because only the last micro-batch's backward pass overlaps with the summing of gradients: γ = 1 is no overlap, and the
larger γ, the nearer to the longer of the two. There is one pair of κ and λ for workers of one host, and another for
workers on several: summing over a network takes longer than within a host. The fit minimises the squared error of the
logarithms, so that it is relative, over the logarithms of the parameters, which keeps them positive
(``least_squares.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edl_hvd.rescale.least_squares import Minimum, minimise
from edl_hvd.timings import Timing

_PLACES = 5  # parameters; two more where workers of one host were measured, and workers on several
_PULL = 1e-3  # towards the place where the fit begins: what no measurement says anything about stays there
_LARGEST_OVERLAP = 10.0  # the paper's bounds of γ: 1 to 10


@dataclass(frozen=True)
class ThroughputModel:
    """See the module.

    Attributes:
        micro_batch_s: α, seconds per micro-batch, whatever its size.
        sample_s: β, seconds per sample of a micro-batch.
        sync_s: κ, seconds to sum the gradients over two workers of one host.
        sync_worker_s: λ, seconds more for each further one.
        overlap: γ.
        between_sync_s: κ of workers on several hosts; ``None``: as on one host.
        between_sync_worker_s: λ of workers on several hosts; ``None``: as on one host.

    >>> model = ThroughputModel(micro_batch_s=0.1, sample_s=0.01, sync_s=0.4, overlap=2.0)
    >>> round(model.step_s(size=2, micro_batch=20, accumulation_steps=3), 3)
    1.1
    """

    micro_batch_s: float
    sample_s: float
    sync_s: float = 0.0
    sync_worker_s: float = 0.0
    overlap: float = 1.0
    between_sync_s: float | None = None
    between_sync_worker_s: float | None = None

    def step_s(self, size: int, micro_batch: int, accumulation_steps: int, hosts: int = 1) -> float:
        """Seconds per optimizer step."""
        gradient_s = self.micro_batch_s + self.sample_s * micro_batch
        sync_s, sync_worker_s = self.sync_s, self.sync_worker_s
        if hosts > 1:
            sync_s = sync_s if self.between_sync_s is None else self.between_sync_s
            sync_worker_s = sync_worker_s if self.between_sync_worker_s is None else self.between_sync_worker_s
        sync_s = sync_s + sync_worker_s * (size - 2) if size > 1 else 0.0
        longer_s, shorter_s = max(gradient_s, sync_s), min(gradient_s, sync_s)
        together_s: float = longer_s * (1 + (shorter_s / longer_s) ** self.overlap) ** (1 / self.overlap)
        return (accumulation_steps - 1) * gradient_s + together_s

    def samples_per_s(self, size: int, micro_batch: int, accumulation_steps: int, hosts: int = 1) -> float:
        """The samples per second of the whole world."""
        samples = size * micro_batch * accumulation_steps
        return samples / self.step_s(size, micro_batch, accumulation_steps, hosts)


def fit(timings: Iterable[Timing]) -> ThroughputModel:
    """The model that is nearest to what was measured.

    What has not been seen is taken as free, as Pollux does: without a step of several workers summing costs nothing,
    and without one of more than two, nothing more than with two. Where only workers of one host were seen, or only
    workers on several, the others are taken to be like them.

    Args:
        timings: At least one.
    """
    known = list(timings)
    shortest = min(known, key=lambda timing: timing.step_s / timing.accumulation_steps)
    part_s = shortest.step_s / shortest.accumulation_steps
    has_both = len({timing.hosts > 1 for timing in known if timing.size > 1}) == 2
    found: list[Minimum] = []
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
            if has_both:
                start += start[2:4]
            found.append(_descend(known, start))
    return _model(known, min(found, key=lambda minimum: (minimum.error, minimum.place)).place)


def _model(timings: Sequence[Timing], place: Sequence[float]) -> ThroughputModel:
    micro_batch_s, sample_s, sync_s, sync_worker_s = (_positive(value) for value in place[:4])
    overlap = 1 + (_LARGEST_OVERLAP - 1) / (1 + math.exp(-min(max(place[4], -60.0), 60.0)))
    if len(place) == _PLACES:
        largest = max(timing.size for timing in timings)
        seen = (sync_s if largest > 1 else 0.0, sync_worker_s if largest > 2 else 0.0)
        return ThroughputModel(micro_batch_s, sample_s, *seen, overlap)
    within, between = (
        max(timing.size for timing in timings if (timing.hosts > 1) == spans and timing.size > 1)
        for spans in (False, True)
    )
    between_sync_s, between_worker_s = (_positive(value) for value in place[_PLACES:])
    return ThroughputModel(
        micro_batch_s, sample_s, sync_s, sync_worker_s if within > 2 else 0.0, overlap,
        between_sync_s, between_worker_s if between > 2 else 0.0,
    )  # fmt: skip


def _positive(logarithm: float) -> float:
    return math.exp(min(max(logarithm, -60.0), 60.0))


def _descend(timings: Sequence[Timing], start: Sequence[float]) -> Minimum:
    def residuals(place: Sequence[float]) -> list[float]:
        model = _model(timings, place)
        errors = [
            math.sqrt(timing.windows) * math.log(model.step_s(*timing.plan) / timing.step_s) for timing in timings
        ]
        return errors + [_PULL * (value - begun) for value, begun in zip(place, start, strict=True)]

    return minimise(residuals, start)
