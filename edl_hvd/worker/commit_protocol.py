"""What the members of a world decide together at a commit: each votes, and all do what any has voted for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from edl_hvd.clock import Clock
from edl_hvd.errors import StorageError, UsageError, WorldBrokenError
from edl_hvd.events import Committed, Event, EventLog, Straggler
from edl_hvd.teacher_models import teacher_models
from edl_hvd.worker import process
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import AveragedBuffers, agree_on_teachers
from edl_hvd.worker.downtime import Downtime
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.joining.rendezvous import RendezvousInfo
from edl_hvd.worker.progress import progress
from edl_hvd.worker.saving.manager import CheckpointManager
from edl_hvd.worker.schedules import Schedules
from edl_hvd.worker.standby.donor import StateDonor
from edl_hvd.worker.training.metric_sync import MetricSync
from edl_hvd.worker.training.round_message import Vote
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_FINAL_ATTEMPTS = 3  # to write the checkpoint of a finished training


class HostsUpdatedInterrupt(Exception):
    """Every rank agreed at this commit to form another world. Not an error."""


@dataclass(frozen=True)
class CommittedState:
    """The parts of a ``State`` that its commits are made of.

    Attributes:
        store: Present state, and the last commit.
        schedules: Where the run is, for the intervals of checkpoints.
        counting: Metrics.
        buffers: Buffers that are averaged before a checkpoint is written.
    """

    store: StateStore
    schedules: Schedules
    counting: MetricSync
    buffers: AveragedBuffers


class CommitProtocol:
    """The commits of one call of an elastic function on one worker.

    The state's runtime calls it, as a :class:`edl_hvd.worker.runtime.CommitCoordinator`.

    Args:
        committed: State of the worker.
        checkpoints: Checkpoints of the job.
        donor: Sends each commit on to standbys.
        downtime: Ends with a commit.
        events: Log for what was committed.
        clock: Measures how long training stands still for a checkpoint.

    Attributes:
        furthest_step: Last optimizer step of this worker in all of its worlds; -1 before the first.
    """

    def __init__(
        self, committed: CommittedState, checkpoints: CheckpointManager, donor: StateDonor, downtime: Downtime,
        events: EventLog, clock: Clock,
    ) -> None:  # fmt: skip
        self._store = committed.store
        self._schedules = committed.schedules
        self._counting = committed.counting
        self._buffers = committed.buffers
        self._checkpoints = checkpoints
        self._donor = donor
        self._downtime = downtime
        self._events = events
        self._clock = clock
        self._rendezvous = process.current().rendezvous
        self._joined: RendezvousInfo | None = None
        self._nonce = 0
        self._writers_busy = False
        self.furthest_step = -1

    @property
    def generation(self) -> int:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._joined.world.generation if self._joined is not None else 0

    def enter_world(self, joined: RendezvousInfo, nonce: int) -> None:
        """Begin the commits of a new world, from the state that its members have agreed on.

        Args:
            joined: World that was entered, and its collectives.
            nonce: Random number that its members have agreed on.
        """
        store = self._store
        self._joined, self._nonce = joined, nonce
        self._writers_busy = False
        self.furthest_step = max(self.furthest_step, store.step)
        if self._checkpoints.is_enabled:
            self._checkpoints.schedule.mark(store.step, store.samples, self._schedules.epoch_position())

    def leave_world(self) -> None:
        """The world was left: until another is entered, commits decide nothing and no event is written."""
        self._joined = None

    # --- votes ---

    def vote(self, samples: int) -> Vote:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._vote(1, samples)._replace(metrics=float(self._counting.is_behind))

    def vote_now(self) -> Vote:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`."""
        return self._vote(0, 0)

    def _vote(self, steps: int, samples: int) -> Vote:
        """This rank's vote for the commit after ``steps`` more steps and ``samples`` more samples."""
        store, checkpoints = self._store, self._checkpoints
        resize = float(self._rendezvous.change_pending())
        teachers = float(teacher_models.is_new)
        if not checkpoints.is_enabled:
            return Vote(resize=resize, teachers=teachers)
        due = (
            self._joined is not None
            and self._joined.world.rank == 0
            and not self._writers_busy
            # A checkpoint waits for the commit at the epoch's end, which is at the same step and has its measurements.
            and not self._schedules.ends_epoch(samples)
            and checkpoints.due(store.step + steps, store.samples + samples, self._schedules.epoch_position(samples))
        )
        return Vote(
            resize=resize,
            checkpoint=float(due),
            writing=float(checkpoints.busy),
            stop=float(bool(checkpoints.stop_reason)),
            failed=float(checkpoints.has_failed),
            teachers=teachers,
        )

    def _vote_out_of_band(self, collectives: Collectives) -> Vote:
        """The largest of all ranks' votes, where they came neither with gradients nor with a comparison. Collective."""
        own = torch.tensor(self.vote_now(), dtype=torch.float32)
        return Vote(*collectives.allreduce(own, "max").tolist())

    def may_come_back(self, answer: Vote | None) -> bool:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`. No rank returns in a fixed world: the job ends."""
        return (
            self._rendezvous.elastic
            or answer is None
            or bool(answer.resize or answer.checkpoint or answer.stop or answer.failed)
        )

    # --- decisions ---

    def agree_on_teachers(self) -> None:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`.

        Raises:
            UsageError: The ranks learn from different models, and the world is fixed; on all ranks.
            WorldBrokenError: They do, and go on from the last commit with the same model; on all ranks.
        """
        joined = self._joined
        if joined is None:
            return
        others = agree_on_teachers(joined.collectives, [0] * joined.world.size)
        if not others:
            return
        found = "; ".join(f"{one.source} has {one.used} and {one.other}" for one in others)
        what = f"teachers with different models (fingerprints) answered to different workers: {found}"
        if not self._rendezvous.elastic:
            raise UsageError(f"{what}; list teachers of one model, or name it by Teachers(fingerprint=…)")
        if joined.world.rank == 0:
            logger.warning("%s; all use the first named from the last commit on", what)
        raise WorldBrokenError(what)

    def agree(self, answer: Vote | None = None) -> None:
        """See :class:`edl_hvd.worker.runtime.CommitCoordinator`. In phase "commit".

        Raises:
            HostsUpdatedInterrupt: Another world is to be formed.
            StorageError: The job is to end.
        """
        joined = self._joined
        if joined is None:
            return
        if self._downtime.is_open:
            self._downtime.end()
        if self._checkpoints.is_enabled:
            self._checkpoints.report()
            self._checkpoints.schedule.note_commit(self._writers_busy)
        agreed = answer
        if agreed is None:
            agreed = self._vote_out_of_band(joined.collectives)
            if agreed.teachers:
                self.agree_on_teachers()
        self._writers_busy = bool(agreed.writing)
        if self._donor.streams:
            self._donor.commit()
        self._note_commit(joined.world)
        self._act(agreed, joined)

    def _note_commit(self, world: World) -> None:
        """Publish the step of the commit: in the heartbeat, and from rank 0 in the event log."""
        store = self._store
        self.furthest_step = max(self.furthest_step, store.step)
        progress.step, progress.samples = store.step, store.samples
        while progress.stragglers:  # the driver tells rank 0 alone
            self._events.emit(Straggler(**vars(progress.stragglers.popleft())))
        if world.rank == 0 and self._events.is_open:
            self._events.emit(Committed(world.generation, world.size, store.step, store.epoch, store.samples))

    def _act(self, agreed: Vote, joined: RendezvousInfo) -> None:
        """Do what some rank has voted for; every rank does the same."""
        if agreed.failed:
            self._checkpoints.share_failure(joined.collectives, joined.world)
        if agreed.stop:
            self._checkpoints.stop_job(joined.collectives, joined.world)
        if agreed.checkpoint:
            self._begin_checkpoint(joined.world)
        if agreed.resize:
            raise HostsUpdatedInterrupt

    @progress.during("checkpoint")
    def _begin_checkpoint(self, world: World, is_last: bool = False) -> None:
        """Begin to write a checkpoint: of the last commit, or of the state of a finished training. Collective."""
        store, schedule = self._store, self._checkpoints.schedule
        start_s = self._clock.monotonic_s()
        if self._buffers.sync() and not is_last:
            store.save(store.commit, light=True)
        snapshot = store.final_snapshot() if is_last else store.deferred_snapshot()
        self._checkpoints.begin(snapshot, world, f"{world.generation}-{store.step}-{self._nonce:016x}")
        schedule.mark(store.step, store.samples, self._schedules.epoch_position())
        schedule.note_stall(self._clock.monotonic_s() - start_s)
        self._writers_busy = True

    def write_last_checkpoint(self, joined: RendezvousInfo) -> None:
        """Write the state of a finished training, and wait until it is in storage. Every rank; collective; blocks.

        Raises:
            StorageError: It could not be written; on every rank.
        """
        checkpoints, collectives, world = self._checkpoints, joined.collectives, joined.world
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
        if self._joined is not None and self._joined.world.rank == 0:
            self._events.emit(event)
