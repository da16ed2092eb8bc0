"""From bytes that may be anything to values that were looked at.

Checksums find accidents, but whoever can write to the storage can compute them too. So nothing in a document is
used before its type and range were checked: a text in the place of a number would fail much later, far from here.
All functions raise ``ValueError`` with what was found, where, and what is expected.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection
from typing import Any

LARGEST_NUMBER = 2**63 - 1
# What torch, safetensors and file systems count with.

# Long enough for names and numbers; of lists and objects the beginning.
_REPRESENTATION = reprlib.Repr()
_REPRESENTATION.maxstring = _REPRESENTATION.maxother = _REPRESENTATION.maxlong = 100


def show(value: object) -> str:
    """A value as a message shows it: however large it is, not longer than a person reads."""
    text = _REPRESENTATION.repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def parse(data: bytes, what: str) -> Any:
    """The value of a JSON text in UTF-8 in which no object has a key twice."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"{what} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                # Allowed in JSON, but then of two readers each may see another value.
                raise ValueError(f"{show(key)} stands twice in one object")
            seen.add(key)
    return result


def mapping(value: object, what: str) -> dict[str, Any]:
    """``value`` if it is an object; its keys may be any."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {show(value)}; expected an object")
    return value


def fields(value: object, what: str, names: Collection[str]) -> dict[str, Any]:
    """``value`` if it is an object with exactly these fields."""
    found = mapping(value, what)
    expected = f"expected {', '.join(names)}"
    for name in names:
        if name not in found:
            raise ValueError(f"{what} lacks {name!r}; {expected}")
    for name in found:
        if name not in names:
            raise ValueError(f"{what} has {show(name)} besides; {expected}")
    return found


def whole_number(value: object, what: str, least: int = 0) -> int:
    # For Python true is a number.
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_NUMBER:
        return value
    raise ValueError(f"{what} is {show(value)}; expected a whole number from {least} to {LARGEST_NUMBER}")


def text(value: object, what: str, most: int) -> str:
    if isinstance(value, str) and len(value) <= most:
        return value
    raise ValueError(f"{what} is {show(value)}; expected a text of at most {most} characters")


def one_of(value: object, what: str, accepted: Collection[str], shown: str | None = None) -> str:
    """``value`` if it is one of these texts; the message lists them, or says ``shown``."""
    if isinstance(value, str) and value in accepted:
        return value
    raise ValueError(f"{what} is {show(value)}; expected one of {shown or ', '.join(sorted(accepted))}")


def shape(value: object, what: str) -> list[int]:
    """``value`` if it is a list of lengths."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {show(value)}; expected a list of whole numbers")
    for length in value:
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= LARGEST_NUMBER:
            raise ValueError(f"{what} is {show(value)}; expected whole numbers from 0 to {LARGEST_NUMBER}")
    return value


def bytes_of_shape(lengths: list[int], element_bytes: int, what: str) -> int:
    """Bytes of a tensor, which are no more than can be counted, also without its empty dimensions."""
    size_bytes = element_bytes
    for length in lengths:
        size_bytes *= max(length, 1)
        if size_bytes > LARGEST_NUMBER:
            raise ValueError(f"{what} would have more bytes than can be counted with shape {show(lengths)}")
    return 0 if 0 in lengths else size_bytes
