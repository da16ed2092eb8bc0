"""What the members of a new world agree on: one state, the freshest that any of them holds, and the checkpoint URL."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

from edl_hvd.errors import ProgressLostError
from edl_hvd.teacher_models import teacher_models
from edl_hvd.worker import process
from edl_hvd.worker.commits.commit import Freshness
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import agree_on_teachers, broadcast_json, broadcast_state, drop_diverged
from edl_hvd.worker.joining.rendezvous import RendezvousInfo
from edl_hvd.worker.saving.manager import CheckpointManager
from edl_hvd.worker.training.alike import check_same_numerics, numerics_fingerprint


class JoinReport(NamedTuple):
    """What each member of a new world tells the others: a row of integers.

    Attributes:
        commit, quality: Freshness of the state that it holds; see :class:`~edl_hvd.worker.commits.commit.Freshness`.
        generation: Generation of the last world that it was in; 0 for none.
        known_step: The furthest step that it has heard of.
        nonce: Random; that of rank 0 is part of the names of this world's checkpoints.
        is_unverified: Whether it has taken its state over as a standby, and has not compared it with the others yet.
        lease: Number of the lease of the checkpoint URL, as far as it knows; 0 for none.
        losses: How often the job has lost all holders of its state, as far as it knows.
        watched_s: For how long the job has been watched, in whole seconds, as far as it knows.
        callbacks: Number of functions that its script has given to ``state.on_resize``.
        has_teachers: Whether it has met a model of teachers.
    """

    commit: int
    quality: int
    generation: int
    known_step: int
    nonce: int
    is_unverified: int
    lease: int
    losses: int
    watched_s: int
    callbacks: int
    has_teachers: int

    @property
    def freshness(self) -> Freshness:
        """Freshness of the state that it holds."""
        return Freshness(self.commit, self.quality)


@dataclass(frozen=True)
class Agreement:
    """What the members of a new world have agreed on, beside the state.

    Attributes:
        nonce: Random number, part of the names of this world's checkpoints.
        generations: Generation of each member's last world, in rank order; 0 for none.
        is_restored: Whether the state is that of a checkpoint.
        has_callbacks: Whether some member has functions to call in a new world.
    """

    nonce: int
    generations: tuple[int, ...]
    is_restored: bool
    has_callbacks: bool

    @property
    def elder(self) -> int | None:
        """A rank that comes from the latest of the members' worlds; ``None`` in the job's first world."""
        latest = max(self.generations)
        return self.generations.index(latest) if latest else None


class StateAgreement:
    """The part of one worker in the agreements of its worlds.

    Args:
        store: State of this worker.
        checkpoints: Checkpoints of the job.
        may_restart: Whether training may begin again at step 0 when the job has lost its progress.

    Attributes:
        known_step: The furthest step that any member of its worlds had heard of; -1 before the first world.
    """

    def __init__(self, store: StateStore, checkpoints: CheckpointManager, may_restart: bool) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._may_restart = may_restart
        self.known_step = -1

    def reach(self, joined: RendezvousInfo, known_step: int, generation: int, callbacks: int) -> Agreement:
        """Bring this worker to the state that all members go on from. Every rank of a new world; collective; blocks.

        Args:
            joined: New world and its collectives.
            known_step: Furthest step that this worker has heard of; -1 for none.
            generation: Generation of the last world of this worker; 0 for none.
            callbacks: Number of functions that this worker is to call in a new world.

        Raises:
            OwnedError: Another job holds the lease of the checkpoint URL; on every rank.
            ProgressLostError: No member holds the state, and no checkpoint does.
            StorageError: The checkpoints cannot be read; on every rank.
            UsageError: With ``exact=True``, this worker computes with other hardware or settings than rank 0.
        """
        store, checkpoints, collectives, world = self._store, self._checkpoints, joined.collectives, joined.world
        self.known_step = max(known_step, joined.known_step)
        own = JoinReport(
            *store.freshness,
            generation=generation,
            known_step=self.known_step,
            nonce=secrets.randbits(62),
            is_unverified=store.is_unverified,
            lease=checkpoints.lease.number,
            losses=checkpoints.schedule.losses,
            watched_s=int(checkpoints.schedule.watched_s),
            callbacks=callbacks,
            has_teachers=bool(teacher_models.met),
        )
        reports = [JoinReport(*row) for row in collectives.gather_integers(own)]
        self.known_step = max(report.known_step for report in reports)
        checkpoints.lease.acquire(collectives, world, [report.lease for report in reports])
        checkpoints.schedule.learn(
            max(report.losses for report in reports), max(report.watched_s for report in reports)
        )
        checkpoints.schedule.learn(checkpoints.lease.history.losses, checkpoints.lease.history.watched_s)
        held, unverified = [report.freshness for report in reports], [bool(report.is_unverified) for report in reports]
        if store.exact:
            own_numerics = numerics_fingerprint(process.device())
            check_same_numerics(own_numerics, broadcast_json(collectives, own_numerics, 0, world.rank))
        generations = tuple(report.generation for report in reports)
        if any(report.has_teachers for report in reports):
            agree_on_teachers(collectives, generations)
        is_restored = self._synchronise(joined, drop_diverged(collectives, store.fingerprint, held, unverified))
        return Agreement(
            reports[0].nonce,
            generations,
            is_restored,
            any(report.callbacks for report in reports),
        )

    def _synchronise(self, joined: RendezvousInfo, held: list[Freshness]) -> bool:
        """Give the best of the states that the members hold to all; whether it is that of a checkpoint.

        Args:
            joined: New world and its collectives.
            held: ``StateStore.freshness`` of each member, in rank order.
        """
        world, freshest = joined.world, max(held)
        root = held.index(freshest)
        dirty = freshest.is_dirty  # by each script in its own way, perhaps
        if not freshest.holds_state:
            if self._restore(joined):
                return True
            root = 0
        elif all(freshness == freshest for freshness in held) and not dirty:
            return False
        if world.size == 1:
            return False  # it keeps what it holds
        plain, tensors = self._store.export() if world.rank == root else (None, {})
        plain, tensors = broadcast_state(joined.collectives, plain, tensors, root, world.rank)
        if held[world.rank] != freshest or ((not freshest.holds_state or dirty) and world.rank != root):
            self._store.load(plain, tensors)
        return False

    def _restore(self, joined: RendezvousInfo) -> bool:
        """Load the newest checkpoint on all ranks, where no member holds state; false if there is none.

        Rank 0 then holds what its script built.
        """
        snapshot = self._checkpoints.newest(joined.collectives, joined.world)
        if snapshot is not None:
            self._store.load(snapshot.plain, dict(snapshot.tensors))
            return True
        if self.known_step > 0 and not self._may_restart:
            raise ProgressLostError(
                f"the job had reached step {self.known_step}, but every worker that held its state is gone and there "
                "is no checkpoint; set checkpoint=… for next time, or EDL_HVD_RESTART_LOST_PROGRESS=1 to start anew"
            )
        if joined.world.rank == 0:
            self._store.save(0)
        return False
