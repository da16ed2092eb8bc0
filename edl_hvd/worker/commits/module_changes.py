"""What a script may change about modules besides values in their ``state_dict``: modes, numbers, shapes of buffers.

Buffers that are not persistent are kept here, too.

A worker that joins has made its modules itself. Without this module it would train a BatchNorm layer that the others
have frozen since, and a step that is made again would change a number a second time.
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from edl_hvd.errors import EdlHvdWarning
from edl_hvd.worker.position import position

_BUFFER = "buffer/"  # begins the names of tensors that are buffers
_NUMBERS_AND_WORDS = frozenset({bool, int, float, str, type(None)})
_NOT_KEPT: Any = object()  # stands for a value of another type
_MOST_ELEMENTS = 1 << 16  # of a buffer that is kept; larger ones are tables and masks, which do not change
_SHORT = 64  # items of a list, or bytes of an array, that are compared one by one


class ModuleChanges:
    """Captures and restores how the modules of a state differ from what they were when the state was made.

    A commit in ``state.evaluate`` has the modes from before the evaluation. A function that continues from it runs from
    its top, and would leave a model in evaluation mode that it finds so.

    Args:
        models: Models of the state, by attribute.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        modules = {f"{name}.{path}": module for name, model in models.items() for path, module in model.named_modules()}
        self._first_modes = [(path, module, module.training) for path, module in modules.items()]
        self._modes: dict[str, bool] = {}
        self._values = [_Values(path, module) for path, module in modules.items()]
        self._others = {
            (path, key): (vars(module), trace)
            for path, module in modules.items()
            if not _is_torchs(module)
            for key, trace in _traces(module)
        }
        self._buffers = {
            f"{_BUFFER}{path}.{name}": (module, name, module._buffers[name])
            for path, module in modules.items()
            for name in module._non_persistent_buffers_set
            if _is_kept(module._buffers[name])
        }
        self._layouts = [_Layouts(name, model) for name, model in models.items()]

    def capture(self) -> dict[str, Any]:
        """Return the changes as JSON values, for the counters of a commit."""
        if not position.place.in_evaluation:
            self._modes = {
                path: module.training for path, module, first in self._first_modes if module.training != first
            }
        values = {numbers.path: changed for numbers in self._values if (changed := numbers.changed())}
        self._warn_of_others()
        layouts = {name: pair for layouts in self._layouts for name, pair in layouts.changed().items()}
        return {"modes": self._modes, "values": values, "layouts": layouts}

    def numbers(self) -> dict[str, int | float]:
        """Return the numbers that have changed, by name; without attributes that were no number at first."""
        found = {}
        for values in self._values:
            for key, value in values.changed().items():
                if type(value) in (int, float) and values.was_number(key):
                    found[f"{values.path.rstrip('.')}.{key}"] = value
        return found

    def _warn_of_others(self) -> None:
        """Warn of tensors, lists and similar attributes that have changed, once of each."""
        moved = []
        for place, (attributes, before) in self._others.items():
            now = _trace(attributes.get(place[1]))
            if now is not None and now != before:
                moved.append(place)
        for place in moved:
            del self._others[place]
        moved += [(numbers.path, key) for numbers in self._values for key in numbers.take_lost()]
        for path, key in moved:
            warnings.warn(
                f"state.{path.rstrip('.')}.{key}, an attribute of a module, has changed since State was made and is "
                "not kept, because it is neither a number nor a word: a worker that joins begins with its own, and a "
                "step that is made again changes it twice; register it as a buffer, keep it in State by itself, or "
                "count with edl_hvd.metrics",
                EdlHvdWarning,
                stacklevel=2,
            )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the live buffers that are not persistent, and not large, by name; the same names on every rank."""
        return {name: self._buffer(*place) for name, place in self._buffers.items()}

    def _buffer(self, module: torch.nn.Module, name: str, first: torch.Tensor) -> torch.Tensor:
        # A cache may have grown on this rank alone. It is not part of the state then.
        live = module._buffers.get(name)
        return live if live is not None and live.shape == first.shape and live.dtype == first.dtype else first

    def restore_layouts(self, changes: Mapping[str, Any]) -> list[str]:
        """Give the buffers that had another shape or type new memory for what a commit has of them.

        The memory is not filled: the values come with the ``state_dict`` of the model. A buffer whose shape was another
        one when ``State`` was made, such as that of a checkpoint of another model, stays as it is.

        Args:
            changes: Return value of ``capture``.

        Returns:
            Names of these buffers, as tensors of a commit are named.
        """
        saved = changes.get("layouts")  # a checkpoint may be older than this
        return [] if saved is None else [name for layouts in self._layouts for name in layouts.restore(saved)]

    @torch.no_grad()
    def restore(self, changes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore modes, numbers and buffers.

        Args:
            changes: Return value of ``capture``.
            tensors: Tensors of the commit, or those that have changed since another commit.
        """
        self._modes = dict(changes["modes"])
        for path, module, first in self._first_modes:
            module.training = self._modes.get(path, first)
        for numbers in self._values:
            numbers.restore(changes["values"].get(numbers.path, {}))
        for name, place in self._buffers.items():
            if name in tensors:
                self._buffer(*place).copy_(tensors[name])


