"""Restoring a checkpoint together: every rank reads a part of it, and the parts travel by broadcast.

So the storage is read once, over the connections of all ranks. A rank that does not see the checkpoint (a folder that
its host does not have) reads nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from edl_hvd.checkpoint.format.entries import Stored, stored_by_file
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.format.snapshot import Snapshot
from edl_hvd.checkpoint.reading.files import Listed
from edl_hvd.checkpoint.reading.restoring import restore_newest, snapshot_from, usable_manifest
from edl_hvd.checkpoint.reading.spans import AT_ONCE, Span, divide, empty_tensors, place_of, read_spans, spans_of
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, StorageError, WorldBrokenError
from edl_hvd.events import Event
from edl_hvd.storage import Storage
from edl_hvd.worker.commits.state_sync import broadcast_json
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_BUCKET_BYTES = 16 << 20
# As long as the longest span: large enough to run at network bandwidth, small enough to cost little memory beside the
# state.

_DIRECT_BYTES = 4 << 20
# What is smaller travels together with others, by way of a bucket; to copy it there costs less than a message.

_MEMORY_OF_SPAN_MB = 8  # two connections

# What a rank found, the worst last; a storage that does not answer must not be taken for damage.
_KINDS: tuple[type[StorageError] | None, ...] = (None, ObjectMissingError, CheckpointDamagedError, StorageError)


class SharedRestore:
    """One restore by the ranks of a world. Collective; blocks.

    Args:
        storage: Storage with the checkpoints, as this rank sees it.
        collectives: Collectives of the world.
        world: World of this rank.
        memory_mb: Memory in megabytes that reading may take beside the state.
    """

    def __init__(self, storage: Storage, collectives: Collectives, world: World, memory_mb: int = 64) -> None:
        self._storage = storage
        self._at_once = max(1, min(AT_ONCE, memory_mb // _MEMORY_OF_SPAN_MB))
        self._collectives = collectives
        self._world = world

    def newest(self, report: Callable[[Event], None]) -> Snapshot | None:
        """The newest checkpoint that verifies, on every rank; ``None`` if none was ever written.

        Args:
            report: Function that is given the events, on rank 0.

        Raises:
            StorageError: On every rank, with the reason of one.
        """
        return self._lead(report) if self._world.rank == 0 else self._follow()

    def _follow(self) -> Snapshot | None:
        snapshot = None
        while "manifest" in (order := self._told(None)):
            try:
                manifest = Manifest.decode(order["manifest"].encode())
                snapshot = self._read(manifest, order["key"], order["manifest"])
            except StorageError:
                snapshot = None  # rank 0 has heard of it, and tells what comes next
        if order["error"]:
            raise StorageError(order["error"])
        return snapshot

    def _lead(self, report: Callable[[Event], None]) -> Snapshot | None:
        snapshot, error = None, ""
        try:
            snapshot = restore_newest(self._storage, report, self._restore)
        except WorldBrokenError:
            raise
        except Exception as problem:  # told to every rank, which then all end with it
            if not isinstance(problem, StorageError):
                logger.exception("the newest checkpoint cannot be restored")
            error = f"the training state cannot be restored: {type(problem).__name__}: {problem}"
        self._told({"error": error})
        if error:
            raise StorageError(error)
        return snapshot

    def _restore(self, storage: Storage, step: int) -> Snapshot:
        listed: Listed = usable_manifest(storage, step)
        self._told({"manifest": (text := listed.data.decode()), "key": listed.key})
        return self._read(listed.manifest, listed.key, text)

    def _read(self, manifest: Manifest, key: str, text: str) -> Snapshot:
        """Raises the same error on every rank if one of them could not read its part."""
        sees = self._world.rank == 0 or self._sees(key, text)
        readers = [rank for rank, [can] in enumerate(self._collectives.gather_integers([sees])) if can]
        shares = dict(zip(readers, divide(spans_of(manifest), len(readers)), strict=True))
        tensors = empty_tensors(manifest)
        self._agree(self._read_own(manifest, shares.get(self._world.rank, []), tensors))
        stored = stored_by_file(manifest.tensors)
        for reader, share in shares.items():
            for bucket in _buckets(share):
                self._hand_on(bucket, stored, tensors, reader)
        return snapshot_from(manifest, tensors)

    def _sees(self, key: str, text: str) -> bool:
        try:
            return self._storage.read(key) == text.encode()
        except StorageError:
            return False

    def _read_own(
        self, manifest: Manifest, share: Sequence[Span], tensors: dict[str, torch.Tensor]
    ) -> StorageError | None:
        try:
            read_spans(self._storage, manifest, share, tensors, self._at_once)
        except StorageError as error:
            return error
        except Exception as error:  # the others wait for an answer
            return StorageError(f"{type(error).__name__}: {error}")
        return None

    def _agree(self, error: StorageError | None) -> None:
        kinds = [row[0] for row in self._collectives.gather_integers([_kind_of(error)])]
        worst = max(kinds)
        raised = _KINDS[worst]
        if raised is not None:
            root = kinds.index(worst)
            raise raised(broadcast_json(self._collectives, str(error), root, self._world.rank))

    def _hand_on(
        self, bucket: Sequence[Span], stored: dict[str, dict[str, Stored]], tensors: dict[str, torch.Tensor], root: int
    ) -> None:
        if len(bucket) == 1:
            piece = stored[bucket[0].file][bucket[0].name]
            self._collectives.broadcast_(torch.from_numpy(place_of(bucket[0], piece, tensors[piece.tensor])), root)
            return
        flat = torch.empty(sum(span.size_bytes for span in bucket), dtype=torch.uint8)
        start = 0
        places = []
        for span in bucket:
            piece = stored[span.file][span.name]
            places.append((place_of(span, piece, tensors[piece.tensor]), flat[start : start + span.size_bytes].numpy()))
            start += span.size_bytes
        if self._world.rank == root:
            for place, part in places:
                part[:] = place
        self._collectives.broadcast_(flat, root)
        if self._world.rank != root:
            for place, part in places:
                place[:] = part

    def _told(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """The order of rank 0 for what all ranks do next. Collective; blocks."""
        return dict(broadcast_json(self._collectives, order, 0, self._world.rank))


def _kind_of(error: StorageError | None) -> int:
    if error is None:
        return 0
    return next(number for number, kind in enumerate(_KINDS) if kind is not None and isinstance(error, kind))


def _buckets(share: Sequence[Span]) -> Iterator[list[Span]]:
    """What travels in one message, each span once: a large one by itself, so that it need not be copied."""
    bucket: list[Span] = []
    bucket_bytes = 0
    for span in share:
        if span.size_bytes >= _DIRECT_BYTES:
            yield [span]
            continue
        if bucket and bucket_bytes + span.size_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, bucket_bytes = [], 0
        if span.size_bytes:
            bucket.append(span)
            bucket_bytes += span.size_bytes
    if bucket:
        yield bucket
