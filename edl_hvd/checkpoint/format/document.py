"""JSON documents in storage: ``{"format": 3, "checksum": ..., "content": {...}}``.

The checksum covers the content, so that a flipped bit in a number is noticed although the JSON still parses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edl_hvd.checkpoint import decoding
from edl_hvd.checkpoint.checksum import checksum
from edl_hvd.checkpoint.decoding import show
from edl_hvd.checkpoint.entries import FileEntry, Piece, TensorEntry, decode_checksum
from edl_hvd.errors import StorageError

FORMAT = 3

_FORMER_FORMATS = {
    1: "that of development versions from before tensors were split by rows",
    2: "that of development versions from before checkpoints had metrics",
}

LARGEST_BYTES = 256 * 1024 * 1024
# A million tensors, or as much plain state; no reader takes in more, and no writer writes it.


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
    document = decoding.mapping(decoding.parse(data, "the document"), "the document")
    if "format" not in document:
        raise ValueError("the document lacks 'format'")
    number = decoding.whole_number(document["format"], "'format' of the document")
    if number != FORMAT:
        # Before anything else is looked at: nothing is known about other formats.
        known = f" ({_FORMER_FORMATS[number]})" if number in _FORMER_FORMATS else ""
        raise StorageError(
            f"it has format {show(number)}{known}, this version of edl_hvd reads format {FORMAT}; "
            "use the version that wrote it"
        )
    decoding.fields(document, "the document", ("format", "checksum", "content"))
    expected = decode_checksum(document["checksum"], "'checksum' of the document")
    content = decoding.mapping(document["content"], "its content")
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
    if isinstance(entry, FileEntry | TensorEntry | Piece):
        return vars(entry)
    raise TypeError(f"{show(entry)} is no JSON value")
