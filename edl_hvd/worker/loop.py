"""The elastic loop: join, agree on the freshest state, run the user's function, and again when the world changes."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import PlatformError, ProgressLostError, WorldBrokenError
from edl_hvd.events import (
    Committed,
    Event,
    EventLog,
    JobEnded,
    JobStarted,
    Metrics,
    Straggler,
    WorkerLeft,
)
from edl_hvd.metrics.metric import Metric
from edl_hvd.settings import Settings
from edl_hvd.worker import process
from edl_hvd.worker.commits.agreement import average_, broadcast_json, broadcast_state, drop_diverged
from edl_hvd.worker.commits.commit import Freshness
from edl_hvd.worker.downtime import Downtime
from edl_hvd.worker.joining.rendezvous import GracefulExit, Handover
from edl_hvd.worker.newcomers.follower import Following
from edl_hvd.worker.newcomers.guide import Guide
from edl_hvd.worker.progress import progress
from edl_hvd.worker.saving import together
from edl_hvd.worker.saving.durable import Checkpoints
from edl_hvd.worker.state import State
from edl_hvd.worker.training import tuning
from edl_hvd.worker.training.arithmetic import arithmetic, refuse_other_arithmetic
from edl_hvd.worker.training.pooling import pool
from edl_hvd.worker.training.reduction import Vote
from edl_hvd.world import World

logger = logging.getLogger(__name__)

# A world that breaks again and again before its first commit, with nobody missing, will not get better.
_MAX_RESETS_WITHOUT_COMMIT = 5


class HostsUpdatedInterrupt(Exception):
    """Every rank agreed at this commit to form another world. Not an error."""


class JoinReport(NamedTuple):
    """What each member of a new world tells the others: a row of integers.

    Attributes:
        commit, quality: How good a state it holds; see :class:`~edl_hvd.worker.commits.commit.Freshness`.
        generation: Generation of the last world that it was in; 0 for none.
        known_step: The furthest step that it has heard of.
        nonce: Random; that of rank 0 is part of the names of this world's checkpoints.
        is_unverified: Whether it came by its state by following a world, and nobody has compared it yet.
        owner: Owner of the checkpoint URL, as far as it knows; 0 for none.
    """

    commit: int
    quality: int
    generation: int
    known_step: int
    nonce: int
    is_unverified: int
    owner: int

    @property
    def freshness(self) -> Freshness:
        """How good a state it holds."""
        return Freshness(self.commit, self.quality)


class Session:
    """One call of an elastic function on one worker."""

    def __init__(self, state: State, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._runtime = state._runtime
        self._store = self._runtime.store
        self._settings = settings
        self._clock = clock
        self._process = process.current()
        self._events = EventLog(settings.events, clock)
        self._checkpoints = Checkpoints(settings, self._events, clock, self._process.launch.run)
        self._guide = Guide(self._store)
        self._known_step = -1
        self._nonce = 0
        self._writers_busy = False
        self._downtime = Downtime(self._events, clock)
        self._runtime.attach(self, settings.commit_every)
        self._runtime.checkpoint = settings.checkpoint

    def close(self) -> None:
        self._guide.abandon()
        self._checkpoints.own(0, speaks=False)
        self._runtime.attach(None)
        self._events.close()

    @property
    def generation(self) -> int:
        world = self._process.world
        return world.generation if world else 0

    # --- the loop ---

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the function to its end, through however many worlds that takes."""
        launch = self._process.launch
        self._events.emit(JobStarted(f"{launch.host}:{launch.local_rank}", os.getpid()))
        while True:
            try:
                self._enter()
                progress.enter("script")
                result = self._call(function)
                self._runtime.check_finished()
                self._finish()
                return result
            except HostsUpdatedInterrupt:
                self._leave("change")
            except GracefulExit as dismissal:
                self._exit_gracefully(dismissal)
            except BaseException as error:
                if not _is_broken_world(error):
                    if not self._process.rendezvous.elastic:
                        self._checkpoints.release()  # nobody goes on
                    self._process.rendezvous.ended(self._store.step, error)
                    self._leave("error")  # at once, so that the others learn of it
                    raise
                if not self._process.rendezvous.elastic:
                    self._leave("error")
                    raise PlatformError(
                        "a worker of a fixed world is gone, so the job ends; start it with horovodrun's elastic "
                        "flags (--min-np, --host-discovery-script) to go on without it"
                    ) from error
                logger.info("the world broke: %s", error)
                self._checkpoints.schedule.note_failure()
                self._leave("failure")
                self._store.restore()
                if self._downtime.resets_without_commit >= _MAX_RESETS_WITHOUT_COMMIT:
                    raise PlatformError(
                        f"{self._downtime.resets_without_commit} worlds of the same workers broke before their first "
                        f"commit, so another will not help; the last one with: {error}"
                    ) from error

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except torch.cuda.OutOfMemoryError as error:  # torch.OutOfMemoryError is the same, from torch 2.5 on
            explained = self._runtime.out_of_memory(error)
            if explained is None:
                raise
            raise explained from error
        except NameError as error:
            said = self._runtime.never_assigned(error)
            if said is None:
                raise
            raise said from error
        except (AttributeError, TypeError) as error:
            missing = self._runtime.gradient_missing(error)
            if missing is None:
                raise
            raise missing from error

    @progress.during("end")
    def _exit_gracefully(self, dismissal: GracefulExit) -> NoReturn:
        logger.info("%s", dismissal)
        if dismissal.save and self._store.held >= 0:
            self._checkpoints.save_last(self._store, dismissal.left_s)
            self._checkpoints.release()
        launch, generation = self._process.launch, self._downtime.generation
        self._events.emit(WorkerLeft(generation, f"{launch.host}:{launch.local_rank}", self._store.step))
        sys.exit(dismissal.code)

    def _leave(self, cause: str) -> None:
        progress.enter("join")
        self._downtime.begin(cause, self._process.world)
        if cause == "change":
            self._guide.end()
        else:
            self._guide.abandon()
        self._checkpoints.abandon(self._store)
        self._runtime.begin_life()
        if self._process.joined is not None:
            self._process.joined = None
            # After an error of the script Horovod itself is well: a regular shutdown tells the others at once.
            self._process.rendezvous.leave(broken=cause == "failure")

    def _enter(self) -> None:
        """Become a member of a world whose members all stand at the same commit."""
        progress.enter("join")
        if self._process.joined is None:
            handover = Handover(self._guide.invite, functools.partial(Following, self._store))
            self._process.joined = self._process.rendezvous.join(self._known_step, self._store.held_step, handover)
        joined = self._process.joined
        world = joined.world
        self._known_step = max(self._known_step, joined.known_step)
        own = JoinReport(
            *self._store.freshness,
            generation=self._downtime.generation,
            known_step=self._known_step,
            nonce=secrets.randbits(62),
            is_unverified=self._store.is_unverified,
            owner=self._checkpoints.owner,
        )
        reports = [JoinReport(*row) for row in joined.collectives.gather_integers(own)]
        self._known_step = max(report.known_step for report in reports)
        self._nonce = reports[0].nonce
        together.own(self._checkpoints, joined.collectives, world, [report.owner for report in reports])
        held, followed = [report.freshness for report in reports], [bool(report.is_unverified) for report in reports]
        if self._store.exact:
            refuse_other_arithmetic(broadcast_json(joined.collectives, arithmetic(), 0, world.rank))
        self._synchronise(world, drop_diverged(joined.collectives, self._store.fingerprint, held, followed))
        self._apply_world(world)
        self._downtime.announce(world, [report.generation for report in reports], self._store.step)
        if self._downtime.before is not None:
            self._runtime.run_callbacks()

    def _synchronise(self, world: World, held: list[Freshness]) -> None:
        freshest = max(held)
        root = held.index(freshest)
        dirty = freshest.is_dirty  # by each script in its own way, perhaps
        if not freshest.holds_state:
            if self._restore(world):
                return
            root = 0
        elif all(freshness == freshest for freshness in held) and not dirty:
            return
        plain, tensors = self._store.export() if world.rank == root else (None, {})
        plain, tensors = broadcast_state(self._process.collectives, plain, tensors, root, world.rank)
        if held[world.rank] != freshest or ((not freshest.holds_state or dirty) and world.rank != root):
            self._store.load(plain, tensors)

    def _restore(self, world: World) -> bool:
        """Nobody holds state: let all hold that of the newest checkpoint, else rank 0 what the script built."""
        snapshot = self._checkpoints.newest(self._process.collectives, world)
        if snapshot is not None:
            self._store.load(snapshot.plain, dict(snapshot.tensors))
            if world.rank == 0:
                self._runtime.began_at = self._store.step
            return True
        if self._known_step > 0 and not self._settings.restart_lost_progress:
            raise ProgressLostError(
                f"the job had reached step {self._known_step}, but every worker that held its state is gone and there "
                "is no checkpoint; set checkpoint=… for next time, or EDL_HVD_RESTART_LOST_PROGRESS=1 to start anew"
            )
        if world.rank == 0:
            self._store.save(0)
        return False

    def _apply_world(self, world: World) -> None:
        """Deal batches and scale the learning rate for this world, and make that part of the commit."""
        self._runtime.begin_life()
        self._runtime.counting.set_world(world.rank, world.size)
        store = self._store
        for sampler in store.of_kind(ElasticBatchSampler):
            sampler.set_world(world.rank, world.size)
            sampler.repeat(store.repeated_samples)
            tuning.place(sampler, store.learning, store.step, world.size)
            factor = sampler.policy.learning_rate_factor(world.size)
            store.ramp = store.ramp.toward(factor, store.samples, sampler.policy.warmup_samples)
        store.resave()
        store.is_unverified = False
        self._known_step = max(self._known_step, store.step)
        self._writers_busy = False
        self._checkpoints.schedule.mark(store.step, store.samples, self._runtime.epoch_position())

    # --- inside a world ---

    def vote(self, samples: int) -> Vote:
        """See :class:`edl_hvd.worker.runtime.Session`."""
        return self._vote(1, samples)._replace(metrics=float(self._runtime.counting.is_behind))

    def _vote(self, steps: int, samples: int) -> Vote:
        """The vote of this rank for the commit that is ``steps`` and ``samples`` further on."""
        store, world, checkpoints = self._store, self._process.world, self._checkpoints
        due = (
            world is not None
            and world.rank == 0
            and checkpoints.wanted
            and not self._writers_busy
            # The next commit is at the same step, and has what the script measures after the epoch.
            and not self._runtime.ends_epoch(samples)
            and checkpoints.due(store.step + steps, store.samples + samples, self._runtime.epoch_position(samples))
        )
        return Vote(
            resize=float(self._process.rendezvous.change_pending()),
            checkpoint=float(due),
            writing=float(checkpoints.busy),
            stop=float(bool(checkpoints.stop_reason)),
        )

    def may_come_back(self, answer: Vote | None) -> bool:
        """See :class:`edl_hvd.worker.runtime.Session`. A fixed world ends with its first worker."""
        return (
            self._process.rendezvous.elastic
            or answer is None
            or bool(answer.resize or answer.checkpoint or answer.stop)
        )

    @progress.during("commit")
    def agree(self, answer: Vote | None = None) -> None:
        """See :class:`edl_hvd.worker.runtime.Session`."""
        world = self._process.world
        if self._process.joined is None or world is None:
            return
        store = self._store
        self._downtime.end()
        self._checkpoints.report()
        self._checkpoints.schedule.note_commit(self._writers_busy)
        agreed = self._vote_out_of_band() if answer is None else answer
        self._writers_busy = bool(agreed.writing)
        self._guide.commit()
        self._known_step = max(self._known_step, store.step)
        progress.step, progress.samples = store.step, store.samples
        while progress.stragglers:  # the driver tells rank 0 alone
            self._events.emit(Straggler(**vars(progress.stragglers.popleft())))
        if world.rank == 0:
            self._events.emit(Committed(world.generation, world.size, store.step, store.epoch, store.samples))
        if agreed.stop:
            together.stop(self._checkpoints, self._process.collectives, world)
        if agreed.checkpoint:
            self._begin_checkpoint(world)
        if agreed.resize:
            raise HostsUpdatedInterrupt

    def _vote_out_of_band(self) -> Vote:
        """One collective of its own: nothing has travelled with gradients."""
        own = torch.tensor(self._vote(0, 0), dtype=torch.float32)
        return Vote(*self._process.collectives.allreduce(own, "max").tolist())

    @progress.during("checkpoint")
    def _begin_checkpoint(self, world: World, is_last: bool = False) -> None:
        store, schedule = self._store, self._checkpoints.schedule
        start_s = self._clock.monotonic_s()
        if self._runtime.sync_buffers() and not is_last:
            store.save(store.commit, light=True)
        copied = store.final_snapshot if is_last else store.deferred_snapshot
        self._checkpoints.begin(copied, world, f"{world.generation}-{store.step}-{self._nonce:016x}")
        schedule.mark(store.step, store.samples, self._runtime.epoch_position())
        schedule.note_stall(self._clock.monotonic_s() - start_s)
        self._writers_busy = True

    def pool(self, metrics: Sequence[Metric], pass_: str | None, word: int) -> int:
        world = self._process.world
        if world is None or world.size == 1:
            return word  # metrics see to themselves
        return pool(metrics, self._process.collectives, world.rank, world.size, pass_, word)

    def level(self, tensors: list[torch.Tensor], weight: int) -> bool:
        world = self._process.world
        if world is None or world.size == 1 or not tensors:
            return False
        average_(self._process.collectives, tensors, weight, world.rank)
        return True

    def report(self, values: dict[str, float]) -> None:
        world = self._process.world
        if world is not None and world.rank == 0:
            store = self._store
            self._events.emit(Metrics(store.step, store.epoch, store.samples, values))

    def announce(self, event: Event) -> None:
        world = self._process.world
        if world is not None and world.rank == 0:
            self._events.emit(event)

    def _finish(self) -> None:
        """The function returned on this worker: make its result durable and wait for the others.

        There is a commit of it only when no world can break any more: from one, the function would be run again though
        it has come to its end, and make another step where it ends by ``return`` after some.
        """
        progress.enter("end")
        world = self._process.world
        assert world is not None
        self._runtime.counting.pool()
        if self._checkpoints.wanted:
            begin = functools.partial(self._begin_checkpoint, world, is_last=True)
            together.write_last(self._checkpoints, self._store, begin, self._process.collectives, world, self._clock)
        self._process.collectives.allreduce(torch.zeros(1, dtype=torch.int64), "max")
        self._store.save(self._store.commit + 1)
        self._process.rendezvous.ended(self._store.step, None)
        if world.rank == 0:
            self._checkpoints.release()
            self._events.emit(JobEnded(self._store.step, self._store.epoch, self._store.samples))


def _is_broken_world(error: BaseException) -> bool:
    if isinstance(error, WorldBrokenError):
        return True
    exceptions = sys.modules.get("horovod.common.exceptions")  # raised by a script's own calls of Horovod
    return exceptions is not None and isinstance(error, exceptions.HorovodInternalError)
