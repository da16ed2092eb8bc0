"""An optimizer whose step is the step of the whole world's global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.swa_utils import AveragedModel

from edl_hvd.compat import patching
from edl_hvd.errors import UsageError
from edl_hvd.worker.position import position
from edl_hvd.worker.training import momentum
from edl_hvd.worker.training.exact import ExactReduction
from edl_hvd.worker.training.reduction import Reduction

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


@dataclass
class Stepping:
    """What is known of one optimizer's steps.

    Attributes:
        before: Called before each, with the optimizer and whether it calls a closure.
        after: Called after each.
        skip: Number of steps that it made before the state was put back; they are not made again.
        samples: Of the last one it has made; 0 where nobody knows.
        round_number: Of the round of gradients that the last one was made with.
        own: Steps outside of the loops of ``State`` since the last commit.
        exact: The optimizer was given ``exact=True``.
    """

    before: list[Callable[[Any, bool], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    skip: int = 0
    samples: int = 0
    round_number: int = 0
    own: int = 0
    exact: bool = False


class _Distributed:
    """Mixed into the class of the optimizer that :func:`DistributedOptimizer` is given."""

    reduction: Reduction
    stepping: Stepping
    velocity: str | None = None
    param_groups: list[dict[str, Any]]

    @property
    def at_boundary(self) -> bool:
        """Whether ``step()`` acts now: this worker's micro-batches of the step are computed, or the last one is.

        In the body of ``state.batches`` what belongs to a step may stand under ``if optimizer.at_boundary:``.
        """
        position.is_asked = position.knows_step = True
        return not position.waits

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this worker inside the block; the first backward after it sums them. As in DDP.

        Every rank uses it at the same places. Not collective; does not block.
        """
        self.reduction.paused = True
        try:
            yield
        finally:
            self.reduction.paused = False

    def synchronize(self) -> None:
        """Refuse Horovod's call, which is not needed here. Not collective.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "optimizer.synchronize() is not needed: after the loop over a step's micro-batches, or when backward() "
            "returns, the gradients are those of the global batch; remove the call, cut them, and call optimizer.step()"
        )

    skip_synchronize = synchronize

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in ``torch.optim``; their gradients are summed, too. Every rank; not collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.reduction.adopt_unnamed(self.param_groups[-1]["params"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimizer step. In the body of ``state.batches`` it acts at the end of a global batch only.

        The learning-rate factor of the batch policy is applied here and undone before it returns, so
        schedulers see, and set, the script's own learning rate.

        Every rank calls it. Outside the loops of ``state.steps`` it may have to sum gradients first; then it is
        collective and blocks.

        Args:
            closure: As in ``torch.optim``: computes the loss again and returns it.

        Returns:
            What the wrapped optimizer's ``step`` returns; ``None`` where the call does not act.

        Raises:
            UsageError: It was called in the loop over a step's micro-batches.
        """
        if closure is not None and position.in_batches and position.per_step > 1:
            raise UsageError(
                "optimizer.step(closure) was called in the body of state.batches(), where the closure sees one "
                f"micro-batch, and the global batch is {position.per_step}; write the loop with `for step in "
                "state.steps(loader):`, and loop over the step in the closure"
            )
        if position.waits:
            position.steps_in_body += 1
            return None
        position.refuse_in_step("optimizer.step()")
        position.refuse_left_early()
        if position.left_unused:
            raise UsageError(
                "optimizer.step() was called behind the loop of state.batches(), which was left before its first "
                "backward(), as next(iter(state.batches(loader))) does; write `for batch in state.batches(loader):`, "
                "and train in its body"
            )
        reduction, stepping = self.reduction, self.stepping
        if closure is None and not reduction.deferred and reduction.round_number == stepping.round_number:
            reduction.complete()
        result = None
        if stepping.skip:
            stepping.skip -= 1
        else:
            result = self._step_at_scaled_rates(closure)
            stepping.samples = reduction.micro_batch.global_samples if reduction.micro_batch else 0
        stepping.round_number = reduction.round_number
        reduction.has_stepped = True
        position.steps_in_body += 1
        stepping.own += not (position.in_batches or position.in_step)
        reduction.attach()
        for callback in stepping.after:
            callback()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # hooks of the script run around the step itself, not around this

    def _step_at_scaled_rates(self, closure: Callable[[], Any] | None) -> Any:
        reduction = self.reduction
        own_rates = [group["lr"] for group in self.param_groups if "lr" in group]
        groups = [group for group in self.param_groups if "lr" in group]
        for group in groups:
            group["lr"] = group["lr"] * reduction.learning_rate_factor
            if self.velocity is not None:
                group[momentum.FACTOR] = reduction.learning_rate_factor
        try:
            for watcher in self.stepping.before:
                watcher(self, closure is not None)
            return self._corrected_step(closure)
        finally:
            for group, rate in zip(groups, own_rates, strict=True):
                group["lr"] = rate

    def repeat(self) -> None:
        """The step that another worker took, with its gradients and options in place."""
        self._corrected_step(None)

    def _corrected_step(self, closure: Callable[[], Any] | None) -> Any:
        if self.velocity is None:
            return super().step(closure)  # type: ignore[misc]
        momentum.correct(self, self.velocity)  # type: ignore[arg-type]
        result = super().step(closure)  # type: ignore[misc]
        momentum.note(self, self.velocity)  # type: ignore[arg-type]
        return result


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    exact: bool = False,
    measure_noise: bool = False,
    velocity: str | None = None,
    **horovods: object,
) -> _Optimizer:
    """Make an optimizer's steps those of the whole world.

    The gradient of a step is that of the mean loss over the global batch, for any number of workers:

        g = sum over j of (w_j / W) · g_j        W = sum over j of w_j

    j numbers the micro-batches of all workers; g_j is the gradient of the script's mean loss over micro-batch j; w_j is
    its number of samples, or what ``step.weigh`` was given. With the numbers of samples, W is the global batch. The
    rule is original here; with equal micro-batches it is Horovod's average.

    Every rank calls it, before it builds schedulers on the optimizer and before ``State(…)``. The call itself is not
    collective and does not block. The sum is collective: it starts in ``backward()``, runs beside it, and is waited for
    where ``backward()`` of the step's last micro-batch returns, or where the loop over a :class:`~edl_hvd.Step` ends.
    ``optimizer.step()`` then computes the same on every worker. In a world of one it computes what it computed before.

    The optimizer also gets ``at_boundary`` (whether ``step()`` acts now) and ``no_sync()`` (as in DDP).

    Args:
        optimizer: Any ``torch.optim.Optimizer`` with dense gradients.
        named_parameters: Pairs of name and parameter, as ``model.named_parameters()`` gives them, of one or several
            models. They must name every parameter of the optimizer. Left out, parameters are named by their place in
            it.
        exact: Whether weights come out identical, bit for bit, for any number of workers. Gradients are then summed in
            a fixed order, and running statistics of normalisation layers are computed as in one process. The limits are
            in ``docs/exact.md``.
        measure_noise: Whether to measure how noisy the gradients are, for ``state.gradient_noise_scale``. Batch
            policies that need it measure it anyway.
        velocity: Name of the tensor in the optimizer's state that is a momentum with the learning rate in it
            (v = m v + η g). It is corrected when the policy's factor changes (Goyal et al. 2017, arXiv:1706.02677,
            section 3). No optimizer of torch has one: their momentum consists of gradients alone and needs no
            correction.
        **horovods: Arguments of Horovod's own ``DistributedOptimizer`` that this one lacks. They are refused, with what
            to write instead.

    Returns:
        The same object, its class extended, so that references to it stay valid.

    Raises:
        UsageError: Names are missing or doubled, the optimizer is wrapped already, a scheduler was built on it before,
            or an argument of Horovod's was given.
    """
    _refuse_horovods(horovods)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already; wrap it once")
    if "step" in vars(optimizer):
        raise UsageError(
            "a learning-rate scheduler was built on this optimizer before it was wrapped; call DistributedOptimizer "
            "first and give the scheduler what it returns"
        )
    if named_parameters is None:
        named = [(f"parameter.{i}", parameter) for i, parameter in enumerate(parameters)]
    else:
        wanted = set(parameters)
        named = [(name, parameter) for name, parameter in named_parameters if parameter in wanted]
    names = [name for name, _ in named]
    if len(set(names)) != len(names) or {parameter for _, parameter in named} != set(parameters):
        raise UsageError(
            f"named_parameters names {len(set(names))} of the optimizer's {len(parameters)} parameters; expected a "
            "different name for each, e.g. named_parameters=model.named_parameters()"
        )
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    optimizer.reduction = ExactReduction(named) if exact else Reduction(named)  # type: ignore[attr-defined]
    optimizer.stepping = Stepping(exact=exact)  # type: ignore[attr-defined]
    optimizer.velocity = velocity  # type: ignore[attr-defined]
    if measure_noise:
        optimizer.reduction.measure_noise()  # type: ignore[attr-defined]
    return optimizer


