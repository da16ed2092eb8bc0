"""The documents of a checkpoint: one part per rank while it is written, one manifest when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from edl_hvd.checkpoint.format import document
from edl_hvd.checkpoint.format.document import LARGEST_BYTES, decode, encode, show
from edl_hvd.checkpoint.format.entries import FileEntry, TensorEntry, decode_files, decode_tensors
from edl_hvd.checkpoint.format.object_keys import is_attempt_name

_DIGEST = 16  # hexadecimal digits

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
        return encode(vars(self))

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Read a part.

        Raises:
            ValueError: This is not a whole one.
            StorageError: It is of another format.
        """
        content = document.fields(decode(data), "its content", _names(cls))
        failure = content["failure"]
        return cls(
            rank=_number(content, "rank"),
            step=_number(content, "step"),
            epoch=_number(content, "epoch"),
            samples=_number(content, "samples"),
            files=(files := decode_files(content["files"])),
            tensors=decode_tensors(content["tensors"], files, whole=False),
            digests=_digests(content["digests"]),
            failure=None if failure is None else document.text(failure, "'failure' of its content", LARGEST_BYTES),
        )


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, complete.

    Attributes:
        attempt: Name of the attempt that wrote it.
        step, epoch, samples: Progress of the job, see ``Snapshot``.
        metrics: Values that had been reported last when it was written, by name.
        world_size: Number of ranks that wrote it; it can be restored by any number.
        created: UTC time in ISO 8601 form, for people.
        versions: Versions of edl_hvd and torch.
        plain: Plain state of the snapshot.
        files: Shards by file name.
        tensors: Tensors by name, in the snapshot's order.
    """

    attempt: str
    step: int
    epoch: int
    samples: int
    metrics: dict[str, float]
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
        return encode(vars(self))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: This is not a whole one.
            StorageError: It is of another format.
        """
        content = document.fields(decode(data), "its content", _names(cls))
        attempt, versions = content["attempt"], document.mapping(content["versions"], "'versions' of its content")
        if not isinstance(attempt, str) or not is_attempt_name(attempt):
            raise ValueError(f"'attempt' of its content is {show(attempt)}; expected letters, digits and '_.-'")
        return cls(
            attempt=attempt,
            step=_number(content, "step"),
            epoch=_number(content, "epoch"),
            samples=_number(content, "samples"),
            metrics=_metrics(content["metrics"]),
            world_size=_number(content, "world_size", least=1),
            created=document.text(content["created"], "'created' of its content", _LONGEST_WORD),
            versions={
                name: document.text(version, f"{show(name)} in 'versions' of its content", _LONGEST_WORD)
                for name, version in versions.items()
            },
            plain=document.mapping(content["plain"], "'plain' of its content"),
            files=(files := decode_files(content["files"])),
            tensors=decode_tensors(content["tensors"], files, whole=True),
        )


def _names(kind: type[Part] | type[Manifest]) -> list[str]:
    return [field.name for field in fields(kind)]


def _digests(value: object) -> dict[str, str]:
    digests = document.mapping(value, "'digests' of its content")
    return {name: document.text(digest, f"digest {show(name)}", _DIGEST) for name, digest in digests.items()}


def _metrics(value: object) -> dict[str, float]:
    metrics = document.mapping(value, "'metrics' of its content")
    for name, measured in metrics.items():
        if not isinstance(measured, float):
            raise ValueError(f"{show(name)} in 'metrics' of its content is {show(measured)}; expected a float")
    return metrics


def _number(content: Mapping[str, object], name: str, least: int = 0) -> int:
    return document.whole_number(content[name], f"{name!r} of its content", least)
