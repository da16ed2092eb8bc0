"""The JSON documents of a checkpoint: one part per rank while it is written, one manifest when it is done.

Both are ``{"format": 1, "checksum": ..., "content": {...}}``; the checksum covers the content, so that a
flipped bit in a number is noticed although the JSON still parses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from edl_hvd.checkpoint import decoding
from edl_hvd.checkpoint.checksum import checksum
from edl_hvd.checkpoint.decoding import show
from edl_hvd.checkpoint.element_types import ELEMENT_TYPES
from edl_hvd.checkpoint.layout import is_attempt_name, is_shard_name
from edl_hvd.errors import StorageError

FORMAT = 1

LARGEST_BYTES = 256 * 1024 * 1024
# A million tensors, or as much plain state; no reader takes in more, and no writer writes it.

RESERVED_NAME = "__metadata__"
# What the safetensors format keeps for itself.

_LONGEST_WORD = 100
# Of a version, a date or an attempt.

_CHECKSUM = re.compile(r"xxh3-128:[0-9a-f]{32}")


@dataclass(frozen=True)
class FileEntry:
    """A shard file: its length and the checksum of all its bytes."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: the shard that has it, torch's name of its type, its shape, the checksum of its elements."""

    file: str
    dtype: str
    shape: list[int]
    checksum: str


@dataclass(frozen=True)
class Part:
    """What one rank wrote. ``failure`` says why it wrote nothing, ``None`` if all is well."""

    rank: int
    step: int
    epoch: int
    samples: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    failure: str | None = None

    def encode(self) -> bytes:
        return _encode(asdict(self))

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
            files=(files := _files(content["files"])),
            tensors=_tensors(content["tensors"], files),
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
        return _encode(asdict(self))

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
            files=(files := _files(content["files"])),
            tensors=_tensors(content["tensors"], files),
        )


def _encode(content: Mapping[str, Any]) -> bytes:
    document = {"format": FORMAT, "checksum": checksum(_canonical(content)), "content": content}
    data = _canonical(document) + b"\n"
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
    if decoding.whole_number(document["format"], "'format' of the document") != FORMAT:
        # Before anything else is looked at: nothing is known about other formats.
        raise StorageError(
            f"it has format {show(document['format'])}, this version of edl_hvd reads format {FORMAT}; "
            "use the version that wrote it"
        )
    decoding.fields(document, "the document", ("format", "checksum", "content"))
    expected = _checksum(document["checksum"], "'checksum' of the document")
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


def _number(content: Mapping[str, object], name: str, least: int = 0) -> int:
    return decoding.whole_number(content[name], f"{name!r} of its content", least)


def _checksum(value: object, what: str) -> str:
    if isinstance(value, str) and _CHECKSUM.fullmatch(value):
        return value
    raise ValueError(f"{what} is {show(value)}; expected 'xxh3-128:' and 32 hexadecimal digits")


def _files(value: object) -> dict[str, FileEntry]:
    entries = decoding.mapping(value, "'files' of its content")
    for name in entries:
        # Names are joined to a path: only names that the writer gives are believed.
        if not is_shard_name(name) or len(name) > _LONGEST_WORD * 2:
            raise ValueError(f"it lists unexpected files: {show(name)} is no shard's name")
    return {name: _file(entry, f"file {name!r}") for name, entry in entries.items()}


def _file(value: object, what: str) -> FileEntry:
    entry = decoding.fields(value, what, ("size_bytes", "checksum"))
    return FileEntry(
        decoding.whole_number(entry["size_bytes"], f"'size_bytes' of {what}"),
        _checksum(entry["checksum"], f"'checksum' of {what}"),
    )


def _tensors(value: object, files: Mapping[str, FileEntry]) -> dict[str, TensorEntry]:
    """The tensors, all of which have their place in one of the files."""
    entries = decoding.mapping(value, "'tensors' of its content")
    if RESERVED_NAME in entries:
        raise ValueError(f"tensor {RESERVED_NAME!r} has the one name that no tensor can have")
    tensors = {name: _tensor(entry, f"tensor {show(name)}", files) for name, entry in entries.items()}
    needed_bytes = dict.fromkeys(files, 0)
    for name, entry in tensors.items():
        element_bytes = ELEMENT_TYPES[entry.dtype].size_bytes
        needed_bytes[entry.file] += decoding.bytes_of_shape(entry.shape, element_bytes, f"tensor {show(name)}")
    for name, size_bytes in needed_bytes.items():
        if size_bytes > files[name].size_bytes:
            raise ValueError(f"file {name!r} has {files[name].size_bytes} bytes, its tensors need {size_bytes}")
    return tensors


def _tensor(value: object, what: str, files: Mapping[str, FileEntry]) -> TensorEntry:
    entry = decoding.fields(value, what, ("file", "dtype", "shape", "checksum"))
    return TensorEntry(
        file=decoding.one_of(entry["file"], f"'file' of {what}", files, "the manifest's files"),
        dtype=decoding.one_of(entry["dtype"], f"'dtype' of {what}", ELEMENT_TYPES),
        shape=decoding.shape(entry["shape"], f"'shape' of {what}"),
        checksum=_checksum(entry["checksum"], f"'checksum' of {what}"),
    )


def _canonical(value: Mapping[str, Any]) -> bytes:
    # Python writes the shortest text that reads back as the same float, so reading and writing again
    # gives the same bytes; ``json`` keeps the order of keys.
    return json.dumps(value, separators=(",", ":")).encode()
