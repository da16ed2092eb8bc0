"""How each kind of object given to ``State`` is captured and restored."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Any, Protocol

import numpy
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from edl_hvd.errors import StateError
from edl_hvd.worker.codec import TensorLayout, encode
from edl_hvd.worker.commits.dirty import FrozenParameters
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.scheduler import gate
from edl_hvd.worker.training.step_gates import gate_average, gate_scaler

_NO_LAYOUT = TensorLayout([], [])


class Handler(Protocol):
    """Captures one attribute of ``State`` and restores it.

    ``capture`` returns a nested state (see ``codec.py``) whose tensors may be the live ones. ``load`` takes one back;
    it must copy what it keeps, because the tensors belong to the snapshot. ``load_plain`` does the same where the live
    tensors have the values of the state already.

    ``capture_delta`` leaves out what only a distributed optimizer's step changes, and what nothing changes;
    ``load_delta`` restores the others. ``merge_delta`` takes two encoded states, the live one and that of a
    ``capture_delta``. It returns what ``capture`` would have returned at the moment of the latter, provided that what
    was left out has not changed since.

    ``tensor_layout`` returns the live tensors that ``capture`` would return; see
    :class:`~edl_hvd.worker.codec.TensorLayout`. Its key need not change with what ``merge_delta`` takes from the delta.

    Attributes:
        value: Object itself.
        has_delta: Whether ``capture_delta`` may leave something out.
    """

    value: Any

    @property
    def has_delta(self) -> bool: ...

    def capture(self) -> Any: ...

    def load(self, state: Any) -> None: ...

    def load_plain(self, state: Any) -> None: ...

    def capture_delta(self) -> Any: ...

    def load_delta(self, state: Any) -> None: ...

    def merge_delta(self, live: Any, delta: Any) -> Any: ...

    def tensor_layout(self) -> TensorLayout: ...


class ObjectHandler:
    """Anything with ``state_dict`` and ``load_state_dict``: scalers, schedulers, samplers.

    The object stays the one the script made, so a scheduler keeps driving its own optimizer.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def has_delta(self) -> bool:
        return False

    def capture(self) -> Any:
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        self.value.load_state_dict(state)

    def load_plain(self, state: Any) -> None:
        self.load(state)

    def capture_delta(self) -> Any:
        return self.capture()

    def load_delta(self, state: Any) -> None:
        self.load(state)

    def merge_delta(self, live: Any, delta: Any) -> Any:
        return delta

    def tensor_layout(self) -> TensorLayout:
        return _NO_LAYOUT


class ModuleHandler(ObjectHandler):
    """A model.

    Attributes:
        stepped: Parameters of the model that distributed optimizers step; empty where its ``state_dict`` is not just
            its tensors by name.
    """

    def __init__(self, value: torch.nn.Module, stepped: Set[torch.nn.Parameter], frozen: FrozenParameters) -> None:
        super().__init__(value)
        # Else it keeps more, or in a way of its own.
        self._by_name = {name for name, _ in self._named_values()} == value.state_dict().keys()
        self._frozen = frozen
        self.set_stepped(stepped)
        if self._by_name:
            frozen.consider(frozenset(value.parameters()) - stepped)

    def set_stepped(self, stepped: Set[torch.nn.Parameter]) -> None:
        """Take these as the parameters, of this model and others, that distributed optimizers step from now on."""
        own = frozenset(self.value.parameters())
        self.stepped: frozenset[torch.nn.Parameter] = own & stepped if self._by_name else frozenset()

    @property
    def has_delta(self) -> bool:
        return self._by_name

    def capture_delta(self) -> Any:
        if not self._by_name:
            return self.capture()
        skipped = self.stepped | self._frozen.parameters
        return {name: value for name, value in self._named_values() if value not in skipped}

    def _named_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self.value.named_modules(remove_duplicate=False):
            left_out = module._non_persistent_buffers_set
            buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in left_out]
            for name, value in [*module._parameters.items(), *buffers]:
                if value is not None:
                    yield f"{prefix}.{name}" if prefix else name, value

    def load_delta(self, state: Any) -> None:
        if not self._by_name:
            self.load(state)
        else:
            # A parameter may have been given to an optimizer since: then it is as many steps ahead as the others.
            live = {name: value for name, value in self._named_values() if value not in self.stepped}
            copy_tensors({name: live[name] for name in state if name in live}, state)

    def merge_delta(self, live: Any, delta: Any) -> Any:
        return live

    def tensor_layout(self) -> TensorLayout:
        named = list(self._named_values())
        return TensorLayout([name for name, _ in named], [value for _, value in named])


