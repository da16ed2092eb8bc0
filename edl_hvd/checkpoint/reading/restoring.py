"""From storage back to a snapshot."""

from __future__ import annotations

from collections.abc import Callable

import torch

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.format.shards import DTYPES
from edl_hvd.checkpoint.format.snapshot import Snapshot
from edl_hvd.checkpoint.reading.catalog import read_catalog
from edl_hvd.checkpoint.reading.files import Listed, missing_or_short, read_listed, read_shard
from edl_hvd.checkpoint.reading.spans import empty_tensors, read_spans, spans_of
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, StorageError
from edl_hvd.events import CheckpointDamaged, Event
from edl_hvd.storage import Storage

_PASSES = 3
# A pass finds nothing only if retention removed all it had listed; that fast a writer is a mistake.


def steps(storage: Storage) -> list[int]:
    """Steps of the listed checkpoints, newest first."""
    return read_catalog(storage).steps


def restore(storage: Storage, step: int) -> Snapshot:
    """The snapshot that was checkpointed at ``step``, verified, into a world of any size.

    Called by any rank; not collective; blocks while it reads. Elements are read into their tensors: beside those it
    takes what the storage takes for a transfer, and 16 MiB.

    Raises:
        ObjectMissingError: No checkpoint of that step is listed.
        CheckpointDamagedError: It is listed and does not verify.
        StorageError: The storage does not answer, or another version wrote the checkpoint.
    """
    manifest = usable_manifest(storage, step).manifest
    tensors = empty_tensors(manifest)
    read_spans(storage, manifest, spans_of(manifest), tensors)
    return snapshot_from(manifest, tensors)


def usable_manifest(storage: Storage, step: int) -> Listed:
    """The manifest of a checkpoint whose files are there in their length. Raises as :func:`restore` does."""
    listed = read_listed(storage, step)
    manifest = listed.manifest
    unknown = sorted({entry.dtype for entry in manifest.tensors.values()} - DTYPES.keys())
    if unknown:
        raise StorageError(
            f"cannot restore step {step} from {storage.url}: it has tensors of type {', '.join(unknown)}, which torch "
            f"{torch.__version__} lacks; it was written with torch {manifest.versions.get('torch')}"
        )
    # Before memory is taken: so no more of it is than there are bytes.
    for name in missing_or_short(manifest, storage.list(object_keys.folder(step))):
        read_shard(storage, manifest, name, stored_by_file(manifest.tensors).get(name, {}))
    return listed


def snapshot_from(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> Snapshot:
    """What was checkpointed, of a manifest and its tensors."""
    return Snapshot(
        tensors,
        manifest.plain,
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
        metrics=manifest.metrics,
    )


def restore_newest(
    storage: Storage, report: Callable[[Event], None], restore: Callable[[Storage, int], Snapshot] = restore
) -> Snapshot | None:
    """The newest checkpoint that verifies, or ``None`` if none was ever written.

    Called by the rank that needs the state; not collective; blocks while it reads. An outage of the
    storage is not taken for damage: it raises, so that no progress is thrown away for a passing fault.

    Args:
        storage: Storage that has the checkpoints.
        report: Function that is given a ``CheckpointDamaged`` for each one passed over.
        restore: Function that restores one, and raises as :func:`restore` does.

    Raises:
        CheckpointDamagedError: Checkpoints are listed and none verifies; names them all.
        StorageError: The storage does not answer.
    """
    for _ in range(_PASSES):
        listed = steps(storage)
        damaged: list[CheckpointDamagedError] = []
        for step in listed:
            try:
                return restore(storage, step)
            except ObjectMissingError:
                continue  # Retention removed it while it was being read; it was not the newest any more.
            except CheckpointDamagedError as error:
                damaged.append(error)
                report(CheckpointDamaged(url=storage.url, step=step, reason=str(error)))
        if damaged:
            raise CheckpointDamagedError(
                f"none of the {len(listed)} checkpoints in {storage.url} can be restored; repair one, or start "
                "over with another checkpoint URL:\n" + "\n".join(f"  {error}" for error in damaged)
            ) from damaged[0]
        if not listed:
            return None
    raise StorageError(
        f"every checkpoint listed in {storage.url} vanished while it was read, {_PASSES} times over; "
        "is another job writing to this URL?"
    )
