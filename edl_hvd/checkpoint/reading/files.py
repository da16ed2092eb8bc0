"""A checkpoint's manifest and files, verified as bytes, where torch may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.document import LARGEST_BYTES
from edl_hvd.checkpoint.format.entries import Stored, stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.reading.catalog import listed_key, read_catalog
from edl_hvd.checkpoint.reading.verification import verified_views
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage import Storage, StoredObject

Tell = Callable[[int, int], None]
# How far long work is: gets what is done and the whole, in the same unit.


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
    try:
        data = storage.read(key, limit_bytes=LARGEST_BYTES)
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is too large for a manifest: {error}") from error
    except ObjectMissingError as error:
        if any(entry.key == key for entry in storage.list(key)):
            # For instance a link that leads nowhere.
            raise CheckpointDamagedError(f"{key} in {storage.url} is listed and cannot be read: {error}") from error
        raise
    try:
        manifest = Manifest.decode(data)
    except UsageError:
        raise
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: {error}") from error
    except StorageError as error:
        raise UnreadableError(f"cannot use {key} in {storage.url}: {error}") from error
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
    try:
        data = storage.read(key, limit_bytes=entry.size_bytes)
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is longer than listed: {error}") from error
    except ObjectMissingError as error:
        refuse_if_removed(storage, manifest.step)
        raise CheckpointDamagedError(f"{key} in {storage.url} is missing: {error}") from error
    try:
        views = verified_views(data, entry, expected)
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: {error}") from error
    return Shard(data, [(expected[stored], view) for stored, view in views.items()])


def refuse_if_removed(storage: Storage, step: int) -> None:
    """A file of a checkpoint is not there. Raises ``ObjectMissingError`` if none of it is, by the job that wrote it."""
    if not read_catalog(storage, step).manifests:
        raise ObjectMissingError(f"the checkpoint of step {step} in {storage.url} was removed while it was read")


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every file of a checkpoint; holds one in memory at a time. Raises as :func:`read_shard` does."""
    stored = stored_by_file(manifest.tensors)
    for name in manifest.files:
        read_shard(storage, manifest, name, stored.get(name, {}))


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
