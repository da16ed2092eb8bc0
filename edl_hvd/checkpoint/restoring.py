"""From storage back to a snapshot."""

from __future__ import annotations

from collections.abc import Callable

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.files import read_manifest
from edl_hvd.checkpoint.reading import read_tensors
from edl_hvd.checkpoint.snapshot import Snapshot
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, StorageError
from edl_hvd.events import CheckpointDamaged, Event
from edl_hvd.storage import Storage

_PASSES = 3
# A pass finds nothing only if retention removed all it had listed; that fast a writer is a mistake.


def steps(storage: Storage) -> list[int]:
    """Steps of the listed checkpoints, newest first."""
    return layout.listed_steps(storage.list(layout.ROOT))


def restore(storage: Storage, step: int) -> Snapshot:
    """The snapshot that was checkpointed at ``step``, verified, into a world of any size.

    Called by any rank; not collective; blocks while it reads.

    Raises:
        ObjectMissingError: No checkpoint of that step is listed.
        CheckpointDamagedError: It is listed and does not verify.
        StorageError: The storage does not answer, or another version wrote the checkpoint.
    """
    manifest = read_manifest(storage, step)
    tensors = {}
    for name in manifest.files:
        tensors.update(read_tensors(storage, manifest, name))
    return Snapshot(
        tensors={name: tensors[name] for name in manifest.tensors},
        plain=manifest.plain,
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
    )


def restore_newest(storage: Storage, report: Callable[[Event], None]) -> Snapshot | None:
    """The newest checkpoint that verifies, or ``None`` if none was ever written.

    Called by the rank that needs the state; not collective; blocks while it reads. An outage of the
    storage is not taken for damage: it raises, so that no progress is thrown away for a passing fault.

    Args:
        storage: Where the checkpoints are.
        report: Gets a ``CheckpointDamaged`` for each one passed over.

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
