"""JSON documents in storage: ``{"format": 3, "checksum": ..., "content": {...}}``, written and read.

The checksum covers the content, so that a flipped bit in a number is noticed although the JSON still parses.

Checksums find accidents, but whoever can write to the storage can compute them too. So nothing in a document is
used before its type and range were checked: a text in the place of a number would fail much later, far from here.
The functions that check a value raise ``ValueError`` with what was found, where, and what is expected.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any

from edl_hvd.checkpoint.format.checksum import checksum, is_checksum
from edl_hvd.errors import StorageError

FORMAT = 3

_FORMER_FORMATS = {
    1: "that of development versions from before tensors were split by rows",
    2: "that of development versions from before checkpoints had metrics",
}

LARGEST_BYTES = 256 * 1024 * 1024
# A million tensors, or as much plain state; no reader takes in more, and no writer writes it.

LARGEST_NUMBER = 2**63 - 1
# What torch, safetensors and file systems count with.

# Long enough for names and numbers; of lists and objects the beginning.
_REPRESENTATION = reprlib.Repr()
_REPRESENTATION.maxstring = _REPRESENTATION.maxother = _REPRESENTATION.maxlong = 100


def encode(fields_by_name: Mapping[str, Any]) -> bytes:
    """Raises ``StorageError`` if the document would be too large."""
    content = _canonical(fields_by_name)
    data = b'{"format":%d,"checksum":"%s","content":%s}\n' % (FORMAT, checksum(content).encode(), content)
    if len(data) > LARGEST_BYTES:
        raise StorageError(
            f"what is not tensors would take {len(data)} bytes as JSON; expected at most {LARGEST_BYTES}, keep large "
            "values of the state as tensors"
        )
    return data


def decode(data: bytes) -> dict[str, Any]:
    """The content of a document of this format whose checksum is right.

    Raises ``ValueError`` if this is not a whole document, ``StorageError`` if it is of another format.
    """
    document = mapping(parse(data, "the document"), "the document")
    if "format" not in document:
        raise ValueError("the document lacks 'format'")
    number = whole_number(document["format"], "'format' of the document")
    if number != FORMAT:
        # Before anything else is looked at: nothing is known about other formats.
        known = f" ({_FORMER_FORMATS[number]})" if number in _FORMER_FORMATS else ""
        raise StorageError(
            f"it has format {show(number)}{known}, this version of edl_hvd reads format {FORMAT}; "
            "use the version that wrote it"
        )
    fields(document, "the document", ("format", "checksum", "content"))
    expected = checksum_text(document["checksum"], "'checksum' of the document")
    content = mapping(document["content"], "its content")
    try:
        found = checksum(_canonical(content))
    except RecursionError as error:
        raise ValueError("its content is nested too deeply") from error
    if found != expected:
        raise ValueError("its checksum does not match its content")
    return content


def _canonical(value: Mapping[str, Any]) -> bytes:
    # Python writes the shortest text that reads back as the same float, so reading and writing again
    # gives the same bytes; ``json`` keeps the order of keys.
    return json.dumps(value, separators=(",", ":"), default=_fields_of).encode()


def _fields_of(entry: object) -> dict[str, Any]:
    # ``dataclasses.asdict`` copies every number and text first, which takes the training's time several times over.
    if is_dataclass(entry):
        return vars(entry)
    raise TypeError(f"{show(entry)} is no JSON value")


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


def checksum_text(value: object, what: str) -> str:
    """``value`` if it is what ``checksum`` gives."""
    if isinstance(value, str) and is_checksum(value):
        return value
    raise ValueError(f"{what} is {show(value)}; expected 'xxh3-128:' and 32 hexadecimal digits")


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
