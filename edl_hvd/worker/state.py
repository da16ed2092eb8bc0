"""What a training script hands over: everything that has to survive a change of the world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from edl_hvd.errors import StateError
from edl_hvd.worker.position import position
from edl_hvd.worker.runtime import METRICS, Runtime
from edl_hvd.worker.training.batching import Step, batches, steps, weigh
from edl_hvd.worker.training.evaluation import evaluate

if TYPE_CHECKING:
    from edl_hvd.worker.commits.weights import Fit


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

    _runtime: Runtime

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in given.items() if value is not None} | attributes
        counters = {name: given.pop(name) for name in ("step", "epoch", "samples") if name in given}
        # `batches` is both: the keyword takes the sampler, the method runs the loop over what it deals.
        own = set(dir(type(self))) - {"batches"}
        taken = sorted(name for name in given if name in own or name.startswith("_"))
        if taken:
            raise StateError(f"State(…) was given {', '.join(taken)}, which are names of its own; choose others")
        _refuse_hidden_optimizers(given)
        runtime = Runtime(given)
        for name, value in counters.items():
            setattr(runtime.store, name, value)
        super().__setattr__("_runtime", runtime)

    # --- attributes ---

    def __getattr__(self, name: str) -> Any:
        store = self.__dict__["_runtime"].store
        if name in store.attributes:
            return store.attributes[name]
        if name in store.handlers:
            return store.handlers[name].value
        raise AttributeError(f"State has no attribute {name!r}; give it to State(…) to have it kept")

    def __setattr__(self, name: str, value: Any) -> None:
        store = self._runtime.store
        if name in ("step", "epoch", "samples"):
            setattr(store, name, value)
        elif name in store.handlers:
            raise StateError(f"state.{name} cannot be replaced by another object; change the one given to State(…)")
        elif hasattr(type(self), name):
            raise StateError(f"state.{name} cannot be set; it is a name of State's own")
        elif name in store.attributes:
            store.attributes[name] = value
        else:
            raise StateError(f"state.{name} is not kept, because State(…) was not given it; add {name}=… there")

    @property
    def step(self) -> int:
        """Optimizer steps of the whole run."""
        position.knows_step = True
        return self._runtime.store.step

    @property
    def epoch(self) -> int:
        """Epochs finished; inside ``epochs()`` the number of the present one."""
        return self._runtime.store.epoch

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, over all workers and epochs."""
        return self._runtime.store.samples

    @property
    def generation(self) -> int:
        """Generation of the present world; 0 before the first."""
        return self._runtime.session.generation if self._runtime.session is not None else 0

    @property
    def learning_rate_factor(self) -> float:
        """What ``optimizer.step()`` multiplies the learning rate with at the next step."""
        return self._runtime.learning_rate_factor

    @property
    def scale_invariant_steps(self) -> float:
        """Sum of the learning-rate factors of all steps: under AdaScale, how many of the script's own they equal."""
        return self._runtime.store.learning.scale_invariant_steps

    @property
    def gradient_noise_scale(self) -> float | None:
        """The batch at which the noise of the gradient is as large as the gradient, in samples; ``None`` if not known.

        Measured where the batch policy needs it, and with ``DistributedOptimizer(…, measure_noise=True)``. It takes two
        micro-batches per step, over all workers. Infinite while no gradient stands out from the noise.
        """
        return self._runtime.store.learning.noise.samples

    # --- the training loop ---

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of so many whole epochs, the same in every world; for ``OneCycleLR`` and its like.

        Args:
            epochs: At least 0.

        Raises:
            UsageError: ``State`` has no sampler, or its number of steps depends on the world (``WorkerBatch``).
        """
        return epochs * self._runtime.sampler("state.total_steps()").steps_per_epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs left of ``count``, starting with the one under way; commits after each.

        Every rank runs it. Blocks for the commit's collective.
        """
        while self.epoch < count:
            yield self.epoch
            self._runtime.end_epoch()

    def steps(self, loader: Any) -> Iterator[Step]:
        """The optimizer steps left in the present epoch, the same ones on every worker; commits after each.

        Every rank runs it to its end. The body runs once per optimizer step, on every worker, also on one that was
        dealt nothing::

            for step in state.steps(loader):
                for images, target in step:            # this worker's micro-batches: none, one or several
                    F.cross_entropy(model(images), target).backward()
                clip_grad_norm_(model.parameters(), 1.0)   # the gradient of the whole global batch
                optimizer.step()
                optimizer.zero_grad()

        See :class:`~edl_hvd.Step`. Random generators (torch, ``random``, NumPy) are seeded before each micro-batch and
        at step level, from the sampler's seed, the epoch and the position, so that nothing random depends on the world;
        at step level every worker draws the same numbers. At the end of the epoch floating-point buffers (BatchNorm's
        running statistics) are averaged over the workers.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the sampler given to ``State``.

        Raises:
            UsageError: Loader, sampler and optimizer do not fit together, or the epoch has been gone through already.
        """
        return steps(self._runtime, loader)

    def batches(self, loader: Any) -> Iterator[Any]:
        """This worker's micro-batches left in the present epoch; commits between global batches.

        The smallest change of a script; :meth:`steps` suits everything beyond one ``backward()`` and ``step()``. The
        body runs once per micro-batch, so several times per optimizer step, or not at all on a worker that was dealt
        nothing. ``optimizer.step()``, schedulers, ``GradScaler`` and ``AveragedModel`` given to ``State`` and
        ``state.report`` act in the body that ends a step, and ``.grad`` has the gradient of the whole global batch
        then; before that it is as it was. A worker that was dealt nothing takes over the state of another.

        Every rank runs it to its end. ``backward()`` and ``step()`` belong in the loop's body. Random
        generators (torch, ``random``, NumPy) are seeded before each micro-batch from the sampler's seed, the epoch and
        the position, so nothing random depends on the world. At the end of the epoch floating-point
        buffers (BatchNorm's running statistics) are averaged over the workers.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the sampler given to ``State``.

        Raises:
            UsageError: Loader, sampler and optimizer do not fit together, the epoch has been gone through already, or
                the body does what depends on how a batch is dealt.
        """
        return batches(self._runtime, loader)

    def weigh(self, weight: float | torch.Tensor) -> None:
        """In the body of :meth:`batches`: how much the present micro-batch weighs, instead of its number of samples.

        As :meth:`edl_hvd.Step.weigh`, for a loss that is a mean over something else, such as tokens or pixels. Call it
        before ``backward()``. Not collective.

        Args:
            weight: At least 0, finite; 0 leaves the micro-batch out, whatever its gradient is.

        Raises:
            UsageError: No micro-batch is being computed, or its gradient has been already; or the weight is no number.
        """
        weigh(self._runtime, weight, "state.weigh()")

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
        return evaluate(self._runtime, loader)

    def commit(self) -> None:
        """Make the present a point to come back to, and act on what the world agreed on. Collective.

        Copies the state, then combines one row of integers over the ranks: is a change of the world
        pending, is a checkpoint due? All ranks act on it here, at the same step. Call it at the same
        places on every rank.

        The commits that :meth:`batches` makes by itself are lighter: they copy no parameters and no optimizer state as
        long as nothing but the optimizers moves them, and the row has travelled with the gradients.
        """
        self._runtime.commit()

    def check_host_updates(self) -> None:
        """Horovod's name for a commit that is wanted for host changes only; here it is a commit."""
        self.commit()

    def on_resize(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on every worker of each new world but its first, when its state is in place."""
        self._runtime.callbacks.append(callback)

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
        if position.waits:
            return
        attributes = self._runtime.store.attributes
        attributes[METRICS] = {**attributes[METRICS], **values}
        if self._runtime.session is not None:
            self._runtime.session.report(values)

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
        from edl_hvd.worker.commits.weights import load_weights

        return load_weights(self._runtime.store, url, step, partial)


def _refuse_hidden_optimizers(attributes: dict[str, Any]) -> None:
    """An optimizer may hold another one, as SAM does, whose momentum would not be kept."""
    optimizers = {name: value for name, value in attributes.items() if isinstance(value, torch.optim.Optimizer)}
    for name, optimizer in optimizers.items():
        for key, inner in vars(optimizer).items():
            if isinstance(inner, torch.optim.Optimizer) and all(inner is not other for other in optimizers.values()):
                raise StateError(
                    f"State(…) was given {name}, whose attribute {key!r} is another optimizer, and not that one: its "
                    f"state, such as momentum, would be lost with a worker; add {key}={name}.{key} to State(…)"
                )
