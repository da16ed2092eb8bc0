"""An optimizer whose step is the step of the whole world's global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker.position import position
from edl_hvd.worker.training.process_group import PresentGroup, refuse_broken_world
from edl_hvd.worker.training.reduction import Reduction
from edl_hvd.worker.training.weak_callbacks import WeakCallbacks

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

# Of a parameter group: the policy's factor for this step. Of a parameter's state: that of the last step.
VELOCITY_FACTOR = "edl_hvd_factor"


@dataclass
class Stepping:
    """What is known of one optimizer's steps.

    Attributes:
        before: Called before each, with the optimizer and whether it calls a closure.
        after: Called after each.
        after_own: Called after each that is made outside of the loops of ``State``.
        skip: Number of steps that it made before the state was put back; they are not made again.
        samples: Of the last one it has made; 0 where nobody knows.
        round_number: Of the round of gradients that the last one was made with.
        own: Steps outside of the loops of ``State`` since the last commit.
        exact: The optimizer was given ``exact=True``.
        kept_groups: Number of groups that there were when the elastic function ran again; 0 in its first run.
    """

    before: WeakCallbacks = field(default_factory=WeakCallbacks)
    after: WeakCallbacks = field(default_factory=WeakCallbacks)
    after_own: WeakCallbacks = field(default_factory=WeakCallbacks)
    skip: int = 0
    samples: int = 0
    round_number: int = 0
    own: int = 0
    exact: bool = False
    kept_groups: int = 0


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
        """Add parameters, as in ``torch.optim``; their gradients are summed, too. Every rank; not collective.

        Where the elastic function runs again, in another world or from a checkpoint, it does nothing for a group that
        is there already.

        Raises:
            UsageError: State(…) was given the optimizer, and no model that had these parameters then.
        """
        if isinstance(param_group.get("params"), Iterator):
            param_group["params"] = list(param_group["params"])
        if any(_same_parameters(group, param_group) for group in self.param_groups[: self.stepping.kept_groups]):
            return
        super().add_param_group(param_group)  # type: ignore[misc]
        self._refuse_later_parameters()
        self.reduction.parameters.adopt_unnamed(self.param_groups[-1]["params"])

    def _refuse_later_parameters(self) -> None:
        """Refuse a new group that a worker which joins could not have: its models are those it makes before State."""
        reduction, added = self.reduction, self.param_groups[-1]["params"]
        later = [p for p in added if p not in reduction.names and p not in reduction.catalogue]
        if reduction.is_joined and later:
            self.param_groups.pop()
            raise UsageError(
                f"add_param_group() was given {len(later)} parameter(s) that no model in State had when State was "
                "made, so a worker that joins would lack them; build the whole model before State(…), freeze what "
                "comes later with requires_grad_(False), and give it to the optimizer when it is used"
            )

    def step(self, closure: Callable[[], Any] | None = None, *more: Any, **options: Any) -> Any:
        """Make one optimizer step. In the body of ``state.batches`` it acts at the end of a global batch only.

        The learning-rate factor of the batch policy is applied here and undone before it returns, so
        schedulers see, and set, the script's own learning rate.

        Every rank calls it. Outside the loops of ``state.steps`` it may have to sum gradients first; then it is
        collective and blocks.

        Args:
            closure: As in ``torch.optim``: computes the loss again and returns it.
            more: Nothing; for an error that says what to do instead.
            options: The same.

        Returns:
            What the wrapped optimizer's ``step`` returns; ``None`` where the call does not act.

        Raises:
            WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
            UsageError: It was called in the loop over a step's micro-batches, or with further arguments; or ``State``
                was not given this optimizer.
        """
        if more or options:
            given = ", ".join([*map(repr, more), *(f"{name}=…" for name in options)])
            raise UsageError(
                f"step() was given {given}; expected nothing but a closure, since workers repeat steps that others "
                "have made; set what a step needs as an option in param_groups before it"
            )
        refuse_broken_world()
        if position.place.in_training and not self.reduction.is_joined:
            raise UsageError(
                f"{type(self).__name__}.step() was called in the loop, and State(…) was not given this "
                "DistributedOptimizer, so its steps would be lost with a worker; give State(…) every optimizer before "
                "the elastic function is called, as State(optimizer=…, second=…), and choose among them by the epoch"
            )
        if not position.admits_step(closure is not None):
            position.steps_in_body += 1
            return None
        reduction, stepping = self.reduction, self.stepping
        if closure is None and not reduction.deferred and reduction.round_number == stepping.round_number:
            reduction.complete()
        result = None
        if stepping.skip:
            stepping.skip -= 1
        else:
            result = self._step_at_scaled_rates(closure)
            micro_batch = reduction.micro_batch
            stepping.samples = micro_batch.global_samples if micro_batch else 0
        stepping.round_number = reduction.round_number
        reduction.has_stepped = True
        position.steps_in_body += 1
        is_own = not position.place.in_training
        stepping.own += is_own
        reduction.parameters.attach()
        stepping.after.call()
        if is_own:
            stepping.after_own.call()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # hooks of the script run around the step itself, not around this

    def _step_at_scaled_rates(self, closure: Callable[[], Any] | None) -> Any:
        reduction = self.reduction
        own_rates = [group["lr"] for group in self.param_groups if "lr" in group]
        groups = [group for group in self.param_groups if "lr" in group]
        for group in groups:
            group["lr"] = group["lr"] * reduction.learning_rate_factor
            if self.velocity is not None:
                group[VELOCITY_FACTOR] = reduction.learning_rate_factor
        try:
            self.stepping.before.call(self, closure is not None)
            return self._corrected_step(closure)
        finally:
            for group, rate in zip(groups, own_rates, strict=True):
                group["lr"] = rate

    def repeat(self) -> None:
        """The step that another worker took, with its gradients and options in place."""
        self._corrected_step(None)

    def _corrected_step(self, closure: Callable[[], Any] | None) -> Any:
        if self.velocity is None:
            return self._own_step(closure)
        _correct_velocity(self, self.velocity)  # type: ignore[arg-type]
        result = self._own_step(closure)
        _note_velocity(self, self.velocity)  # type: ignore[arg-type]
        return result

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        """Call the optimizer's own step; one that a script has written may take no closure."""
        step: Callable[..., Any] = super().step  # type: ignore[misc]
        return step() if closure is None else step(closure)


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
    optimizer.reduction = Reduction(named, PresentGroup(), exact)  # type: ignore[attr-defined]
    optimizer.stepping = Stepping(exact=exact)  # type: ignore[attr-defined]
    optimizer.velocity = velocity  # type: ignore[attr-defined]
    if measure_noise:
        optimizer.reduction.measure_noise()  # type: ignore[attr-defined]
    return optimizer


