"""A checkpoint's manifest and files, verified as bytes, where torch may be missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.checksum import CHUNK_BYTES, chunks
from edl_hvd.checkpoint.format.document import LARGEST_BYTES
from edl_hvd.checkpoint.format.entries import FileEntry, Stored, stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.format.safetensors import HeaderEntry
from edl_hvd.checkpoint.reading.catalog import listed_key, read_catalog
from edl_hvd.checkpoint.reading.verification import damaged_chunks, raise_damaged, verified_header, verified_views
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage import Storage, StoredObject

_LOG = logging.getLogger(__name__)

Tell = Callable[[int, int], None]
# How far long work is: gets what is done and the whole, in the same unit.

Content = TypeVar("Content")


def read_again_if_damaged(what: str, read: Callable[[], Content]) -> Content:
    """What ``read`` returns, at its second attempt if the first finds damage: a bit may have flipped on the way.

    Args:
        what: What is read, for the log.
        read: Function that reads and verifies; raises ``ValueError`` where something is damaged.

    Raises:
        ValueError: It is damaged both times.
    """
    try:
        return read()
    except UsageError:
        raise
    except ValueError as error:
        reason = str(error)  # the error itself holds what was read, which may be large
    _LOG.warning("%s is read once more, because it came damaged: %s", what, reason)
    return read()


class UnreadableError(StorageError):
    """There is a manifest, of another version's format; the storage is well."""


@dataclass(frozen=True)
class Listed:
    """A manifest as it is stored: where, its bytes, and what they say."""

    key: str
    data: bytes
    manifest: Manifest


def read_listed(storage: Storage, step: int) -> Listed:
    """The manifest of ``step``.

    Raises:
        ObjectMissingError: There is no such checkpoint.
        CheckpointDamagedError: There is a manifest, but not a whole one.
        UnreadableError: Another version of this package wrote it.
        StorageError: The storage does not answer.
    """
    return read_listed_key(storage, step, listed_key(storage, step))


def read_listed_key(storage: Storage, step: int, key: str) -> Listed:
    """The manifest of ``step`` that is known to be listed under ``key``. Raises as :func:`read_listed` does."""

    def read() -> tuple[bytes, Manifest]:
        data = storage.read(key, limit_bytes=LARGEST_BYTES)
        try:
            return data, Manifest.decode(data)
        except StorageError as error:
            raise UnreadableError(f"cannot use {key} in {storage.url}: {error}") from error

    try:
        data, manifest = read_again_if_damaged(key, read)
    except UsageError:
        raise
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is too large for a manifest: {error}") from error
    except ObjectMissingError as error:
        if any(entry.key == key for entry in storage.list(key)):
            # For instance a link that leads nowhere.
            raise CheckpointDamagedError(f"{key} in {storage.url} is listed and cannot be read: {error}") from error
        raise
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: {error}") from error
    if manifest.step != step:
        raise CheckpointDamagedError(f"{key} in {storage.url} belongs to step {manifest.step}, not to {step}")
    return Listed(key, data, manifest)


@dataclass(frozen=True)
class Shard:
    """A verified file: its bytes, and the elements of each piece in it."""

    data: bytes
    pieces: list[tuple[Stored, memoryview]]


def read_shard(storage: Storage, manifest: Manifest, name: str, expected: Mapping[str, Stored]) -> Shard:
    """One file, every byte of it verified.

    Args:
        storage: Storage that has the checkpoint.
        manifest: Manifest of the checkpoint.
        name: Name of the file.
        expected: Pieces in it, from ``stored_by_file``.

    Raises:
        CheckpointDamagedError: Missing, of another length, or changed.
        ObjectMissingError: The whole checkpoint was removed meanwhile.
        StorageError: The storage does not answer.
    """
    key = object_keys.folder(manifest.step) + name
    entry = manifest.files[name]

    def read() -> Shard:
        data = storage.read(key, limit_bytes=entry.size_bytes)
        return Shard(data, [(expected[piece], view) for piece, view in verified_views(data, entry, expected).items()])

    with _damage_named(storage, manifest.step, key):
        return read_again_if_damaged(key, read)


