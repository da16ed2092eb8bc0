"""What the loops of the package keep of a ``State``, and do with it; a script sees ``State`` alone."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import EdlHvdWarning, UsageError
from edl_hvd.events import Event, Metrics
from edl_hvd.metrics.metric import Metric
from edl_hvd.worker import process
from edl_hvd.worker.commits.live_state import METRICS
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import average_, broadcast_state
from edl_hvd.worker.position import LeftLoop, position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.reruns import FunctionReruns
from edl_hvd.worker.training.alike import check_alike
from edl_hvd.worker.training.metric_sync import MetricSync
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.process_group import PresentGroup, ProcessGroup, WorldGroup
from edl_hvd.worker.training.round_message import Vote
from edl_hvd.worker.training.scheduler import SCALE_INVARIANT, GatedScheduler, PacedScheduler
from edl_hvd.worker.training.tuning import StepTimer

logger = logging.getLogger(__name__)

_NUMBERS = "numbers of modules"  # a name that no attribute can have
_EPOCH_LEVEL = -1
# What random numbers at the level of an epoch are seeded with, behind seed and epoch; a step has its own place.


class CommitCoordinator(Protocol):
    """The commits of one call of an elastic function; see ``commit_protocol.py``."""

    @property
    def generation(self) -> int:
        """The generation of the present world; 0 between worlds."""

    def vote(self, samples: int) -> Vote:
        """What this rank wants at the commit after the next step, of ``samples`` samples over all ranks."""

    def vote_now(self) -> Vote:
        """What this rank wants at a commit without a step before it."""

    def may_come_back(self, answer: Vote | None) -> bool:
        """Somebody may need the state of the commit that the ranks have voted on."""

    def agree(self, answer: Vote | None = None) -> None:
        """Act on the ranks' votes at a commit. Collective; blocks, unless their sum is there already."""

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""


class FinishedEpoch(NamedTuple):
    """The epoch whose batches the script has last gone through to their end.

    Attributes:
        coordinator: Commits of the call of the elastic function that it was in.
        attempt: ``Runtime.attempt`` of that time.
        epoch: Number of the epoch; -1 for none.
    """

    coordinator: CommitCoordinator | None = None
    attempt: int = -1
    epoch: int = -1


