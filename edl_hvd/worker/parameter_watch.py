"""Whether anything but optimizer steps moves the parameters.

If nothing does, a commit need not copy them: until the next optimizer step they are what they were at the commit, and
a step comes only after the world has summed every gradient of it. A script that moves parameters by itself (it swaps in
an average of them to validate, it prunes, it runs an optimizer of its own) gets commits that copy.

Writes are seen by the tensors' version counters, and those that bypass them (``parameter.data``) by one element of each
parameter, on the CPU only: on a GPU every look would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CLEAN_COMMITS = 2
# What a script does in every step shows in the first two; whatever it does later makes them twice as many.
_MOST_CLEAN_COMMITS = 1024
_NEVER = 1 << 62


class ParameterWatch:
    """Of one worker's distributed optimizers.

    Attributes:
        steps: How often each optimizer has moved since the last commit.
        trusted: Nothing else has moved parameters lately.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self.steps = [0] * len(optimizers)
        self._clean = 0
        self._needed = _CLEAN_COMMITS
        self._trace = _Trace([])
        for number, optimizer in enumerate(optimizers):
            optimizer.reduction.before_step.append(lambda _, closure, number=number: self._before_step(number, closure))
            optimizer.reduction.after_step.append(self.look)

    @property
    def trusted(self) -> bool:
        return self._clean >= self._needed

    def commit(self) -> None:
        """The present is a point to come back to."""
        self._clean += 1
        self.steps = [0] * len(self._optimizers)

    def check(self) -> None:
        """Stop trusting a script that has moved parameters itself since the last look."""
        if self.is_disturbed():
            self.distrust()
            self.look()

    def look(self) -> None:
        """Whatever has moved the parameters up to here was meant to."""
        self._trace = _Trace([p for optimizer in self._optimizers for p in optimizer.reduction.names], self._trace)

    def is_disturbed(self) -> bool:
        """Something else has moved parameters since the last look."""
        return not self._trace.fits()

    def distrust(self) -> None:
        """Something else moves parameters: do without copies only after more commits in which nothing does."""
        self._clean, self._needed = 0, min(2 * self._needed, _MOST_CLEAN_COMMITS)

    def _before_step(self, number: int, closure: bool) -> None:
        if closure:  # it sums gradients while it moves parameters
            self._clean, self._needed = 0, _NEVER
        else:
            self.check()
        self.steps[number] += 1


class _Trace:
    """What some tensors were at one moment, as far as it can be told without reading them."""

    def __init__(self, parameters: list[torch.nn.Parameter], before: _Trace | None = None) -> None:
        self._parameters = parameters
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._versions = [parameter._version for parameter in parameters]
        self._elements: list[list[torch.Tensor]] = (
            before._elements if before and before._addresses == self._addresses else _elements_of(parameters)
        )
        self._values = self._read()

    def fits(self) -> bool:
        return (
            self._versions == [parameter._version for parameter in self._parameters]
            and self._addresses == [parameter.data_ptr() for parameter in self._parameters]
            and all(map(_same_bits, self._values, self._read()))
        )

    def _read(self) -> list[torch.Tensor]:
        return [torch.stack(elements) for elements in self._elements]


def _elements_of(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A view of the middle element in memory of each parameter on the CPU, by type."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.device.type == "cpu" and parameter.numel():
            detached = parameter.detach()
            middle = detached.storage_offset() + sum(
                (n // 2) * s for n, s in zip(detached.shape, detached.stride(), strict=True)
            )
            found.setdefault(parameter.dtype, []).append(detached.as_strided((), (), middle))
    return list(found.values())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # NaN equals itself
