"""What acts once per optimizer step though the body of ``state.batches`` runs more often: scalers, averages of weights.

Schedulers do the same (``scheduler.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from edl_hvd.compat import patching
from edl_hvd.errors import UsageError
from edl_hvd.worker.position import position


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler for mixed precision in float16, for use with a distributed optimizer.

    It is ``torch.amp.GradScaler``, with its arguments and methods, except that ``unscale_``, ``step`` and ``update`` in
    the body of ``state.batches`` act at the end of a global batch only. In the loops of ``state.steps`` they belong at
    step level. Give it to ``State``; a plain ``torch.amp.GradScaler`` that is given to ``State`` becomes one.

    Every rank uses it alike. Not collective: the sum of the gradients is infinite or NaN on all ranks or on none, so
    all ranks skip the same steps and hold the same scale.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, once per step. Every rank; not collective.

        Before clipping. In the body of ``state.batches`` it does nothing before the global batch is complete.

        Args:
            optimizer: A ``DistributedOptimizer``.
        """
        if not position.waits:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Make the optimizer's step, or skip it where a gradient is infinite or NaN. Every rank; not collective.

        Args:
            optimizer: A ``DistributedOptimizer``.
            *args: Passed on to ``optimizer.step``.
            **kwargs: Passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns; ``None`` where the step is skipped or the global batch is not complete.
        """
        position.steps_in_body += 1
        return None if position.waits else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after a step: smaller after one that was skipped. Every rank; not collective.

        In the body of ``state.batches`` it does nothing before the global batch is complete.

        Args:
            new_scale: Scale to set instead, greater than 0: a number, or a float32 tensor of one element on the GPU.
        """
        if not position.waits:
            super().update(new_scale)


def gate_scaler(scaler: torch.amp.GradScaler) -> None:
    """Make a plain scaler one of :class:`GradScaler`, in place."""
    if not isinstance(scaler, GradScaler):
        kind = type(scaler)
        scaler.__class__ = GradScaler if kind is torch.amp.GradScaler else type(kind.__name__, (GradScaler, kind), {})


def _refusing(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_parameters(average: AveragedModel, model: torch.nn.Module) -> None:
        if not isinstance(average, _StepwiseAverage) and position.place.in_training:
            raise UsageError(
                "update_parameters() was called in the loop of an AveragedModel that State(…) was not given, so the "
                "average would be lost with a worker; add it: State(ema=ema, …)"
            )
        update(average, model)

    return update_parameters


# For the whole process: else nobody would see an average that is not part of the state.
patching.replace("averages", AveragedModel, "update_parameters", _refusing)


class _StepwiseAverage:
    """Mixed into the class of an ``AveragedModel`` that is given to ``State``."""

    def update_parameters(self, model: torch.nn.Module) -> None:
        """As in torch; in the body of ``state.batches`` once per optimizer step.

        Raises:
            UsageError: It was called in the loop over a step's micro-batches.
        """
        position.refuse_in_step("update_parameters()")
        if not position.waits:
            super().update_parameters(model)  # type: ignore[misc]


def gate_average(average: AveragedModel) -> None:
    """Have an average of weights move with the optimizer steps, in place."""
    kind = type(average)
    if not isinstance(average, _StepwiseAverage):
        average.__class__ = type(kind.__name__, (_StepwiseAverage, kind), {})
