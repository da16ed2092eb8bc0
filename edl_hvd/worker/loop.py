"""The elastic loop: join a world, run the user's function, and both again when the world changes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError, UsageError, WorldBrokenError
from edl_hvd.events import EventLog, JobEnded, JobStarted, StopCause, WorkerLeft
from edl_hvd.protocol import LONGEST_SAVE_S
from edl_hvd.settings import Settings
from edl_hvd.teacher_models import teacher_models
from edl_hvd.worker import process
from edl_hvd.worker.commit_protocol import CommitProtocol, CommittedState, HostsUpdatedInterrupt
from edl_hvd.worker.downtime import Downtime
from edl_hvd.worker.error_advice import explain
from edl_hvd.worker.joining.rendezvous import GracefulExit, StateTransfer
from edl_hvd.worker.progress import progress
from edl_hvd.worker.saving.manager import CheckpointManager
from edl_hvd.worker.standby.donor import StateDonor
from edl_hvd.worker.standby.replica import StandbyReplica
from edl_hvd.worker.state import State
from edl_hvd.worker.state_agreement import StateAgreement
from edl_hvd.worker.training import tuning
from edl_hvd.worker.training.process_group import WorldGroup
from edl_hvd.world import World
from edl_hvd.world_change import world_change

logger = logging.getLogger(__name__)

_MAX_RESETS_WITHOUT_COMMIT = 5  # in a row, of the same workers: after these, the next world would break as well


class ElasticLoop:
    """One call of an elastic function on one worker.

    Args:
        state: State of the job, as the script made it.
        settings: Settings of the elastic function.
        clock: Clock of this worker.
    """

    def __init__(self, state: State, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._runtime = state._runtime
        self._grace_s = settings.termination_grace_s
        self._store = self._runtime.store
        self._process = process.current()
        self._events = EventLog(settings.events, clock)
        self._checkpoints = CheckpointManager(settings, self._events, clock, self._process.launch.run)
        self._donor = StateDonor(self._store)
        self._downtime = Downtime(self._events, clock)
        self._agreement = StateAgreement(self._store, self._checkpoints, settings.restart_lost_progress)
        committed = CommittedState(self._store, self._runtime.schedules, self._runtime.counting, self._runtime.buffers)
        self._commits = CommitProtocol(committed, self._checkpoints, self._donor, self._downtime, self._events, clock)
        self._runtime.attach(self._commits, settings.commit_every)
        self._runtime.checkpoint = settings.checkpoint

    def close(self) -> None:
        """Release what the call has held: threads, files, the lease of the checkpoints. Not collective."""
        self._donor.abandon()
        self._checkpoints.lease.set(0, renews=False)
        self._runtime.reruns.end_function(is_over=True)
        self._runtime.attach(None)
        self._runtime.bind(None)
        self._events.close()
        teacher_models.forget()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the function, again in each new world, until it returns.

        Args:
            function: Function of the script, without arguments.

        Returns:
            What the function has returned.
        """
        self._refuse_another_call()
        launch = self._process.launch
        self._events.emit(JobStarted(f"{launch.host}:{launch.local_rank}", os.getpid()))
        while True:
            try:
                self._enter()
                progress.enter("script")
                self._runtime.reruns.begin_function()
                result = self._call(function)
                self._runtime.check_finished()
                self._finish()
                self._process.is_complete = True
                return result
            except HostsUpdatedInterrupt:
                self._runtime.reruns.end_function(is_over=False)
                self._leave("change")
            except GracefulExit as exit_:
                self._exit_gracefully(exit_)
            except BaseException as error:
                if not _is_broken_world(error):
                    self._leave_after_error(error)
                    raise
                self._recover(error)

    def _refuse_another_call(self) -> None:
        """Refuse a second call of an elastic function where the world may change.

        For the launcher the job is complete with the first call, so a worker that joins in the second would end it.

        Raises:
            UsageError: An elastic function has returned, and the world may change.
        """
        if not (self._process.is_complete and self._process.rendezvous.elastic):
            return
        error = UsageError(
            "an elastic function was called after one had returned in the same job, which is complete with the first, "
            "so a worker that joins or is lost in the second would end it; make all folds or phases epochs of one "
            "elastic function, `for epoch in state.epochs(folds * epochs):`, or start one job for each"
        )
        self._process.rendezvous.ended(self._store.step, error)
        raise error

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call the function; raise its error, or one that says what to do about it."""
        try:
            with world_change.found_by(self._may_leave):
                return function()
        except Exception as error:
            if not _is_broken_world(error):
                # Where the script has caught the error of a broken world, this one follows from it.
                self._process.refuse_broken_world()
            reduction, samplers = self._store.reduction, self._runtime.samplers
            explained = explain(
                error,
                part=reduction.micro_batch if reduction is not None else None,
                policy=samplers[0].policy if samplers else None,
                has_computed=self._runtime.has_computed,
                is_behind_steps=self._runtime.is_behind_steps,
            )
            if explained is None:
                raise
            raise explained from error

    def _may_leave(self) -> bool:
        """Whether the world is to change or has broken, and the last commit can be returned to."""
        rendezvous = self._process.rendezvous
        return rendezvous.elastic and (rendezvous.change_pending() or rendezvous.has_lost_member())

    def _leave_after_error(self, error: BaseException) -> None:
        """The function has raised an error of its own: leave the world at once, which stops the other workers."""
        if not self._process.rendezvous.elastic:
            self._checkpoints.lease.release()  # no worker continues the job
        self._process.rendezvous.ended(self._store.step, error)
        self._leave("error")
        self._checkpoints.lease.leave()

    def _recover(self, error: BaseException) -> None:
        """The world has broken: return to the last commit, for the next world.

        Raises:
            PlatformError: There is no next world, or too many in a row have broken before their first commit.
        """
        if not self._process.rendezvous.elastic:
            self._leave("error")
            raise PlatformError(
                "a worker of a fixed world is gone, so the job ends; start it with horovodrun's elastic "
                "flags (--min-np, --host-discovery-script) to go on without it"
            ) from error
        logger.info("the world broke: %s", error)
        self._leave("failure")
        self._runtime.reruns.end_function(is_over=False)
        self._store.restore()
        if self._store.kept_change:
            self._runtime.warn_once(
                "kept_change",
                f"the script has changed {self._store.kept_change} besides its optimizers since the last commit, which "
                "has no copy of it, so the step that is made again changes it twice; change weights behind "
                "optimizer.step(), where they count once",
            )
        resets = self._downtime.resets_without_commit
        if resets >= _MAX_RESETS_WITHOUT_COMMIT:
            raise PlatformError(
                f"{resets} worlds of the same workers broke before their first "
                f"commit, so another will not help; the last one with: {error}"
            ) from error

    @progress.during("end")
    def _exit_gracefully(self, exit_: GracefulExit) -> NoReturn:
        """This worker is to end: save what no other worker holds, and exit."""
        logger.info("%s", exit_)
        if exit_.save and self._store.held >= 0 and not (exit_.job_goes_on and self._store.is_unverified):
            if exit_.job_goes_on is None:
                self._checkpoints.write_emergency(self._store, exit_.remaining_s)
                self._checkpoints.lease.release()
            else:
                process.end_within(LONGEST_SAVE_S)
                self._checkpoints.write_with_peers(self._store, exit_.job_goes_on)
                process.end_within(self._grace_s)  # the script may have threads that do not end
        else:
            self._checkpoints.lease.leave()
        launch, generation = self._process.launch, self._downtime.generation
        self._events.emit(WorkerLeft(generation, f"{launch.host}:{launch.local_rank}", self._store.step))
        sys.exit(exit_.code)

    def _leave(self, cause: StopCause) -> None:
        """Leave the present world, if there is one.

        Args:
            cause: As for :meth:`Downtime.begin`.
        """
        progress.enter("join")
        self._downtime.begin(cause, self._process.world)
        if cause == "change":
            self._donor.end()
        else:
            self._donor.abandon()
        self._checkpoints.abandon(self._store)
        self._runtime.begin_attempt()
        self._commits.leave_world()
        if self._process.joined is not None:
            self._process.joined = None
            self._runtime.bind(None)
            # After an error of the script Horovod still works, and a regular shutdown stops the others at once.
            self._process.rendezvous.leave(broken=cause == "failure")

    @property
    def _known_step(self) -> int:
        """The furthest step that this worker has heard of, from others or by its own commits."""
        return max(self._agreement.known_step, self._commits.furthest_step)

    def _enter(self) -> None:
        """Become a member of a world whose members all stand at the same commit."""
        progress.enter("join")
        if self._process.joined is None:
            receive = partial(StandbyReplica, self._store)
            transfer = StateTransfer(self._donor.serve, receive, lambda: self._store.held_step)
            self._process.joined = self._process.rendezvous.join(self._known_step, self._store.held_step, transfer)
        joined = self._process.joined
        world = joined.world
        self._runtime.bind(WorldGroup(world.rank, world.size, joined.collectives, world.hosts))
        agreed = self._agreement.reach(
            joined, self._known_step, self._downtime.generation, len(self._runtime.callbacks)
        )
        if agreed.is_restored:
            progress.restored_step = self._store.step
            if world.rank == 0:
                self._runtime.began_at = self._store.step
        self._apply_world(world)
        self._commits.enter_world(joined, agreed.nonce)
        self._downtime.announce(world, agreed.generations, self._store.step)
        if agreed.has_callbacks and agreed.elder is not None:
            self._runtime.run_callbacks(agreed.elder)

    def _apply_world(self, world: World) -> None:
        """Deal batches and scale the learning rate for this world, and add that to the last commit."""
        self._runtime.begin_attempt()
        self._runtime.counting.set_world(world.rank, world.size)
        store = self._store
        for sampler in self._runtime.samplers:
            sampler.set_world(world.rank, world.size)
            sampler.repeat(store.repeated_samples)
            tuning.place(sampler, store.learning, store.step, world.size)
            store.ramp = store.ramp.follow(sampler.policy, world.size, store.samples)
            progress.work = tuning.work_report(sampler.policy, store.learning, self._runtime.group)
        store.resave()
        store.is_unverified = False

    def _finish(self) -> None:
        """The function has returned on this worker: write its last checkpoint and wait for the others.

        There is no commit before the last collective. With one, a world that breaks in that collective would run the
        function again although it is complete, and a function that returns after some steps would make another step.
        """
        progress.enter("end")
        joined = self._process.joined
        assert joined is not None
        self._runtime.counting.sync()
        if self._checkpoints.is_enabled:
            self._commits.write_last_checkpoint(joined)
        joined.collectives.allreduce(torch.zeros(1, dtype=torch.int64), "max")
        self._store.save(self._store.commit + 1)
        self._process.rendezvous.ended(self._store.step, None)
        if joined.world.rank == 0:
            self._checkpoints.lease.release()
            self._events.emit(JobEnded(self._store.step, self._store.epoch, self._store.samples))


def _is_broken_world(error: BaseException) -> bool:
    if isinstance(error, WorldBrokenError):
        return True
    exceptions = sys.modules.get("horovod.common.exceptions")  # raised by a script's own calls of Horovod
    return exceptions is not None and isinstance(error, exceptions.HorovodInternalError)
