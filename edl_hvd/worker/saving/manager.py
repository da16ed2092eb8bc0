"""The checkpoints of a job, as its workers write and restore them: when one is due, and what has become of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import NoReturn

import torch

from edl_hvd.build.tools import processors
from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.checkpoint.format.snapshot import DeferredSnapshot
from edl_hvd.checkpoint.writing.saver_claim import SaverClaim
from edl_hvd.checkpoint.writing.schedule import CheckpointSchedule
from edl_hvd.checkpoint.writing.throttle import CpuThrottle
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import CheckpointFailedError, OwnedError, StorageError
from edl_hvd.events import CheckpointFailed, CheckpointWritten, EmergencyCheckpoint, EventLog, Restored
from edl_hvd.settings import Settings
from edl_hvd.storage import open_storage
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import broadcast_json
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.progress import progress
from edl_hvd.worker.saving.lease import CheckpointLease
from edl_hvd.worker.saving.shared_restore import SharedRestore
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SLOWEST = 0.1
# Of the time between two checkpoints: what is lost with a job is half of that on average, and hardly more for this.


class CheckpointManager:
    """The checkpoints of one job on one worker; without a URL in the settings it does nothing.

    Args:
        settings: Settings of the elastic function: where checkpoints are, and how often one is due.
        events: Log for what was written and restored.
        clock: Measures intervals.
        run: Name of this run of the job, the same on every worker.

    Attributes:
        is_enabled: Whether the job writes checkpoints.
        schedule: Intervals, and the checkpoint that they begin with.
        lease: Lease of the URL.
        written_step: Step of the last checkpoint that became visible; -1 for none.
    """

    def __init__(self, settings: Settings, events: EventLog, clock: Clock = SYSTEM_CLOCK, run: str = "alone") -> None:
        self._settings = settings
        self._events = events
        self._clock = clock
        self._storage = (
            open_storage(settings.checkpoint, settings.checkpoint_memory_mb) if settings.checkpoint else None
        )
        self.is_enabled = self._storage is not None
        self._writer = (
            CheckpointWriter(
                self._storage, settings.keep_newest, clock, keep_every=settings.keep_every, keep_best=settings.keep_best
            )
            if self._storage
            else None
        )
        self.schedule = CheckpointSchedule(settings.checkpoint_every, clock)
        self.written_step = -1
        self.lease = CheckpointLease(self._storage, run, settings.take_over, clock)
        self._begun_s = clock.monotonic_s()
        self._failure = ""
        self._unshared = ""  # why this rank's share was not written, as long as rank 0 has not been told
        self._bytes_per_s = 0.0  # of one rank, as far as rank 0 knows it
        self._writers = 1
        self._rank = 0

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._writer is not None and self._writer.busy

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write its share, and rank 0 has not been told over the world."""
        return bool(self._unshared)

    @property
    def url(self) -> str:
        """The URL of the checkpoints; empty for none."""
        return self._storage.url if self._storage is not None else ""

    @property
    def stop_reason(self) -> str:
        """The reason why the whole job has to end, as far as this rank knows; empty for none."""
        return self.lease.lost or self._failure

    # --- of this worker ---

    def due(self, step: int, samples: int, epoch_position: float) -> bool:
        """Whether the interval since the last checkpoint has passed at this point of the run. Rank 0."""
        return self._writer is not None and self.schedule.is_due(step, samples, epoch_position)

    def begin(self, snapshot: Snapshot | DeferredSnapshot, world: World, attempt: str) -> None:
        """Start writing this rank's share of a checkpoint in the background. Every rank; does not block.

        Args:
            snapshot: Snapshot to write.
            world: World whose ranks write it.
            attempt: Name of the attempt, see ``CheckpointWriter.begin``.
        """
        rank, size = world.rank, world.size
        self._rank, self._unshared = rank, ""
        if self._writer is not None:
            cpu = self._cpu_throttle(world.local_size)
            self._writer.begin(snapshot, rank, size, attempt, self.lease.number, cpu)
            self._writers = size
            if self._settings.checkpoint_every.is_auto:
                logger.info("checkpoints every %.0f s for now", self.schedule.interval_s)

    def _cpu_throttle(self, workers: int) -> CpuThrottle:
        """What one of this host's workers may use of the processors to write beside its training."""
        now_s, share = self._clock.monotonic_s(), self._settings.checkpoint_cpu_fraction
        since_s, self._begun_s = now_s - self._begun_s, now_s
        allowed = share * processors() / workers if share < 1 else None
        return CpuThrottle(allowed, _SLOWEST * since_s, self._clock)

    def write_emergency(self, store: StateStore, remaining_s: float | None) -> None:
        """Write the last commit from this worker alone, if there is a URL and time for it. Blocks.

        Args:
            store: State with the commit.
            remaining_s: Seconds until the process will be killed; ``None`` if not known.
        """
        if self._storage is None:
            return
        start_s = self._clock.monotonic_s()
        needed_s = store.size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        if remaining_s is not None and needed_s > remaining_s:
            reason = f"it would take {needed_s:.1f} s at the speed of the last one, and {remaining_s:.1f} s are left"
        else:
            reason = self._write_alone(store)
        self._report_emergency(store.step, start_s, reason)

    def write_with_peers(self, store: StateStore, job_goes_on: Callable[[], bool]) -> None:
        """Have the last commit in storage, of which other workers may hold copies: one writes, the others wait. Blocks.

        The lease is given back, or left to others, as far as this worker can know.

        Args:
            store: State with the commit.
            job_goes_on: Function that tells whether the launcher lives. Then there are others that train on, or the
                worker that renews the lease is here as well, and writes.
        """
        if self._storage is None:
            return
        start_s = self._clock.monotonic_s()
        claim = SaverClaim(self._storage, store.step, self.lease.number, self._clock)
        try:
            if not claim.acquire():
                logger.info("step %d: saved by another worker", store.step)
                self.lease.release(has_peers=True)
                return
            if not self.lease.renews and job_goes_on():
                logger.info("step %d: not saved, the job goes on without this worker", store.step)
                claim.give_up()
                return
            reason = self._write_alone(store, claim.renew)
            claim.give_up()
        except StorageError as error:
            reason = str(error)
        self._report_emergency(store.step, start_s, reason)
        if reason:
            self.lease.leave()
        else:
            self.lease.release(has_peers=True)

    def _write_alone(self, store: StateStore, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Write the last commit from this worker alone; the reason why it was not written, empty if it was."""
        attempt = f"last-{store.step}-{secrets.randbits(64):016x}"
        self.begin(store.snapshot(), World(0, 0, 1, members=("",)), attempt)
        self.expedite()
        while self.busy:
            meanwhile()
            self._clock.sleep(_POLL_S)
        return self.report()

    def _report_emergency(self, step: int, start_s: float, reason: str) -> None:
        logger.warning("step %d: %s", step, f"not saved: {reason}" if reason else "saved")
        seconds = round(self._clock.monotonic_s() - start_s, 3)
        self._events.emit(EmergencyCheckpoint(self.url, step, not reason, seconds, reason))

    def expedite(self) -> None:
        """Write without regard to the training from now on: this worker waits for it."""
        if self._writer is not None:
            self._writer.expedite()

    def report(self) -> str:
        """Write the events of what the writer has finished since the last call.

        Returns:
            The reason why the last checkpoint failed; empty if it did not.
        """
        reason = ""
        for event in self._writer.poll() if self._writer is not None else ():
            if isinstance(event, CheckpointWritten):
                self.written_step = progress.saved_step = event.step
                self._bytes_per_s = event.size_bytes / max(event.duration_s - event.held_s, 1e-3) / self._writers
            if isinstance(event, CheckpointFailed):
                logger.warning("checkpoint of step %d failed: %s", event.step, event.reason)
                reason = event.reason
                if self._rank != 0:
                    self._unshared = reason
                self.lease.check_soon()  # perhaps another job has taken over
                if self._settings.on_checkpoint_failure == "stop":
                    self._failure = (
                        f"the checkpoint of step {event.step} failed, and on_checkpoint_failure is 'stop': {reason}"
                    )
            self._events.emit(event)
        return reason

    def abandon(self, store: StateStore) -> None:
        """Abandon the checkpoint that is being written: the world whose ranks share it is gone."""
        if self._writer is not None:
            self._writer.abandon()
            store.drop_snapshot()
            self.report()

    # --- of all ranks together ---

    def newest(self, collectives: Collectives, world: World) -> Snapshot | None:
        """The newest valid checkpoint, read by all ranks together. Collective; blocks."""
        if self._storage is None:
            return None
        start_s = self._clock.monotonic_s()
        snapshot = SharedRestore(self._storage, collectives, world, self._settings.checkpoint_memory_mb).newest(
            self._events.emit
        )
        if snapshot is not None and world.rank == 0:
            seconds = self._clock.monotonic_s() - start_s
            self._events.emit(
                Restored(self._storage.url, snapshot.step, snapshot.epoch, snapshot.samples, round(seconds, 3))
            )
            logger.info("restored step %d from %s", snapshot.step, self._storage.url)
        return snapshot

    def wait_for_writers(self, collectives: Collectives, world: World) -> None:
        """Wait until no rank is writing. Every rank; collective; blocks.

        Raises:
            CheckpointFailedError, OwnedError: The job is to end; on every rank.
        """
        self.expedite()
        while True:
            self.report()
            busy, failed = collectives.allreduce(torch.tensor([int(self.busy), int(self.has_failed)]), "max").tolist()
            if failed:
                self.share_failure(collectives, world)
            elif not busy:
                break
            self._clock.sleep(_POLL_S)
        self.report()
        if collectives.allreduce(torch.tensor([bool(self.stop_reason)], dtype=torch.int64), "max").item():
            self.stop_job(collectives, world)

    def has_written(self, step: int, collectives: Collectives, world: World) -> bool:
        """Whether the checkpoint of a step is in storage, which rank 0 knows. Every rank; collective; blocks."""
        is_behind = world.rank == 0 and self.written_step < step
        return not collectives.allreduce(torch.tensor([int(is_behind)]), "max").item()

    def stop_job(self, collectives: Collectives, world: World) -> NoReturn:
        """End the job with the reason that one rank has. Every rank; collective; blocks.

        Raises:
            OwnedError: Another job has taken the URL over; on every rank.
            CheckpointFailedError: Always otherwise; on every rank.
        """
        reasons = collectives.gather_integers([bool(self.stop_reason) + bool(self.lease.lost)])
        kinds = [kind for [kind] in reasons]
        words = broadcast_json(collectives, self.stop_reason, kinds.index(max(kinds)), world.rank)
        raise (OwnedError if max(kinds) > 1 else CheckpointFailedError)(words)

    def share_failure(self, collectives: Collectives, world: World) -> None:
        """Tell rank 0 why another rank's share was not written, so that it does not wait for it.

        Every rank, once one of them has voted that it has failed; collective; blocks.
        """
        failed = [kind for [kind] in collectives.gather_integers([bool(self._unshared)])]
        root = failed.index(max(failed))
        reason = broadcast_json(collectives, self._unshared, root, world.rank)
        self._unshared = ""
        if self._writer is not None and world.rank == 0 and reason:
            self._writer.fail(f"rank {root} could not write its share: {reason}")
