"""Which parameters' gradients are summed, by which names, and when autograd adds to their ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from edl_hvd.errors import UsageError

_Listener = Callable[[torch.nn.Parameter], None]


class HookedParameters:
    """The parameters of a reduction, with a hook of autograd's on each that requires a gradient.

    Args:
        before: Function that autograd calls when it is about to add to a parameter's ``.grad``.
        after: Function that autograd calls when it has added to it.

    Attributes:
        names: Names of the parameters, unique and the same on every rank.
        catalogue: Names of parameters that may come later.
    """

    def __init__(self, before: _Listener, after: _Listener) -> None:
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


class _Hooks:
    """On one parameter: before autograd adds to its ``.grad``, and after.

    The first is on the node that adds, not on the parameter: ``torch.autograd.grad`` passes by the node.
    """

    def __init__(self, parameter: torch.nn.Parameter, before: _Listener, after: _Listener) -> None:
        self._node = _accumulator_of(parameter)
        self._handles = [
            self._node.register_prehook(lambda _: before(parameter)),
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
