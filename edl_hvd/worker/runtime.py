"""What the package does with a ``State`` while an elastic function runs: worlds, commits, epochs, comparisons."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.order import IndexOrder, ShuffledOrder
from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import EdlHvdWarning, UsageError
from edl_hvd.events import Event, Metrics
from edl_hvd.metrics.metric import Metric
from edl_hvd.worker import process
from edl_hvd.worker.commits.live_state import METRICS
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.commits.state_sync import AveragedBuffers, broadcast_state, share_options
from edl_hvd.worker.own_steps import OwnSteps
from edl_hvd.worker.position import LeftLoop, position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.reruns import FunctionReruns
from edl_hvd.worker.schedules import Schedules
from edl_hvd.worker.training.alike import buffer_digests, check_alike, is_due
from edl_hvd.worker.training.metric_sync import MetricSync
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.process_group import PresentGroup, ProcessGroup, WorldGroup
from edl_hvd.worker.training.round_message import Vote
from edl_hvd.worker.training.tuning import StepTimer

logger = logging.getLogger(__name__)

_NUMBERS = "numbers of modules"  # a name that no attribute can have
_SEEDED_ORDERS, _COMPARED_SAMPLES = (IndexOrder, ShuffledOrder), 4096
# Random numbers at the top of an epoch are seeded with the sampler's seed, the epoch and this; a step has its offset in
# its place.
_EPOCH_LEVEL = -1


class CommitCoordinator(Protocol):
    """The commits of one call of an elastic function; see ``commit_protocol.py``."""

    @property
    def generation(self) -> int:
        """The generation of the present world; 0 between worlds."""

    def vote(self, samples: int) -> Vote:
        """What this rank wants at the commit after the next step, of ``samples`` samples over all ranks."""

    def vote_now(self) -> Vote:
        """What this rank wants at a commit without a step before it."""

    def agree_on_teachers(self) -> None:
        """Let all ranks learn from teachers of the same models. Collective; blocks."""

    def may_come_back(self, answer: Vote | None) -> bool:
        """Whether a rank may need the state of the commit that the ranks have voted on."""

    def agree(self, answer: Vote | None = None) -> None:
        """Act on the ranks' votes at a commit. Collective; blocks, unless their sum is there already."""

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""


class FinishedEpoch(NamedTuple):
    """The epoch whose loop over batches has last come to its end.

    Attributes:
        coordinator: Commits of that call of the elastic function.
        attempt: ``Runtime.attempt`` of that time.
        epoch: Number of the epoch; -1 for none.
    """

    coordinator: CommitCoordinator | None = None
    attempt: int = -1
    epoch: int = -1


