"""Buffers that a forward pass changes, and that are no statistics of normalisation: seen, and said once.

Such as the codebook of a VQ-VAE, the centre of DINO or the queue of MoCo: what they become of a whole global batch
cannot be told from what they became of its micro-batches, and unlike running statistics they take part in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from edl_hvd.worker import process
from edl_hvd.worker.position import position

_LOOKS = 4  # at what a forward pass does, each epoch


class OtherBuffers:
    """The buffers of some models that are neither running statistics nor vectors of a spectral norm.

    Args:
        models: Models, by their attribute of the state.
        warn: Says something once, by what it is about.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._looks = _LOOKS
        self._places = {
            (module, name): f"state.{attribute}.{path}.{name}".replace("..", ".")
            for attribute, model in models.items()
            for path, module in model.named_modules()
            if not isinstance(module, (_NormBase, _SpectralNorm, torch.optim.swa_utils.AveragedModel))
            for name in module._buffers.keys() - module._non_persistent_buffers_set - _of_hooks(module)
        }
        self._before: list[object] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def begin_step(self) -> None:
        """A global batch begins, or another loop over it."""
        if self._looks:
            self._before = self._look()

    def end_pass(self) -> None:
        """A micro-batch is through."""
        if not self._looks:
            return
        self._looks -= 1
        now = self._look()
        if position.per_step > 1 or process.size() > 1:
            for place, before, after in zip(self._places.values(), self._before, now, strict=True):
                if before != after:
                    self._warn(
                        "buffer",
                        f"{place}, a buffer, is changed by the forward pass, which sees one micro-batch and not the "
                        "whole global batch, so what it becomes depends on how the batch is dealt; change it behind "
                        "the loop over a step, from sums that edl_hvd.allreduce makes (docs/recipes.md: Buffers that "
                        "training changes)",
                    )
        self._before = now

    def end_step(self) -> None:
        """All micro-batches are through."""

    def _look(self) -> list[object]:
        found = (module._buffers.get(name) for module, name in self._places)
        return [(id(buffer), buffer._version) if buffer is not None else None for buffer in found]


def _of_hooks(module: torch.nn.Module) -> set[str]:
    """Buffers of the older form of spectral norm, a hook."""
    hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
    return {f"{hook.name}_{vector}" for hook in hooks for vector in ("u", "v")}
