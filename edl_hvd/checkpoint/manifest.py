"""The JSON documents of a checkpoint: one part per rank while it is written, one manifest when it is done.

Both are ``{"format": 1, "checksum": ..., "content": {...}}``; the checksum covers the content, so that a
flipped bit in a number is noticed although the JSON still parses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edl_hvd.checkpoint.layout import is_shard_name
from edl_hvd.checkpoint.shards import checksum
from edl_hvd.errors import StorageError

FORMAT = 1


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
        """Raises ``ValueError`` if this is not a whole part."""
        try:
            return cls(**_with_entries(_decode(data)))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a part of a checkpoint: {error}") from error


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
        try:
            manifest = cls(**_with_entries(_decode(data)))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error}") from error
        strangers = [name for name in manifest.files if not is_shard_name(name)]
        homeless = [name for name, entry in manifest.tensors.items() if entry.file not in manifest.files]
        if strangers or homeless:
            raise ValueError(f"not a manifest: unexpected files {strangers} or tensors without a file {homeless}")
        return manifest


def _encode(content: Mapping[str, Any]) -> bytes:
    document = {"format": FORMAT, "checksum": checksum(_canonical(content)), "content": content}
    return _canonical(document) + b"\n"


def _decode(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("content"), dict):
        raise ValueError("not a document of a checkpoint")
    if document.get("format") != FORMAT:
        raise StorageError(
            f"it has format {document.get('format')!r}, this version of edl_hvd reads format {FORMAT}; "
            "use the version that wrote it"
        )
    content: dict[str, Any] = document["content"]
    if document.get("checksum") != checksum(_canonical(content)):
        raise ValueError("its checksum does not match its content")
    return content


def _with_entries(content: dict[str, Any]) -> dict[str, Any]:
    return {
        **content,
        "files": {name: FileEntry(**entry) for name, entry in content.get("files", {}).items()},
        "tensors": {name: TensorEntry(**entry) for name, entry in content.get("tensors", {}).items()},
    }


def _canonical(value: Mapping[str, Any]) -> bytes:
    # Python writes the shortest text that reads back as the same float, so reading and writing again
    # gives the same bytes; ``json`` keeps the order of keys.
    return json.dumps(value, separators=(",", ":")).encode()