def check_shard(
    storage: Storage, manifest: Manifest, name: str, expected: Mapping[str, Stored],
    between: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Read one file, every byte of it verified, and keep nothing: takes 16 MiB of memory.

    Args:
        between: Called before each read; may wait, or raise to give up.

    Raises as :func:`read_shard` does.
    """
    key = object_keys.folder(manifest.step) + name
    entry = manifest.files[name]

    def fetch(start: int, size_bytes: int) -> memoryview:
        between()
        buffer = bytearray(size_bytes)
        found = storage.read_into(key, start, buffer) if size_bytes else 0
        if found < size_bytes:
            raise ValueError(f"it has {start + found} bytes instead of {entry.size_bytes}")
        return memoryview(buffer)

    def read() -> None:
        header = verified_header(fetch(0, entry.header_bytes), entry, expected)
        if storage.read_into(key, entry.size_bytes, bytearray(1)):
            raise ValueError(f"it is longer than the {entry.size_bytes} bytes listed")
        damaged = []
        for group in _groups(entry, header):
            begin = group[0].start
            data = fetch(begin, group[-1].end - begin)
            for chunk in group:
                elements = data[chunk.start - begin : chunk.end - begin]
                place = header[chunk.name].start
                damaged += damaged_chunks(elements, expected[chunk.name], chunk.start - place, entry.chunk_bytes, place)
        raise_damaged(damaged)

    with _damage_named(storage, manifest.step, key):
        read_again_if_damaged(key, read)


@dataclass(frozen=True)
class _Chunk:
    """Elements of one piece that share a checksum: which bytes of the file they are."""

    name: str
    start: int
    end: int


def _groups(entry: FileEntry, header: Mapping[str, HeaderEntry]) -> Iterator[list[_Chunk]]:
    """The chunks of a file in their order, neighbours together as long as they are no more than a large chunk."""
    group: list[_Chunk] = []
    for name, found in sorted(header.items(), key=lambda item: item[1].start):
        for start, end in chunks(found.end - found.start, entry.chunk_bytes):
            chunk = _Chunk(name, found.start + start, found.start + end)
            if group and chunk.end - group[0].start > CHUNK_BYTES:
                yield group
                group = []
            group.append(chunk)
    if group:
        yield group


@contextmanager
def _damage_named(storage: Storage, step: int, key: str) -> Iterator[None]:
    """What reading the file ``key`` raises, as :func:`read_shard` raises it."""
    try:
        yield
    except UsageError:
        raise
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is longer than listed: {error}") from error
    except ObjectMissingError as error:
        refuse_if_removed(storage, step)
        raise CheckpointDamagedError(f"{key} in {storage.url} is missing: {error}") from error
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: {error}") from error


def refuse_if_removed(storage: Storage, step: int) -> None:
    """A file of a checkpoint is not there. Raises ``ObjectMissingError`` if none of it is, by the job that wrote it."""
    if not read_catalog(storage, step).manifests:
        raise ObjectMissingError(f"the checkpoint of step {step} in {storage.url} was removed while it was read")


def verify(storage: Storage, manifest: Manifest, between: Callable[[], None] = lambda: None) -> None:
    """Read every file of a checkpoint, and keep nothing. Raises as :func:`read_shard` does.

    Args:
        between: Called before each read; may wait, or raise to give up.
    """
    stored = stored_by_file(manifest.tensors)
    for name in manifest.files:
        check_shard(storage, manifest, name, stored.get(name, {}), between)


def missing_or_short(manifest: Manifest, objects: Iterable[StoredObject]) -> dict[str, str]:
    """By name, what is wrong with files that a listing does not have, or not in their length; reads nothing."""
    sizes_bytes = {entry.key: entry.size_bytes for entry in objects}
    wrong = {}
    for name, entry in manifest.files.items():
        key = object_keys.folder(manifest.step) + name
        if key not in sizes_bytes:
            wrong[name] = f"{key} is missing"
        elif sizes_bytes[key] != entry.size_bytes:
            wrong[name] = f"{key} has {sizes_bytes[key]} bytes instead of {entry.size_bytes}"
    return wrong
