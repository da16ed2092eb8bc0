"""What a training script hands over: everything that has to survive a change of the world."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import StateError, UsageError
from edl_hvd.events import Event
from edl_hvd.metrics.metric import Metric
from edl_hvd.worker.keeping.memory import Memory
from edl_hvd.worker.training.batching import batches
from edl_hvd.worker.training.evaluation import evaluate
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.out_of_memory import explained
from edl_hvd.worker.training.pooling import Counting
from edl_hvd.worker.training.scheduler import SCALE_INVARIANT, GatedScheduler, PacedScheduler
from edl_hvd.worker.training.tuning import StepTimer

METRICS = "_metrics"
# The attribute with the last value of each metric; it goes where the others go, into commits and to newcomers.

if TYPE_CHECKING:
    from edl_hvd.worker.keeping.weights import Fit


class Session(Protocol):
    """The run of an elastic function that a state is part of; see ``loop.py``."""

    @property
    def generation(self) -> int:
        """Of the present world; 0 between worlds."""

    def wishes(self, samples: int, apart: bool) -> torch.Tensor:
        """What this rank wishes at the commit after the next step, as numbers to be summed over the ranks.

        Args:
            samples: Of that step, over all ranks.
            apart: This rank is not dealt any, so the script will not see it.
        """

    def agree(self, answer: torch.Tensor | None = None) -> None:
        """Act on the ranks' wishes at a commit. Collective; blocks, unless their sums are there already."""

    def pool(self, metrics: Sequence[Metric], pass_: str | None, word: int) -> int:
        """Bring together what the ranks' metrics have counted, see ``training/pooling.py``. Collective; blocks."""

    def level(self, tensors: list[torch.Tensor]) -> bool:
        """Make tensors equal on all ranks, in place; whether any may have changed. Collective; blocks."""

    def report(self, values: dict[str, float]) -> None:
        """Write numbers to the event log, from rank 0."""

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""


