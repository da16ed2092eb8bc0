"""Reading a checkpoint's objects and believing nothing that does not verify."""

from __future__ import annotations

import torch

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.manifest import Manifest
from edl_hvd.checkpoint.shards import DTYPE_NAMES, checksum, checksum_of, unpack
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, StorageError
from edl_hvd.storage import Storage


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The manifest of ``step``.

    Raises:
        ObjectMissingError: There is no such checkpoint.
        CheckpointDamagedError: There is a manifest, but not a whole one.
        StorageError: Another version of this package wrote it, or the storage does not answer.
    """
    key = layout.manifest_key(step)
    data = storage.read(key)
    try:
        manifest = Manifest.decode(data)
    except ValueError as error:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: {error}") from error
    except StorageError as error:
        raise StorageError(f"cannot use {key} in {storage.url}: {error}") from error
    if manifest.step != step:
        raise CheckpointDamagedError(f"{key} in {storage.url} belongs to step {manifest.step}, not to {step}")
    return manifest


def read_shard(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """The verified bytes of one shard file.

    Raises:
        CheckpointDamagedError: Missing, of another length, or changed.
        ObjectMissingError: The whole checkpoint was removed meanwhile.
    """
    key = layout.folder(manifest.step) + name
    entry = manifest.files[name]
    try:
        data = storage.read(key)
    except ObjectMissingError as error:
        if not storage.exists(layout.manifest_key(manifest.step)):
            raise
        raise CheckpointDamagedError(f"{key} in {storage.url} is missing") from error
    if len(data) != entry.size_bytes:
        raise CheckpointDamagedError(f"{key} in {storage.url} has {len(data)} bytes instead of {entry.size_bytes}")
    if checksum(data) != entry.checksum:
        raise CheckpointDamagedError(f"{key} in {storage.url} is damaged: its checksum is not the manifest's")
    return data


def read_tensors(storage: Storage, manifest: Manifest, name: str) -> dict[str, torch.Tensor]:
    """The verified tensors of one shard file. Raises as ``read_shard`` does."""
    expected = {tensor: entry for tensor, entry in manifest.tensors.items() if entry.file == name}
    try:
        tensors = unpack(read_shard(storage, manifest, name))
    except ValueError as error:
        raise CheckpointDamagedError(f"{name} of step {manifest.step} in {storage.url}: {error}") from error
    if tensors.keys() != expected.keys():
        raise CheckpointDamagedError(f"{name} of step {manifest.step} in {storage.url} holds other tensors than listed")
    for tensor, entry in expected.items():
        found = tensors[tensor]
        if (
            DTYPE_NAMES.get(found.dtype) != entry.dtype
            or list(found.shape) != entry.shape
            or checksum_of(found) != entry.checksum
        ):
            raise CheckpointDamagedError(
                f"tensor {tensor!r} of step {manifest.step} in {storage.url} is {found.dtype} {list(found.shape)}; "
                f"the manifest lists {entry.dtype} {entry.shape} with checksum {entry.checksum}"
            )
    return tensors


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every shard and compare it with the manifest; holds one shard in memory at a time.

    Raises:
        CheckpointDamagedError: Something is missing or changed.
    """
    for name in manifest.files:
        read_shard(storage, manifest, name)
