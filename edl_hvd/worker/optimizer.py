"""An optimizer whose step is the step of the whole world's global batch.

Gradient of a step, with G samples in the global batch dealt out as micro-batches j of n_j samples each:

    g = sum over j of (n_j / G) · g_j,      g_j the gradient of the user's mean loss over micro-batch j

so it equals the gradient of the mean loss over all G samples, for any dealing. A worker accumulates its
own g_j in units of the n_j of its latest micro-batch (equal sizes, the usual case, cost nothing) and the
factor n / G is applied inside the allreduce. Each parameter's allreduce starts as soon as backward has
finished its gradient, and all have finished when ``backward()`` returns, as in
``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

from edl_hvd.errors import UsageError
from edl_hvd.worker import process

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


@dataclass(frozen=True)
class MicroBatch:
    """The part of a global batch that the next backward computes.

    Attributes:
        samples: n_j, at least 1.
        global_samples: G.
        first: It is this worker's first of the step.
        last: It is this worker's last of the step.
    """

    samples: int
    global_samples: int
    first: bool
    last: bool


class Reduction:
    """Sums gradients over the world; belongs to one optimizer. Internal; see the module.

    Attributes:
        wishes: Gives numbers of this rank that are to be summed over the world on the way.
        answer: Their sums, once ``complete`` has returned.
        skip: So many steps the optimizer has made already, before the state was put back; they are not made again.
    """

    def __init__(self, named_parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = {parameter: name for name, parameter in named_parameters}
        self.micro_batch: MicroBatch | None = None
        self.learning_rate_factor = 1.0
        self.before_step: list[Callable[[Any, bool], None]] = []  # optimizer; whether it calls a closure
        self.after_step: list[Callable[[], None]] = []
        self.paused = False
        self.done = False  # the gradients of this step are summed
        self.wishes: Callable[[], torch.Tensor] | None = None
        self.answer: torch.Tensor | None = None
        self.skip = 0
        self._unit = 1  # n of the micro-batch whose units the accumulated gradients are in
        self._handles: dict[torch.nn.Parameter | None, Any] = {}
        self._finish_queued = False
        for parameter in self.names:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def at_boundary(self) -> bool:
        """Backward now completes a global batch."""
        return self.micro_batch is None or self.micro_batch.last

    @torch.no_grad()
    def begin(self, micro_batch: MicroBatch) -> None:
        """The next backward computes this. Called by ``State.batches``."""
        if not micro_batch.first and micro_batch.samples != self._unit:
            grads = [parameter.grad for parameter in self.names if parameter.grad is not None]
            if grads:
                torch._foreach_mul_(grads, self._unit / micro_batch.samples)
        self._unit = micro_batch.samples
        self.micro_batch = micro_batch
        self._handles.clear()
        self._finish_queued = self.done = False

    def forget(self) -> None:
        """Drop what is under way: the world it was for is gone."""
        self.micro_batch = None
        self.wishes = self.answer = None
        self._handles.clear()
        self._finish_queued = self.done = False

    def _scale(self) -> float:
        if self.micro_batch is None:
            return 1.0 / process.size()
        return self.micro_batch.samples / self.micro_batch.global_samples

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self.paused or not self.at_boundary:
            return
        if self.done or parameter in self._handles:
            raise UsageError(
                f"backward() computed the gradient of {self.names[parameter]!r} twice in one batch, after the world "
                "had started to sum it; add the losses and call backward() once, or run all but the last backward() "
                "under `with optimizer.no_sync():`"
            )
        self._start(parameter)
        if not self._finish_queued:
            self._finish_queued = True
            # Runs when this backward is through, on the thread that called it.
            Variable._execution_engine.queue_callback(self.complete)

    def _start(self, parameter: torch.nn.Parameter) -> None:
        if self.wishes is not None and None not in self._handles:
            # With the first gradient: it travels in the same message.
            self.answer = self.wishes()
            self._handles[None] = process.current().collectives.start_sum(self.answer, "edl_hvd.wishes", 1.0)
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            raise UsageError(
                f"the gradient of {self.names[parameter]!r} is sparse, which cannot be summed over a changing world; "
                "build the module with sparse=False"
            )
        elif gradient.stride() != parameter.stride():
            # Every rank sums in memory order, so the order has to be that of the parameter on all of them.
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
        name = f"edl_hvd.gradient.{self.names[parameter]}"
        self._handles[parameter] = process.current().collectives.start_sum(gradient, name, self._scale())

    def complete(self) -> None:
        """Sum whatever was not summed yet, and wait for all of it. A collective over the world.

        A parameter that got no gradient here (not used by this loss, or no micro-batch was dealt to this
        worker) takes part with zeros, because it may have one elsewhere.
        """
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._handles:
                self._start(parameter)
        process.current().collectives.finish(list(self._handles.values()))
        self._handles.clear()
        self._finish_queued = False
        self.wishes = None
        self.done = True

    def take_part(self, global_samples: int) -> None:
        """Sum with a share of nothing. Called by ``State.batches`` on a worker that was dealt nothing."""
        for parameter in self.names:
            parameter.grad = None
        self.begin(MicroBatch(samples=1, global_samples=global_samples, first=True, last=True))
        self.complete()


class _Distributed:
    """Mixed into the class of the optimizer that :func:`DistributedOptimizer` is given."""

    reduction: Reduction
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
        try:
            for watcher in reduction.before_step:
                watcher(self, closure is not None)
            return super().step(closure)  # type: ignore[misc]
        finally:
            for group, rate in zip(groups, own_rates, strict=True):
                group["lr"] = rate

    def repeat(self) -> None:
        """The step that another worker took, with its gradients and options in place."""
        super().step()  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: _Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None
) -> _Optimizer:
    """Make an optimizer's steps those of the whole world.

    The same object comes back, its class extended, so references to it stay good. In a world of one it
    computes what it computed before.

    Args:
        optimizer: Any ``torch.optim.Optimizer`` with dense gradients.
        named_parameters: ``model.named_parameters()``, or those of several models; must name every
            parameter of the optimizer. Left out, parameters are named by their place in it.

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
    optimizer.reduction = Reduction(named)  # type: ignore[attr-defined]
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
