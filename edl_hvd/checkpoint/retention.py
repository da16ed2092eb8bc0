"""Which checkpoints go, after a new one and by hand: decided purely, then deleted manifest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.catalog import Catalog, read_catalog
from edl_hvd.checkpoint.files import Tell, missing_or_short, read_listed_key
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, UsageError
from edl_hvd.storage import Storage


@dataclass(frozen=True)
class Pruning:
    """What goes and what stays.

    Attributes:
        kept: Steps of the checkpoints counted, newest first.
        spared: Listed steps that are neither counted nor removed: newer ones, and damaged ones among those counted.
        removed: Steps of the listed checkpoints that go, newest first.
        keys: Objects to delete, in this order: what dead attempts left is among them.
        size_bytes: Their bytes.
    """

    kept: list[int]
    spared: list[int]
    removed: list[int]
    keys: list[str]
    size_bytes: int


def plan(catalog: Catalog, keep: int, intact: Callable[[int], bool], written: int | None = None) -> Pruning:
    """Keep the newest ``keep`` intact checkpoints; everything older goes, what dead attempts left included.

    With fewer intact ones than that, only what is older than the oldest of them goes; with none, nothing.

    Args:
        catalog: All checkpoints.
        keep: Checkpoints to keep, at least 1.
        intact: Whether a listed checkpoint is worth counting; asked newest first, no more than needed.
        written: Step of a checkpoint just written. It counts as the newest: what is newer was passed over when
            the job began, and will be older than the oldest kept one some day.
    """
    listed = catalog.steps
    kept = [] if written is None else [written]
    for step in listed:
        if len(kept) == keep:
            break
        if (written is None or step < written) and intact(step):
            kept.append(step)
    if not kept:
        return Pruning([], listed, [], [], 0)
    steps = {entry.key: layout.step_of(entry.key) for entry in catalog.objects}
    sizes_bytes = {entry.key: entry.size_bytes for entry in catalog.objects}
    old = [key for key, step in steps.items() if step is not None and step < kept[-1]]
    removed = [step for step in listed if step < kept[-1]]
    # Manifests first: from then on the rest is not listed, so stopping anywhere leaves no torn checkpoint.
    manifests = {key for keys in layout.manifests(catalog.objects).values() for key in keys}
    return Pruning(
        kept=kept,
        spared=[step for step in listed if step not in kept and step >= kept[-1]],
        removed=removed,
        keys=sorted(old, key=lambda key: (key not in manifests, key)),
        size_bytes=sum(sizes_bytes[key] for key in old),
    )


def looks_intact(storage: Storage, catalog: Catalog, step: int) -> bool:
    """Whether the manifest of ``step`` verifies and its files are there in full length; reads no shard.

    Raises:
        UnreadableError: Another version of this package wrote it, so it is not for this one to remove.
        StorageError: The storage does not answer.
    """
    try:
        manifest = read_listed_key(storage, step, catalog.manifests[step]).manifest
        return not missing_or_short(manifest, catalog.objects)
    except (CheckpointDamagedError, ObjectMissingError):
        return False


def collect(storage: Storage, written: int, keep: int, check: Callable[[], None]) -> None:
    """After the checkpoint of step ``written``: delete what it makes superfluous, and its finished parts.

    ``check`` is called before each deletion; it raises if nothing may be deleted any more.

    Raises:
        StorageError: The storage does not answer, or has a checkpoint of another version of this package among
            the newest; the next checkpoint tries again.
    """
    catalog = read_catalog(storage)
    parts = [entry.key for entry in catalog.objects if entry.key.startswith(layout.parts_prefix(written))]
    old = plan(catalog, keep, lambda step: looks_intact(storage, catalog, step), written).keys
    for key in parts + old:
        check()
        storage.delete(key)


def plan_for(storage: Storage, keep: int) -> Pruning:
    """The plan for what is in a storage now, by hand.

    Raises:
        UsageError: ``keep`` is below 1.
        ObjectMissingError: No checkpoint is listed.
        CheckpointDamagedError: None of those listed is intact, so any of them may be worth repairing.
        StorageError: As from ``collect``.
    """
    if keep < 1:
        raise UsageError(f"cannot keep {keep} checkpoints; expected at least 1")
    catalog = read_catalog(storage)
    if not catalog.manifests:
        raise ObjectMissingError(f"no checkpoint is listed in {storage.url}, so there is nothing to remove")
    pruning = plan(catalog, keep, lambda step: looks_intact(storage, catalog, step))
    if not pruning.kept:
        raise CheckpointDamagedError(
            f"none of the {len(pruning.spared)} checkpoints in {storage.url} is intact, so nothing was removed; "
            "'edl-hvd checkpoint list' says what is wrong with each"
        )
    return pruning


def carry_out(storage: Storage, pruning: Pruning, tell: Tell) -> None:
    """Delete what the plan says; ``tell`` gets the objects deleted so far, and all."""
    for number, key in enumerate(pruning.keys, start=1):
        storage.delete(key)
        tell(number, len(pruning.keys))