def is_distributed(value: object) -> bool:
    """Whether a value came out of :func:`DistributedOptimizer`."""
    return isinstance(value, _Distributed)


def join(
    optimizers: Sequence[Any], names: Mapping[str, torch.nn.Module], attributes: Sequence[str]
) -> Reduction | None:
    """Have several optimizers' gradients summed together; called by ``State``.

    Args:
        optimizers: Distributed ones.
        names: The models of the state, by attribute: a parameter is named by attribute and its name in the model.
        attributes: Those of the optimizers: a parameter of no model is named by that and its name, or place, there.

    Returns:
        What sums them from now on; ``None`` where there is no optimizer.
    """
    if not optimizers:
        return None
    catalogue: dict[torch.nn.Parameter, str] = {}
    for attribute, model in names.items():
        for name, parameter in model.named_parameters():
            catalogue.setdefault(parameter, f"{attribute}.{name}")
    named: dict[torch.nn.Parameter, str] = {}
    noise = None
    for attribute, optimizer in zip(attributes, optimizers, strict=True):
        noise = noise or optimizer.reduction.noise
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, name in optimizer.reduction.names.items():
            if parameter in own:
                named.setdefault(parameter, catalogue.get(parameter) or f"{attribute}.{name}")
        optimizer.reduction.detach()
    exact = all(optimizer.stepping.exact for optimizer in optimizers)
    listed = [(name, parameter) for parameter, name in named.items()]
    reduction = ExactReduction(listed) if exact else Reduction(listed)
    reduction.catalogue = catalogue
    reduction.is_joined = True
    reduction.noise = noise
    for optimizer in optimizers:
        optimizer.reduction = reduction
    return reduction