class OptimizerHandler(ObjectHandler):
    """An optimizer. Its state appears with its first step, and ``load_state_dict`` would share tensors.

    Its groups stay the objects they are: another optimizer may have them, too, as SAM and the one inside it.
    """

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self._groups = value.param_groups

    def _load_state(self, state: Any) -> None:
        self.value.load_state_dict(state)
        if self.value.param_groups is not self._groups:
            for group, loaded in zip(self._groups, self.value.param_groups, strict=True):
                group.update(loaded)
        self._keep_groups()

    def _keep_groups(self) -> None:
        if self.value.param_groups is not self._groups:
            self.value.param_groups = self._groups

    @property
    def has_delta(self) -> bool:
        return is_distributed(self.value)

    @torch.no_grad()
    def load(self, state: Any) -> None:
        live, live_tensors = encode(self.value.state_dict(), "")
        saved, saved_tensors = encode(state, "")
        if live["state"] == saved["state"] and _same_layout(live_tensors, saved_tensors):
            if live_tensors:
                torch._foreach_copy_(list(live_tensors.values()), list(saved_tensors.values()))
            self._load_options(state)
        else:
            self._load_state(_own(state))

    def load_plain(self, state: Any) -> None:
        live, _ = encode(self.value.state_dict(), "")
        saved, _ = encode(state, "")
        if live["state"] == saved["state"]:
            self._load_options(state)
        else:
            self.load(state)

    def capture_delta(self) -> Any:
        if not self.has_delta:
            return self.capture()
        groups = self.value.param_groups
        return [{key: option for key, option in group.items() if key != "params"} for group in groups]

    def load_delta(self, state: Any) -> None:
        if not self.has_delta:
            self.load(state)
        else:
            self._load_options({"param_groups": state})

    def merge_delta(self, live: Any, delta: Any) -> Any:
        if not self.has_delta:
            return delta
        groups = zip(live["param_groups"], delta, strict=True)
        return {**live, "param_groups": [{**options, "params": group["params"]} for group, options in groups]}

    def tensor_layout(self) -> TensorLayout:
        if type(self.value).state_dict is not torch.optim.Optimizer.state_dict:
            return _NO_LAYOUT  # it may keep more
        key: list[Hashable] = []
        values: list[Any] = []
        for group in self.value.param_groups:
            if any(_has_tensors(option) for name, option in group.items() if name != "params"):
                return _NO_LAYOUT
            key += [len(group["params"]), *map(id, group["params"])]
        for parameter, state in self.value.state.items():
            if type(state) is not dict:
                return _NO_LAYOUT
            key += [id(parameter), *state]
            values += state.values()
        return TensorLayout(key, values)

    def _load_options(self, state: Any) -> None:
        self._keep_groups()
        for group, options in zip(self.value.param_groups, state["param_groups"], strict=True):
            group.update({key: _own(option) for key, option in options.items() if key != "params"})


class GeneratorHandler(ObjectHandler):
    """A ``torch.Generator``."""

    def capture(self) -> Any:
        return self.value.get_state()

    def load(self, state: Any) -> None:
        self.value.set_state(state.cpu().clone())


class RandomHandler(ObjectHandler):
    """A ``random.Random``."""

    def capture(self) -> Any:
        return self.value.getstate()

    def load(self, state: Any) -> None:
        self.value.setstate(state)


