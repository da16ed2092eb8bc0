"""One rank's part in writing one checkpoint: the body of the background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress

import torch

from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.document import LARGEST_BYTES
from edl_hvd.checkpoint.format.entries import FileEntry, Piece, TensorEntry, stored_name
from edl_hvd.checkpoint.format.manifest import Manifest, Part
from edl_hvd.checkpoint.format.shards import DTYPE_NAMES, Packed, checksums_of, elements_of, pack
from edl_hvd.checkpoint.format.snapshot import check_plain
from edl_hvd.checkpoint.lease import check_owner
from edl_hvd.checkpoint.reading.files import missing_or_short, read_listed_key, verify
from edl_hvd.checkpoint.writing.assembly import Task, assemble, rows_of, shares_of
from edl_hvd.checkpoint.writing.audit import digests_of, drifted
from edl_hvd.checkpoint.writing.shares import Rows
from edl_hvd.clock import Clock
from edl_hvd.errors import CheckpointDamagedError, ObjectExistsError, StateError, StorageError
from edl_hvd.events import CheckpointFailed, CheckpointWritten, Event, ReplicasDrifted
from edl_hvd.storage.pieces import Pieces
from edl_hvd.tensor_threads import TensorThread, run_in_tensor_thread

_LOG = logging.getLogger(__name__)

_SLOWEST_TO_OWN_TIME = 4
# Shares are equal in bytes: a rank that needs four times as long as rank 0 did is stuck, not slow.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SLOWER = 0.01, 0.2, 1.3
# Between looks at the storage while waiting for the others; also the longest delay of ``cancel``. Growing like that,
# each is a quarter of the time waited so far.

_HEAD_START_S = 0.005
# Whoever began this goes on first, instead of waiting for Python's lock; as long as a thread may keep it.

_NAMED = 5  # tensors in an event


class _Cancelled(Exception):
    """Ends the thread of a cancelled attempt; never leaves this module."""


class Attempt:
    """One rank's writing of its share; rank 0 then waits for the others and makes the checkpoint visible.

    Args:
        task: Task of this rank.
        clock: Clock that measures and waits.
        report: Function that the background thread gives each event.
    """

    def __init__(self, task: Task, clock: Clock, report: Callable[[Event], None]) -> None:
        self._task = task
        self._clock = clock
        self._report = report
        self._start_s = clock.monotonic_s()
        self._cancelled = threading.Event()
        self._told_failure = ""
        # Held while the manifest is written, which must not go on once ``cancel`` has returned.
        self._exclusive = threading.Lock()
        self.thread = TensorThread(self._run, f"edl-hvd-checkpoint-{task.name}")

    def cancel(self) -> None:
        """Give up. On return the tensors may change: what is on the wire then is anything, and no manifest names it."""
        self._cancelled.set()
        self.expedite()
        with self._exclusive:
            pass

    def fail(self, reason: str) -> None:
        """Wait for the other ranks no longer: one of them has said why its share will not come."""
        self._told_failure = reason

    def expedite(self) -> None:
        """Write as fast as can be."""
        self._task.cpu.expedite()

    def _run(self) -> None:
        try:
            if self._task.deferred is not None:
                with self._not_cancelled():
                    self._task.deferred.materialise()
            self._cancelled.wait(_HEAD_START_S)
            check_plain(self._task.snapshot.plain)
            part = self._write_share()
            if self._task.rank == 0:
                self._publish(self._gather(part))
                self._apply_retention()
        except _Cancelled:
            return
        except Exception as error:
            # Whatever it is, training must not notice more than an event.
            if not self._cancelled.is_set():
                is_told = isinstance(error, (StorageError, StateError))
                reason = str(error) if is_told else f"{type(error).__name__}: {error}"
                # In this order: where the storage stalls, telling rank 0 takes as long again.
                self._report(CheckpointFailed(self._task.storage.url, self._task.snapshot.step, reason))
                self._tell_rank_0(reason)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled

    @contextmanager
    def _not_cancelled(self) -> Iterator[None]:
        """What is done in here is over before ``cancel`` returns, or is not begun."""
        with self._exclusive:
            self._check_cancelled()
            yield

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The same, for something that takes a while."""
        self._task.cpu.throttle()
        with self._not_cancelled():
            yield

    def _write_share(self) -> Part:
        """Write this rank's tensors and, for rank 0 to find, a part that describes them."""
        task = self._task
        shares = shares_of(task)
        packed = self._pack(shares[task.rank])
        files = {}
        # The file does not hold its checksums, so it need not wait for them.
        seen = run_in_tensor_thread(lambda: self._checksum(shares, packed), "edl-hvd-checkpoint-checksum")
        try:
            if shares[task.rank]:
                data = Pieces(packed.data, between=task.cpu.throttle)
                name = self._write_shard(object_keys.shard_name(task.rank, task.size), data)
                # If the attempt was given up meanwhile, the tensors are the caller's again: the file may hold anything.
                self._check_cancelled()
                files[name] = packed.entry
        finally:
            wait([seen])  # from here on no thread of this attempt reads the tensors
        checksums, digests = seen.result()
        tensors = self._described(shares[task.rank], next(iter(files), ""), checksums)
        part = self._part(files, tensors, digests)
        if task.rank != 0:
            self._check_cancelled()
            task.storage.write(object_keys.part_key(task.snapshot.step, task.name, task.rank), part.encode())
        return part

    def _pack(self, share: list[Rows]) -> Packed:
        return pack({self._stored_name(rows): self._piece(rows) for rows in share}, guard=self._not_cancelled)

    def _piece(self, rows: Rows) -> torch.Tensor:
        tensor = self._task.snapshot.tensors[rows.name]
        return tensor if rows.count == rows_of(tensor) else tensor.narrow(0, rows.first, rows.count)

    def _stored_name(self, rows: Rows) -> str:
        return stored_name(rows.name, rows.first, rows.count, rows_of(self._task.snapshot.tensors[rows.name]))

    def _checksum(self, shares: list[list[Rows]], packed: Packed) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Checksums of this rank's pieces, and digests of all tensors, if there is another rank to compare with."""
        checksums = packed.checksums(self._in_turn)
        if self._task.size == 1:
            return checksums, {}

        def of_piece(rows: Rows) -> list[str]:
            name = self._stored_name(rows)
            if name in checksums:
                return checksums[name]
            elements = elements_of(self._piece(rows), self._in_turn)
            return checksums_of(elements, guard=self._in_turn)

        return checksums, digests_of(self._task.snapshot.tensors, shares, of_piece)

    def _described(self, share: list[Rows], file: str, checksums: Mapping[str, list[str]]) -> dict[str, TensorEntry]:
        tensors = {}
        for rows in share:
            tensor = self._task.snapshot.tensors[rows.name]
            piece = Piece(file, rows.first, rows.count, checksums[self._stored_name(rows)])
            tensors[rows.name] = TensorEntry(DTYPE_NAMES[tensor.dtype], list(tensor.shape), [piece])
        return tensors

    def _write_shard(self, name: str, data: Pieces) -> str:
        """Write the shard under a name that nothing had, and return it.

        Never replacing a file is what protects a listed checkpoint from a writer that was paused or
        given up and goes on late: it can only add files that no manifest names.
        """
        self._check_cancelled()
        task = self._task
        prefix = object_keys.folder(task.snapshot.step)
        if task.owner <= object_keys.FIRST_OWNER:
            try:
                task.storage.write_new(prefix + name, data)
                return name
            except ObjectExistsError:
                pass  # an earlier attempt at this step got as far as writing its share
        # Names of former owners are never used again: they may still be about to delete what they planned to.
        name = object_keys.shard_name(task.rank, task.size, task.name)
        task.storage.write_new(prefix + name, data)
        return name

    def _part(
        self,
        files: dict[str, FileEntry],
        tensors: dict[str, TensorEntry],
        digests: dict[str, str],
        failure: str | None = None,
    ) -> Part:
        snapshot = self._task.snapshot
        return Part(self._task.rank, snapshot.step, snapshot.epoch, snapshot.samples, files, tensors, digests, failure)

    def _tell_rank_0(self, reason: str) -> None:
        """Spare rank 0 the wait for a share that will not come, if the storage still takes a small object."""
        task = self._task
        if task.rank != 0:
            with suppress(StorageError):
                key = object_keys.part_key(task.snapshot.step, task.name, task.rank)
                task.storage.write(key, self._part({}, {}, {}, failure=reason).encode())

    def _publish(self, manifest: Manifest) -> None:
        """Make the checkpoint visible."""
        task = self._task
        try:
            self._write_manifest(object_keys.manifest_key(manifest.step, task.owner), manifest)
        except ObjectExistsError:
            manifest = self._settle(manifest)
        self._check_owner()
        seconds = self._clock.monotonic_s() - self._start_s
        held_s = min(task.cpu.held_s, seconds)
        self._report(CheckpointWritten(task.storage.url, manifest.step, manifest.size_bytes, seconds, held_s))

    def _settle(self, manifest: Manifest) -> Manifest:
        """This job has a manifest of this step already: keep it if it is good, else write one that counts more."""
        storage, owner = self._task.storage, self._task.owner
        try:
            existing = read_listed_key(storage, manifest.step, object_keys.manifest_key(manifest.step, owner)).manifest
            if existing.attempt != manifest.attempt:  # Ours if the first answer to our own write was lost.
                verify(storage, existing)
            return existing
        except CheckpointDamagedError:
            self._write_manifest(object_keys.manifest_key(manifest.step, owner, manifest.attempt), manifest)
            return manifest

    def _write_manifest(self, key: str, manifest: Manifest) -> None:
        storage = self._task.storage
        with self._not_cancelled():
            storage.write_new(key, manifest.encode())
        # If this process was stopped until now, and given up, the others may have taken its pieces for orphans.
        gone: dict[str, str] = {}
        with suppress(StorageError):  # the checkpoint stands: it is not known that anything is wrong with it
            gone = missing_or_short(manifest, storage.list(object_keys.folder(manifest.step)))
        if gone:
            storage.delete(key)
            raise StorageError(f"the others have gone on while this process was stopped: {next(iter(gone.values()))}")

    def _check_owner(self) -> None:
        """Raises ``OwnedError`` if another job has taken over."""
        if self._task.owner:
            check_owner(self._task.storage, self._task.owner)

    def _apply_retention(self) -> None:
        """Remove what is no longer needed; the checkpoint stands whether or not this succeeds."""
        task = self._task
        try:
            parts = [object_keys.part_key(task.snapshot.step, task.name, rank) for rank in range(1, task.size)]
            task.collector.collect(
                task.snapshot.step, parts, self._check_may_delete, self._pause_between_reads, self._report
            )
        except StorageError as error:
            _LOG.warning("cannot remove old checkpoints, the next checkpoint tries again: %s", error)

    def _pause_between_reads(self) -> None:
        self._task.cpu.throttle()
        self._check_cancelled()

    def _check_may_delete(self) -> None:
        self._check_cancelled()
        self._check_owner()

    def _gather(self, own: Part) -> Manifest:
        """Wait until every rank's share is in storage, then describe them all in one manifest."""
        parts = {0: own}
        own_s = self._clock.monotonic_s() - self._start_s
        patience_s = max(self._task.patience_s, _SLOWEST_TO_OWN_TIME * own_s)
        deadline_s = self._clock.monotonic_s() + patience_s
        pause_s = _FIRST_PAUSE_S
        while missing := self._missing(parts):
            self._check_cancelled()
            if self._told_failure:
                raise StorageError(self._told_failure)
            if self._clock.monotonic_s() >= deadline_s:
                raise StorageError(
                    f"{'; '.join(missing)} did not appear in {self._task.storage.url} within {patience_s:.0f} s; every "
                    "host must see the same storage (a folder has to be shared between the hosts, S3 always is)"
                )
            self._clock.sleep(pause_s)
            pause_s = min(_SLOWER * pause_s, _LONGEST_PAUSE_S)
        manifest = assemble(self._task, parts, self._clock.wall_s())
        self._audit(parts)
        return manifest

    def _audit(self, parts: Mapping[int, Part]) -> None:
        """Tell of ranks that hold other weights than the others."""
        task = self._task
        for rank, names in drifted({rank: part.digests for rank, part in parts.items()}).items():
            tensors = f"{len(names)} tensors, among them {', '.join(sorted(names)[:_NAMED])}"
            _LOG.warning("step %d: rank %d holds other weights than most: %s", task.snapshot.step, rank, tensors)
            self._report(
                ReplicasDrifted(task.storage.url, task.snapshot.step, rank, len(names), sorted(names)[:_NAMED])
            )

    def _missing(self, parts: dict[int, Part]) -> list[str]:
        """Read the parts that have arrived into ``parts``; say what is still not there."""
        task = self._task
        prefix = object_keys.folder(task.snapshot.step)
        sizes_bytes = {entry.key: entry.size_bytes for entry in task.storage.list(prefix)}
        for rank in range(task.size):
            key = object_keys.part_key(task.snapshot.step, task.name, rank)
            if rank not in parts and key in sizes_bytes:
                parts[rank] = _arrived(Part.decode(task.storage.read(key, limit_bytes=LARGEST_BYTES)))
        absent = [f"the share of rank {rank}" for rank in range(task.size) if rank not in parts]
        # A part without its file means a rank that writes to another disk under the same path.
        incomplete = [
            f"{name} of rank {part.rank} ({entry.size_bytes} bytes)"
            for part in parts.values()
            for name, entry in part.files.items()
            if sizes_bytes.get(prefix + name) != entry.size_bytes
        ]
        return absent + incomplete


def _arrived(part: Part) -> Part:
    if part.failure is not None:
        raise StorageError(f"rank {part.rank} could not write its share: {part.failure}")
    return part
