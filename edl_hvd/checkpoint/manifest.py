"""The JSON documents of a checkpoint: one part per rank while it is written, one manifest when it is done.

Both are ``{"format": 2, "checksum": ..., "content": {...}}``; the checksum covers the content, so that a
flipped bit in a number is noticed although the JSON still parses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from edl_hvd.checkpoint import decoding
from edl_hvd.checkpoint.checksum import checksum
from edl_hvd.checkpoint.decoding import show
from edl_hvd.checkpoint.entries import FileEntry, Piece, TensorEntry, decode_checksum, decode_files, decode_tensors
from edl_hvd.checkpoint.layout import is_attempt_name
from edl_hvd.errors import StorageError

FORMAT = 2

_FORMER_FORMATS = {1: "that of development versions from before tensors were split by rows"}

_DIGEST = 16  # hexadecimal digits
LARGEST_BYTES = 256 * 1024 * 1024
# A million tensors, or as much plain state; no reader takes in more, and no writer writes it.

_LONGEST_WORD = 100
# Of a version or a date.


@dataclass(frozen=True)
class Part:
    """What one rank wrote, of each tensor its own pieces, and digests of all that it holds, see ``audit.py``.

    ``failure`` says why it wrote nothing, ``None`` if it did.
    """

    rank: int
    step: int
    epoch: int
    samples: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    digests: dict[str, str]
    failure: str | None = None

    def encode(self) -> bytes:
        return _encode(vars(self))

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Raises ``ValueError`` if this is not a whole part, ``StorageError`` if it is of another format."""
        content = decoding.fields(_decode(data), "its content", _names(cls))
        failure = content["failure"]
        return cls(
            rank=_number(content, "rank"),
            step=_number(content, "step"),
            epoch=_number(content, "epoch"),
            samples=_number(content, "samples"),
            files=(files := decode_files(content["files"])),
            tensors=decode_tensors(content["tensors"], files, whole=False),
            digests=_digests(content["digests"]),
            failure=None if failure is None else decoding.text(failure, "'failure' of its content", LARGEST_BYTES),
        )


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, complete.

    Attributes:
        attempt: The attempt that wrote it.
        step, epoch, samples: Progress of the job, see ``Snapshot``.
        world_size: Ranks that wrote it; it can be restored by any number.
        created: UTC time in ISO 8601 form, for people.
        versions: Of edl_hvd and torch.
        plain: The snapshot's plain state.
        files: Shards by file name.
        tensors: Tensors by name, in the snapshot's order.
    """

    attempt: str
    step: int
    epoch: int
    samples: int
    world_size: int
    created: str
    versions: dict[str, str]
    plain: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(entry.size_bytes for entry in self.files.values())

    def encode(self) -> bytes:
        return _encode(vars(self))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises ``ValueError`` if this is not a whole manifest, ``StorageError`` if it is of another format."""
        content = decoding.fields(_decode(data), "its content", _names(cls))
        attempt, versions = content["attempt"], decoding.mapping(content["versions"], "'versions' of its content")
        if not isinstance(attempt, str) or not is_attempt_name(attempt):
            raise ValueError(f"'attempt' of its content is {show(attempt)}; expected letters, digits and '_.-'")
        return cls(
            attempt=attempt,
            step=_number(content, "step"),
            epoch=_number(content, "epoch"),
            samples=_number(content, "samples"),
            world_size=_number(content, "world_size", least=1),
            created=decoding.text(content["created"], "'created' of its content", _LONGEST_WORD),
            versions={
                name: decoding.text(version, f"{show(name)} in 'versions' of its content", _LONGEST_WORD)
                for name, version in versions.items()
            },
            plain=decoding.mapping(content["plain"], "'plain' of its content"),
            files=(files := decode_files(content["files"])),
            tensors=decode_tensors(content["tensors"], files, whole=True),
        )


def _encode(fields_by_name: Mapping[str, Any]) -> bytes:
    content = _canonical(fields_by_name)
    data = b'{"format":%d,"checksum":"%s","content":%s}\n' % (FORMAT, checksum(content).encode(), content)
    if len(data) > LARGEST_BYTES:
        raise StorageError(
            f"what is not tensors would take {len(data)} bytes as JSON; expected at most {LARGEST_BYTES}, keep large "
            "values of the state as tensors"
        )
    return data


def _decode(data: bytes) -> object:
    """The content of a document of this format whose checksum is right."""
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


def _names(kind: type[Part] | type[Manifest]) -> list[str]:
    return [field.name for field in fields(kind)]


def _digests(value: object) -> dict[str, str]:
    digests = decoding.mapping(value, "'digests' of its content")
    return {name: decoding.text(digest, f"digest {decoding.show(name)}", _DIGEST) for name, digest in digests.items()}


def _number(content: Mapping[str, object], name: str, least: int = 0) -> int:
    return decoding.whole_number(content[name], f"{name!r} of its content", least)


def _canonical(value: Mapping[str, Any]) -> bytes:
    # Python writes the shortest text that reads back as the same float, so reading and writing again
    # gives the same bytes; ``json`` keeps the order of keys.
    return json.dumps(value, separators=(",", ":"), default=_fields_of).encode()


def _fields_of(entry: object) -> dict[str, Any]:
    # ``dataclasses.asdict`` copies every number and text first, which takes the training's time several times over.
    if isinstance(entry, FileEntry | TensorEntry | Piece):
        return vars(entry)
    raise TypeError(f"{show(entry)} is no JSON value")