class _Layouts:
    """Shapes and types of the persistent buffers of one model, some of which the script may set to others.

    Such as a memory bank that grows, or a buffer that is registered as ``None`` and set later.
    """

    def __init__(self, attribute: str, model: torch.nn.Module) -> None:
        self._attribute, self._model = attribute, model
        # Without lazy layers, whose buffers have no shape yet.
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if not any(buffer is not None and is_lazy(buffer) for buffer in module._buffers.values())
        }
        self._buffers = [module._buffers for module in self._modules.values()]
        self._first = self._present()
        self._seen = self._marks()
        self._changed: dict[str, Any] = {}

    def _marks(self) -> list[Any]:
        """Return the shapes and types of all buffers: a commit is made after each step, and takes no longer for it."""
        present = [buffer for buffers in self._buffers if buffers for buffer in buffers.values()]
        return [None if buffer is None else (buffer.shape, buffer.dtype) for buffer in present]

    def _present(self) -> dict[str, Any]:
        return {
            f"{self._attribute}/{path}.{key}" if path else f"{self._attribute}/{key}": _layout(buffer)
            for path, module in self._modules.items()
            for key, buffer in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        }

    def changed(self) -> dict[str, Any]:
        """Return first and present layout of those that have another one now, or are new, or have been removed."""
        seen = self._marks()
        if seen != self._seen:
            present, self._seen = self._present(), seen
            names = [name for name in present.keys() | self._first.keys() if present.get(name) != self._first.get(name)]
            self._changed = {name: [self._first.get(name), present.get(name)] for name in sorted(names)}
        return self._changed

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore the layouts; returns the names of buffers that had another one."""
        found = []
        present = self._present()
        for name in sorted(present.keys() | self._first.keys() | saved.keys()):
            attribute, _, place = name.partition("/")
            path, _, key = place.rpartition(".")
            first, module = self._first.get(name), self._modules.get(path)
            before, wanted = saved.get(name, (first, first))
            if attribute != self._attribute or module is None or before != first or present.get(name) == wanted:
                continue
            found.append(name)
            if wanted is None and name not in self._first:
                del module._buffers[key]  # the script may ask whether it is there
            else:
                module._buffers[key] = None if wanted is None else self._memory(module, key, *wanted)
        return found

    def _memory(self, module: torch.nn.Module, key: str, shape: Sequence[int], kind: str) -> torch.Tensor:
        own = [module._buffers.get(key), *module.parameters(), *module.buffers(), *self._model.parameters()]
        device = next((tensor.device for tensor in own if tensor is not None), None)
        return torch.zeros(list(shape), dtype=getattr(torch, kind), device=device)


class _Values:
    """The attributes of one module that are numbers, words or ``None``, in whose place one of them may come.

    Attributes:
        path: Name of the module.
    """

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self.path = path
        self._attributes = vars(module)
        # A lazy layer of torch's sets its sizes in its first forward pass; commits leave them out.
        sets_sizes = isinstance(module, LazyModuleMixin) and _is_torchs(module)
        self._left_out = {
            key
            for key, value in self._attributes.items()
            if _plain(value) is _NOT_KEPT or (sets_sizes and not isinstance(value, float))
        }
        self._first = {key: value for key, value in self._attributes.items() if self._is_watched(key)}
        self._lost: set[str] = set()
        self._said: set[str] = set()
        self._look()

    def changed(self) -> dict[str, Any]:
        """Return those that differ from the first ones, or are new. The caller must not change the dictionary.

        A commit is made after each step, and a model has hundreds of modules. So values are compared only where some
        attribute is another object than at the last look.
        """
        attributes = self._attributes
        if len(attributes) != self._count or not all(map(operator.is_, map(attributes.get, self._keys), self._seen)):
            self._look()
        return self._changed

    def was_number(self, key: str) -> bool:
        """Whether it was a number when the state was made. What is set later may come from one forward pass."""
        return type(_plain(self._first.get(key))) in (int, float)

    def restore(self, changed: Mapping[str, Any]) -> None:
        """Restore the attributes; those of another type, which are not kept, stay as they are."""
        attributes = self._attributes
        for key in [key for key in attributes if self._is_watched(key)]:
            if key not in changed and key not in self._first and _plain(attributes[key]) is not _NOT_KEPT:
                del attributes[key]
        for key, first in self._first.items():
            if key not in changed and _plain(attributes.get(key)) is not _NOT_KEPT:
                attributes[key] = first
        attributes.update(changed)

    def take_lost(self) -> set[str]:
        """Return the names of those that were a number or a word and are something else now; each name once."""
        lost, self._lost = self._lost - self._said, set()
        self._said |= lost
        return lost

    def _look(self) -> None:
        watched = {key: _plain(value) for key, value in self._attributes.items() if self._is_watched(key)}
        first = self._first
        self._changed = {
            key: value
            for key, value in watched.items()
            if value is not _NOT_KEPT and not (key in first and _is_same(value, first[key]))
        }
        # Other values are not held here: a script may want their memory freed.
        self._keys = list(watched)
        self._seen = [_NOT_KEPT if value is _NOT_KEPT else self._attributes[key] for key, value in watched.items()]
        self._count = len(self._attributes)
        self._lost = {
            key
            for key, value in watched.items()
            if value is _NOT_KEPT and first.get(key) is not None and _trace(self._attributes[key]) is not None
        }

    def _is_watched(self, key: str) -> bool:
        return not key.startswith("_") and key != "training" and key not in self._left_out


def _layout(buffer: torch.Tensor | None) -> list[Any] | None:
    """Shape and type of a buffer as JSON."""
    return None if buffer is None else [list(buffer.shape), str(buffer.dtype).removeprefix("torch.")]


def _is_kept(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.layout == torch.strided and buffer.numel() <= _MOST_ELEMENTS


def _plain(value: Any) -> Any:
    """The value as Python's number, string or ``None``; ``_NOT_KEPT`` where it is something else."""
    if isinstance(value, numpy.generic):
        value = value.item()
    return value if type(value) in _NUMBERS_AND_WORDS else _NOT_KEPT


