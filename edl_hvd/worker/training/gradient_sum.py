"""How the gradients of a step's micro-batches become their sum over the world.

A worker accumulates its own gradients in units of the weight of its first micro-batch (equal weights, the usual case,
cost nothing). Each parameter's part is summed over the world by itself, as soon as it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from edl_hvd.errors import EdlHvdWarning
from edl_hvd.worker.training.micro_batch import MicroBatch
from edl_hvd.worker.training.process_group import ProcessGroup


class GradientSum:
    """The sum of one round, under way.

    Args:
        names: Names of the parameters; it may grow.
        group: Workers to sum over.

    Attributes:
        group: Workers to sum over.
        micro_batch: Micro-batch being computed; ``None`` in a script without ``state.batches`` and ``state.steps``.
        weight: Weight of the micro-batch.
        total_weight: Weight of all micro-batches of this rank.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str], group: ProcessGroup) -> None:
        self.group = group
        self.micro_batch: MicroBatch | None = None
        self.weight = self.total_weight = 1.0
        self._names = names
        self._normaliser = 0.0  # W of the last round, where it was not G
        self._has_warned_of_dropped = False
        self.begin_round()

    # --- what is summed ---

    def begin_round(self) -> None:
        """Begin another sum."""
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # this rank's part
        self._dropped: set[torch.nn.Parameter] = set()  # which have one of a micro-batch of weight 0, which is 0 then
        self._late: dict[torch.nn.Parameter, torch.Tensor] = {}  # what came after its sum had started
        self._sums: dict[torch.nn.Parameter, Any] = {}  # under way
        self._unit: float | None = None  # weight that the held gradients count as 1

    def begin(self, micro_batch: MicroBatch) -> None:
        """The next gradients are those of this micro-batch."""
        self.micro_batch = micro_batch
        self.weight = float(micro_batch.samples)
        if micro_batch.first:
            self.total_weight = 0.0
        self.total_weight += self.weight

    def weigh(self, weight: float) -> None:
        """Give the micro-batch another weight than its number of samples."""
        self.total_weight += weight - self.weight
        self.weight = weight

    def forget(self) -> None:
        """Drop what is under way."""
        self.micro_batch = None
        self.weight = self.total_weight = 1.0
        self.begin_round()

    def forget_world(self) -> None:
        """The next world is another one."""
        self.forget()
        self._normaliser = 0.0

    # --- this rank's part ---

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a gradient of the present micro-batch to this rank's part.

        Returns:
            This rank's part so far, in its unit; ``None`` where the gradient was not added to it.
        """
        if self.weight == 0:
            self._warn_of_dropped(gradient)
            self._dropped.add(parameter)
            return None
        if self._unit is None:
            self._unit = self._first_unit()
        if self._is_started(parameter):
            self._accumulate(self._late, parameter, gradient)
            return None
        self._accumulate(self._held, parameter, gradient)
        return self._held[parameter]

    def _warn_of_dropped(self, gradient: torch.Tensor) -> None:
        """Say once that a gradient counts for nothing; that of a mean over nothing is 0 or not a number."""
        if self._has_warned_of_dropped or not bool((torch.isfinite(gradient) & (gradient != 0)).any()):
            return
        self._has_warned_of_dropped = True
        warnings.warn(
            "a micro-batch was given the weight 0, so its gradient, which is not zero, counts for nothing; a sum over "
            "all samples that is divided by the number of some, such as positives or boxes, is written in another way: "
            "see 'A sum over all, divided by the number of some' in docs/recipes.md",
            EdlHvdWarning,
            stacklevel=2,
        )

    @property
    def share(self) -> float:
        """The weight of the micro-batch, in the unit of this rank's part."""
        assert self._unit is not None
        return self.weight / self._unit

    def present(self) -> list[torch.nn.Parameter]:
        """The parameters that this rank has a gradient of in this round, in the order of the names."""
        return [parameter for parameter in self._names if parameter in self._held or parameter in self._dropped]

    @property
    def is_late(self) -> bool:
        """Whether this rank has gradients that came after their sums had started."""
        return bool(self._late)

    @property
    def row(self) -> int:
        """The row of a name that values of the present micro-batch are recorded in."""
        return 0

    @property
    def rows(self) -> int:
        """The number of rows of recorded values; the same on every rank."""
        return 1

    def _is_started(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._sums

    def _first_unit(self) -> float:
        """The weight whose gradient counts as it is."""
        return self.weight

    def _accumulate(
        self, into: dict[torch.nn.Parameter, torch.Tensor], parameter: torch.nn.Parameter, gradient: torch.Tensor
    ) -> None:
        share = self.share
        held = into.get(parameter)
        if held is not None:
            held.add_(gradient, alpha=share)
        else:
            gradient = gradient.detach() if gradient.requires_grad else gradient
            into[parameter] = gradient if share == 1.0 else gradient.mul_(share)

    # --- the sum ---

    def start_early(self, parameter: torch.nn.Parameter, may_grow: bool) -> None:
        """The rank's part of this gradient is complete, or almost certainly so: begin to sum it.

        Args:
            parameter: Parameter of the gradient.
            may_grow: Whether more of the gradient may come after all.
        """
        if self.group.size > 1 and parameter in self._held:
            self._start(parameter, self._held[parameter], "gradient")

    def start(self, used: Sequence[torch.nn.Parameter]) -> None:
        """Begin to sum what is not under way yet.

        Args:
            used: Parameters that some rank has a gradient of; the same on every rank.
        """
        if self.group.size == 1:
            return
        for parameter in used:
            if parameter not in self._sums:
                self._start(parameter, self._held.get(parameter), "gradient")

    def finish(
        self, used: Sequence[torch.nn.Parameter], weight: float, is_late: bool, others: Sequence[Any]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Wait for the sums. Collective; blocks.

        Args:
            used: Parameters that some rank has a gradient of; the same on every rank.
            weight: Weight W of all micro-batches, over all ranks.
            is_late: Whether some rank has gradients that came after their sums had started.
            others: Handles to wait for as well.

        Returns:
            The gradient of the mean over the global batch, by parameter.
        """
        if self.group.size == 1:
            return self._finish_alone(used, others)
        self.group.collectives.finish([*(self._sums[parameter] for parameter in used), *others])
        if is_late:
            self._sum_late(used)
        if self.micro_batch is not None:
            normaliser = self._normaliser or self.micro_batch.global_samples
            if weight != normaliser and weight > 0 and used:
                torch._foreach_mul_([self._held[parameter] for parameter in used], normaliser / weight)
            self._normaliser = weight if weight != self.micro_batch.global_samples else 0.0
        return {parameter: self._held[parameter] for parameter in used}

    def _finish_alone(
        self, used: Sequence[torch.nn.Parameter], others: Sequence[Any]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        for parameter in self._dropped - self._held.keys():
            self._held[parameter] = torch.zeros_like(parameter)
        if self.micro_batch is not None and used and self._unit not in (None, self.total_weight):
            torch._foreach_mul_([self._held[parameter] for parameter in used], (self._unit or 0.0) / self.total_weight)
        if others:
            self.group.collectives.finish(others)
        return {parameter: self._held[parameter] for parameter in used}

    def _scale(self) -> float:
        """What this rank's part is multiplied with before it is summed."""
        if self.micro_batch is None:
            return 1.0 / self.group.size
        return (self._unit or 0.0) / (self._normaliser or self.micro_batch.global_samples)

    def _start(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None, kind: str) -> None:
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.stride() != parameter.stride():
            # Every rank sums in memory order, so the order has to be that of the parameter on all of them.
            gradient = torch.empty_like(parameter).copy_(gradient)
        self._held[parameter] = gradient
        name = f"edl_hvd.{kind}.{self._names[parameter]}"
        self._sums[parameter] = self.group.collectives.start_sum(gradient, name, self._scale())

    def _sum_late(self, used: Sequence[torch.nn.Parameter]) -> None:
        first = {parameter: self._held[parameter] for parameter in used}
        self._sums.clear()
        for parameter in used:
            self._start(parameter, self._late.get(parameter), "late")
        self.group.collectives.finish([self._sums[parameter] for parameter in used])
        for parameter in used:
            self._held[parameter].add_(first[parameter])
