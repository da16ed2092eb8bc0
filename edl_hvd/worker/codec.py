"""Nested state as JSON plus named tensors, and back. No pickle: reading a state runs no code.

``state_dict()`` of models, optimizers and schedulers nests dictionaries (with string or integer keys),
lists, tuples, numbers, strings and tensors. JSON knows fewer types, so the others are tagged.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from edl_hvd.errors import StateError

_TENSOR, _TUPLE, _MAPPING, _COUNTER = "__tensor__", "__tuple__", "__mapping__", "__counter__"
_DEFAULT, _ORDERED, _DEQUE = "__defaultdict__", "__ordereddict__", "__deque__"
_LEAVES = frozenset({type(None), bool, int, float, str})
_TAGS = frozenset({_TENSOR, _TUPLE, _MAPPING, _COUNTER, _DEFAULT, _ORDERED, _DEQUE})
_FACTORIES = {kind.__name__: kind for kind in (list, dict, int, float, str, bool, tuple)}
# What a ``defaultdict`` may make where a key is missing: a function of the script cannot be kept.
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# Of tensors of other types it is not known when two are the same memory.


class Encoded(NamedTuple):
    """A nested state, split.

    Attributes:
        plain: JSON value, in which tensors are named.
        tensors: Tensors by name.
    """

    plain: Any
    tensors: dict[str, torch.Tensor]


def encode(tree: Any, path: str) -> Encoded:
    """Split a nested state into a JSON value and its tensors.

    Args:
        tree: Dictionaries, lists, tuples, deques, ``None``, booleans, numbers, strings and tensors.
        path: Name of the whole, used in tensor names and in errors.

    Returns:
        The JSON value, and the tensors (not copied) by name. The same structure gives the same names on every rank.

    Raises:
        StateError: Something in it is of another type; the message says where and which.
    """
    tensors: dict[str, torch.Tensor] = {}
    return Encoded(_encode(tree, path, tensors), tensors)


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) in _LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        name = path if path not in tensors else f"{path}~{len(tensors)}"
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, list):
        return _encode_items(value, path, tensors)
    if isinstance(value, tuple):
        return {_TUPLE: _encode_items(value, path, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, collections.deque):
        return {_DEQUE: [_encode_items(value, path, tensors), value.maxlen]}
    raise StateError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept; accepted are numbers, "
        "strings, booleans, None, lists, tuples, dictionaries, deques, tensors, random generators, and objects with "
        "state_dict() and load_state_dict(); convert it: what is outside State begins anew on a worker that joins"
    )


def _encode_items(values: Collection[Any], path: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    # An optimizer has thousands of numbers, and the training waits: none is given a path of its own, nor looked at
    # one by one where there is nothing else.
    if _LEAVES.issuperset(map(type, values)):
        return list(values)
    return [item if type(item) in _LEAVES else _encode(item, f"{path}/{i}", tensors) for i, item in enumerate(values)]


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    items = {
        key: item if type(item) in _LEAVES else _encode(item, f"{path}/{key}", tensors) for key, item in value.items()
    }
    if isinstance(value, collections.Counter):
        return {_COUNTER: [[_key(key, path), item] for key, item in items.items()]}
    if isinstance(value, collections.defaultdict) and value.default_factory is not None:
        factory = _name_of_factory(value.default_factory, path)
        return {_DEFAULT: [factory, [[_key(key, path), item] for key, item in items.items()]]}
    if type(value) is collections.OrderedDict and not hasattr(value, "_metadata"):  # not a module's state_dict
        return {_ORDERED: [[_key(key, path), item] for key, item in items.items()]}
    if set(map(type, items)) <= {str} and _TAGS.isdisjoint(items):
        return items
    return {_MAPPING: [[_key(key, path), item] for key, item in items.items()]}


def _name_of_factory(factory: Any, path: str) -> str:
    for name, kind in _FACTORIES.items():
        if factory is kind:
            return name
    raise StateError(
        f"{path} is a defaultdict of {factory!r}, which cannot be kept; accepted are defaultdicts of "
        f"{', '.join(_FACTORIES)}, and dictionaries, whose setdefault() does the same"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, (bool, int, float, str)) or key is None:
        return key
    raise StateError(f"{path} has the key {key!r}, which cannot be kept; accepted are strings and numbers")


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put a nested state together again; the inverse of :func:`encode`. Tensors are not copied."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode(item, tensors) for item in value[_TUPLE])
    if _COUNTER in value:
        return collections.Counter({key: decode(item, tensors) for key, item in value[_COUNTER]})
    if _DEFAULT in value:
        factory, items = value[_DEFAULT]
        return collections.defaultdict(_FACTORIES[factory], {key: decode(item, tensors) for key, item in items})
    if _ORDERED in value:
        return collections.OrderedDict((key, decode(item, tensors)) for key, item in value[_ORDERED])
    if _DEQUE in value:
        items, maxlen = value[_DEQUE]
        return collections.deque((decode(item, tensors) for item in items), maxlen)
    if _MAPPING in value:
        return {key: decode(item, tensors) for key, item in value[_MAPPING]}
    return {key: decode(item, tensors) for key, item in value.items()}


def names_in(value: Any) -> Iterator[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(value, list):
        for item in value:
            yield from names_in(item)
    elif isinstance(value, dict):
        if _TENSOR in value:
            yield value[_TENSOR]
        else:
            yield from names_in(list(value.values()))


def placed(
    value: Any, tensors: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those of ``tensors`` that an encoded value has, on the devices of those that they take the place of.

    Args:
        value: The JSON value.
        tensors: From elsewhere, on any devices.
        live: What there is in its place, by the same names. Where a name is missing, the first one says which device.
    """
    first = next(iter(live.values()), None)
    found = {}
    for name in tensors.keys() & names_in(value):
        like = live.get(name, first)
        found[name] = tensors[name] if like is None else tensors[name].to(like.device)
    return found


