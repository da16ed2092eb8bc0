"""What the members of a world decide together at a commit: each votes, all act on the sum of the votes."""

from __future__ import annotations

import torch

from edl_hvd.clock import Clock
from edl_hvd.errors import StorageError
from edl_hvd.events import Committed, Event, EventLog, Straggler
from edl_hvd.worker import process
from edl_hvd.worker.downtime import Downtime
from edl_hvd.worker.progress import progress
from edl_hvd.worker.runtime import Runtime
from edl_hvd.worker.saving.manager import CheckpointManager
from edl_hvd.worker.standby.donor import StateDonor
from edl_hvd.worker.training.round_message import Vote
from edl_hvd.world import World

_FINAL_ATTEMPTS = 3  # to write the checkpoint of a finished training


class HostsUpdatedInterrupt(Exception):
    """Every rank agreed at this commit to form another world. Not an error."""


class CommitProtocol:
    """The commits of one call of an elastic function on one worker.

    It is the :class:`edl_hvd.worker.runtime.CommitCoordinator` of the state's runtime.

    Args:
        runtime: State of the worker.
        checkpoints: Checkpoints of the job.
        donor: Sends each commit on to standbys.
        downtime: Ends with a commit.
        events: Log for what was committed.
        clock: Measures how long training stands still for a checkpoint.

    Attributes:
        furthest_step: The furthest step that this worker has come to; -1 before its first world.
    """

    def __init__(
        self, runtime: Runtime, checkpoints: CheckpointManager, donor: StateDonor, downtime: Downtime, events: EventLog,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._store = runtime.store
        self._checkpoints = checkpoints
        self._donor = donor
        self._downtime = downtime
        self._events = events
        self._clock = clock
        self._process = process.current()
        self._world: World | None = None
        self._nonce = 0
        self._writers_busy = False
        self.furthest_step = -1

    @property
    def generation(self) -> int:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._world.generation if self._world else 0

    def enter_world(self, world: World, nonce: int) -> None:
        """Begin the commits of a new world, from the state that its members have agreed on.

        Args:
            world: World that was entered.
            nonce: Random number that its members have agreed on.
        """
        store = self._store
        self._world, self._nonce = world, nonce
        self._writers_busy = False
        self.furthest_step = max(self.furthest_step, store.step)
        self._checkpoints.schedule.mark(store.step, store.samples, self._runtime.epoch_position())

    def leave_world(self) -> None:
        """Until another world is entered a commit is this worker's alone, and nothing is announced."""
        self._world = None

    # --- votes ---

    def vote(self, samples: int) -> Vote:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._vote(1, samples)._replace(metrics=float(self._runtime.counting.is_behind))

    def vote_now(self) -> Vote:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._vote(0, 0)

    def _vote(self, steps: int, samples: int) -> Vote:
        """The vote of this rank for the commit that is ``steps`` and ``samples`` further on."""
        store, world, checkpoints = self._store, self._world, self._checkpoints
        resize = float(self._process.rendezvous.change_pending())
        if not checkpoints.is_enabled:
            return Vote(resize=resize)
        due = (
            world is not None
            and world.rank == 0
            and not self._writers_busy
            # The next commit is at the same step, and has what the script measures after the epoch.
            and not self._runtime.ends_epoch(samples)
            and checkpoints.due(store.step + steps, store.samples + samples, self._runtime.epoch_position(samples))
        )
        return Vote(
            resize=resize,
            checkpoint=float(due),
            writing=float(checkpoints.busy),
            stop=float(bool(checkpoints.stop_reason)),
            failed=float(checkpoints.has_failed),
        )

    def _vote_out_of_band(self) -> Vote:
        """One collective of its own: the votes have travelled neither with gradients nor with a comparison."""
        own = torch.tensor(self.vote_now(), dtype=torch.float32)
        return Vote(*self._process.collectives.allreduce(own, "max").tolist())

    def may_come_back(self, answer: Vote | None) -> bool:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`. A fixed world ends with its first worker."""
        return (
            self._process.rendezvous.elastic
            or answer is None
            or bool(answer.resize or answer.checkpoint or answer.stop or answer.failed)
        )

    # --- decisions ---

    def agree(self, answer: Vote | None = None) -> None:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`. In phase "commit".

        Raises:
            HostsUpdatedInterrupt: Another world is to be formed.
            StorageError: The job is to end.
        """
        world = self._world
        if world is None:
            return
        if self._downtime.is_open:
            self._downtime.end()
        if self._checkpoints.is_enabled:
            self._checkpoints.report()
            self._checkpoints.schedule.note_commit(self._writers_busy)
        agreed = self._vote_out_of_band() if answer is None else answer
        self._writers_busy = bool(agreed.writing)
        if self._donor.streams:
            self._donor.commit()
        self._note_commit(world)
        self._act(agreed, world)

    def _note_commit(self, world: World) -> None:
        store = self._store
        self.furthest_step = max(self.furthest_step, store.step)
        progress.step, progress.samples = store.step, store.samples
        while progress.stragglers:  # the driver tells rank 0 alone
            self._events.emit(Straggler(**vars(progress.stragglers.popleft())))
        if world.rank == 0 and self._events.is_open:
            self._events.emit(Committed(world.generation, world.size, store.step, store.epoch, store.samples))

    def _act(self, agreed: Vote, world: World) -> None:
        if agreed.failed:
            self._checkpoints.share_failure(self._process.collectives, world)
        if agreed.stop:
            self._checkpoints.stop_job(self._process.collectives, world)
        if agreed.checkpoint:
            self._begin_checkpoint(world)
        if agreed.resize:
            raise HostsUpdatedInterrupt

    @progress.during("checkpoint")
    def _begin_checkpoint(self, world: World, is_last: bool = False) -> None:
        store, schedule = self._store, self._checkpoints.schedule
        start_s = self._clock.monotonic_s()
        if self._runtime.sync_buffers() and not is_last:
            store.save(store.commit, light=True)
        snapshot = store.final_snapshot() if is_last else store.deferred_snapshot()
        self._checkpoints.begin(snapshot, world, f"{world.generation}-{store.step}-{self._nonce:016x}")
        schedule.mark(store.step, store.samples, self._runtime.epoch_position())
        schedule.note_stall(self._clock.monotonic_s() - start_s)
        self._writers_busy = True

    def write_last_checkpoint(self, world: World) -> None:
        """Have the state of a finished training in storage. Every rank; collective; blocks.

        Raises:
            StorageError: It could not be written; on every rank.
        """
        checkpoints, collectives = self._checkpoints, self._process.collectives
        checkpoints.wait_for_writers(collectives, world)
        for _ in range(_FINAL_ATTEMPTS):
            if checkpoints.has_written(self._store.step, collectives, world):
                return
            self._begin_checkpoint(world, is_last=True)
            checkpoints.wait_for_writers(collectives, world)
        if not checkpoints.has_written(self._store.step, collectives, world):
            raise StorageError(
                f"training is complete, but its last checkpoint could not be written to {checkpoints.url} in "
                f"{_FINAL_ATTEMPTS} attempts; see the log and the checkpoint_failed events"
            )

    # --- events ---

    def announce(self, event: Event) -> None:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        if self._world is not None and self._world.rank == 0:
            self._events.emit(event)
