"""What a training script hands over: everything that has to survive a change of the world."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import StateError
from edl_hvd.worker.batching import batches
from edl_hvd.worker.memory import Memory
from edl_hvd.worker.optimizer import is_distributed
from edl_hvd.worker.scheduler import GatedScheduler

METRICS = "_metrics"
# The attribute with the last value of each metric; it goes where the others go, into commits and to newcomers.

if TYPE_CHECKING:
    from edl_hvd.worker.weights import Fit


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

    def level(self, tensors: list[torch.Tensor]) -> None:
        """Make tensors equal on all ranks, in place. Collective; blocks."""

    def report(self, values: dict[str, float]) -> None:
        """Write numbers to the event log, from rank 0."""


class State:
    """Everything the elastic function needs to go on after a failure, a resize or a restart.

    Every keyword becomes an attribute. Models, optimizers, schedulers, ``GradScaler``,
    :class:`~edl_hvd.ElasticBatchSampler`, ``torch.Generator`` and anything else with ``state_dict`` and
    ``load_state_dict`` stay the objects they are; numbers, strings, lists, dictionaries and tensors
    are plain attributes, deep-copied by every commit.

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
        own = {*dir(type(self)), "memory", "life", "commit_every"} - {"batches"}
        taken = sorted(name for name in given if name in own or name.startswith("_"))
        if taken:
            raise StateError(f"State(…) was given {', '.join(taken)}, which are names of its own; choose others")
        put = super().__setattr__
        put("memory", Memory({**given, METRICS: {}}))
        put("life", 0)  # rises whenever the state is put back or a world is joined
        put("commit_every", 1)
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
        return self.memory.ramp.factor(self.memory.samples)

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

    def commit(self) -> None:
        """Make the present a point to come back to, and act on what the world agreed on. Collective.

        Copies the state, then combines one row of integers over the ranks: is a change of the world
        pending, is a checkpoint due? All ranks act on it here, at the same step. Call it at the same
        places on every rank.

        The commits that :meth:`batches` makes by itself are lighter: they copy no parameters and no optimizer state as
        long as nothing but the optimizers moves them, and the row has travelled with the gradients.
        """
        self.memory.take(self.memory.commit + 1)
        if self._session is not None:
            self._session.agree()

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
        from edl_hvd.worker.weights import load_weights

        return load_weights(self.memory, url, step, partial)

    # --- for the loop ---

    def attach(self, session: Session | None, commit_every: int = 1) -> None:
        """Commits go through ``session`` from now on."""
        self._session, self.commit_every = session, commit_every

    def run_callbacks(self) -> None:
        for callback in self._callbacks:
            callback()

    def wishes(self, samples: int, apart: bool) -> Callable[[], torch.Tensor] | None:
        """See :class:`Session`; ``None`` outside of one."""
        return None if self._session is None else functools.partial(self._session.wishes, samples, apart)

    def commit_step(self, answer: torch.Tensor | None) -> None:
        """The commit after a step, whose gradients brought the ranks' wishes along."""
        self.memory.take(self.memory.commit + 1, light=self.commit_every == 1)
        if self._session is not None:
            self._session.agree(answer)

    def begin_life(self) -> None:
        """Forget what is under way in a world that is gone."""
        self.life += 1
        for optimizer in self.memory.of_kind(is_distributed):
            optimizer.reduction.forget()

    def schedulers(self) -> list[Any]:
        return list(self.memory.of_kind(GatedScheduler))

    def epoch_position(self, samples: int = 0) -> float:
        """Epochs finished, with the fraction of the present one, after so many more samples."""
        samplers = list(self.memory.of_kind(ElasticBatchSampler))
        return self.epoch + sum((s.offset + samples) / s.length for s in samplers if s.epoch == self.epoch)

    def ends_epoch(self, samples: int = 0) -> bool:
        """After so many more samples the epoch's batches are all counted, and what the script does then is to come."""
        samplers = self.memory.of_kind(ElasticBatchSampler)
        return any(s.epoch == self.epoch and s.offset + samples >= s.epoch_samples() for s in samplers)

    def level_buffers(self) -> None:
        """Make the models' buffers equal on all ranks. Collective; blocks.

        BatchNorm's running statistics are those of the samples a worker saw: floating-point buffers are
        averaged, counters (``num_batches_tracked``) become the largest.
        """
        if self._session is not None:
            models = self.memory.of_kind(torch.nn.Module)
            self._session.level([buffer for model in models for buffer in model.buffers()])

    def _after_step(self) -> None:
        for scheduler in self.schedulers():
            scheduler.edl_ready = True
