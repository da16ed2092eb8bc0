"""How each kind of thing given to ``State`` is captured and put back."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from edl_hvd.errors import StateError
from edl_hvd.worker.codec import encode
from edl_hvd.worker.scheduler import gate


class Handler(Protocol):
    """Captures one attribute of ``State`` and puts it back.

    ``capture`` returns a nested state (see ``codec.py``) whose tensors may be the live ones; ``load``
    takes one back and must copy what it keeps, because the tensors belong to the snapshot. ``load_plain``
    does the same where the live tensors have the values of the state already.
    """

    value: Any

    def capture(self) -> Any: ...

    def load(self, state: Any) -> None: ...

    def load_plain(self, state: Any) -> None: ...


class ObjectHandler:
    """Anything with ``state_dict`` and ``load_state_dict``: models, scalers, schedulers, samplers.

    The object stays the one the script made, so a scheduler keeps driving its own optimizer.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Any:
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        self.value.load_state_dict(state)

    def load_plain(self, state: Any) -> None:
        self.load(state)


class OptimizerHandler(ObjectHandler):
    """An optimizer. Its state appears with its first step, and ``load_state_dict`` would share tensors."""

    @torch.no_grad()
    def load(self, state: Any) -> None:
        live, live_tensors = encode(self.value.state_dict(), "")
        saved, saved_tensors = encode(state, "")
        if live["state"] == saved["state"] and _same_layout(live_tensors, saved_tensors):
            if live_tensors:
                torch._foreach_copy_(list(live_tensors.values()), list(saved_tensors.values()))
            self._load_options(state)
        else:
            self.value.load_state_dict(_own(state))

    def load_plain(self, state: Any) -> None:
        live, _ = encode(self.value.state_dict(), "")
        saved, _ = encode(state, "")
        if live["state"] == saved["state"]:
            self._load_options(state)
        else:
            self.load(state)

    def _load_options(self, state: Any) -> None:
        for group, options in zip(self.value.param_groups, state["param_groups"], strict=True):
            group.update({key: _own(option) for key, option in options.items() if key != "params"})


class GeneratorHandler:
    """A ``torch.Generator``."""

    def __init__(self, value: torch.Generator) -> None:
        self.value = value

    def capture(self) -> Any:
        return self.value.get_state()

    def load(self, state: Any) -> None:
        self.value.set_state(state.cpu().clone())

    def load_plain(self, state: Any) -> None:
        self.load(state)


def handler_for(name: str, value: Any) -> Handler | None:
    """The handler of an attribute, or ``None`` for a plain one (numbers, strings, lists, tensors, …).

    Raises:
        StateError: The value is of a kind that cannot be kept.
    """
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerHandler(value)
    if isinstance(value, torch.Generator):
        return GeneratorHandler(value)
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


def _own(value: Any) -> Any:
    """A deep copy whose tensors are new."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_own(item) for item in value)
    return value
