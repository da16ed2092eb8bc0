"""Whose gradient is in ``.grad``: the script's, that of the present micro-batch, or the world's.

What a script has left there is set aside when autograd is about to add to it. What a micro-batch has made is taken out
before its sum is made. The world's sum is put there, added to what the script had left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from edl_hvd.errors import UsageError


class GradAttribute:
    """The attribute ``.grad`` of the parameters of a reduction.

    Args:
        names: Names of the parameters; it may grow.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._names = names
        self._found: dict[torch.nn.Parameter, torch.Tensor] = {}  # when the micro-batch began
        self.begin_round()

    def begin_round(self) -> None:
        """What was set aside is back in its place, and nothing is left to take."""
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}  # set aside
        self._present: dict[torch.nn.Parameter, int] = {}  # of the present micro-batch: its version

    def begin_micro_batch(self) -> None:
        """The next backward computes another micro-batch: note what is there before."""
        self._found = {parameter: parameter.grad for parameter in self._names if parameter.grad is not None}

    def forget(self) -> None:
        """Drop what the present micro-batch has left."""
        for parameter in self._present:
            parameter.grad = None
        self._found.clear()
        self.begin_round()

    def set_aside(self, parameter: torch.nn.Parameter) -> None:
        """Autograd is about to add: set aside what the script has left there.

        Raises:
            UsageError: The script has changed what the micro-batch has left there.
        """
        gradient = parameter.grad
        if gradient is None:
            return
        if parameter in self._present:
            self._check_unchanged(parameter, gradient)
        else:
            self._before[parameter] = gradient
            parameter.grad = None

    def was_set(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the script had left a gradient there before this round."""
        return parameter in self._before

    def clear(self, parameter: torch.nn.Parameter) -> None:
        """Drop what the script had left, as the scripts of the other ranks have done."""
        self._before.pop(parameter, None)
        parameter.grad = None

    def keep(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Leave the gradient of the micro-batch there, up to the end of the micro-batch."""
        self._present[parameter] = gradient._version

    def kept(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradient of the micro-batch is still there."""
        return list(self._present)

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Take what the micro-batch has left there; ``None`` where the script has let go of it.

        Raises:
            UsageError: The script has changed it.
        """
        if parameter not in self._present:
            return None
        gradient = parameter.grad
        if gradient is not None:
            self._check_unchanged(parameter, gradient)
            parameter.grad = None
        del self._present[parameter]
        return gradient

    def take_assigned(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Take what a script has put there by itself, for instance from ``torch.autograd.grad``."""
        for parameter in self._names:
            gradient = parameter.grad
            if gradient is None or gradient is self._found.get(parameter) or parameter in self._before:
                continue
            parameter.grad = None
            yield parameter, gradient.detach()

    def publish(self, sums: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Make the sums the parameters' gradients, added to what was there."""
        for parameter, gradient in self._before.items():
            if parameter not in sums:
                parameter.grad = gradient
        for parameter, gradient in sums.items():
            before = self._before.get(parameter, parameter.grad)
            parameter.grad = gradient if before is None else before.add_(gradient)

    def _check_unchanged(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A script may clear the gradient of a micro-batch; cutting it there would do something else than it looks."""
        if gradient._version != self._present[parameter] and gradient.count_nonzero():
            raise UsageError(
                f"the gradient of {self._names[parameter]!r} was changed in the loop over a step's micro-batches, "
                "where it is not complete; move what changes it, such as clip_grad_norm_, after that loop, into the "
                "body of `for step in state.steps(loader):`"
            )
