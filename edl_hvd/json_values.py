"""A frozen value of plain fields as a JSON object, and back, each field checked.

What a file or a connection says is checked before it is used: a number where a name belongs would fail much later,
far from the line that is wrong. A field that was renamed is read under both names, see :func:`formerly`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from edl_hvd.errors import UsageError

Value = TypeVar("Value")

_MEANINGS = {str: "a text", int: "a whole number", bool: "true or false"}
_PLAIN = frozenset({str, int, float, bool, type(None)})
_FORMER_NAME, _FORMER_VALUES = "formerly", "former values"
_LONGEST_SHOWN = 200
# A few lines of a terminal.

# Evaluated once per class: the driver of a large job reads thousands of messages a second.
_types_of: Callable[[Any], Mapping[str, Any]] = functools.cache(get_type_hints)


class TextEnum(Enum):
    """Base of enums whose members are texts in JSON and in sentences."""

    def __str__(self) -> str:
        return str(self.value)


def formerly(name: str) -> dict[str, str]:
    """Metadata of a field that had this name in the version before, whose files are still read.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Slot:
    ...     incarnation: int = dataclasses.field(metadata=formerly("life"))
    >>> read_fields(Slot, {"life": 2})
    Slot(incarnation=2)
    """
    return {_FORMER_NAME: name}


def former_values(values: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """Metadata of a field for which an earlier version wrote these words instead; its files are still read.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Worker:
    ...     state: Literal["leaving"] = dataclasses.field(metadata=former_values({"going": "leaving"}))
    >>> read_fields(Worker, {"state": "going"})
    Worker(state='leaving')
    """
    return {_FORMER_VALUES: values}


def former_names(kind: Any) -> Mapping[str, str]:
    """Present names of the fields of a dataclass that were renamed, by their former names."""
    return _former_names_of(kind)


@functools.cache
def _former_names_of(kind: Any) -> Mapping[str, str]:
    fields = dataclasses.fields(kind)
    return {field.metadata[_FORMER_NAME]: field.name for field in fields if _FORMER_NAME in field.metadata}


def _find_former_values(kind: Any) -> Mapping[str, Mapping[str, str]]:
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_FORMER_VALUES] for field in fields if _FORMER_VALUES in field.metadata}


_former_values_of: Callable[[Any], Mapping[str, Mapping[str, str]]] = functools.cache(_find_former_values)


def renamed(kind: type[Any], fields: Mapping[str, Value]) -> Mapping[str, Value]:
    """The same fields, each under its present name.

    Raises:
        UsageError: One field is given under both of its names.
    """
    names = former_names(kind)
    if not any(name in names for name in fields):
        return fields
    twice = next((old for old, new in names.items() if old in fields and new in fields), None)
    if twice is not None:
        raise UsageError(
            f"{kind.__name__} has {twice!r} and {names[twice]!r}, which are one field; expected one of them"
        )
    return {names.get(name, name): value for name, value in fields.items()}


def as_fields(value: Any) -> dict[str, Any]:
    """The inverse of :func:`read_fields`: what ``json.dumps`` takes of a dataclass, with the text of each enum."""
    # dataclasses.asdict takes five times as long.
    return {name: _plain(getattr(value, name)) for name in _field_names(type(value))}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind(map(_plain, value))
    if isinstance(value, TextEnum):
        return str(value)
    if dataclasses.is_dataclass(kind):
        return as_fields(value)
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _find_field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


_field_names: Callable[[Any], tuple[str, ...]] = functools.cache(_find_field_names)


def read_fields(kind: type[Value], fields: object) -> Value:
    """A ``kind`` made of a JSON object's fields. Those it has defaults for may be missing, unknown ones may not.

    Args:
        kind: A dataclass whose fields are texts, literal texts, a :class:`TextEnum`, numbers, truth values, other such
            dataclasses, tuples of one of these, or ``None``.
        fields: What ``json.loads`` gave.

    Raises:
        UsageError: A field is missing, unknown or of another type, or its value is not accepted by ``kind``.
    """
    if not isinstance(fields, Mapping):
        raise UsageError(f"{show(fields)} is no {kind.__name__}; expected an object with {_names(kind)}")
    types = _types_of(kind)
    fields = renamed(kind, fields)
    for name, present in _former_values_of(kind).items():
        value = fields.get(name)
        if isinstance(value, str) and value in present:
            fields = {**fields, name: present[value]}
    for name in fields:
        if name not in types:
            raise UsageError(f"{kind.__name__} has no field {show(name)}; expected {_names(kind)}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise UsageError(f"{kind.__name__} lacks {field.name!r}; expected {_names(kind)}")
    return kind(**{name: _read(types[name], value, f"{kind.__name__}.{name}") for name, value in fields.items()})


def read_number(value: object, name: str) -> float:
    """A finite number, whole or not; ``name`` is for the message.

    Raises:
        UsageError: It is none.
    """
    # For Python true is a number, and JSON has numbers that no float holds.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return value
    raise UsageError(f"{name} is {show(value)}; expected a number")


def show(value: object) -> str:
    """A value as a message shows it, not longer than a person reads."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


@functools.cache
def _words_of(kind: Any) -> Mapping[str, object] | None:
    """What a text stands for where only some are allowed; ``None`` for any other kind of value."""
    if get_origin(kind) is Literal:
        return {word: word for word in get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, TextEnum):
        return {str(member): member for member in kind}
    return None


def _names(kind: type[Any]) -> str:
    return ", ".join(_types_of(kind)) or "no field"


def _read(kind: Any, value: object, name: str) -> object:
    if kind is float:
        return read_number(value, name)
    if type(value) is kind:
        return value
    if (words := _words_of(kind)) is not None:
        if isinstance(value, str) and value in words:
            return words[value]
        raise UsageError(f"{name} is {show(value)}; expected one of {', '.join(map(repr, words))}")
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{name} is {show(value)}; expected a list")
        return tuple(_read(get_args(kind)[0], item, name) for item in value)
    if get_origin(kind) in (Union, UnionType):
        # Optional is the only union there is.
        return None if value is None else _read(get_args(kind)[0], value, name)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        try:
            return read_fields(kind, value)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    raise UsageError(f"{name} is {show(value)}; expected {_MEANINGS[kind]}")