class NumpyGeneratorHandler(ObjectHandler):
    """A ``numpy.random.Generator``; arrays in its state are kept as lists of numbers."""

    def capture(self) -> Any:
        return _without_arrays(self.value.bit_generator.state)

    def load(self, state: Any) -> None:
        bits = self.value.bit_generator
        if state["bit_generator"] != bits.state["bit_generator"]:
            raise ValueError(f"it is that of a {state['bit_generator']}, not of a {bits.state['bit_generator']}")
        bits.state = _with_arrays(state, bits.state)


class RandomStateHandler(ObjectHandler):
    """A ``numpy.random.RandomState``."""

    def capture(self) -> Any:
        return _without_arrays(self.value.get_state(legacy=False))

    def load(self, state: Any) -> None:
        self.value.set_state(_with_arrays(state, self.value.get_state(legacy=False)))


GENERATORS = (GeneratorHandler, RandomHandler, NumpyGeneratorHandler, RandomStateHandler)


def handler_for(name: str, value: Any, stepped: Set[torch.nn.Parameter], frozen: FrozenParameters) -> Handler | None:
    """The handler of an attribute, or ``None`` for a plain one (numbers, strings, lists, tensors, …).

    Args:
        name: Name of the attribute.
        value: Value of the attribute.
        stepped: Parameters that distributed optimizers step.
        frozen: Watches the parameters that none of them steps.

    Raises:
        StateError: The value is of a kind that cannot be kept.
    """
    if isinstance(value, torch.optim.Optimizer):
        _check_saved_form(name, value)
        return OptimizerHandler(value)
    if isinstance(value, torch.Generator):
        return GeneratorHandler(value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return RandomHandler(value)
    if isinstance(value, numpy.random.Generator):
        return NumpyGeneratorHandler(value)
    if isinstance(value, numpy.random.RandomState):
        return RandomStateHandler(value)
    if isinstance(value, torch.nn.Module):
        if isinstance(value, AveragedModel):
            gate_average(value)
        return ModuleHandler(value, stepped, frozen)
    if isinstance(value, torch.amp.GradScaler):
        gate_scaler(value)
    if isinstance(value, LRScheduler):
        gate(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return ObjectHandler(value)
    try:
        encode(value, name)
    except StateError as error:
        raise StateError(f"State(…, {name}=…): {error}") from None
    return None


def _check_saved_form(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is saved in a form of its own; some keep addresses, which mean nothing elsewhere."""
    keys = optimizer.state_dict().keys()
    if not {"state", "param_groups"} <= keys:
        raise StateError(
            f"State(…, {name}=…): state_dict() of {type(optimizer).__name__} has {', '.join(map(str, keys))}; expected "
            "state and param_groups, as optimizers of PyTorch have, which a worker that joins can load; remove its own "
            "state_dict() and load_state_dict(), and keep what it needs for a parameter in self.state[parameter]"
        )


@torch.no_grad()
def copy_tensors(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of a commit into the live ones of the same names; torch would fit a shape to another one.

    Raises:
        StateError: A tensor has another shape than in the commit.
    """
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise StateError(
                f"{name.replace('/', '.')} has the shape {tuple(tensor.shape)} and cannot get back what the last "
                f"commit has of it, whose shape is {tuple(saved[name].shape)}; expected a parameter or a tensor of an "
                "optimizer to keep its shape in the training; register what changes its shape as a buffer of its model"
            )
    if live:
        torch._foreach_copy_(list(live.values()), [saved[name] for name in live])


def _same_layout(live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> bool:
    return live.keys() == saved.keys() and all(
        live[name].shape == saved[name].shape and live[name].dtype == saved[name].dtype for name in live
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, (numpy.ndarray, numpy.generic)) else state


def _with_arrays(state: Any, like: Any) -> Any:
    """The state with arrays where ``like`` has some."""
    if isinstance(like, dict):
        return {key: _with_arrays(item, like.get(key)) for key, item in state.items()}
    return numpy.array(state, like.dtype) if isinstance(like, numpy.ndarray) else state


def _own(value: Any) -> Any:
    """A deep copy whose tensors are new."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item) for item in value)
    return value