class Runtime:
    """The part of one ``State`` that the loops of the package use.

    Attributes:
        store: What is kept, and the last commit of it.
        optimizers: Distributed optimizers of the state.
        samplers: Samplers of the state that deal out batches.
        reruns: What the elastic function does once more in the next world.
        attempt: Rises whenever the state is put back or a world is joined.
        commit_every: Optimizer steps between commits.
        step_timer: How long steps take.
        counting: Metrics, and the loop that they count in.
        coordinator: Commits of the present call of the elastic function; ``None`` outside.
        group: Workers of the present world.
        callbacks: Called in each new world but the first.
        checkpoint: Where the job's checkpoints are, if anywhere.
        began_at: The step that a checkpoint had brought this job to when it began; 0 where it began anew.
        steps_here: Optimizer steps counted in this run of the elastic function, whatever world they were made in.
        has_computed: This worker has been dealt a micro-batch in this run of the script.
        failure: What has failed as the script left a loop, where nothing can be raised; the next commit raises it.
        left: What to say, unless an error follows, of a loop that the script has left early; empty for nothing.
        finished_epoch: The epoch whose batches the script has last gone through to their end.
        passes: Micro-batches that this worker has computed since the buffers were made equal.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.store = StateStore({**attributes, METRICS: {}})
        self.attempt = 0
        self.commit_every = 1
        self.step_timer = StepTimer()
        self.counting = MetricSync(self.store.of_kind(Metric), self.store.of_kind(EvaluationSampler))
        self.optimizers: list[Any] = list(self.store.of_kind(is_distributed))
        self.samplers: list[ElasticBatchSampler] = list(self.store.of_kind(ElasticBatchSampler))
        self.reruns = FunctionReruns(self.store, self.optimizers, self.warn_once)
        self._gated: list[Any] = list(self.store.of_kind(GatedScheduler))
        self._paced: list[Any] = list(self.store.of_kind(PacedScheduler))
        self.coordinator: CommitCoordinator | None = None
        self.group: ProcessGroup = PresentGroup()
        self.callbacks: list[Callable[[], None]] = []
        self.checkpoint: str | None = None
        self.began_at = 0
        self.steps_here = 0
        self.has_computed = True
        self.failure: Exception | None = None
        self.left = ""
        self.finished_epoch = FinishedEpoch()
        self._thread = threading.get_ident()
        self._beside: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.passes = 0
        self._step_hook: Any = None
        self._committed_step = 0  # what a script may set ``state.step`` to by itself
        self._has_committed = False
        self._warned: set[str] = set()
        if self.store.reduction is not None and self._gated:
            self.store.reduction.on_round.add(self.schedulers_may_move)
        for optimizer in self.optimizers:
            optimizer.stepping.after.add(self._after_step)

    def warn_once(self, about: str, message: str) -> None:
        """Say something to the user, once."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, EdlHvdWarning, stacklevel=3)

    # --- the run of the elastic function ---

    def attach(self, coordinator: CommitCoordinator | None, commit_every: int = 1) -> None:
        """Commits go through ``coordinator`` from now on."""
        self.coordinator, self.commit_every = coordinator, commit_every
        if coordinator is None:
            self.counting.set_world(0, 1)
        for sampler in self.samplers:
            sampler.is_watched = coordinator is not None
            sampler.was_watched = sampler.was_watched or sampler.is_watched
        position.leave()
        if self._step_hook is not None:
            self._step_hook.remove()
        self._step_hook = None if coordinator is None else register_optimizer_step_pre_hook(self._check_optimizer)
        self._thread = threading.get_ident()

    def bind(self, group: WorldGroup | None) -> None:
        """Compute together with these workers from now on: a world was entered; ``None`` where it was left."""
        self.group = group or PresentGroup()
        self.counting.bind(group)
        if self.store.reduction is not None:
            self.store.reduction.bind(self.group)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer of any kind is about to step.

        Raises:
            UsageError: It moves a model of the state with the gradient of this worker alone.
        """
        if is_distributed(optimizer) or not position.place.in_training:
            return
        if threading.get_ident() != self._thread:  # another one trains something of its own
            return
        store = self.store
        summed = store.reduction.names if store.reduction is not None else {}
        kept = {parameter for model in store.of_kind(torch.nn.Module) for parameter in model.parameters()}
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter in kept and parameter not in summed for parameter in own):
            raise UsageError(
                f"{type(optimizer).__name__}.step() moves parameters of a model in State by the gradient of this "
                "worker alone, because the optimizer is not a DistributedOptimizer; write optimizer = "
                "edl_hvd.DistributedOptimizer(optimizer) and give it to State(…)"
            )
        is_beside = any(isinstance(p, torch.nn.Parameter) and p.grad is not None and p not in summed for p in own)
        # One that is made for a single step may be meant for this worker alone.
        if is_beside and self._beside.setdefault(optimizer, store.step) != store.step:
            raise UsageError(
                f"{type(optimizer).__name__}.step() moves parameters of no model in State, by the gradient of this "
                "worker alone, and a worker that joins would not have them; give State(…) their model, and "
                "optimizer = edl_hvd.DistributedOptimizer(optimizer)"
            )

    def begin_attempt(self) -> None:
        """Forget what is under way in a world that is gone."""
        self.attempt += 1
        self.failure = None
        self.left = ""
        self.has_computed = not self.samplers
        self.counting.begin_attempt()
        self.step_timer.forget()
        position.leave()
        if self.store.reduction is not None:
            self.store.reduction.forget_world()
        for optimizer in self.optimizers:
            optimizer.stepping.own = 0
        self._committed_step = self.store.step

    def run_callbacks(self) -> None:
        for callback in self.callbacks:
            callback()

    def check_finished(self) -> None:
        """The script's function has returned: say what it has done without effect.

        Raises:
            WorldBrokenError: It has caught the error of a collective.
            UsageError: It has left the loop over a step.
        """
        process.refuse_broken_world()
        position.refuse_left_early()
        self._settle()
        own = max((optimizer.stepping.own for optimizer in self.optimizers), default=0)
        if own and not self._has_committed:
            self._warn_uncounted(own)
        elif not self.steps_here and self.store.step and self.began_at == self.store.step:
            logger.warning(
                "step %s of %s%s; nothing left to train",
                f"{self.store.step:,}",
                f"{self.store.step:,}",
                f" in {self.checkpoint}" if self.checkpoint else "",
            )

    def _after_step(self) -> None:
        """An optimizer has stepped: in a loop over the loader itself nobody counts it."""
        if self.coordinator is None or position.place.in_training:
            return
        for sampler in self.samplers:
            sampler.has_stepped = True
        if self._has_committed:
            return
        own = max(optimizer.stepping.own for optimizer in self.optimizers)
        if own > 1 and any(sampler.is_bypassed for sampler in self.samplers):
            self._warn_uncounted(own)

    def _warn_uncounted(self, steps: int) -> None:
        self.warn_once(
            "uncounted",
            f"optimizer.step() was called {steps} times outside of state.steps() and state.batches(), without "
            "state.commit(): no sample is counted, no checkpoint written, and a lost worker costs all of it; write "
            "`for step in state.steps(loader):` instead of a loop over the loader",
        )

    def _settle(self) -> None:
        """Say what could not be said as the script left a loop: nothing can be raised there, nor told from an error."""
        if self.failure is not None:
            raise self.failure
        if self.left:
            said, self.left = self.left, ""
            self.warn_once("left", said)

    # --- commits ---

    def vote_after(self, samples: int) -> Callable[[], Vote]:
        """What to ask for this rank's vote at the commit after the next step, of ``samples`` samples over all ranks."""
        return Vote if self.coordinator is None else functools.partial(self.coordinator.vote, samples)

    def report(self, values: dict[str, float]) -> None:
        """Write numbers to the event log, from rank 0."""
        self.announce(Metrics(self.store.step, self.store.epoch, self.store.samples, values))

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""
        if self.coordinator is not None:
            self.coordinator.announce(event)

    def commit(self) -> None:
        """The commit that a script asks for. Collective."""
        process.refuse_broken_world()
        position.refuse_left_early()
        position.left = LeftLoop.NOT
        self._count_own_steps()
        self.counting.sync()
        with progress.during("commit"):
            self.commit_whole()

    def _count_own_steps(self) -> None:
        """In a loop of the script's own, each step of its optimizer is one of the run, unless it counts by itself."""
        own = max((optimizer.stepping.own for optimizer in self.optimizers), default=0)
        for optimizer in self.optimizers:
            optimizer.stepping.own = 0
        if own:
            self._has_committed = True
            if self.store.step == self._committed_step:
                self.store.step += own
                self.steps_here += own

    def commit_step(self, answer: Vote | None) -> None:
        """The commit after a step, whose gradients brought the ranks' votes along."""
        if answer is None or self.counting.may_have_trained or answer.metrics > 0:
            self.counting.sync()
        self.commit_light(answer)

    def commit_whole(self, answer: Vote | None = None) -> None:
        """A commit of a copy of everything, when the metrics are pooled."""
        self._settle()
        self._committed_step = self.store.step
        self.store.save(self.store.commit + 1)
        self._note_commit()
        if self.coordinator is not None:
            self.coordinator.agree(answer)

    def commit_light(self, answer: Vote | None = None) -> None:
        """A commit of what optimizer steps do not move, where that will do, and when the metrics are pooled."""
        self._settle()
        self._committed_step = self.store.step
        number = self.store.commit + 1
        if self.coordinator is None or self.coordinator.may_come_back(answer):
            self.store.save(number, light=self.commit_every == 1)
        else:
            self.store.skip(number)
        self._note_commit()
        if self.coordinator is not None:
            self.coordinator.agree(answer)

    def _note_commit(self) -> None:
        for sampler in self.samplers:
            sampler.note_commit()

    # --- where the run is ---

    def move_schedulers(self) -> None:
        """Move those of ``edl_hvd.schedule`` to where the run is; on every rank alike."""
        store = self.store
        for scheduler in self._paced:
            scheduler.edl_move(
                {
                    "samples": store.samples,
                    "epochs": self.epoch_position(),
                    "steps": store.step,
                    SCALE_INVARIANT: store.learning.scale_invariant_steps,
                }
            )

    def schedulers_may_move(self) -> None:
        """A step's gradient is complete."""
        for scheduler in self._gated:
            scheduler.edl_ready = True

    @property
    def learning_rate_factor(self) -> float:
        """What ``optimizer.step()`` multiplies the learning rate with at the next step."""
        factor, noise = self.store.ramp.factor(self.store.samples), self.store.learning.noise
        return self.samplers[0].policy.adapted(factor, noise) if self.samplers else factor

    def epoch_position(self, samples: int = 0) -> float:
        """The number of epochs finished, with the fraction of the present one, after ``samples`` more samples."""
        epoch = self.store.epoch
        return epoch + sum((s.offset + samples) / s.positions for s in self.samplers if s.epoch == epoch)

    def ends_epoch(self, samples: int = 0) -> bool:
        """Whether ``samples`` more samples complete the epoch's batches, so that the script goes on behind the loop."""
        epoch = self.store.epoch
        return any(s.epoch == epoch and s.offset + samples >= s.epoch_samples() for s in self.samplers)

    def begin_epoch(self) -> None:
        """The body of the present epoch begins: on a worker that has just joined, too, and where it is continued."""
        self.reruns.begin_epoch(any(sampler.epoch == self.store.epoch and sampler.offset for sampler in self.samplers))
        if len(self.samplers) == 1:
            seed_everything(self.samplers[0].seed, self.store.epoch, _EPOCH_LEVEL)

    def end_epoch(self) -> None:
        """The script has gone through the present epoch. Collective."""
        self.store.epoch += 1
        for sampler in self.samplers:
            sampler.set_epoch(self.store.epoch)
        self.move_schedulers()
        self.commit()

    def samples_of_epochs(self, count: int) -> int | None:
        """Samples of the epochs after the present one, up to ``count`` of all, and of all before; ``None``: unknown."""
        if len(self.samplers) != 1:
            return None
        sampler, store = self.samplers[0], self.store
        return store.samples + sampler.epoch_samples() * (count - store.epoch) - sampler.offset

    def sampler(self, call: str) -> ElasticBatchSampler:
        """The one that deals the batches.

        Raises:
            UsageError: There is none, or more than one.
        """
        if len(self.samplers) != 1:
            raise UsageError(
                f"{call} cannot tell how batches are dealt: State holds {len(self.samplers)} ElasticBatchSampler(s); "
                "expected one, State(batches=batches, …)"
            )
        return self.samplers[0]

    # --- together with the other ranks ---

    def sync_buffers(self) -> bool:
        """Make the models' buffers equal on all ranks; whether any may have changed. Collective; blocks.

        BatchNorm's running statistics are those of the samples a worker saw: floating-point buffers are averaged,
        weighted by the micro-batches that each worker has computed; counters (``num_batches_tracked``) become the
        largest. With ``exact=True`` they are equal already.
        """
        if self.coordinator is None or self.store.exact:
            return False
        passes, self.passes = self.passes, 0
        buffers = [buffer for model in self.store.of_kind(torch.nn.Module) for buffer in model.buffers()]
        if self.group.size == 1 or not buffers:
            return False
        average_(self.group.collectives, buffers, passes, self.group.rank)
        return True

    def check_alike(self) -> Vote | None:
        """Refuse to go on where the workers' weights have come apart, and tell of attributes. Collective; blocks.

        Returns:
            The ranks' votes for a commit that follows at once; ``None`` where nothing was compared.

        Raises:
            UsageError: They have; on all ranks.
        """
        reduction = self.store.reduction
        if self.coordinator is None or self.group.size == 1 or reduction is None:
            return None
        averages = {
            parameter: f"{name}.{key}"
            for name, handler in self.store.handlers.items()
            if isinstance(handler.value, torch.optim.swa_utils.AveragedModel)
            for key, parameter in handler.value.named_parameters()
        }
        names, vote = {**reduction.names, **averages}, self.coordinator.vote_now()
        numbers = {name: value for name, value in self.store.module_numbers().items() if isinstance(value, float)}
        attributes = {**self.store.attributes, _NUMBERS: numbers}
        found = check_alike(names, attributes, vote, self.group.collectives, self.store.step)
        for name in found.unlike:
            if name == _NUMBERS:
                name = ", state.".join(sorted(numbers)) or "model"
            self.warn_once(
                f"attribute.{name}",
                f"state.{name} is not the same on all workers after step {self.store.step}, so what the job goes "
                "on with, when the world changes, is that of any one of them; set it from what all have, such as "
                "step.mean(…), what edl_hvd.allreduce returns, or a metric of edl_hvd.metrics",
            )
        return found.answer

    def take_over(self, ran: bool) -> None:
        """Between two commits: a member whose script did not go through the step takes over from one whose did.

        Collective; blocks.

        Args:
            ran: The script has gone through the step here.
        """
        if self.group.size == 1:
            return
        collectives, rank = self.group.collectives, self.group.rank
        have_run = [bool(row[0]) for row in collectives.gather_integers([int(ran)])]
        if all(have_run) or not any(have_run):
            return
        root = have_run.index(True)
        plain, tensors = self.store.between() if rank == root else (None, {})
        plain, tensors = broadcast_state(collectives, plain, tensors, root, rank)
        if not ran:
            self.store.take_over(plain, tensors)
