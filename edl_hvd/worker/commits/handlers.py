"""How each kind of thing given to ``State`` is captured and put back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Set
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from edl_hvd.errors import StateError
from edl_hvd.worker.codec import encode
from edl_hvd.worker.commits.dirty import FrozenParameters
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.scheduler import gate
from edl_hvd.worker.training.step_gates import gate_average, gate_scaler


class Handler(Protocol):
    """Captures one attribute of ``State`` and puts it back.

    ``capture`` returns a nested state (see ``codec.py``) whose tensors may be the live ones; ``load``
    takes one back and must copy what it keeps, because the tensors belong to the snapshot. ``load_plain``
    does the same where the live tensors have the values of the state already.

    ``capture_rest`` leaves out what nothing but a distributed optimizer's step moves, or nothing at all, and
    ``load_rest`` puts the others back. ``completed`` is what ``capture`` would have returned at the moment of a
    ``capture_rest``, if what that left out still stands; both already encoded.

    ``held`` returns a key and the live tensors that ``capture`` would return, in its order. The key changes whenever
    anything else in the result of ``capture`` does, except for what ``completed`` puts in. Both are empty where there
    is no such key. ``held`` takes a tenth of the time of ``capture``.

    Attributes:
        value: The object itself.
        leaves_out: ``capture_rest`` may leave something out.
    """

    value: Any

    @property
    def has_delta(self) -> bool: ...

    def capture(self) -> Any: ...

    def load(self, state: Any) -> None: ...

    def load_plain(self, state: Any) -> None: ...

    def capture_delta(self) -> Any: ...

    def load_delta(self, state: Any) -> None: ...

    def merge_delta(self, live: Any, rest: Any) -> Any: ...

    def held(self) -> tuple[list[Hashable], list[torch.Tensor]]: ...


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

    def merge_delta(self, live: Any, rest: Any) -> Any:
        return rest

    def held(self) -> tuple[list[Hashable], list[torch.Tensor]]:
        return [], []


class ModuleHandler(ObjectHandler):
    """A model.

    Attributes:
        stepped: Those of its parameters that distributed optimizers move, if all of it is tensors by name.
    """

    def __init__(self, value: torch.nn.Module, stepped: Set[torch.nn.Parameter], still: FrozenParameters) -> None:
        super().__init__(value)
        # Else it keeps more, or in a way of its own.
        self._by_name = {name for name, _ in self._named_values()} == value.state_dict().keys()
        self._frozen_parameters = still
        self.move_by_steps(stepped)
        if self._by_name:
            still.consider(frozenset(value.parameters()) - stepped)

    def move_by_steps(self, stepped: Set[torch.nn.Parameter]) -> None:
        """These are the parameters that distributed optimizers move from now on, of this model and others."""
        own = frozenset(self.value.parameters())
        self.stepped: frozenset[torch.nn.Parameter] = own & stepped if self._by_name else frozenset()

    @property
    def has_delta(self) -> bool:
        return self._by_name

    def capture_delta(self) -> Any:
        if not self._by_name:
            return self.capture()
        skipped = self.stepped | self._frozen_parameters.parameters
        return {name: value for name, value in self._named_values() if value not in skipped}

    def _named_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self.value.named_modules(remove_duplicate=False):
            left_out = module._non_persistent_buffers_set
            buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in left_out]
            for name, value in [*module._parameters.items(), *buffers]:
                if value is not None:
                    yield f"{prefix}.{name}" if prefix else name, value

    @torch.no_grad()
    def load_delta(self, state: Any) -> None:
        if not self._by_name:
            self.load(state)
        else:
            # A parameter may have been given to an optimizer since: then it is as many steps ahead as the others.
            live = {name: value for name, value in self._named_values() if value not in self.stepped}
            names = [name for name in state if name in live]
            if names:
                torch._foreach_copy_([live[name] for name in names], [state[name] for name in names])

    def merge_delta(self, live: Any, rest: Any) -> Any:
        return live

    def held(self) -> tuple[list[Hashable], list[torch.Tensor]]:
        named = list(self._named_values())
        return [name for name, _ in named], [value for _, value in named]


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

    def merge_delta(self, live: Any, rest: Any) -> Any:
        if not self.has_delta:
            return rest
        groups = zip(live["param_groups"], rest, strict=True)
        return {**live, "param_groups": [{**options, "params": group["params"]} for group, options in groups]}

    def held(self) -> tuple[list[Hashable], list[torch.Tensor]]:
        if type(self.value).state_dict is not torch.optim.Optimizer.state_dict:
            return [], []  # it may keep more
        places: list[Hashable] = []
        values: list[Any] = []
        for group in self.value.param_groups:
            if any(_has_tensors(option) for name, option in group.items() if name != "params"):
                return [], []
            places += [len(group["params"]), *map(id, group["params"])]
        for parameter, state in self.value.state.items():
            if type(state) is not dict:
                return [], []
            places += [id(parameter), *state]
            values += state.values()
        return places, values

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


def handler_for(name: str, value: Any, stepped: Set[torch.nn.Parameter], still: FrozenParameters) -> Handler | None:
    """The handler of an attribute, or ``None`` for a plain one (numbers, strings, lists, tensors, …).

    Args:
        name: Of the attribute.
        value: Its value.
        stepped: The parameters that distributed optimizers move.
        still: Gets those that none moves.

    Raises:
        StateError: The value is of a kind that cannot be kept.
    """
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerHandler(value)
    if isinstance(value, torch.Generator):
        return GeneratorHandler(value)
    if isinstance(value, torch.nn.Module):
        if isinstance(value, AveragedModel):
            gate_average(value)
        return ModuleHandler(value, stepped, still)
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


def _same_layout(live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> bool:
    return live.keys() == saved.keys() and all(
        live[name].shape == saved[name].shape and live[name].dtype == saved[name].dtype for name in live
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _own(value: Any) -> Any:
    """A deep copy whose tensors are new."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item) for item in value)
    return value