_HOROVODS = {
    "compression": "leave it out: gradients travel as they are",
    "op": "leave it out: the gradient is the mean over the global batch",
    "backward_passes_per_step": "leave it out, and give ElasticBatchSampler(…) a micro_batch",
    "gradient_predivide_factor": "leave it out",
    "num_groups": "leave it out",
    "groups": "leave it out",
    "sparse_as_dense": "leave it out, and build the module with sparse=False",
    "process_set": "leave it out: the optimizer is that of the whole world",
}


def _refuse_horovods(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _HOROVODS:
            raise TypeError(f"DistributedOptimizer() got an unexpected keyword argument {name!r}")
        raise UsageError(
            f"DistributedOptimizer was given {name}={given[name]!r}, an argument of Horovod's own; {_HOROVODS[name]}"
        )


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler for mixed precision in float16, for use with a distributed optimizer.

    It is ``torch.amp.GradScaler``, with its arguments and methods, except that ``unscale_``, ``step`` and ``update`` in
    the body of ``state.batches`` act at the end of a global batch only. In the loops of ``state.steps`` they belong at
    step level. Give it to ``State``; a plain ``torch.amp.GradScaler`` that is given to ``State`` becomes one.

    Every rank uses it alike. Not collective: the sum of the gradients is infinite or NaN on all ranks or on none, so
    all ranks skip the same steps and hold the same scale.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, once per step. Every rank; not collective.

        Before clipping. In the body of ``state.batches`` it does nothing before the global batch is complete.

        Args:
            optimizer: A ``DistributedOptimizer``.
        """
        if not position.waits:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Make the optimizer's step, or skip it where a gradient is infinite or NaN. Every rank; not collective.

        Args:
            optimizer: A ``DistributedOptimizer``.
            *args: Passed on to ``optimizer.step``.
            **kwargs: Passed on to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returns; ``None`` where the step is skipped or the global batch is not complete.
        """
        position.steps_in_body += 1
        return None if position.waits else super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after a step: smaller after one that was skipped. Every rank; not collective.

        In the body of ``state.batches`` it does nothing before the global batch is complete.

        Args:
            new_scale: Scale to set instead, greater than 0: a number, or a float32 tensor of one element on the GPU.
        """
        if not position.waits:
            super().update(new_scale)


def gate_scaler(scaler: torch.amp.GradScaler) -> None:
    """Make a plain scaler one of :class:`GradScaler`, in place."""
    if not isinstance(scaler, GradScaler):
        kind = type(scaler)
        scaler.__class__ = GradScaler if kind is torch.amp.GradScaler else type(kind.__name__, (GradScaler, kind), {})


def _refusing(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_parameters(average: AveragedModel, model: torch.nn.Module) -> None:
        if not isinstance(average, _StepwiseAverage) and (position.in_step or position.in_batches):
            raise UsageError(
                "update_parameters() was called in the loop of an AveragedModel that State(…) was not given, so the "
                "average would be lost with a worker; add it: State(ema=ema, …)"
            )
        update(average, model)

    return update_parameters


# For the whole process: else nobody would see an average that is not part of the state.
patching.replace("averages", AveragedModel, "update_parameters", _refusing)


class _StepwiseAverage:
    """Mixed into the class of an ``AveragedModel`` that is given to ``State``."""

    def update_parameters(self, model: torch.nn.Module) -> None:
        """As in torch; in the body of ``state.batches`` once per optimizer step.

        Raises:
            UsageError: It was called in the loop over a step's micro-batches.
        """
        position.refuse_in_step("update_parameters()")
        if not position.waits:
            super().update_parameters(model)  # type: ignore[misc]


def gate_average(average: AveragedModel) -> None:
    """Have an average of weights move with the optimizer steps, in place."""
    kind = type(average)
    if not isinstance(average, _StepwiseAverage):
        average.__class__ = type(kind.__name__, (_StepwiseAverage, kind), {})
