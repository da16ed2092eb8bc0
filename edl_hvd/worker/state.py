"""What a training script hands over: everything that has to survive a change of the world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from edl_hvd.errors import StateError
from edl_hvd.worker.batch_loops.batches import batches
from edl_hvd.worker.batch_loops.evaluation import evaluate
from edl_hvd.worker.batch_loops.steps import Step, steps, weigh
from edl_hvd.worker.commits.live_state import METRICS
from edl_hvd.worker.position import position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.runtime import Runtime

if TYPE_CHECKING:
    from edl_hvd.worker.commits.weights import LoadReport


class State:
    """Everything the elastic function needs to go on after a failure, a resize or a restart.

    Every keyword becomes an attribute. Models, optimizers, schedulers, ``GradScaler``,
    :class:`~edl_hvd.ElasticBatchSampler`, ``torch.Generator`` and anything else with ``state_dict`` and
    ``load_state_dict`` stay the objects they are. Numbers, strings, lists, dictionaries and tensors are plain
    attributes, deep-copied by every commit; set them with ``state.name = value``. A tensor that comes from a checkpoint
    or from another worker is put on the device of the tensor that it replaces. A list, dictionary, deque or tensor
    given here stays the same object, on workers that join, too, until the script sets the attribute to another.

    Every rank makes one, with the same names, before it enters the elastic function; that is not collective and does
    not block. Any rank may read its properties at any time.

    Names of its own, which attributes cannot have: ``check_host_updates``, ``commit``, ``epochs``, ``evaluate``,
    ``generation``, ``gradient_noise_scale``, ``learning_rate_factor``, ``load_weights``, ``on_resize``,
    ``register_reset_callbacks``, ``report``, ``scale_invariant_steps``, ``steps``, ``total_steps``, ``weigh``, and all
    that begin with an underscore. ``batches`` may be given, for the sampler; ``state.batches`` remains the method.

    Args:
        model: Model to keep, by the name ``model``, as in Horovod's ``TorchState``.
        optimizer: Optimizer to keep, by the name ``optimizer``.
        **attributes: Objects and values to keep, by name. ``epoch``, ``step`` and ``samples``, integers of at least 0,
            set the first values of the counters instead.

    Raises:
        StateError: A name is taken, a value cannot be kept, or an optimizer holds another one that was not given. Also
            raised when an attribute is set that was not given here, or an object is replaced.
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
        _refuse_moved_tensors(given)
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
        """The number of optimizer steps of the whole run, over all worlds; equal on all ranks at a commit."""
        position.knows_step = True
        return self._runtime.store.step

    @property
    def epoch(self) -> int:
        """The number of epochs finished, which inside ``epochs()`` is the number of the present one, from 0."""
        return self._runtime.store.epoch

    @property
    def samples(self) -> int:
        """The number of samples consumed by the whole run, over all workers and epochs."""
        return self._runtime.store.samples

    @property
    def generation(self) -> int:
        """The number of the present world, which rises with every world of the job; 0 between worlds."""
        return self._runtime.coordinator.generation if self._runtime.coordinator is not None else 0

    @property
    def learning_rate_factor(self) -> float:
        """The factor that ``optimizer.step()`` multiplies the learning rate with at the next step; greater than 0."""
        return self._runtime.schedules.learning_rate_factor

    @property
    def scale_invariant_steps(self) -> float:
        """The sum of the learning-rate factors of all steps of the run.

        Under AdaScale it is the number of steps of the script's own batch that the run equals (Johnson et al. 2020,
        arXiv:2007.05105, section 3).
        """
        return self._runtime.store.learning.scale_invariant_steps

    @property
    def gradient_noise_scale(self) -> float | None:
        """The batch size, in samples, at which the gradient's noise is as large as the gradient; ``None`` if unknown.

        It is ``tr(Σ) / |∇F|²``, with ∇F the true gradient and Σ the covariance of one sample's gradient (McCandlish et
        al. 2018, arXiv:1812.06162, section 2.2). Measured where the batch policy needs it, and with
        ``DistributedOptimizer(…, measure_noise=True)``, from steps of at least two micro-batches over all workers.
        Infinite while no gradient stands out from the noise.
        """
        return self._runtime.store.learning.noise.samples

    # --- the training loop ---

    def total_steps(self, epochs: int) -> int:
        """The optimizer steps of whole epochs, the same in every world; for ``OneCycleLR`` and similar schedulers.

        Any rank; not collective.

        Args:
            epochs: Number of epochs, at least 0.

        Returns:
            ``epochs`` times ``steps_per_epoch`` of the sampler.

        Raises:
            UsageError: ``State`` has no sampler, or its number of steps depends on the world (``WorkerBatch``).
        """
        return self._runtime.schedules.steps_of_epochs(epochs)

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs left of ``count``, starting with the one under way; commits after each.

        Collective: every rank runs it. Blocks for the commit after each epoch.

        Random generators (torch, ``random``, NumPy) are seeded at the beginning of each epoch, and where its loop over
        the sampler ends, from the sampler's seed and the epoch. So all workers draw the same numbers there, and draw
        them again where an epoch is continued in another world.

        The body of an epoch that is continued runs from its top. What it changes there of the objects in ``State``,
        before its loop over batches, is put back when that loop goes on, because it has changed it before.

        Args:
            count: Epochs of the whole run, at least 0.

        Returns:
            An iterator over the numbers of the epochs left, from ``state.epoch`` to ``count - 1``. It is empty when
            that many are finished.

        Raises:
            StateError: A plain attribute holds a value that cannot be kept.
            UsageError: The body has left a loop between the micro-batches of a step.
        """
        self._runtime.reruns.enter_epochs(count)
        while self.epoch < count:
            progress.total_samples = self._runtime.schedules.samples_of_epochs(count)
            self._runtime.begin_epoch()
            yield self.epoch
            self._runtime.end_epoch()
        self._runtime.reruns.leave_epochs()

    def steps(self, loader: Any) -> Iterator[Step]:
        """Iterate over the optimizer steps left in the present epoch; commits after each.

        Collective: every rank runs it to its end, and blocks for each step's gradients. The body runs once per
        optimizer step, on every worker, also on a worker that was dealt nothing::

            for step in state.steps(loader):
                for images, target in step:            # this worker's micro-batches: none, one or several
                    F.cross_entropy(model(images), target).backward()
                clip_grad_norm_(model.parameters(), 1.0)   # the gradient of the whole global batch
                optimizer.step()
                optimizer.zero_grad()

        Random generators (torch, ``random``, NumPy) are seeded before each micro-batch and at step level, from the
        sampler's seed, the epoch and the position. So nothing random depends on the world, and at step level every
        worker draws the same numbers. At the end of the epoch floating-point buffers (BatchNorm's running statistics)
        are averaged over the workers.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the sampler given to ``State``.

        Returns:
            An iterator of :class:`~edl_hvd.Step`, the same steps on every worker.

        Raises:
            UsageError: Loader, sampler and optimizer do not fit together, or the epoch has been gone through already.
        """
        return steps(self._runtime, loader)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over this worker's micro-batches left in the present epoch; commits between global batches.

        The smallest change of a script; :meth:`steps` suits everything beyond one ``backward()`` and ``step()``. The
        body runs once per micro-batch: several times per optimizer step, or not at all on a worker that was dealt
        nothing, which then takes over the state of another worker. ``optimizer.step()``, schedulers, ``GradScaler`` and
        ``AveragedModel`` given to ``State`` and ``state.report`` act in the body that ends a step. There ``.grad`` has
        the gradient of the whole global batch; before that it is as it was.

        Collective: every rank runs it to its end, and blocks for each step's gradients. ``backward()`` and ``step()``
        belong in the loop's body. Random generators (torch, ``random``, NumPy) are seeded before each micro-batch, from
        the sampler's seed, the epoch and the position, so nothing random depends on the world. At the end of the epoch
        floating-point buffers (BatchNorm's running statistics) are averaged over the workers.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is the sampler given to ``State``.

        Returns:
            An iterator over the loader's items, as the loader gives them.

        Raises:
            UsageError: Loader, sampler and optimizer do not fit together, the epoch has been gone through already, or
                the body does what depends on how a batch is dealt.
        """
        return batches(self._runtime, loader)

    def weigh(self, weight: float | torch.Tensor) -> None:
        """Set the weight of the present micro-batch, in the body of :meth:`batches`. Not collective.

        As :meth:`edl_hvd.Step.weigh`, for a loss that is a mean over something other than samples, such as tokens or
        pixels. Call it before ``backward()``. Waits for a GPU if ``weight`` is a tensor there.

        Args:
            weight: Weight instead of the number of samples, finite and at least 0: a number, or a tensor of one
                element. 0 leaves the micro-batch out, whatever its gradient is.

        Raises:
            UsageError: No micro-batch is being computed, or its gradient has been already; or the weight is no number.
        """
        weigh(self._runtime, weight, "state.weigh()")

    def evaluate(self, loader: Any) -> Iterator[Any]:
        """Iterate over this worker's batches left of an evaluation; commits about once a second.

        Collective: every rank runs it to its end, after the epoch's training loop, not inside, and blocks for the
        commits. Each sample comes to one rank. Metrics that are updated in the loop start from zero with each
        evaluation and are complete on every rank after it. When the world changes, the function runs again from its
        top, and this loop goes on where the last commit was. An evaluation that was complete before that, at the same
        optimizer step, is not repeated: its loop is empty.

        It changes neither the models' mode nor that of autograd: call ``model.eval()``, and use ``torch.no_grad()``.
        Random generators are seeded before each batch.

        Args:
            loader: A ``DataLoader`` whose ``batch_sampler`` is an :class:`~edl_hvd.EvaluationSampler`, which is given
                to ``State``, too.

        Returns:
            An iterator over the loader's items, as the loader gives them.

        Raises:
            UsageError: Loader, data set, sampler and ``State`` do not fit together, or a loop is under way.
        """
        return evaluate(self._runtime, loader)

    def commit(self) -> None:
        """Make the present state a point to return to, and act on what the world has agreed on. Collective; blocks.

        Every rank calls it at the same places. It copies the state in memory, then combines one row of integers over
        the ranks: is a change of the world pending, is a checkpoint due? All ranks act on the answer here, at the same
        step. For loops of your own: there it adds the optimizer steps since the last commit to ``step``.

        The commits that :meth:`steps` and :meth:`batches` make are lighter. They copy no parameters and no optimizer
        state while only the optimizers change them, and the row travels with the gradients.

        Raises:
            StateError: A plain attribute holds a value that cannot be kept.
            UsageError: A loop was left between the micro-batches of a step.
        """
        self._runtime.commit()

    def check_host_updates(self) -> None:
        """Commit, under Horovod's name for a check for host changes. Collective; blocks; see :meth:`commit`."""
        self.commit()

    def on_resize(self, callback: Callable[[], None]) -> None:
        """Register a function to call in each new world but the worker's first, when the state is in place.

        Every rank registers the same functions, before it enters the elastic function. Not collective; does not block.

        Args:
            callback: Function without arguments, called before the training function runs again. Functions are called
                in the order of their registration. A worker that is new to the job does not call them, so they must not
                use collectives, nor change what is in the state, such as a learning rate.
        """
        self._runtime.callbacks.append(callback)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register several functions, under Horovod's name; see :meth:`on_resize`. Every rank; not collective.

        Args:
            callbacks: Functions without arguments.
        """
        for callback in callbacks:
            self.on_resize(callback)

    def report(self, **metrics: float) -> None:
        """Write numbers to the event log, once for the whole world, from rank 0.

        Every rank calls it with equal values, so that any of them can go on as rank 0. Not collective; waits for a GPU
        if a value is a tensor there. The last value of each name is part of the state, and of every later checkpoint.

        Args:
            **metrics: Numbers, or tensors of one element, by name.
        """
        values = {name: float(value) for name, value in metrics.items()}
        if position.waits:
            return
        attributes = self._runtime.store.attributes
        attributes[METRICS] = {**attributes[METRICS], **values}
        self._runtime.report(values)

    def load_weights(self, url: str | os.PathLike[str], step: int | None = None, partial: bool = False) -> LoadReport:
        """Load the weights of another run's checkpoint into the models of this state, for fine-tuning.

        Optimizers, counters and everything else stay as they are. A job that resumes from its own checkpoints does not
        need it. Every rank calls it before the elastic function. Not collective; blocks while it reads.

        Args:
            url: Folder or URL of the other run's checkpoints.
            step: Optimizer step of the checkpoint to read, at least 0; the newest one if left out.
            partial: Whether to load the weights that fit and leave the others as they are, instead of raising.

        Returns:
            An object with the names of the weights: ``loaded``, ``missing``, ``unexpected`` and ``mismatched``
            (of another shape); ``complete`` says whether all were loaded.

        Raises:
            StateError: Weights are missing, unexpected or of another shape, and ``partial`` is false. Nothing was
                loaded.
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


def _refuse_moved_tensors(attributes: dict[str, Any]) -> None:
    """A tensor of an optimizer would be another one, which the optimizer does not know, on a worker that joins."""
    optimizers = [value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)]
    moved = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, value in attributes.items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, torch.Tensor) and id(item) in moved for item in items):
            raise StateError(
                f"State(…) was given {name}, a tensor that an optimizer moves; on a worker that joins, a copy would "
                "take its place, and the optimizer would move the old one; make it part of a model, such as "
                f"{name} = torch.nn.ParameterList([tensor]), give its parameters() to the optimizer, and it to State(…)"
            )