def _is_same(value: Any, first: Any) -> bool:
    # Types are compared as well: for Python, 0 equals False and 1 equals 1.0.
    return value is first or (type(value) is type(_plain(first)) and bool(value == first))


def _is_torchs(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _traces(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that are tensors, arrays or containers, each with its trace."""
    for key, value in vars(module).items():
        if not key.startswith("_") and _plain(value) is _NOT_KEPT and (trace := _trace(value)) is not None:
            yield key, trace


def _trace(value: Any, is_item: bool = False) -> Any:
    """A value that differs when the given one has changed, made without reading tensors or long lists.

    ``None`` where a change does not matter: a tensor that requires a gradient was computed by a forward pass, and the
    next one computes it again.
    """
    if isinstance(value, torch.Tensor):
        return None if value.requires_grad or value.is_inference() else (id(value), value._version)
    if isinstance(value, numpy.ndarray):
        return value.shape, value.tobytes() if value.nbytes <= _SHORT else id(value)
    if isinstance(value, (list, dict, set, deque)) and not is_item:
        items = list(value.values() if isinstance(value, dict) else value) if len(value) <= _SHORT else []
        return len(value), [_trace(item, is_item=True) for item in items]
    plain = _plain(value)
    return None if plain is _NOT_KEPT else plain
