"""Which objects of older checkpoints go: decided purely, then deleted manifest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.files import read_manifest
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError
from edl_hvd.storage import Storage, StoredObject


def expired(objects: Iterable[StoredObject], written: int, keep: int, intact: Callable[[int], bool]) -> list[str]:
    """Keys to delete, in the order to delete them, now that the checkpoint of step ``written`` is visible.

    Kept are ``written`` and the newest ``keep - 1`` intact ones before it. Everything older goes, what dead
    attempts left included. Nothing newer is touched: it was passed over at restore, and it will be
    older than the oldest kept one some day.

    Args:
        objects: A listing of all checkpoints.
        written: Step of the checkpoint just written; always kept.
        keep: Checkpoints to keep, at least 1.
        intact: Whether a listed checkpoint is worth counting; asked newest first, no more than needed.
    """
    objects = list(objects)
    kept = [written]
    for step in layout.listed_steps(objects):
        if len(kept) == keep:
            break
        if step < written and intact(step):
            kept.append(step)
    steps = {entry.key: layout.step_of(entry.key) for entry in objects}
    old = [key for key, step in steps.items() if step is not None and step < kept[-1]]
    # Manifests first: from then on the rest is not listed, so stopping anywhere leaves no torn checkpoint.
    manifests = {layout.manifest_key(step) for step in layout.listed_steps(objects)}
    return sorted(old, key=lambda key: (key not in manifests, key))


def looks_intact(storage: Storage, objects: Iterable[StoredObject], step: int) -> bool:
    """Whether the manifest of ``step`` verifies and its files are there in full length; reads no shard."""
    sizes_bytes = {entry.key: entry.size_bytes for entry in objects}
    try:
        manifest = read_manifest(storage, step)
    except (CheckpointDamagedError, ObjectMissingError):
        return False
    prefix = layout.folder(step)
    return all(sizes_bytes.get(prefix + name) == entry.size_bytes for name, entry in manifest.files.items())


def collect(storage: Storage, written: int, keep: int, check_cancelled: Callable[[], None]) -> None:
    """Delete what has expired and the finished parts of ``written``.

    Raises:
        StorageError: The storage does not answer; the next checkpoint tries again.
    """
    objects = storage.list(layout.ROOT)
    parts = [entry.key for entry in objects if entry.key.startswith(layout.parts_prefix(written))]
    old = expired(objects, written, keep, lambda step: looks_intact(storage, objects, step))
    for key in parts + old:
        check_cancelled()
        storage.delete(key)
