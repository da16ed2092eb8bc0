"""Lists, dictionaries and tensors given to State, which stay the same objects when a state is loaded.

A script holds them by other names, too: a data set is made of tensors, a loop appends to its list. Were the attribute
another object after a change of the world, the script would go on with one that State does not keep. An object is the
same until the script sets the attribute, or what is inside, to another; a loaded state knows of which that is true, so
that a worker that joins does not overwrite an object for which the others have another one by now.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from edl_hvd.worker.codec import decode, encode, names_in

_CONTAINERS = (list, dict, deque, OrderedDict, Counter, defaultdict)


class SameObjects:
    """The objects that plain attributes were given, until they have others.

    Args:
        attributes: Plain attributes of ``State``, by name.
        others: Tensors that State keeps in other ways, such as parameters. A tensor that shares memory with one of
            them, or with one more of the attributes, has no object of its own.
    """

    def __init__(self, attributes: Mapping[str, Any], others: Iterable[torch.Tensor]) -> None:
        self._objects = {n: v for n, v in attributes.items() if type(v) in _CONTAINERS or isinstance(v, torch.Tensor)}
        encoded = {name: encode(value, name).tensors for name, value in self._objects.items()}
        places = Counter(_place(tensor) for tensors in encoded.values() for tensor in tensors.values())
        places.update({_place(tensor) for tensor in others})
        self._tensors = {
            name: {path: tensor for path, tensor in tensors.items() if _place(tensor) and places[_place(tensor)] == 1}
            for name, tensors in encoded.items()
        }

    def names(self, name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return which objects of an attribute are still those given: its name, and those of tensors in it.

        Args:
            name: Name of the attribute.
            value: Its present value.
            tensors: The tensors in it, as :func:`encode` names them.
        """
        if name not in self._tensors:
            return []
        same = [path for path, first in self._tensors[name].items() if _is_set_to(tensors.get(path), first)]
        return [*same, name] if name in self._objects and value is self._objects[name] else same

    def keep(self, names: Collection[str]) -> None:
        """A commit has been made: hold no other objects than these, of which the script may want the memory freed."""
        self._objects = {name: value for name, value in self._objects.items() if name in names}
        for found in self._tensors.values():
            for path in found.keys() - set(names):
                del found[path]

    @torch.no_grad()
    def load(self, name: str, plain: Any, tensors: Mapping[str, torch.Tensor], same: Collection[str]) -> Any:
        """Return the value of an attribute in a state, of which nothing is shared with that state.

        Args:
            name: Name of the attribute.
            plain: Its plain value in the state.
            tensors: Tensors of the state, by name.
            same: What :meth:`names` returned when the state was captured.
        """
        here = {}
        for path in names_in(plain):
            first = self._tensors.get(name, {}).get(path) if path in same else None
            if first is None or not _fits(first, tensors[path]):
                here[path] = tensors[path].clone()
                continue
            here[path] = first
            if not _is_set_to(tensors[path], first):
                first.copy_(tensors[path])
        value = decode(plain, here)
        first = self._objects.get(name) if name in same else None
        if isinstance(first, torch.Tensor):
            return first if value is self._tensors[name].get(name) else value
        return value if first is None else _filled(first, value)


def _filled(first: Any, value: Any) -> Any:
    """Return the first container with the contents of another, or the other where they are of two kinds."""
    if type(first) is not type(value):
        return value
    if isinstance(first, list):
        first[:] = value
    elif isinstance(first, deque):
        if first.maxlen != value.maxlen:
            return value
        first.clear()
        first.extend(value)
    else:
        first.clear()
        first.update(value)
    return first


def _place(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 for one that has no memory of its own, such as a sparse one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_set_to(tensor: torch.Tensor | None, first: torch.Tensor) -> bool:
    """Whether a tensor is the same memory, cut in the same way."""
    return tensor is not None and tensor.layout is first.layout is torch.strided and tensor.is_set_to(first)


def _fits(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    return first.shape == tensor.shape and first.dtype == tensor.dtype and not first.is_inference()
