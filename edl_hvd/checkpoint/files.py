"""A checkpoint's manifest and files, verified as bytes, where torch may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.checksum import checksum
from edl_hvd.checkpoint.manifest import LARGEST_BYTES, Manifest
from edl_hvd.checkpoint.tensor_bytes import check_tensors
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage import Storage

Tell = Callable[[int, int], None]
# How far long work is: gets what is done and the whole, in the same unit.


class UnreadableError(StorageError):
    """There is a manifest, of another version's format; the storage is well."""


@dataclass(frozen=True)
class Listed:
    """A manifest as it is stored: its bytes, and what they say."""

    data: bytes
    manifest: Manifest


def chosen_steps(storage: Storage, step: int | None, every: bool = False) -> list[int]:
    """Steps that are meant, newest first: every listed one, or this one, or the newest.

    Raises:
        ObjectMissingError: None is listed, or not this one; then the message names those there are.
    """
    listed = layout.listed_steps(storage.list(layout.ROOT))
    if not listed:
        raise ObjectMissingError(f"no checkpoint is listed in {storage.url}; expected the URL that a job was given")
    if every or step is None:
        return listed if every else listed[:1]
    if step not in listed:
        there = ", ".join(map(str, listed))
        raise ObjectMissingError(f"no checkpoint of step {step} is listed in {storage.url}; those there are: {there}")
    return [step]


def read_listed(storage: Storage, step: int) -> Listed:
    """The manifest of ``step``.

    Raises:
        ObjectMissingError: There is no such checkpoint.
        CheckpointDamagedError: There is a manifest, but not a whole one.
        UnreadableError: Another version of this package wrote it.
        StorageError: The storage does not answer.
    """
    key = layout.manifest_key(step)
    try:
        data = storage.read(key, limit_bytes=LARGEST_BYTES)
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is too large for a manifest: {error}") from error
    except ObjectMissingError as error:
        if step in layout.listed_steps(storage.list(key)):
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
    return Listed(data, manifest)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """What :func:`read_listed` reads, without its bytes. Raises as that does."""
    return read_listed(storage, step).manifest


def read_shard(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """The verified bytes of one file.

    Raises:
        CheckpointDamagedError: Missing, of another length, or changed.
        ObjectMissingError: The whole checkpoint was removed meanwhile.
        StorageError: The storage does not answer.
    """
    key = layout.folder(manifest.step) + name
    entry = manifest.files[name]
    try:
        data = storage.read(key, limit_bytes=entry.size_bytes)
    except ObjectTooLargeError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is longer than listed: {error}") from error
    except ObjectMissingError as error:
        if not storage.exists(layout.manifest_key(manifest.step)):
            raise ObjectMissingError(
                f"the checkpoint of step {manifest.step} in {storage.url} was removed while it was read"
            ) from error
        raise CheckpointDamagedError(f"{key} in {storage.url} is missing: {error}") from error
    if len(data) != entry.size_bytes:
        raise CheckpointDamagedError(f"{key} in {storage.url} has {len(data)} bytes instead of {entry.size_bytes}")
    if checksum(data) != entry.checksum:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: its checksum is not the manifest's")
    return data


def read_file(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """The same, with the tensors in it compared with what the manifest says of them. Raises as that does."""
    data = read_shard(storage, manifest, name)
    key = layout.folder(manifest.step) + name
    try:
        check_tensors(data, {tensor: one for tensor, one in manifest.tensors.items() if one.file == name})
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is not what the manifest says: {error}") from error
    return data
