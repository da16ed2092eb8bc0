"""Reading a checkpoint's objects and believing nothing that does not verify."""

from __future__ import annotations

import torch

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.decoding import show
from edl_hvd.checkpoint.files import read_shard
from edl_hvd.checkpoint.manifest import Manifest
from edl_hvd.checkpoint.shards import DTYPE_NAMES, checksum_of, unpack
from edl_hvd.errors import CheckpointDamagedError
from edl_hvd.storage import Storage


def read_tensors(storage: Storage, manifest: Manifest, name: str) -> dict[str, torch.Tensor]:
    """The verified tensors of one shard file. Raises as ``read_shard`` does."""
    where = f"{layout.folder(manifest.step)}{name} in {storage.url}"
    expected = {tensor: entry for tensor, entry in manifest.tensors.items() if entry.file == name}
    data = read_shard(storage, manifest, name)
    try:
        tensors = unpack(data)
    except ValueError as error:
        raise CheckpointDamagedError(f"{where}: {error}") from error
    for tensor in [*expected, *tensors]:
        if tensor not in tensors:
            raise CheckpointDamagedError(f"{where} lacks {show(tensor)}, which the manifest lists")
        if tensor not in expected:
            raise CheckpointDamagedError(f"{where} has a tensor besides those listed: {show(tensor)}")
    for tensor, entry in expected.items():
        found = tensors[tensor]
        dtype, shape, found_checksum = DTYPE_NAMES.get(found.dtype), list(found.shape), checksum_of(found)
        if (dtype, shape, found_checksum) != (entry.dtype, entry.shape, entry.checksum):
            raise CheckpointDamagedError(
                f"tensor {show(tensor)} of {where} is {dtype} {show(shape)} with checksum {found_checksum}; "
                f"the manifest lists {entry.dtype} {show(entry.shape)} with checksum {entry.checksum}"
            )
    return tensors


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every shard and compare it with the manifest; holds one shard in memory at a time.

    Raises:
        CheckpointDamagedError: Something is missing or changed.
    """
    for name in manifest.files:
        read_shard(storage, manifest, name)
