"""Running statistics of normalisation layers, such that they do not depend on the world.

A layer keeps r, a mean or a variance, and every forward pass that trains it makes of it

    r ← d·r + p        p from the batch of this pass;  d = 1 - momentum, or n / (n + 1) after n passes without momentum

Workers run the passes of a step side by side. Each of them starts all its passes from the r that the step began with;
what p was follows from what r became. All workers then get every p of the step, and go through them in the order of the
micro-batches, as one worker would have done. What is computed is the same everywhere, and for any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from edl_hvd.errors import UsageError
from edl_hvd.worker import process


class RunningStatistics:
    """The running statistics of all normalisation layers of some models; passes are counted per layer.

    Raises:
        UsageError: One of the layers computes statistics over the workers of its world.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        layers = {layer: None for model in models for layer in model.modules() if isinstance(layer, _NormBase)}
        for layer in layers:
            if isinstance(layer, torch.nn.SyncBatchNorm):
                raise UsageError(
                    "exact=True cannot work with SyncBatchNorm, whose statistics are those of the samples that the "
                    "whole world has at a time; use BatchNorm, or GroupNorm"
                )
        self._layers: list[Any] = [layer for layer in layers if layer.running_mean is not None]
        self._values = [value for layer in self._layers for value in (layer.running_mean, layer.running_var)]
        self._sizes = [value.numel() for value in self._values]
        self._start: list[torch.Tensor] = []
        self._passes: list[int] = []  # of each layer, before the step
        self._rows: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin_step(self) -> None:
        """A global batch begins."""
        self._rows = []
        self._start = [value.clone() for value in self._values]
        self._passes = [int(layer.num_batches_tracked) for layer in self._layers]

    @torch.no_grad()
    def end_pass(self) -> None:
        """A micro-batch is through: keep what it made of the statistics, and put those of the step's begin back."""
        if not self._layers:
            return
        counts = []
        for layer, before, i in zip(self._layers, self._passes, range(0, len(self._values), 2), strict=True):
            moved = not torch.equal(layer.running_mean, self._start[i])
            counts.append(float(moved if _counts_nothing(layer) else int(layer.num_batches_tracked) - before))
            layer.num_batches_tracked.fill_(before)
        tail = torch.tensor(counts, dtype=torch.float64, device=self._values[0].device)
        self._rows.append(torch.cat([*(value.double() for value in self._values), tail]))
        torch._foreach_copy_(self._values, self._start)

    @torch.no_grad()
    def end_step(self) -> None:
        """All micro-batches of the step are through, here and elsewhere. Collective; blocks."""
        if not self._layers:
            return
        width = sum(self._sizes) + len(self._layers)
        own = (
            torch.cat(self._rows) if self._rows else torch.empty(0, dtype=torch.float64, device=self._values[0].device)
        )
        collectives = process.current().collectives
        table = collectives.result(collectives.start_gather(own, "edl_hvd.statistics")).view(-1, width)
        counts = table[:, sum(self._sizes) :].tolist()
        columns = table[:, : sum(self._sizes)].split(self._sizes, dim=1)
        for i, layer in enumerate(self._layers):
            passes = [int(row[i]) for row in counts]
            for j in (2 * i, 2 * i + 1):
                self._values[j].copy_(
                    _folded(self._start[j].double(), columns[j], passes, self._passes[i], layer.momentum)
                )
            if not _counts_nothing(layer):
                layer.num_batches_tracked.fill_(self._passes[i] + sum(passes))


def _counts_nothing(layer: torch.nn.Module) -> bool:
    """InstanceNorm has the counter of passes that BatchNorm has, and leaves it at 0."""
    return isinstance(layer, _InstanceNorm)


def _folded(
    start: torch.Tensor, ends: torch.Tensor, passes: list[int], passes_before: int, momentum: float | None
) -> torch.Tensor:
    """What one worker that runs all micro-batches one after the other would have at the end.

    Args:
        start: What all of them started from; shape (channels,), float64.
        ends: What each one made of it; shape (micro-batches, channels).
        passes: How often each one went through the layer.
        passes_before: How often it had been gone through at the start.
        momentum: The layer's; ``None`` for the mean of all passes.
    """
    value, before = start, passes_before
    for end, count in zip(ends, passes, strict=True):
        if count == 0:
            continue
        if momentum is not None:
            decay = (1.0 - momentum) ** count
            value = decay * value + (end - decay * start)
        else:
            here, alone = before + count, passes_before + count
            value = (before * value + (alone * end - passes_before * start)) / here
            before = here
    return value
