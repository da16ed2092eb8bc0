"""What a script may change about parameters besides their values: what requires a gradient, groups, gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch

from edl_hvd.worker.training.reduction import Reduction

_GRADIENT = "gradient/"  # in the names of tensors


class ParameterChanges:
    """Captures and restores what differs from how the parameters of a state were when the state was made.

    Args:
        models: Models of the state, by attribute.
        optimizers: Distributed optimizers of the state, by attribute.
        reduction: Sums the gradients of all distributed optimizers; ``None`` where there is none.
    """

    def __init__(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Any], reduction: Reduction | None
    ) -> None:
        self._optimizers = optimizers
        self._reduction = reduction
        self._parameters = {f"{name}.{key}": p for name, model in models.items() for key, p in model.named_parameters()}
        self._required = {name: parameter.requires_grad for name, parameter in self._parameters.items()}
        self._group_counts = {name: len(optimizer.param_groups) for name, optimizer in optimizers.items()}

    def capture(self) -> dict[str, Any]:
        """Return the changes as JSON values, for the counters of a commit."""
        return {
            "requires_grad": self._requires_grad(),
            "added_groups": self._added_groups(),
            "present": [name for parameter, name in self._names.items() if parameter.grad is not None],
        }

    def carried_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients that no step has been made with yet: a script accumulates them over several steps."""
        return {
            f"{_GRADIENT}{self._names[parameter]}": parameter.grad
            for optimizer in self._optimizers.values()
            if has_carried(optimizer)
            for parameter in _parameters_of(optimizer)
            if parameter.grad is not None
        }

    def all_gradients(self) -> dict[str, torch.Tensor]:
        """Return every gradient there is, under the same names."""
        return {f"{_GRADIENT}{name}": p.grad for p, name in self._names.items() if p.grad is not None}

    @torch.no_grad()
    def restore_gradients(self, tensors: Mapping[str, torch.Tensor], present: Collection[str] = ()) -> None:
        """Restore the gradients among these tensors, and have no others.

        Args:
            tensors: Tensors of a commit.
            present: Parameters that have a gradient of zeros where the commit has none of theirs. A script may clear
                gradients to zeros, which is not ``None``.
        """
        zeroed = set(present)
        for optimizer in self._optimizers.values():
            optimizer.stepping.round_number = optimizer.reduction.round_number
            for parameter in _parameters_of(optimizer):
                name = self._names[parameter]
                gradient = tensors.get(f"{_GRADIENT}{name}")
                if gradient is None:
                    parameter.grad = _zeros_like(parameter) if name in zeroed else None
                else:
                    parameter.grad = torch.empty_like(parameter).copy_(gradient)
                    optimizer.stepping.round_number = optimizer.reduction.round_number - 1

    def restore_requires_grad(self, changed: Mapping[str, bool]) -> None:
        """Restore which parameters require a gradient; ``changed`` has those that differ from the first."""
        required = {**self._required, **changed}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != required[name]:
                parameter.requires_grad_(required[name])

    def drop_groups(self, added: Mapping[str, list[list[str]]]) -> list[torch.nn.Parameter]:
        """Remove the groups that optimizers have got since a commit with these groups; returns their parameters."""
        if self._reduction is None:
            return []
        all_dropped: list[torch.nn.Parameter] = []
        for attribute, optimizer in self._optimizers.items():
            groups = optimizer.param_groups
            kept = self._group_counts[attribute] + len(added.get(attribute, []))
            dropped = [parameter for group in groups[kept:] for parameter in group["params"]]
            if dropped:
                del groups[kept:]
                for parameter in dropped:
                    optimizer.state.pop(parameter, None)
                self._reduction.release(dropped)
                all_dropped += dropped
        return all_dropped

    def add_groups(self, added: Mapping[str, list[list[str]]]) -> None:
        """Give the optimizers the groups of a commit that they lack."""
        if self._reduction is None or not added:
            return
        parameters = {name: parameter for parameter, name in {**self._reduction.catalogue, **self._names}.items()}
        for attribute, optimizer in self._optimizers.items():
            present = len(optimizer.param_groups) - self._group_counts[attribute]
            for group in added.get(attribute, [])[present:]:
                optimizer.add_param_group({"params": [parameters[name] for name in group]})

    @property
    def _names(self) -> Mapping[torch.nn.Parameter, str]:
        return self._reduction.names if self._reduction is not None else {}

    def _requires_grad(self) -> dict[str, bool]:
        required = self._required
        return {
            name: parameter.requires_grad
            for name, parameter in self._parameters.items()
            if parameter.requires_grad is not required[name]
        }

    def _added_groups(self) -> dict[str, list[list[str]]]:
        """Return the groups that optimizers have got since the state was made, by the names of their parameters."""
        return {
            attribute: [[self._names[p] for p in group["params"]] for group in groups[self._group_counts[attribute] :]]
            for attribute, groups in ((name, optimizer.param_groups) for name, optimizer in self._optimizers.items())
            if len(groups) > self._group_counts[attribute]
        }


def is_gradient(name: str) -> bool:
    """Return whether a tensor of this name, in a commit, is a gradient."""
    return name.startswith(_GRADIENT)


def has_carried(optimizer: Any) -> bool:
    """Return whether the optimizer has gradients that it has made no step with yet."""
    return bool(optimizer.reduction.round_number > optimizer.stepping.round_number)


def _parameters_of(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _zeros_like(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros that take no time before something writes there: most scripts clear gradients first."""
    if not parameter.is_cpu or not parameter.is_contiguous() or parameter.nbytes == 0:
        return torch.zeros_like(parameter)
    memory = torch.from_numpy(numpy.zeros(parameter.nbytes, dtype=numpy.uint8))  # pages of zeros, as they are needed
    return memory.view(parameter.dtype).view(parameter.shape)
