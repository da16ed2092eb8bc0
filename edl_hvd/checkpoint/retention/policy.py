"""Which checkpoints stay, after a new one and by hand: decided purely, then deleted manifest first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.reading.catalog import Catalog, read_catalog
from edl_hvd.checkpoint.reading.files import Tell, missing_or_short, read_listed_key, verify
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, UsageError
from edl_hvd.storage import Storage
from edl_hvd.values import Best, Interval

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionPolicy:
    """What stays.

    Attributes:
        newest: Number of the newest intact checkpoints that stay, at least 1.
        every: An interval in steps, samples or whole epochs, whose milestones stay for good; see ``milestones``.
        best: The metric whose best checkpoint stays; see ``best_of``.
    """

    newest: int = 3
    every: Interval | None = None
    best: Best | None = None

    @property
    def needs_manifests(self) -> bool:
        """It cannot be decided by the steps alone, so every listed manifest has to be readable."""
        return self.best is not None or (self.every is not None and self.every.unit != "steps")


@dataclass(frozen=True)
class Facts:
    """What a manifest says that matters here; ``files`` are the lengths of its files in bytes, by their keys."""

    samples: int
    epochs: int
    metrics: Mapping[str, float]
    files: Mapping[str, int]

    def are_complete(self, sizes_bytes: Mapping[str, int]) -> bool:
        """Whether all files are among the objects whose lengths are given, in full length."""
        return all(sizes_bytes.get(key) == size_bytes for key, size_bytes in self.files.items())


@dataclass(frozen=True)
class Pruning:
    """What goes and what stays.

    Attributes:
        kept: Steps of the newest checkpoints counted, newest first.
        milestones: Steps of those that stay for good, newest first; they may be in ``kept``, too.
        best: Step of the best one, if one is asked for and known; likewise.
        spared: Listed steps that are neither counted nor removed: newer ones, and damaged ones among those counted.
        removed: Steps of the listed checkpoints that go, newest first.
        keys: Objects to delete, in this order: what dead attempts left is among them.
        size_bytes: Number of their bytes.
        orphans: Keys among them that dead attempts have left beside checkpoints that stay, see ``collector.py``.
    """

    kept: list[int]
    milestones: list[int]
    best: int | None
    spared: list[int]
    removed: list[int]
    keys: list[str]
    size_bytes: int
    orphans: list[str] = field(default_factory=list)


def plan(
    catalog: Catalog,
    policy: RetentionPolicy,
    facts: Mapping[int, Facts],
    intact: Callable[[int], bool],
    written: int | None = None,
) -> Pruning:
    """Keep the newest intact checkpoints, milestones and the best; everything older goes, dead attempts included.

    With fewer intact ones than that, only what is older than the oldest of them goes; with none, nothing.

    Args:
        catalog: Catalog of all checkpoints.
        policy: Rule of what stays.
        facts: Facts of listed checkpoints whose manifest is whole, by step; may be empty if ``policy`` needs none.
        intact: Function that says whether a listed checkpoint counts; asked newest first, no more than needed.
        written: Step of a checkpoint just written. It counts as the newest: what is newer was passed over when
            the job began, and will be older than the oldest kept one some day.
    """
    listed = catalog.steps
    kept = [] if written is None else [written]
    for step in listed:
        if len(kept) == policy.newest:
            break
        if (written is None or step < written) and intact(step):
            kept.append(step)
    if not kept:
        return Pruning([], [], None, listed, [], [], 0)
    for_good = milestones(_positions(listed, policy.every, facts), policy.every.count) if policy.every else set()
    best = best_of(facts, policy.best, intact) if policy.best else None
    staying = {step for step in listed if step >= kept[-1] or step in for_good or step == best}
    sizes_bytes = {entry.key: entry.size_bytes for entry in catalog.objects}
    steps = {key: object_keys.step_of(key) for key in sizes_bytes}
    old = [key for key, step in steps.items() if step is not None and step < kept[-1] and step not in staying]
    # Manifests first: from then on the rest is not listed, so stopping anywhere leaves no torn checkpoint.
    manifests = {key for keys in object_keys.manifests(catalog.objects).values() for key in keys}
    return Pruning(
        kept=kept,
        milestones=[step for step in listed if step in for_good],
        best=best,
        spared=[step for step in listed if step not in kept and step >= kept[-1]],
        removed=[step for step in listed if step not in staying],
        keys=sorted(old, key=lambda key: (key not in manifests, key)),
        size_bytes=sum(sizes_bytes[key] for key in old),
    )


def milestones(positions: Mapping[int, int], every: float) -> set[int]:
    """The checkpoints that stay for good: the first one at or after each multiple of ``every``.

    >>> sorted(milestones({step: step for step in (40, 90, 110, 150, 205, 430, 480)}, every=100))
    [110, 205, 430]

    Each multiple but 0 rules up to the next one, and the first checkpoint there is its milestone (150 is not that of
    100, and 300 has none). That one alone is never removed there, so whoever decides again, however many of the
    others are gone and whatever has been written since, finds the same: what stays does not depend on when it is
    decided. Whether a checkpoint is damaged does not count: a milestone may be worth repairing.

    Args:
        positions: Position of each checkpoint, by its step, in the unit of ``every``.
        every: Interval between multiples, greater than 0.
    """
    first: dict[int, tuple[int, int]] = {}
    for step, position in positions.items():
        multiple = int(position // every)
        if multiple > 0:
            first[multiple] = min(first.get(multiple, (position, step)), (position, step))
    return {step for _, step in first.values()}


def best_of(facts: Mapping[int, Facts], best: Best, intact: Callable[[int], bool]) -> int | None:
    """Step of the checkpoint with the best value; of equal ones the oldest, which is closest to where it was measured.

    NaN is never best. The best one so far always stays, so this does not depend on when others were removed either.
    """
    orders = {step: best.order(found.metrics) for step, found in facts.items()}
    known = sorted((order, step) for step, order in orders.items() if order is not None)
    return next((step for _, step in known if intact(step)), None)


def _positions(steps: Collection[int], every: Interval, facts: Mapping[int, Facts]) -> dict[int, int]:
    if every.unit == "steps":
        return {step: step for step in steps}
    return {step: found.samples if every.unit == "samples" else found.epochs for step, found in facts.items()}


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


def read_whole(storage: Storage, catalog: Catalog, step: int, between: Callable[[], None] = lambda: None) -> str:
    """Read every byte of a listed checkpoint; says what is damaged, or nothing.

    Args:
        between: Called before each read; may wait, or raise to give up.

    Raises:
        StorageError: The storage does not answer.
    """
    try:
        verify(storage, read_listed_key(storage, step, catalog.manifests[step]).manifest, between)
    except (CheckpointDamagedError, ObjectMissingError) as error:
        return str(error)
    return ""


def plan_verified(
    plan_without: Callable[[Collection[int]], Pruning],
    is_whole: Callable[[int], bool],
    known: Collection[int] = (),
    every: bool = True,
) -> Pruning:
    """A plan that removes nothing before what it keeps was read, and found whole.

    A flipped bit is seen by nobody who does not read all bytes: the newest checkpoint may be damaged, and the last one
    that is whole be among those to be removed.

    Args:
        plan_without: Function that plans, without counting the damaged checkpoints that it is given.
        is_whole: Function that reads a checkpoint and says whether it is whole; asked once for each.
        known: Steps that are known to be whole.
        every: Whether all the newest ones that stay have to be whole, or one of them.
    """
    whole, damaged = set(known), set[int]()
    while True:
        pruning = plan_without(damaged)
        unread = [step for step in pruning.kept if step not in whole]
        if not pruning.removed or not unread or (not every and len(unread) < len(pruning.kept)):
            return pruning
        for step in unread:
            (whole if is_whole(step) else damaged).add(step)
            if step in whole and not every:
                break


def read_facts(storage: Storage, step: int, key: str) -> Facts | None:
    """What a manifest of ``step`` says; ``None`` if it is damaged or gone. Raises as ``looks_intact`` does."""
    try:
        manifest = read_listed_key(storage, step, key).manifest
    except (CheckpointDamagedError, ObjectMissingError):
        return None
    files = {object_keys.folder(step) + name: entry.size_bytes for name, entry in manifest.files.items()}
    return Facts(manifest.samples, manifest.epoch, manifest.metrics, files)


def plan_for(storage: Storage, policy: RetentionPolicy) -> Pruning:
    """The plan for what is in a storage now, by hand. Reads every byte of what it keeps before anything is to go.

    Raises:
        UsageError: ``policy`` counts below 1, or names a metric that no checkpoint has.
        ObjectMissingError: No checkpoint is listed.
        CheckpointDamagedError: None of those listed is intact, so any of them may be worth repairing.
        StorageError: The storage does not answer, or another version of this package wrote a checkpoint that has to
            be looked at.
    """
    if policy.newest < 1:
        raise UsageError(f"cannot keep {policy.newest} checkpoints; expected at least 1")
    catalog = read_catalog(storage)
    if not catalog.manifests:
        raise ObjectMissingError(f"no checkpoint is listed in {storage.url}, so there is nothing to remove")
    facts = {}
    for step, key in catalog.manifests.items() if policy.needs_manifests else ():
        found = read_facts(storage, step, key)
        if found is not None:
            facts[step] = found
    if unknown := unknown_metric(policy, facts):
        raise UsageError(f"cannot keep the best checkpoint in {storage.url}: {unknown}")

    def plan_without(damaged: Collection[int]) -> Pruning:
        return plan(catalog, policy, facts, lambda step: step not in damaged and looks_intact(storage, catalog, step))

    def is_whole(step: int) -> bool:
        if reason := read_whole(storage, catalog, step):
            _LOG.warning("step %d does not count: %s", step, reason)
        return not reason

    pruning = plan_verified(plan_without, is_whole)
    if not pruning.kept:
        raise CheckpointDamagedError(
            f"none of the {len(pruning.spared)} checkpoints in {storage.url} is intact, so nothing was removed; "
            "'edl-hvd checkpoint list' says what is wrong with each"
        )
    return pruning


def unknown_metric(policy: RetentionPolicy, facts: Mapping[int, Facts]) -> str:
    """Why no checkpoint is the best: none has the metric, which may be misspelt; empty if one has it."""
    there = {name for found in facts.values() for name in found.metrics}
    if policy.best is None or policy.best.metric in there:
        return ""
    return f"none has the metric {policy.best.metric!r}; those there are: {', '.join(sorted(there)) or 'none'}"


def carry_out(storage: Storage, pruning: Pruning, tell: Tell) -> None:
    """Delete what the plan says; ``tell`` gets the objects deleted so far, and all."""
    for number, key in enumerate(pruning.keys, start=1):
        storage.delete(key)
        tell(number, len(pruning.keys))
