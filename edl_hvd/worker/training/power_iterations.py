"""Spectral norm, such that it does not depend on how a batch is dealt.

Each forward pass in training makes a step of the power iteration that finds a weight's largest singular value. What
it makes of the vectors u and v depends on the weight alone, not on the samples. So all micro-batches of a loop over a
step start from the same u and v, and these make as many steps as in one pass with the whole batch. A worker without a
micro-batch gets them from the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrizations

from edl_hvd.worker import process
from edl_hvd.worker.position import position
from edl_hvd.worker.training.other_buffers import OtherBuffers
from edl_hvd.worker.training.running_statistics import RunningStatistics


class PowerIterations:
    """The power iterations of all layers of some models that have a spectral norm, in either form of torch's."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        vectors = {id(vector): vector for model in models for vector in _vectors_of(model)}
        self._vectors = list(vectors.values())
        self._start: list[torch.Tensor] = []
        self._end: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._vectors)

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        self._start = self._end = [vector.clone() for vector in self._vectors]

    @torch.no_grad()
    def end_pass(self) -> None:
        """A micro-batch is through."""
        self._end = [vector.clone() for vector in self._vectors]
        torch._foreach_copy_(self._vectors, self._start)

    @torch.no_grad()
    def end_step(self) -> None:
        """All micro-batches are through, here and elsewhere. Collective in a step with an idle worker; blocks there."""
        if position.has_idle and process.size() > 1:
            self._take_over()
        torch._foreach_copy_(self._vectors, self._end)

    def _take_over(self) -> None:
        flat = torch.cat([vector.view(-1).to("cpu", torch.float64) for vector in self._end])
        if self._end is self._start:  # this worker has computed nothing
            flat = torch.full_like(flat, float("-inf"))
        flat = process.current().collectives.allreduce(flat, "max")
        parts = flat.split([vector.numel() for vector in self._vectors])
        self._end = [part.view_as(vector) for part, vector in zip(parts, self._vectors, strict=True)]


class Buffers:
    """What forward passes change beside what the optimizers move: each kind in its own way.

    Args:
        kinds: Of which those are left out that the models have nothing of.
    """

    def __init__(self, *kinds: RunningStatistics | PowerIterations | OtherBuffers) -> None:
        self._kinds = [kind for kind in kinds if kind]

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        for kind in self._kinds:
            kind.begin_step()

    def end_pass(self) -> None:
        """A micro-batch is through."""
        for kind in self._kinds:
            kind.end_pass()

    def end_step(self) -> None:
        """All micro-batches are through, here and elsewhere. Collective; blocks."""
        for kind in self._kinds:
            kind.end_step()


def _vectors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    # The older form, a hook: it is imported with torch, by a name that the function of that module hides.
    hook: Any = sys.modules["torch.nn.utils.spectral_norm"]
    for module in model.modules():
        if isinstance(module, parametrizations._SpectralNorm):
            yield from module.buffers(recurse=False)
        for before in module._forward_pre_hooks.values():
            if isinstance(before, hook.SpectralNorm):
                yield from (getattr(module, f"{before.name}_{vector}") for vector in ("u", "v"))
