"""When a checkpoint is due, and handing the commit to the layer that writes it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, ownership
from edl_hvd.checkpoint.heartbeat import Heartbeat
from edl_hvd.checkpoint.ownership import Owner
from edl_hvd.checkpoint.pace import Pace
from edl_hvd.checkpoint.schedule import Schedule
from edl_hvd.checkpoint.snapshot import DeferredSnapshot
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.events import CheckpointFailed, CheckpointWritten, EmergencyCheckpoint, EventLog, Restored
from edl_hvd.settings import Settings
from edl_hvd.storage import open_storage
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.progress import progress
from edl_hvd.worker.saving.shared_restore import SharedRestore
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SLOWEST = 0.1
# Of the time between two checkpoints: what is lost with a job is half of that on average, and hardly more for this.


class Checkpoints:
    """The checkpoints of one job; without a URL in the settings it does nothing.

    Args:
        settings: Where and how often.
        events: Where to tell.
        clock: For intervals in seconds.
        run: Names this run of the job, see ``ownership.py``; the same on every worker.

    Attributes:
        schedule: When the next one is due.
        written_step: Step of the last one that became visible; -1 for none.
        owner: Number of the job's ownership of the URL; 0 if it is not known to this worker.
    """

    def __init__(self, settings: Settings, events: EventLog, clock: Clock = SYSTEM_CLOCK, run: str = "alone") -> None:
        self._settings = settings
        self._events = events
        self._clock = clock
        self._storage = (
            open_storage(settings.checkpoint, settings.checkpoint_memory_mb) if settings.checkpoint else None
        )
        self._writer = (
            CheckpointWriter(
                self._storage, settings.keep, clock, keep_every=settings.keep_every, keep_best=settings.keep_best
            )
            if self._storage
            else None
        )
        self.schedule = Schedule(settings.checkpoint_every, clock)
        self.written_step = -1
        self.owner = 0
        self._run = run
        self._begun_s = clock.monotonic_s()
        self._heartbeat: Heartbeat | None = None
        self._failure = ""
        self._bytes_per_s = 0.0  # of one rank, as far as rank 0 knows it
        self._writers = 1

    @property
    def wanted(self) -> bool:
        return self._storage is not None

    @property
    def busy(self) -> bool:
        """This rank is still writing."""
        return self._writer is not None and self._writer.busy

    @property
    def url(self) -> str:
        return self._storage.url if self._storage is not None else ""

    @property
    def stop_reason(self) -> str:
        """Why the whole job has to end, as far as this rank knows; empty if it has not to."""
        if self._heartbeat is not None and self._heartbeat.lost is not None:
            return str(self._heartbeat.lost)
        return self._failure

    def take_url(self) -> int:
        """Become the owner of the URL, on behalf of the job; its number. Blocks.

        Raises:
            OwnedError: Another job owns it.
            StorageError: The storage does not answer.
        """
        if self._storage is None:
            return 0
        process = Owner.this_process(self._run, self._clock)
        return ownership.take(self._storage, process, self._clock, self._settings.take_over)

    def own(self, owner: int, speaks: bool) -> None:
        """The job is this owner of the URL; ``speaks`` if this worker is to give the signs of life."""
        if self._heartbeat is not None and not (speaks and owner == self.owner):
            self._heartbeat.stop(ended=False)
            self._heartbeat = None
        self.owner = owner
        if speaks and owner and self._storage is not None and self._heartbeat is None:
            self._heartbeat = Heartbeat(self._storage, owner, Owner.this_process(self._run, self._clock))

    def release(self) -> None:
        """The job has ended, and another may have the URL at once."""
        if self._storage is not None and self.owner:
            self.own(self.owner, speaks=True)
            assert self._heartbeat is not None
            self._heartbeat.stop(ended=True)
            self._heartbeat = None

    def due(self, step: int, samples: int, epoch_position: float) -> bool:
        """The interval since the last one will have passed at this point of the run. Asked on rank 0."""
        return self._writer is not None and self.schedule.is_due(step, samples, epoch_position)

    def begin(self, copied: Callable[[], Snapshot | DeferredSnapshot], world: World, attempt: str) -> None:
        """Start writing this rank's share of a checkpoint in the background. Every rank; does not block.

        Args:
            copied: Returns what to write.
            world: Which one.
            attempt: See ``CheckpointWriter.begin``.
        """
        rank, size = world.rank, world.size
        if self._writer is not None:
            self._writer.begin(copied(), rank, size, attempt, self.owner, self._pace(world.local_size))
            self._writers = size
            if self._settings.checkpoint_every.is_auto:
                logger.info("checkpoints every %.0f s for now", self.schedule.interval_s)

    def _pace(self, workers: int) -> Pace:
        """The pace at which one of this host's workers may write beside its training."""
        now_s, share = self._clock.monotonic_s(), self._settings.checkpoint_share
        since_s, self._begun_s = now_s - self._begun_s, now_s
        processors = share * len(os.sched_getaffinity(0)) / workers if share < 1 else None
        return Pace(processors, _SLOWEST * since_s, self._clock)

    def save_last(self, store: StateStore, left_s: float | None) -> None:
        """Write the last commit from this worker alone, if there is a place for it and time enough. Blocks.

        Args:
            store: Holds the commit.
            left_s: Seconds until the process will be killed, if known.
        """
        if self._storage is None:
            return
        start_s = self._clock.monotonic_s()
        needed_s = store.size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        reason = ""
        if left_s is not None and needed_s > left_s:
            reason = f"it would take {needed_s:.1f} s at the speed of the last one, and {left_s:.1f} s are left"
        else:
            attempt = f"last-{store.step}-{secrets.randbits(64):016x}"
            self.begin(store.snapshot, World(0, 0, 1, members=("",)), attempt)
            self.hurry()
            while self.busy:
                self._clock.sleep(_POLL_S)
            reason = self.report()
        logger.warning("step %d: %s", store.step, f"not saved: {reason}" if reason else "saved")
        seconds = round(self._clock.monotonic_s() - start_s, 3)
        self._events.emit(EmergencyCheckpoint(self._storage.url, store.step, not reason, seconds, reason))

    def hurry(self) -> None:
        """Somebody waits for what is being written."""
        if self._writer is not None:
            self._writer.hurry()

    def report(self) -> str:
        """Tell what the writer has finished since the last call; why the last one failed, if it did."""
        reason = ""
        for event in self._writer.poll() if self._writer is not None else ():
            if isinstance(event, CheckpointWritten):
                self.written_step = progress.saved_step = event.step
                self._bytes_per_s = event.size_bytes / max(event.seconds - event.held_s, 1e-3) / self._writers
            if isinstance(event, CheckpointFailed):
                logger.warning("checkpoint of step %d failed: %s", event.step, event.reason)
                reason = event.reason
                if self._heartbeat is not None:
                    self._heartbeat.hurry()  # perhaps another job has taken over
                if self._settings.on_checkpoint_failure == "stop":
                    self._failure = (
                        f"the checkpoint of step {event.step} failed, and on_checkpoint_failure is 'stop': {reason}"
                    )
            self._events.emit(event)
        return reason

    def abandon(self, store: StateStore) -> None:
        """Give up what is being written: the world it was shared out over is gone."""
        if self._writer is not None:
            self._writer.abandon()
            store.drop_snapshot()
            self.report()

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
