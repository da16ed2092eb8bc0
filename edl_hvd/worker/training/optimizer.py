"""An optimizer whose step is the step of the whole world's global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker.training import momentum
from edl_hvd.worker.training.exact import ExactReduction
from edl_hvd.worker.training.reduction import Reduction

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


class _Distributed:
    """Mixed into the class of the optimizer that :func:`DistributedOptimizer` is given."""

    reduction: Reduction
    velocity: str | None = None
    param_groups: list[dict[str, Any]]

    @property
    def at_boundary(self) -> bool:
        """``step()`` will act now: this worker's last micro-batch of the global batch is being computed."""
        return self.reduction.at_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients computed inside only accumulate; the first backward after it sums. As in DDP."""
        self.reduction.paused = True
        try:
            yield
        finally:
            self.reduction.paused = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, at the start of a global batch only."""
        if self.reduction.micro_batch is None:
            self.reduction.forget()  # a batch the script gave up without a step
        if self.reduction.micro_batch is None or self.reduction.micro_batch.first:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step, at the end of a global batch only; elsewhere it does nothing.

        The learning-rate factor of the batch policy is applied here and undone before it returns, so
        schedulers see, and set, the script's own learning rate.
        """
        reduction = self.reduction
        if not reduction.at_boundary:
            return None
        if closure is None and not reduction.done:
            reduction.complete()
        result = None
        if reduction.skip:
            reduction.skip -= 1
        else:
            result = self._step_at_scaled_rates(closure)
            reduction.stepped_samples = reduction.micro_batch.global_samples if reduction.micro_batch else 0
        if reduction.micro_batch is None:
            reduction.done = False
        for callback in reduction.after_step:
            callback()
        return result

    def _step_at_scaled_rates(self, closure: Callable[[], Any] | None) -> Any:
        reduction = self.reduction
        own_rates = [group["lr"] for group in self.param_groups if "lr" in group]
        groups = [group for group in self.param_groups if "lr" in group]
        for group in groups:
            group["lr"] = group["lr"] * reduction.learning_rate_factor
            if self.velocity is not None:
                group[momentum.FACTOR] = reduction.learning_rate_factor
        try:
            for watcher in reduction.before_step:
                watcher(self, closure is not None)
            return self._corrected_step(closure)
        finally:
            for group, rate in zip(groups, own_rates, strict=True):
                group["lr"] = rate

    def repeat(self) -> None:
        """The step that another worker took, with its gradients and options in place."""
        self._corrected_step(None)

    def _corrected_step(self, closure: Callable[[], Any] | None) -> Any:
        if self.velocity is None:
            return super().step(closure)  # type: ignore[misc]
        momentum.correct(self, self.velocity)  # type: ignore[arg-type]
        result = super().step(closure)  # type: ignore[misc]
        momentum.note(self, self.velocity)  # type: ignore[arg-type]
        return result


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    exact: bool = False,
    measure_noise: bool = False,
    velocity: str | None = None,
) -> _Optimizer:
    """Make an optimizer's steps those of the whole world.

    The same object comes back, its class extended, so references to it stay good. In a world of one it
    computes what it computed before.

    Args:
        optimizer: Any ``torch.optim.Optimizer`` with dense gradients.
        named_parameters: ``model.named_parameters()``, or those of several models; must name every
            parameter of the optimizer. Left out, parameters are named by their place in it.
        exact: Sum gradients, and keep the running statistics of normalisation layers, such that the weights come out
            identical, bit for bit, for any number of workers; see ``docs/exact.md`` for how and within which limits.
        measure_noise: Measure how noisy the gradients are, for ``state.gradient_noise_scale``; batch policies that need
            it do so anyway.
        velocity: Name of the tensor in the optimizer's state that is a momentum with the learning rate in it
            (v = m v + η g); it is corrected when the policy's factor changes (Goyal et al. 2017, section 3). No
            optimizer of torch has one: their momentum is made of gradients alone and needs no correction.

    Raises:
        UsageError: Names are missing or doubled, the optimizer is wrapped already, or a scheduler was
            built on it before.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already; wrap it once")
    if "step" in vars(optimizer):
        raise UsageError(
            "a learning-rate scheduler was built on this optimizer before it was wrapped; call DistributedOptimizer "
            "first and give the scheduler what it returns"
        )
    if named_parameters is None:
        named = [(f"parameter.{i}", parameter) for i, parameter in enumerate(parameters)]
    else:
        wanted = set(parameters)
        named = [(name, parameter) for name, parameter in named_parameters if parameter in wanted]
    names = [name for name, _ in named]
    if len(set(names)) != len(names) or {parameter for _, parameter in named} != set(parameters):
        raise UsageError(
            f"named_parameters names {len(set(names))} of the optimizer's {len(parameters)} parameters; expected a "
            "different name for each, e.g. named_parameters=model.named_parameters()"
        )
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    optimizer.reduction = ExactReduction(named) if exact else Reduction(named)  # type: ignore[attr-defined]
    optimizer.velocity = velocity  # type: ignore[attr-defined]
    if measure_noise:
        optimizer.reduction.measure_noise()  # type: ignore[attr-defined]
    return optimizer


def is_distributed(value: object) -> bool:
    """Whether a value came out of :func:`DistributedOptimizer`."""
    return isinstance(value, _Distributed)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a distributed optimizer: acts at global-batch boundaries only."""

    _skipped = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(optimizer, "at_boundary", True):
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._skipped = not getattr(optimizer, "at_boundary", True)
        return None if self._skipped else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self._skipped:
            super().update(new_scale)
