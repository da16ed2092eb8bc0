"""What is deleted after each checkpoint: those that are not kept, and what dead attempts have left.

An **orphan** is a shard or part that no manifest names, of an attempt whose world broke, or whose checkpoint was there
already. One at a step older than the oldest kept checkpoint goes with everything there. Elsewhere it goes when this
process has found it orphaned twice, an hour apart. No attempt loses what it needs by that:

- One of the present world: a collection is the end of an attempt, and the next one begins after it. The pieces of one
  that begins meanwhile, in a new world, were not there an hour ago.
- One given up in a former world: it writes no manifest any more (``Attempt.cancel``), so its pieces are of no use.
- One of a process that was stopped all that time, and does not know that it was given up: having written its manifest,
  it finds that the pieces are gone, and takes the manifest back (``Attempt._write_manifest``).
- One of an owner that was taken over: its manifest does not count (``lease.py``).

Whoever prunes by hand looks once, and takes an orphan's age from the storage; where that does not tell, it stays.

Steps newer than the checkpoint just written are left alone: the job may come by them again, and names are
free again once an orphan is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.reading.catalog import Catalog, read_catalog
from edl_hvd.checkpoint.reading.files import UnreadableError
from edl_hvd.checkpoint.retention.policy import (
    Facts,
    Pruning,
    RetentionPolicy,
    looks_intact,
    plan,
    plan_for,
    plan_verified,
    read_facts,
    read_whole,
    unknown_metric,
)
from edl_hvd.clock import Clock
from edl_hvd.events import CheckpointDamaged, Event
from edl_hvd.storage import Storage, StoredObject

_LOG = logging.getLogger(__name__)

GRACE_S = 3600.0
# Far longer than anything that runs may need between its last piece and its manifest; leftovers cost little.


@dataclass(frozen=True)
class _Written:
    """A manifest as a listing shows it; one that was deleted and written anew is another, where the storage says so."""

    key: str
    size_bytes: int
    written_s: float | None


class Collector:
    """The removal of obsolete files by one process; it works while this is rank 0.

    An attempt that was given up may be in here still when the next one is, in another thread. Each makes its own
    dictionaries and puts them in place whole, and one that comes late makes the other read, or wait, once more.

    Args:
        storage: Storage that has the checkpoints.
        policy: Rule of what stays.
        clock: Clock that measures the grace time.
    """

    def __init__(self, storage: Storage, policy: RetentionPolicy, clock: Clock) -> None:
        self._storage = storage
        self._policy = policy
        self._clock = clock
        # A manifest never changes, so what it says is read once: milestones may be many. Neither does a shard.
        self._facts: dict[_Written, Facts | None] = {}
        self._whole: set[_Written] = set()  # manifests whose checkpoints were read back and found whole
        self._orphaned_s: dict[StoredObject, float] = {}  # when each was first found to be one
        self._warned = False

    def collect(
        self, written: int, parts: Collection[str], check: Callable[[], None],
        between: Callable[[], None] = lambda: None, report: Callable[[Event], None] = lambda event: None,
    ) -> None:  # fmt: skip
        """After the checkpoint of step ``written``: delete what is superfluous now.

        Before a checkpoint goes, one of the newest that stay was read back by this process, every byte of it. That is
        one of as many as are kept, so with three of them each third one is read.

        Args:
            written: Step of the new checkpoint.
            parts: Keys of the parts that it was put together from.
            check: Function called before each deletion; raises if nothing may be deleted any more.
            between: Function called before each read of a checkpoint; may wait, or raise to give up.
            report: Function that is given a ``CheckpointDamaged`` for each that was read and is damaged.

        Raises:
            StorageError: The storage does not answer, or has a checkpoint of another version of this package among
                those that have to be looked at; the next checkpoint tries again.
        """
        storage = self._storage
        catalog = read_catalog(storage)
        self._facts = facts = self._read(catalog)
        by_key = {manifest.key: found for manifest, found in facts.items()}
        listed = {step: found for step, key in catalog.manifests.items() if (found := by_key[key]) is not None}
        self._warn_once(listed)
        manifests = {step: manifest for manifest in facts for step, key in catalog.manifests.items()
                     if key == manifest.key}  # fmt: skip
        sizes_bytes = {entry.key: entry.size_bytes for entry in catalog.objects}

        def is_intact(step: int) -> bool:
            if step in listed:
                return listed[step].are_complete(sizes_bytes)
            return looks_intact(storage, catalog, step)  # raises where another version has written it

        def plan_without(damaged: Collection[int]) -> Pruning:
            newest = None if written in damaged else written
            return plan(catalog, self._policy, listed, lambda step: step not in damaged and is_intact(step), newest)

        def is_whole(step: int) -> bool:
            if step not in manifests:
                return False  # it is not listed: somebody has removed it
            reason = read_whole(storage, catalog, step, between)
            if reason:
                _LOG.warning("step %d is written and damaged, so nothing older goes for it: %s", step, reason)
                report(CheckpointDamaged(storage.url, step, reason))
            else:
                self._whole = {manifests[step], *(self._whole & set(facts))}
            return not reason

        known = [step for step, manifest in manifests.items() if manifest in self._whole]
        pruning = plan_verified(plan_without, is_whole, known, every=False)
        for key in [*parts, *pruning.keys]:
            check()
            storage.delete(key)
        self._collect_orphans(orphans(catalog.objects, by_key, written), written, check)

    def _read(self, catalog: Catalog) -> dict[_Written, Facts | None]:
        """The facts of all manifests, those that do not count included."""
        steps = {key: step for step, keys in object_keys.manifests(catalog.objects).items() for key in keys}
        facts = {}
        for entry in catalog.objects:
            if entry.key in steps:
                manifest = _Written(entry.key, entry.size_bytes, entry.written_s)
                facts[manifest] = self._facts.get(manifest) or self._read_one(catalog, steps[entry.key], entry.key)
        return facts

    def _read_one(self, catalog: Catalog, step: int, key: str) -> Facts | None:
        try:
            return read_facts(self._storage, step, key)
        except UnreadableError:
            if self._policy.needs_manifests and catalog.manifests.get(step) == key:
                raise
            return None

    def _warn_once(self, listed: Mapping[int, Facts]) -> None:
        # What is measured after an epoch is there after the first one.
        if not self._warned and any(found.metrics and found.epochs for found in listed.values()):
            if unknown := unknown_metric(self._policy, listed):
                _LOG.warning("keep_best keeps no checkpoint in %s so far: %s", self._storage.url, unknown)
            self._warned = True

    def _collect_orphans(self, found: list[StoredObject], written: int, check: Callable[[], None]) -> None:
        now_s = self._clock.monotonic_s()
        self._orphaned_s = {entry: self._orphaned_s.get(entry, now_s) for entry in found}
        overdue = {entry for entry, since_s in self._orphaned_s.items() if now_s - since_s >= GRACE_S}
        for step in sorted({step for entry in overdue if (step := object_keys.step_of(entry.key)) is not None}):
            # Everything anew: what is deleted must be what nobody names now.
            objects = self._storage.list(object_keys.folder(step))
            keys = object_keys.manifests(objects).get(step, [])
            try:
                facts = {key: read_facts(self._storage, step, key) for key in keys}
            except UnreadableError:
                continue
            for entry in orphans(objects, facts, written):
                if entry in overdue:
                    check()
                    self._storage.delete(entry.key)


def plan_by_hand(storage: Storage, policy: RetentionPolicy, clock: Clock) -> Pruning:
    """What ``plan_for`` says, and the orphans beside what stays that were written more than ``GRACE_S`` ago.

    Raises as ``plan_for`` does.
    """
    pruning = plan_for(storage, policy)
    objects = storage.list(object_keys.ROOT)
    facts: dict[str, Facts | None] = {}
    for step, keys in object_keys.manifests(objects).items():
        for key in keys:
            try:
                facts[key] = read_facts(storage, step, key)
            except UnreadableError:
                facts[key] = None
    going = set(pruning.keys)
    overdue = [
        entry
        for entry in orphans(objects, facts, pruning.kept[0])
        if entry.key not in going and entry.written_s is not None and clock.wall_s() - entry.written_s >= GRACE_S
    ]
    return replace(
        pruning,
        keys=[*pruning.keys, *(entry.key for entry in overdue)],
        size_bytes=pruning.size_bytes + sum(entry.size_bytes for entry in overdue),
        orphans=[entry.key for entry in overdue],
    )


def orphans(objects: Collection[StoredObject], facts: Mapping[str, Facts | None], written: int) -> list[StoredObject]:
    """The pieces at steps up to ``written`` that no manifest names.

    Args:
        objects: Objects of all steps, or all of one step.
        facts: Facts of each manifest among them, by its key; ``None`` if they are not known, then nothing is an
            orphan at its step.
        written: Newest step to look at.
    """
    manifests = object_keys.manifests(objects)
    unknown = {step for step, keys in manifests.items() if any(facts[key] is None for key in keys)}
    named = {file for keys in manifests.values() for key in keys for file in _files(facts[key])}
    found = []
    for entry in objects:
        step = object_keys.step_of(entry.key)
        if step is not None and step <= written and step not in unknown and entry.key not in named:
            name = entry.key.removeprefix(object_keys.folder(step))
            if object_keys.is_shard_name(name) or entry.key.startswith(object_keys.parts_prefix(step)):
                found.append(entry)
    return found


def _files(facts: Facts | None) -> Iterable[str]:
    return facts.files if facts is not None else ()
