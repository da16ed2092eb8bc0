"""What a script may change about modules besides their ``state_dict``: modes, numbers, buffers that are not persistent.

Without it a worker that joins would compute with what its own script has made, such as a BatchNorm layer that the
others have frozen since, and a step that is repeated would change a number twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from edl_hvd.worker.position import position

_BUFFER = "buffer/"
# In the names of tensors.
_LARGEST = 1 << 16
# Elements of a buffer that is kept: larger ones are tables and masks, which nothing changes.


class ModuleChanges:
    """Captures and restores what differs from how the modules of a state were when the state was made.

    While ``state.evaluate`` is under way, the modes before it are kept: the function runs again from its top, and a
    model that was found in evaluation mode there might stay in it.

    Args:
        models: Models of the state, by attribute.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        modules = {f"{name}.{path}": module for name, model in models.items() for path, module in model.named_modules()}
        self._first_modes = [(path, module, module.training) for path, module in modules.items()]
        self._modes: dict[str, bool] = {}
        self._first_values = [
            (path, vars(module), key, value)
            for path, module in modules.items()
            for key, value in vars(module).items()
            if _may_change(module, key, value)
        ]
        self._buffers = {
            f"{_BUFFER}{path}.{name}": (module, name, module._buffers[name])
            for path, module in modules.items()
            for name in module._non_persistent_buffers_set
            if _is_kept(module._buffers[name])
        }

    def capture(self) -> dict[str, Any]:
        """Return the changes as JSON values, for the counters of a commit."""
        if not position.in_evaluation:
            self._modes = {
                path: module.training for path, module, first in self._first_modes if module.training != first
            }
        values: dict[str, dict[str, Any]] = {}
        for path, attributes, key, first in self._first_values:
            value = attributes.get(key, first)
            if value is not first and value != first and type(value) in (bool, int, float, str):
                values.setdefault(path, {})[key] = value
        return {"modes": self._modes, "values": values}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the live buffers that are not persistent, and not large, by name; the same names on every rank."""
        return {name: self._buffer(*place) for name, place in self._buffers.items()}

    def _buffer(self, module: torch.nn.Module, name: str, first: torch.Tensor) -> torch.Tensor:
        # A cache may have grown, on this rank alone; then it is no matter of the state.
        live = module._buffers.get(name)
        return live if live is not None and live.shape == first.shape and live.dtype == first.dtype else first

    @torch.no_grad()
    def restore(self, changes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore them.

        Args:
            changes: Return value of ``capture``.
            tensors: Tensors of the commit, or those that have changed since another one.
        """
        self._modes = dict(changes["modes"])
        for path, module, first in self._first_modes:
            module.training = self._modes.get(path, first)
        for path, attributes, key, first in self._first_values:
            attributes[key] = changes["values"].get(path, {}).get(key, first)
        for name, place in self._buffers.items():
            if name in tensors:
                self._buffer(*place).copy_(tensors[name])


def _may_change(module: torch.nn.Module, key: str, value: Any) -> bool:
    """Whether it is a number or a word that a script or the module's own code may change while it trains."""
    if key.startswith("_") or key == "training":
        return False
    is_torchs = type(module).__module__.startswith("torch.")
    return type(value) is float or (not is_torchs and type(value) in (bool, int, str))


def _is_kept(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.layout == torch.strided and buffer.numel() <= _LARGEST