class TensorLayout(NamedTuple):
    """The tensors of an object, without the work of encoding it.

    Attributes:
        key: Changes whenever anything but the contents of the tensors does; empty where there is no such key.
        tensors: Live tensors, in the order in which they are encoded.
    """

    key: list[Hashable]
    tensors: list[torch.Tensor]


class Encodable(Protocol):
    """What :class:`EncodingCache` encodes."""

    def capture(self) -> Any:
        """Return the nested state, with live tensors."""

    def tensor_layout(self) -> TensorLayout:
        """Return the layout of what ``capture`` would return; takes a tenth of its time."""


class _CachedEncoding(NamedTuple):
    key: list[Hashable]
    plain: Any
    names: list[str]


class EncodingCache:
    """Keeps how an object is encoded from one checkpoint to the next.

    An optimizer's step changes the contents of the tensors, not the tensors. The cache does not keep the tensors
    themselves: that would keep memory that a script wants freed.

    Args:
        name: Attribute of ``State`` that holds the object.
        source: Captures the object.
    """

    def __init__(self, name: str, source: Encodable) -> None:
        self._name, self._source = name, source
        self._cached: _CachedEncoding | None = None

    def encoded(self) -> Encoded:
        """Return what ``encode`` makes of ``capture()`` now, with live tensors; do not change it."""
        key, live = self._source.tensor_layout()
        if self._cached is not None and self._cached.key == key and _PLAIN_TENSORS.issuperset(map(type, live)):
            return Encoded(self._cached.plain, dict(zip(self._cached.names, live, strict=True)))
        plain, tensors = encode(self._source.capture(), self._name)
        # Else there is more to it than the tensors, or others are made of them for each capture.
        is_cachable = bool(key) and _are_same(live, list(tensors.values()))
        self._cached = _CachedEncoding(key, plain, list(tensors)) if is_cachable else None
        return Encoded(plain, tensors)


def _are_same(live: list[torch.Tensor], captured: list[torch.Tensor]) -> bool:
    """The same memory, cut in the same way, in the same order."""
    return (
        len(live) == len(captured)
        and _PLAIN_TENSORS.issuperset(map(type, live))
        and all(map(torch.Tensor.is_set_to, live, captured))
    )
