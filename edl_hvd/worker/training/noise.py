"""Measures how noisy the gradient is while it is summed; the arithmetic is in ``edl_hvd/rescale/noise.py``.

The small gradient of a rank is that of its first micro-batch of the step, measured parameter by parameter as backward
finishes them and before they are summed; the large one is the sum. Three numbers travel beside the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from edl_hvd.rescale.noise import Observation
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.training.micro_batch import MicroBatch


class NoiseMeter:
    """A meter of the noise of a step's gradients.

    Attributes:
        loss_scale: What the loss is multiplied with in this step, by a ``GradScaler``.
        observation: What the step has shown, once it is summed; ``None`` where it cannot tell.
    """

    def __init__(self) -> None:
        self.loss_scale = 1.0
        self.observation: Observation | None = None
        self._part: MicroBatch | None = None
        self._squares: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._sums: torch.Tensor | None = None
        self._samples = 0

    def begin(self, part: MicroBatch) -> None:
        """The next backward computes this."""
        self._part = part
        if part.first:
            self._squares.clear()
            self._samples = part.samples
            self._sums = self.observation = None

    def forget(self) -> None:
        """What is under way is not finished."""
        self._part = self._sums = self.observation = None
        self._squares.clear()

    def small(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, scale: float) -> None:
        """What backward has made so far of a parameter's gradient, of this micro-batch, multiplied with ``scale``."""
        if self._part is not None and self._part.first:
            self._squares[parameter] = _square_of(gradient) / scale**2

    def start(self, collectives: Collectives) -> list[Any]:
        """Begin to sum what the ranks have measured; handles to be finished with those of the gradients."""
        if self._part is None:  # a script without state.batches: nobody knows how many samples a gradient is of
            return []
        row = [_total(self._squares.values()), 1.0 / self._samples, 1.0] if self._squares else [0.0, 0.0, 0.0]
        self._sums = torch.tensor(row, dtype=torch.float64)
        return [collectives.start_sum(self._sums, "edl_hvd.noise", 1.0)]

    def large(self, gradients: Iterable[torch.Tensor]) -> None:
        """These are the sums."""
        if self._part is None or self._sums is None:
            return
        small_square, inverse_samples, ranks = self._sums.tolist()
        self._sums = None
        if ranks == 0:
            return
        large_square = _total(map(_square_of, gradients))
        scale = self.loss_scale**2
        self.observation = Observation(
            small_square / ranks / scale, ranks / inverse_samples, large_square / scale, self._part.global_samples
        )


def _square_of(gradient: torch.Tensor) -> torch.Tensor:
    """The squared norm, in double precision; waits for nothing.

    Row by row: a single sum of millions of squares in float32 is wrong by up to a percent, and one in float64 takes
    five times as long.
    """
    rows = gradient.detach()
    if rows.dim() > 1:
        kind = torch.promote_types(rows.dtype, torch.float32)
        rows = torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.dim())), dtype=kind)
    return rows.abs().double().square().sum()


def _total(squares: Iterable[torch.Tensor]) -> float:
    """Their sum; waits for the device once."""
    found = list(squares)
    return float(torch.stack(found).sum()) if found else 0.0