class Runtime:
    """The part of one ``State`` that the elastic loop and the loops over batches use; a script sees ``State`` alone.

    Args:
        attributes: Everything given to ``State``, by name.

    Attributes:
        store: Present state, and the last commit.
        optimizers: Distributed optimizers of the state.
        samplers: Samplers of the state that deal out batches.
        schedules: Where the run is, and the schedulers and the learning rate that move with it.
        buffers: Buffers of the models, which are averaged over the ranks.
        reruns: What the elastic function repeats in the next world.
        attempt: Number that rises whenever the state is restored or a world is joined.
        commit_every: Optimizer steps between commits.
        step_timer: How long steps take.
        counting: Metrics, and the loop that they count in.
        coordinator: Commits of the present call of the elastic function; ``None`` outside.
        group: Workers of the present world.
        callbacks: Functions to call in each new world but the first.
        checkpoint: URL of the job's checkpoints; ``None`` for none.
        began_at: Step of the checkpoint that this job began from; 0 where there was none.
        steps_here: Optimizer steps counted since this process called the elastic function, in all worlds.
        has_computed: Whether this worker has been dealt a micro-batch in this run of the elastic function.
        has_begun_step: Whether the world has begun a step in this run of the elastic function.
        failure: Error that occurred as the script left a loop, where nothing can be raised; the next commit raises it.
        left_warning: Warning about a loop that the script has left early, for the next commit: an error that comes
            before it was the reason for leaving. Empty for none.
        finished_epoch: Epoch whose loop over batches has last come to its end.
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
        self.schedules = Schedules(self.store)
        self.buffers = AveragedBuffers(self.store.of_kind(torch.nn.Module), is_exact=self.store.exact)
        self._own_steps = OwnSteps(self.store, self.optimizers, self.samplers, self.warn_once)
        self.coordinator: CommitCoordinator | None = None
        self.group: ProcessGroup = PresentGroup()
        self.callbacks: list[Callable[[], None]] = []
        self.checkpoint: str | None = None
        self.began_at = 0
        self._compared_attempt = -1  # that in which workers were compared last
        self.steps_here = 0
        self.has_computed = True
        self.has_begun_step = True
        self.failure: Exception | None = None
        self.left_warning = ""
        self.finished_epoch = FinishedEpoch()
        self._warned: set[str] = set()

    def warn_once(self, about: str, message: str) -> None:
        """Warn the user, once for each ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, EdlHvdWarning, stacklevel=3)

    @property
    def is_behind_steps(self) -> bool:
        """Whether this run of the elastic function has begun behind all steps of the present epoch."""
        if self.has_begun_step or not self.samplers:
            return False
        return not any(True for sampler in self.samplers for _ in sampler.steps())

    # --- the run of the elastic function ---

    def attach(self, coordinator: CommitCoordinator | None, commit_every: int = 1) -> None:
        """The elastic function is called: its commits go through ``coordinator``; ``None`` where it is left."""
        self.coordinator, self.commit_every = coordinator, commit_every
        if coordinator is None:
            self.counting.set_world(0, 1)
        for sampler in self.samplers:
            sampler.is_watched = coordinator is not None
            sampler.was_watched = sampler.was_watched or sampler.is_watched
        position.leave()
        self._own_steps.watch(is_running=coordinator is not None)

    def bind(self, group: WorldGroup | None) -> None:
        """A world was entered: compute together with its workers; ``None`` where it was left."""
        self.group = group or PresentGroup()
        self.counting.bind(group)
        self.buffers.group = group
        if self.store.reduction is not None:
            self.store.reduction.bind(self.group)

    def begin_attempt(self) -> None:
        """The state was restored or a world joined: forget loops and rounds that have not come to their end."""
        self.attempt += 1
        self.failure = None
        self.left_warning = ""
        self.has_computed = not self.samplers
        self.has_begun_step = False
        self.counting.begin_attempt()
        self.step_timer.forget()
        position.leave()
        if self.store.reduction is not None:
            self.store.reduction.forget_world()
        self._own_steps.forget()

    def run_callbacks(self, elder: int) -> None:
        """Call the functions of ``state.on_resize``; all go on with the options that an optimizer has then on a rank.

        Every rank; collective; blocks.

        Args:
            elder: That rank, which was in the world before: what a callback knows of it may not be in ``State``.
        """
        for callback in self.callbacks:
            callback()
        share_options(self.optimizers, self.group, elder)

    def check_finished(self) -> None:
        """The elastic function has returned: warn where it has trained without effect, or not at all.

        Raises:
            WorldBrokenError: It has caught the error of a collective.
            UsageError: It has left a loop between the micro-batches of a step.
        """
        process.refuse_broken_world()
        position.refuse_left_early()
        self._settle()
        is_uncounted = self._own_steps.warn_at_end()
        if not is_uncounted and not self.steps_here and self.store.step and self.began_at == self.store.step:
            logger.warning(
                "step %s of %s%s; nothing left to train",
                f"{self.store.step:,}",
                f"{self.store.step:,}",
                f" in {self.checkpoint}" if self.checkpoint else "",
            )

    def _settle(self) -> None:
        """Raise the error, or give the warning, that was kept as the script left a loop."""
        if self.failure is not None:
            raise self.failure
        if self.left_warning:
            warning, self.left_warning = self.left_warning, ""
            self.warn_once("left", warning)

    # --- commits ---

    def vote_after(self, samples: int) -> Callable[[], Vote]:
        """A function for this rank's vote at the commit after the next step, of ``samples`` samples over all ranks."""
        return Vote if self.coordinator is None else functools.partial(self.coordinator.vote, samples)

    def report(self, values: dict[str, float]) -> None:
        """Write numbers to the event log, from rank 0."""
        self.announce(Metrics(self.store.step, self.store.epoch, self.store.samples, values))

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""
        if self.coordinator is not None:
            self.coordinator.announce(event)

    def commit(self) -> None:
        """See :meth:`edl_hvd.State.commit`."""
        process.refuse_broken_world()
        position.refuse_left_early()
        position.left = LeftLoop.NOT
        self.steps_here += self._own_steps.count()
        self.counting.sync()
        with progress.during("commit"):
            self.commit_whole()

    def commit_step(self, answer: Vote | None) -> None:
        """The commit after a step, whose gradients brought the ranks' votes along."""
        if answer is None or self.counting.may_have_trained or answer.metrics > 0:
            self.counting.sync()
        self.commit_light(answer)

    def commit_whole(self, answer: Vote | None = None) -> None:
        """Commit a copy of everything. Metrics have been summed over the ranks."""
        self._commit(answer, may_be_light=False)

    def commit_light(self, answer: Vote | None = None) -> None:
        """Commit what optimizer steps do not move, where that is enough. Metrics have been summed over the ranks."""
        self._commit(answer, may_be_light=True)

    def _commit(self, answer: Vote | None, may_be_light: bool) -> None:
        self._settle()
        self._own_steps.committed_step = self.store.step
        number, coordinator = self.store.commit + 1, self.coordinator
        if coordinator is not None and answer is not None and answer.teachers:
            coordinator.agree_on_teachers()
        if may_be_light and coordinator is not None and not coordinator.may_come_back(answer):
            self.store.skip(number)
        else:
            self.store.save(number, light=may_be_light and self.commit_every == 1)
        for sampler in self.samplers:
            sampler.note_commit()
        if coordinator is not None:
            coordinator.agree(answer)

    # --- epochs ---

    def begin_epoch(self) -> None:
        """The body of the present epoch begins; also where the epoch is continued, or this worker has just joined."""
        self.reruns.begin_epoch(any(sampler.epoch == self.store.epoch and sampler.offset for sampler in self.samplers))
        if len(self.samplers) == 1:
            seed_everything(self.samplers[0].seed, self.store.epoch, _EPOCH_LEVEL)

    def end_epoch(self) -> None:
        """The body of the present epoch has come to its end. Collective; blocks for the commit."""
        self.store.epoch += 1
        for sampler in self.samplers:
            sampler.set_epoch(self.store.epoch)
        self.schedules.move()
        self.commit()

    # --- together with the other ranks ---

    def check_alike_after_step(self) -> None:
        """See :meth:`check_alike`; after the first steps of a run, then more and more rarely."""
        is_new_world = bool(self._other_orders()) and self._compared_attempt != self.attempt
        if self.group.size > 1 and (is_new_world or is_due(self.store.step)):
            self._compared_attempt = self.attempt
            self.check_alike()

    def _other_orders(self) -> dict[str, ElasticBatchSampler]:
        """Return the samplers whose order depends on more than a seed and the epoch, by a name for that order."""
        return {
            f"order of {name}": kept.value
            for name, kept in self.store.handlers.items()
            if isinstance(kept.value, ElasticBatchSampler) and not isinstance(kept.value.order, _SEEDED_ORDERS)
        }

    def check_alike(self) -> Vote | None:
        """Compare weights and attributes of all ranks; warn of attributes that differ. Collective; blocks.

        Returns:
            The ranks' votes for a commit that follows at once; ``None`` where nothing was compared.

        Raises:
            UsageError: The weights, or the orders in which samples are dealt, differ; on all ranks.
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
        models = {
            name: kept.value for name, kept in self.store.handlers.items() if isinstance(kept.value, torch.nn.Module)
        }
        buffers = buffer_digests(models)
        orders = {
            name: sampler.order.samples(sampler.seed, sampler.epoch, 0, min(sampler.positions, _COMPARED_SAMPLES))
            for name, sampler in self._other_orders().items()
        }
        attributes = {**self.store.attributes, **buffers, **orders, _NUMBERS: numbers}
        found = check_alike(names, attributes, vote, self.group.collectives, self.store.step)
        for name in found.unlike:
            if name in orders:
                raise UsageError(
                    f"the {name} is not the same on all workers after step {self.store.step}, so samples are trained "
                    "on twice or never; an Order must follow from the seed, the epoch and what State keeps: give what "
                    "it depends on, such as weights, to State as an object with state_dict() and load_state_dict()"
                )
            if name in buffers:
                places = ", ".join(f"state.{place}" for place in buffers[name])
                self.warn_once(
                    "buffer",
                    f"a buffer ({places}) is not the same on all workers after step {self.store.step}, and becomes "
                    "their mean at the end of an epoch; set it from what all have, such as parameters, step.mean(…) or "
                    "what edl_hvd.allreduce returns, and not from the last forward pass of this worker",
                )
                continue
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
        """Give the state after a step to the ranks whose script has not run its body. Collective; blocks.

        Args:
            ran: Whether the script has run the body here.
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
