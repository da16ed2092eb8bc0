"""Summing gradients over the world.

Gradient of a step, with G samples in the global batch dealt out as micro-batches j of n_j samples each:

    g = sum over j of (n_j / G) · g_j,      g_j the gradient of the user's mean loss over micro-batch j

so it equals the gradient of the mean loss over all G samples, for any dealing. A worker accumulates its
own g_j in units of the n_j of its latest micro-batch (equal sizes, the usual case, cost nothing) and the
factor n / G is applied inside the allreduce. Each parameter's allreduce starts as soon as backward has
finished its gradient, and all have finished when ``backward()`` returns, as in
``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.training.noise import NoiseMeter


@dataclass(frozen=True)
class MicroBatch:
    """The part of a global batch that the next backward computes.

    Attributes:
        samples: n_j, at least 1.
        global_samples: G.
        first: It is this worker's first of the step.
        last: It is this worker's last of the step.
        index: j, in the global batch.
        unit: Samples of every micro-batch of the step but the last one, which may have fewer; at least 1.
    """

    samples: int
    global_samples: int
    first: bool
    last: bool
    index: int = 0
    unit: int = 1


class Reduction:
    """Sums gradients over the world; belongs to one optimizer. Internal; see the module.

    Attributes:
        wishes: Gives numbers of this rank that are to be summed over the world on the way.
        answer: Their sums, once ``complete`` has returned.
        skip: So many steps the optimizer has made already, before the state was put back; they are not made again.
        stepped_samples: Of the last step it has made; 0 where nobody knows.
        noise: Measures how noisy the gradients are; ``None`` where nobody wants to know.
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
        self.skip = self.stepped_samples = 0
        self.noise: NoiseMeter | None = None
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

    def measure_noise(self) -> None:
        """From the next step on, tell how noisy its gradient was (``noise.observation``)."""
        if self.noise is None:
            self.noise = NoiseMeter(next(iter(self.names.values()), ""))

    @torch.no_grad()
    def begin(self, micro_batch: MicroBatch) -> None:
        """The next backward computes this. Called by ``State.batches``."""
        if not micro_batch.first and micro_batch.samples != self._unit:
            grads = [parameter.grad for parameter in self.names if parameter.grad is not None]
            if grads:
                torch._foreach_mul_(grads, self._unit / micro_batch.samples)
        self._unit = micro_batch.samples
        self.micro_batch = micro_batch
        if self.noise is not None:
            self.noise.begin(micro_batch)
        self._handles.clear()
        self._finish_queued = self.done = False

    def forget(self) -> None:
        """Drop what is under way: the world it was for is gone."""
        self.micro_batch = None
        self.wishes = self.answer = None
        if self.noise is not None:
            self.noise.forget()
        self._handles.clear()
        self._finish_queued = self.done = False

    def _scale(self) -> float:
        if self.micro_batch is None:
            return 1.0 / process.size()
        return self.micro_batch.samples / self.micro_batch.global_samples

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self.noise is not None:
            self.noise.small(parameter)
        if self.paused or not self.at_boundary:
            return
        if self.done or parameter in self._handles:
            raise self._computed_twice(parameter)
        self._start(parameter)
        if not self._finish_queued:
            self._finish_queued = True
            # Runs when this backward is through, on the thread that called it.
            Variable._execution_engine.queue_callback(self.complete)

    def _computed_twice(self, parameter: torch.nn.Parameter) -> UsageError:
        return UsageError(
            f"backward() computed the gradient of {self.names[parameter]!r} twice in one batch, after the world "
            "had started to sum it; add the losses and call backward() once, or run all but the last backward() "
            "under `with optimizer.no_sync():`"
        )

    def _start_wishes(self) -> None:
        """With the first gradient: they travel in the same message."""
        if self.wishes is not None and None not in self._handles:
            self.answer = self.wishes()
            self._handles[None] = process.current().collectives.start_sum(self.answer, "edl_hvd.wishes", 1.0)

    def _gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Zeros where backward has left none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise UsageError(
                f"the gradient of {self.names[parameter]!r} is sparse, which cannot be summed over a changing world; "
                "build the module with sparse=False"
            )
        return parameter.grad

    def _start(self, parameter: torch.nn.Parameter) -> None:
        self._start_wishes()
        gradient = self._gradient_of(parameter)
        if gradient.stride() != parameter.stride():
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
        measured = self.noise.start() if self.noise is not None else []
        process.current().collectives.finish([*self._handles.values(), *measured])
        if self.noise is not None:
            self.noise.large(self.names)
        self._handles.clear()
        self._finish_queued = False
        self.wishes = None
        self.done = True

    def take_part(self, nothing: MicroBatch) -> None:
        """Sum with a share of nothing. Called by ``State.batches`` on a worker that was dealt nothing."""
        for parameter in self.names:
            parameter.grad = None
        self.begin(nothing)
        self.complete()
