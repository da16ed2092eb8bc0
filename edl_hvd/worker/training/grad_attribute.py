"""When autograd adds to ``.grad``, and whose gradient is in it: the script's, that of a micro-batch, or the world's.

What a script has left there is set aside when autograd is about to add to it. What a micro-batch has made is taken out
before its sum is made. The world's sum is put there, added to what the script had left.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from edl_hvd.errors import UsageError

_Listener = Callable[[torch.nn.Parameter], None]
_EarlyListener = Callable[[torch.nn.Parameter, Any], None]


class HookedParameters:
    """The parameters of a reduction, with a hook of autograd's on each that requires a gradient.

    Args:
        before: Function that autograd calls when it is about to add to a parameter's ``.grad``, with that parameter and
            what autograd knows of the gradient.
        after: Function that autograd calls when it has added to it.

    Attributes:
        names: Names of the parameters, unique and the same on every rank.
        catalogue: Names of parameters that may come later.
    """

    def __init__(self, before: _EarlyListener, after: _Listener) -> None:
        self.names: dict[torch.nn.Parameter, str] = {}
        self.catalogue: dict[torch.nn.Parameter, str] = {}
        self._before, self._after = before, after
        self._hooks: dict[torch.nn.Parameter, _Hooks] = {}

    def adopt(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Sum the gradients of these as well."""
        self.names.update((parameter, name) for name, parameter in named_parameters)
        self.attach()

    def adopt_unnamed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The same, by the names that the models of the state have for them, or by their place."""
        new = [parameter for parameter in parameters if parameter not in self.names]
        count = len(self.names)
        self.adopt((self.catalogue.get(p, f"parameter.{count + i}"), p) for i, p in enumerate(new))

    def attach(self) -> None:
        """Take the gradients of all parameters that require one by now."""
        if len(self._hooks) == len(self.names):
            return
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = _Hooks(parameter, self._before, self._after)

    def refresh(self) -> None:
        """The same, where a parameter may have moved to another device since."""
        for parameter, hooks in self._hooks.items():
            if parameter.requires_grad and not hooks.fits(parameter):
                hooks.remove()
                self._hooks[parameter] = _Hooks(parameter, self._before, self._after)
        self.attach()

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Leave those of these parameters alone."""
        for parameter in parameters:
            self.names.pop(parameter, None)
            hooks = self._hooks.pop(parameter, None)
            if hooks is not None:
                hooks.remove()

    def detach(self) -> None:
        """Leave the gradients alone from now on: another reduction sums them."""
        for hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()

    def hooked_by_script(self) -> list[str]:
        """Names of the parameters whose gradient goes through a hook that is not of this reduction."""
        return [
            name
            for parameter, name in self.names.items()
            if parameter._backward_hooks
            or len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > (parameter in self._hooks)
        ]

    def refuse_unseen(self) -> None:
        """Refuse a gradient of a parameter that a script has unfrozen in the middle of a micro-batch.

        Raises:
            UsageError: There is one: no hook has seen it.
        """
        if len(self._hooks) == len(self.names):
            return
        for parameter, name in self.names.items():
            if parameter not in self._hooks and parameter.grad is not None:
                raise UsageError(
                    f"{name!r} was made to require a gradient while a micro-batch was computed; call requires_grad_() "
                    "before the loop, or at step level in `for step in state.steps(loader):`"
                )


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


class _Hooks:
    """On one parameter: before autograd adds to its ``.grad``, and after.

    The first is on the node that adds, not on the parameter: ``torch.autograd.grad`` passes by the node.
    """

    def __init__(self, parameter: torch.nn.Parameter, before: _EarlyListener, after: _Listener) -> None:
        self._node = _accumulator_of(parameter)
        self._handles = [
            self._node.register_prehook(functools.partial(before, parameter)),
            parameter.register_post_accumulate_grad_hook(after),
        ]

    def fits(self, parameter: torch.nn.Parameter) -> bool:
        """Whether autograd still uses the node."""
        return _accumulator_of(parameter) is self._node

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _accumulator_of(parameter: torch.nn.Parameter) -> Any:
    with torch.enable_grad():
        function: Any = parameter.view_as(parameter).grad_fn
    return function.next_functions[0][0]


def is_nested_backward() -> bool:
    """Whether the backward pass that ends runs inside another, as re-entrant activation checkpointing has it."""
    frame = sys._getframe(1)
    nested = torch.autograd.function.BackwardCFunction.apply.__code__
    current: Any = frame
    while current is not None:
        if current.f_code is nested:
            return True
        current = current.f_back
    return False