class State:
    """Everything the elastic function needs to go on after a failure, a resize or a restart.

    Every keyword becomes an attribute. Models, optimizers, schedulers, ``GradScaler``,
    :class:`~edl_hvd.ElasticBatchSampler`, ``torch.Generator`` and anything else with ``state_dict`` and
    ``load_state_dict`` stay the objects they are; numbers, strings, lists, dictionaries and tensors
    are plain attributes, deep-copied by every commit. A tensor that comes from a checkpoint or from another
    worker is put on the device of the one that it takes the place of.

    Besides, and readable at any time: ``step`` (optimizer steps of the whole run), ``epoch`` (epochs
    finished), ``samples`` (consumed by the whole run), ``generation`` (of the present world).

    Args:
        model: Shorthand for ``model=…``, as in Horovod's ``TorchState``.
        optimizer: Likewise.
        **attributes: By name. ``epoch``, ``step`` and ``samples`` set the counters' first values.

    Raises:
        StateError: A name is taken, or a value cannot be kept.
    """

    memory: Memory

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in given.items() if value is not None} | attributes
        counters = {name: given.pop(name) for name in ("step", "epoch", "samples") if name in given}
        # `batches` is both: the keyword takes the sampler, the method runs the loop over what it deals.
        own = {*dir(type(self)), "memory", "life", "commit_every", "step_timer", "counting"} - {"batches"}
        taken = sorted(name for name in given if name in own or name.startswith("_"))
        if taken:
            raise StateError(f"State(…) was given {', '.join(taken)}, which are names of its own; choose others")
        put = super().__setattr__
        put("memory", Memory({**given, METRICS: {}}))
        put("life", 0)  # rises whenever the state is put back or a world is joined
        put("commit_every", 1)
        put("step_timer", StepTimer())
        put("counting", Counting(self.memory.of_kind(Metric), self.memory.of_kind(EvaluationSampler)))
        put("_session", None)
        put("_callbacks", [])
        for name, value in counters.items():
            setattr(self.memory, name, value)
        for optimizer_ in self.memory.of_kind(is_distributed):
            optimizer_.reduction.after_step.append(self._after_step)

    # --- attributes ---

    def __getattr__(self, name: str) -> Any:
        memory: Memory = self.__dict__["memory"]
        if name in memory.attributes:
            return memory.attributes[name]
        if name in memory.handlers:
            return memory.handlers[name].value
        raise AttributeError(f"State has no attribute {name!r}; give it to State(…) to have it kept")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("step", "epoch", "samples"):
            setattr(self.memory, name, value)
        elif name in self.memory.handlers:
            raise StateError(f"state.{name} cannot be replaced by another object; change the one given to State(…)")
        elif name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif name in self.memory.attributes:
            self.memory.attributes[name] = value
        else:
            raise StateError(f"state.{name} is not kept, because State(…) was not given it; add {name}=… there")

    @property
    def step(self) -> int:
        """Optimizer steps of the whole run."""
        return self.memory.step

    @property
    def epoch(self) -> int:
        """Epochs finished; inside ``epochs()`` the number of the present one."""
        return self.memory.epoch

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, over all workers and epochs."""
        return self.memory.samples

    @property
    def generation(self) -> int:
        """Generation of the present world; 0 before the first."""
        return self._session.generation if self._session is not None else 0

    @property
    def learning_rate_factor(self) -> float:
        """What ``optimizer.step()`` multiplies the learning rate with at the next step."""
        factor, noise = self.memory.ramp.factor(self.memory.samples), self.memory.learning.noise
        samplers = self.memory.of_kind(ElasticBatchSampler)
        return next((sampler.policy.adapted(factor, noise) for sampler in samplers), factor)

    @property
    def scale_invariant_steps(self) -> float:
        """Sum of the learning-rate factors of all steps: under AdaScale, how many of the script's own they equal."""
        return self.memory.learning.scale_invariant_steps

    @property
    def gradient_noise_scale(self) -> float | None:
        """The batch at which the noise of the gradient is as large as the gradient, in samples; ``None`` if not known.

        Measured where the batch policy needs it, and with ``DistributedOptimizer(…, measure_noise=True)``. It takes two
        micro-batches per step, over all workers. Infinite while no gradient stands out from the noise.
        """
        return self.memory.learning.noise.samples

    # --- the training loop ---

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs left of ``count``, starting with the one under way; commits after each.

        Every rank runs it. Blocks for the commit's collective.
        """
        while self.epoch < count:
            yield self.epoch
            self.memory.epoch += 1
            for sampler in self.memory.of_kind(ElasticBatchSampler):
                sampler.set_epoch(self.epoch)
            self.move_schedulers()
            self.commit()

    def batches(self, loader: Any) -> Iterator[Any]:
        """This worker's micro-batches left in the present epoch; commits between global batches.

        Every rank runs it to its end. ``backward()`` and ``step()`` belong in the loop's body. Random
        generators (torch, ``random``, NumPy) are seeded before each micro-batch from the sampler's seed, the epoch and
        the position, so nothing random depends on the world. At the end of the epoch floating-point
        buffers (BatchNorm's running statistics) are averaged over the workers.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the sampler given to ``State``.

        Raises:
            UsageError: Loader, sampler and optimizer do not fit together.
        """
        return batches(self, loader)

    def evaluate(self, loader: Any) -> Iterator[Any]:
        """This worker's batches left of an evaluation; commits about once a second.

        Every rank runs it to its end, after the epoch's ``state.batches``, not inside. Each sample comes to one rank.
        Metrics that are updated in the loop start anew with each evaluation and are complete on every rank after it.
        When the world changes, the function runs again from its top, and this loop goes on where the last commit was;
        an evaluation that was complete before that, at the same optimizer step, is not made again: its loop is empty.

        Neither the models' mode nor that of autograd is touched: call ``model.eval()``, and use ``torch.no_grad()``.
        Random generators are seeded before each batch.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is an :class:`~edl_hvd.EvaluationSampler`, which is given
                to ``State``, too.

        Raises:
            UsageError: Loader, data set, sampler and ``State`` do not fit together, or a loop is under way.
        """
        return evaluate(self, loader)

    def commit(self) -> None:
        """Make the present a point to come back to, and act on what the world agreed on. Collective.

        Copies the state, then combines one row of integers over the ranks: is a change of the world
        pending, is a checkpoint due? All ranks act on it here, at the same step. Call it at the same
        places on every rank.

        The commits that :meth:`batches` makes by itself are lighter: they copy no parameters and no optimizer state as
        long as nothing but the optimizers moves them, and the row has travelled with the gradients.
        """
        self.counting.pool()
        self.commit_whole()

    def check_host_updates(self) -> None:
        """Horovod's name for a commit that is wanted for host changes only; here it is a commit."""
        self.commit()

    def on_resize(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on every worker of each new world but its first, when its state is in place."""
        self._callbacks.append(callback)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Horovod's name for :meth:`on_resize`, for several at once."""
        for callback in callbacks:
            self.on_resize(callback)

    def report(self, **metrics: float) -> None:
        """Write numbers to the event log, once for the whole world (from rank 0). Does not block.

        The last value of each is part of the state, and of every checkpoint after it. Call it on every rank with equal
        values, so that any of them can go on as rank 0.
        """
        values = {name: float(value) for name, value in metrics.items()}
        attributes = self.memory.attributes
        attributes[METRICS] = {**attributes[METRICS], **values}
        if self._session is not None:
            self._session.report(values)

    def load_weights(self, url: str | os.PathLike[str], step: int | None = None, partial: bool = False) -> Fit:
        """Begin with the weights of another run: load those of its checkpoint into the models of this state.

        For fine-tuning. Optimizers, counters and all else stay as they are; a job that goes on by itself needs nothing
        of the kind. Call it on every worker before the elastic function. Not collective; blocks while it reads.

        Args:
            url: Where the other run's checkpoints are.
            step: Which one; the newest if left out.
            partial: Load what fits and leave the rest as it is, instead of raising.

        Returns:
            What was loaded, and what is missing, extra or of another shape.

        Raises:
            StateError: Weights are missing, extra or of another shape, and ``partial`` is false; nothing was loaded.
            StorageError: There is no such checkpoint, it does not verify, or the storage does not answer.
        """
        from edl_hvd.worker.keeping.weights import load_weights

        return load_weights(self.memory, url, step, partial)

    # --- for the loop ---

    def attach(self, session: Session | None, commit_every: int = 1) -> None:
        """Commits go through ``session`` from now on."""
        self._session, self.commit_every = session, commit_every
        self.counting.attach(None if session is None else session.pool)

    def announce(self, event: Event) -> None:
        """Write an event, from rank 0."""
        if self._session is not None:
            self._session.announce(event)

    def run_callbacks(self) -> None:
        for callback in self._callbacks:
            callback()

    def wishes(self, samples: int, apart: bool) -> Callable[[], torch.Tensor] | None:
        """See :class:`Session`; ``None`` outside of one."""
        return None if self._session is None else functools.partial(self._session.wishes, samples, apart)

    def commit_step(self, answer: torch.Tensor | None) -> None:
        """The commit after a step, whose gradients brought the ranks' wishes along."""
        if answer is None or self.counting.may_have_trained or answer[-1] > 0:
            self.counting.pool()
        self.commit_light(answer)

    def commit_whole(self) -> None:
        """A commit of a copy of everything, when the metrics are pooled."""
        self.memory.take(self.memory.commit + 1)
        if self._session is not None:
            self._session.agree()

    def commit_light(self, answer: torch.Tensor | None = None) -> None:
        """A commit of what optimizer steps do not move, where that will do, and when the metrics are pooled."""
        self.memory.take(self.memory.commit + 1, light=self.commit_every == 1)
        if self._session is not None:
            self._session.agree(answer)

    def begin_life(self) -> None:
        """Forget what is under way in a world that is gone."""
        self.life += 1
        self.counting.begin_life()
        self.step_timer.forget()
        for optimizer in self.memory.of_kind(is_distributed):
            optimizer.reduction.forget()

    def out_of_memory(self, error: Exception) -> UsageError | None:
        """What to tell the user, where it happened to a micro-batch of :meth:`batches`."""
        parts = [optimizer.reduction.micro_batch for optimizer in self.memory.of_kind(is_distributed)]
        samplers = list(self.memory.of_kind(ElasticBatchSampler))
        return explained(samplers[0].policy, parts[0], error) if samplers and parts and parts[0] is not None else None

    def move_schedulers(self) -> None:
        """Move those of ``edl_hvd.schedule`` to where the run is; on every rank alike."""
        for scheduler in self.memory.of_kind(PacedScheduler):
            scheduler.edl_move(
                {
                    "samples": self.samples,
                    "epochs": self.epoch_position(),
                    "steps": self.step,
                    SCALE_INVARIANT: self.scale_invariant_steps,
                }
            )

    def schedulers(self) -> list[Any]:
        return list(self.memory.of_kind(GatedScheduler))

    def epoch_position(self, samples: int = 0) -> float:
        """Epochs finished, with the fraction of the present one, after so many more samples."""
        samplers = list(self.memory.of_kind(ElasticBatchSampler))
        return self.epoch + sum((s.offset + samples) / s.positions for s in samplers if s.epoch == self.epoch)

    def ends_epoch(self, samples: int = 0) -> bool:
        """After so many more samples the epoch's batches are all counted, and what the script does then is to come."""
        samplers = self.memory.of_kind(ElasticBatchSampler)
        return any(s.epoch == self.epoch and s.offset + samples >= s.epoch_samples() for s in samplers)

    def level_buffers(self) -> bool:
        """Make the models' buffers equal on all ranks; whether any may have changed. Collective; blocks.

        BatchNorm's running statistics are those of the samples a worker saw: floating-point buffers are
        averaged, counters (``num_batches_tracked``) become the largest. With ``exact=True`` they are equal already.
        """
        if self._session is None or self.memory.exact:
            return False
        models = self.memory.of_kind(torch.nn.Module)
        return self._session.level([buffer for model in models for buffer in model.buffers()])

    def _after_step(self) -> None:
        for scheduler in self.schedulers():
            scheduler.edl_ready = True