# Momentum that has the learning rate in it is corrected when the policy's factor changes abruptly. Two forms of SGD
# with momentum are in use (Goyal et al. 2017, arXiv:1706.02677, section 3, equations 9 and 10):
#
#     u = m u + g,      w = w - η u            torch.optim.SGD, RMSprop, and most others
#     v = m v + η g,    w = w - v              some optimizers of other packages, LARS as published
#
# They are the same while the rate η stays. When it changes, the first form needs nothing: u is made of gradients alone,
# and the new rate acts on all of it. In the second, v still has the old rate in it, and to remain the same as the first
# it has to be multiplied with new / old, the *momentum correction*; the smaller the old rate, the less stable without.
# Adam and its kin need none either: their moments are made of gradients alone.
#
# The factor that a velocity was made with stands beside it in the optimizer's state, so wherever the one goes, or
# stays, the other does: a commit, a checkpoint, a newcomer that repeats steps, a step that is not made again.


@torch.no_grad()
def _correct_velocity(optimizer: torch.optim.Optimizer, velocity: str) -> None:
    """Bring all velocities to the rate of this step, before it.

    Args:
        optimizer: Optimizer whose groups have this step's ``VELOCITY_FACTOR``.
        velocity: Name of the tensor in its state that has the rate in it.
    """
    for factor, kept in _velocities(optimizer, velocity):
        before = kept.get(VELOCITY_FACTOR, factor)
        if before != factor:
            kept[velocity].mul_(factor / before)


def _note_velocity(optimizer: torch.optim.Optimizer, velocity: str) -> None:
    """Keep what the velocities were made with, after a step."""
    for factor, kept in _velocities(optimizer, velocity):
        kept[VELOCITY_FACTOR] = factor


def _velocities(optimizer: torch.optim.Optimizer, velocity: str) -> Iterator[tuple[float, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter)
            if kept and isinstance(kept.get(velocity), torch.Tensor):
                yield group[VELOCITY_FACTOR], kept


def _same_parameters(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether another group, as a script gives it to ``add_param_group``, has the parameters of this one."""
    given = other.get("params")
    listed = [given] if isinstance(given, torch.Tensor) else given if isinstance(given, (list, tuple)) else []
    named = [entry[-1] if isinstance(entry, tuple) else entry for entry in listed]
    return list(map(id, group["params"])) == list(map(id, named))


def is_distributed(value: object) -> bool:
    """Whether a value came out of :func:`DistributedOptimizer`."""
    return isinstance(value, _Distributed)


def plain_step_hook(check: Callable[[torch.optim.Optimizer], None]) -> Callable[..., None]:
    """A hook for ``register_optimizer_step_pre_hook`` that passes optimizers on which are not distributed.

    Args:
        check: Function to call with the optimizer that is about to step.
    """

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_distributed(optimizer):
            check(optimizer)

    return hook


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
        optimizer.reduction.parameters.detach()
    exact = all(optimizer.stepping.exact for optimizer in optimizers)
    listed = [(name, parameter) for parameter, name in named.items()]
    reduction = Reduction(listed, PresentGroup(), exact)
    reduction.parameters.catalogue = catalogue
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
