"""Applying the retention rule by hand: the same decision as after a checkpoint, first told, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.files import Tell
from edl_hvd.checkpoint.inspection import look
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, UsageError
from edl_hvd.storage import Storage, StoredObject


@dataclass(frozen=True)
class Pruning:
    """What goes and what stays.

    Attributes:
        kept: Steps of the checkpoints counted, newest first.
        spared: Steps newer than those, or not intact among them; neither counted nor removed.
        removed: Steps of the listed checkpoints that go, newest first.
        keys: Objects to delete, in this order: what dead attempts left is among them.
        size_bytes: Their bytes.
    """

    kept: list[int]
    spared: list[int]
    removed: list[int]
    keys: list[str]
    size_bytes: int


def plan(objects: Iterable[StoredObject], keep: int, intact: Callable[[int], bool]) -> Pruning:
    """Keep the newest ``keep`` intact checkpoints and whatever is newer than the oldest of them.

    With fewer intact ones than that, only what is older than the oldest of them goes; with none, nothing.

    Args:
        objects: A listing of all checkpoints.
        keep: Checkpoints to keep, at least 1.
        intact: Whether a listed checkpoint is worth counting; asked newest first, no more than needed.
    """
    objects = list(objects)
    listed = layout.listed_steps(objects)
    kept: list[int] = []
    for step in listed:
        if len(kept) < keep and intact(step):
            kept.append(step)
    if not kept:
        return Pruning([], listed, [], [], 0)
    steps = {entry.key: layout.step_of(entry.key) for entry in objects}
    sizes_bytes = {entry.key: entry.size_bytes for entry in objects}
    old = [key for key, step in steps.items() if step is not None and step < kept[-1]]
    removed = [step for step in listed if step < kept[-1]]
    # Manifests first: from then on the rest is not listed, so stopping anywhere leaves no torn checkpoint.
    manifests = {layout.manifest_key(step) for step in removed}
    return Pruning(
        kept=kept,
        spared=[step for step in listed if step not in kept and step not in removed],
        removed=removed,
        keys=sorted(old, key=lambda key: (key not in manifests, key)),
        size_bytes=sum(sizes_bytes[key] for key in old),
    )


def plan_for(storage: Storage, keep: int) -> Pruning:
    """The plan for what is in a storage now.

    Raises:
        UsageError: ``keep`` is below 1.
        ObjectMissingError: No checkpoint is listed.
        CheckpointDamagedError: None of those listed is intact, so any of them may be worth repairing.
    """
    if keep < 1:
        raise UsageError(f"cannot keep {keep} checkpoints; expected at least 1")
    objects = storage.list(layout.ROOT)
    if not layout.listed_steps(objects):
        raise ObjectMissingError(f"no checkpoint is listed in {storage.url}, so there is nothing to remove")

    def intact(step: int) -> bool:
        overview = look(storage, objects, step)
        return overview is not None and overview.intact

    pruning = plan(objects, keep, intact)
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
