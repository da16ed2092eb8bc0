"""What a body of the loops has changed that it may change once per optimizer step only."""

from __future__ import annotations

from typing import Any

import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker.carried_values import CarriedValues
from edl_hvd.worker.codec import encode
from edl_hvd.worker.position import position
from edl_hvd.worker.runtime import Runtime
from edl_hvd.worker.script_locals import variables_of
from edl_hvd.worker.trace import TensorTrace
from edl_hvd.worker.training.optimizer import is_distributed

_GENERATOR = object()
_CHANGE_LATER = (
    "write the loop with `for step in state.steps(loader):`, or change it after the loop, or under `if "
    "optimizer.at_boundary:`"
)
_ADVICE = (
    "draw from it at step level, and inside from torch, numpy or random themselves, which are seeded alike for each "
    "micro-batch in every world"
)
_PARAMETER_ADVICE = (
    f"{_CHANGE_LATER}; where the first forward pass sets it (ActNorm), run one batch through the model before State is "
    "made"
)


def encoded(runtime: Runtime) -> dict[str, Any]:
    """The plain attributes of a state and its generators, such that a change in place shows."""
    found: dict[str, Any] = {}
    for name, value in runtime.store.attributes.items():
        if not name.startswith("_"):
            plain, tensors = encode(value, name)
            found[name] = plain, [(tensor.data_ptr(), tensor._version) for tensor in tensors.values()]
    for name, (plain, tensors) in runtime.store.generator_states().items():
        found[name] = _GENERATOR, plain, [tensor.cpu().numpy().tobytes() for tensor in tensors.values()]
    return found


def refuse_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Workers compute different micro-batches, so what they change there differs."""
    changed = [name for name in after if after[name] != before.get(name)]
    if not changed:
        return
    name, where = changed[0], "in the loop over a step's micro-batches, of which every worker has others"
    if after[name][0] is _GENERATOR:
        raise UsageError(f"state.{name} was drawn from {where}; {_ADVICE}")
    raise UsageError(
        f"state.{name} was changed {where}; change it after that loop, in the body of `for step in "
        "state.steps(loader):`, and use step.record(…) and step.mean(…) for numbers of micro-batches"
    )


class NumbersWatch:
    """Sees numbers of modules that the forward pass of each micro-batch changes, such as a temperature or a counter.

    In plain PyTorch there is one such pass per step. A number that changes now and then may be what a forward pass has
    seen of its batch, so nothing is said of it.

    Args:
        runtime: Of the state.
    """

    _LOOKS = 16  # per epoch, at the numbers before and after a micro-batch

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._looks = self._LOOKS
        self._before: dict[str, int | float] = {}
        self._changed: set[str] = set()

    def begin(self) -> None:
        """A micro-batch is about to be computed."""
        if self._looks and position.per_step > 1:
            self._before = self._runtime.store.module_numbers()

    def end(self) -> None:
        """It has been computed."""
        if not self._looks or position.per_step <= 1:
            return
        self._looks -= 1
        now, before, changed_before = self._runtime.store.module_numbers(), self._before, self._changed
        self._changed = {name for name in {**now, **before} if now.get(name) != before.get(name)}
        names = sorted(self._changed & changed_before)
        if names:
            self._runtime.warn_once(
                "module numbers",
                f"state.{', state.'.join(names)} changes with the forward pass of each micro-batch, "
                f"{position.per_step} times per optimizer step over all workers, and each worker "
                "computes others, so what is learned depends on how many workers there are; change it once per step, "
                "behind the loop over a step, or under `if optimizer.at_boundary:`",
            )


def carried_values(runtime: Runtime, loop: str, where: str = "") -> CarriedValues:
    """What tells once of values that go from one micro-batch into the next.

    Args:
        runtime: Of the state.
        loop: The loop over micro-batches.
        where: What a loop over a step belongs to, where the script has none.
    """

    def warn(name: str) -> None:
        runtime.warn_once(
            "carried",
            f"{name} goes from each body of {loop} into the next one, and into the loss, and the body runs "
            f"once per micro-batch, {position.per_step} times per optimizer step over all workers, of which each "
            "computes others, so what is learned depends on how many workers there are; change it once per step, "
            f"behind the loop over a step {where}from step.mean(…) or edl_hvd.allreduce, and keep it in State",
        )

    return CarriedValues(warn)


class BodyWatch:
    """Sees what the body of ``state.batches`` does once per micro-batch that ordinary code means once per step.

    Where a global batch is several micro-batches, the body runs as often as this worker has some. What is given to
    ``State`` must not change then but by what waits for the end of the step; and a counter of the script's own counts
    something else than steps, which is said once.
    """

    _LOOKS = 4  # at the script's variables, in which a counter rises each time

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attributes: dict[str, Any] = {}
        self._others = TensorTrace([])
        self._dirty_count = -1
        self._has_other_states: bool | None = None  # from before the loop, such as Adam's that was cleared
        self._has_stepped: bool | None = None
        self._rates: list[Any] = []
        self._rising: set[str] = set()
        self._counters: dict[str, int] | None = None
        self._looks = self._LOOKS
        self._numbers = NumbersWatch(runtime)
        self._carried = carried_values(runtime, "state.batches()", "of `for step in state.steps(loader):`, ")

    def begin(self) -> None:
        """A body is about to run."""
        self._numbers.begin()
        if position.per_step > 1:
            self._attributes = encoded(self._runtime)
            self._others = self._look()
            watch = self._runtime.store.tracker.stepped
            if self._has_other_states is None:
                self._has_other_states = watch.has_dirty_states()
            self._dirty_count = -1 if self._has_other_states or watch.is_dirty() else watch.dirty_count

    def end(self, frame: Any, is_first: bool) -> None:
        """It has run.

        Args:
            frame: Of the script.
            is_first: Of this worker's bodies in the step.

        Raises:
            UsageError: It has changed what it may change once per step only.
        """
        self._check_steps()
        if position.per_step > 1:
            self._carried.look(frame, position.ends_step)
        if position.per_step <= 1 or (position.is_asked and position.ends_step):
            self._has_other_states = self._has_other_states and not position.ends_step
            return
        self._numbers.end()
        now = encoded(self._runtime)
        changed = [name for name in now if now[name] != self._attributes.get(name)]
        if changed and now[changed[0]][0] is _GENERATOR:
            self._refuse(f"state.{changed[0]} was drawn from", _ADVICE)
        elif changed:
            self._refuse(f"state.{changed[0]} was changed")
        if not self._others.fits():
            self._refuse("a model in State that no distributed optimizer moves was changed")
        watch = self._runtime.store.tracker.stepped
        if self._dirty_count >= 0 and (watch.is_dirty() or watch.dirty_count > self._dirty_count):
            self._refuse("a parameter was changed by something else than its optimizer", _PARAMETER_ADVICE)
        self._has_other_states = self._has_other_states and not position.ends_step
        self._check_rates(is_first)
        self._look_for_counters(frame)

    def _check_steps(self) -> None:
        """Where the body steps in some batches only, it counts batches, of which there are as many as workers make."""
        reduction = self._runtime.store.reduction
        if position.per_step <= 1 or position.is_asked or reduction is None or not reduction.has_computed:
            return
        has_stepped = position.steps_in_body > 0
        if self._has_stepped not in (None, has_stepped):
            self._refuse("optimizer.step() was called for some batches and not for others")
        self._has_stepped = has_stepped

    def _check_rates(self, is_first: bool) -> None:
        """A script that sets a rate by ``state.step`` sets the same one in all bodies of a step."""
        store = self._runtime.store
        rates = [group.get("lr") for optimizer in store.of_kind(is_distributed) for group in optimizer.param_groups]
        has_schedulers = any(True for _ in store.of_kind(torch.optim.lr_scheduler.LRScheduler))
        if not is_first and rates != self._rates and not (position.ends_step and has_schedulers):
            self._refuse("a learning rate was changed")
        self._rates = rates

    def _look(self) -> TensorTrace:
        """At parameters in State that the optimizers do not move, but for averages that move with the steps."""
        store = self._runtime.store
        trained = store.reduction.names if store.reduction is not None else {}
        models = [m for m in store.of_kind(torch.nn.Module) if not isinstance(m, torch.optim.swa_utils.AveragedModel)]
        return TensorTrace(
            [parameter for model in models for parameter in model.parameters() if parameter not in trained]
        )

    def _refuse(self, what: str, advice: str = _CHANGE_LATER) -> None:
        raise UsageError(
            f"{what} in the body of state.batches(), which runs once per micro-batch ({position.per_step} per step, "
            f"over all workers), so the result would depend on how many workers there are; {advice}"
        )

    def _look_for_counters(self, frame: Any) -> None:
        if self._looks <= 0 or frame is None:
            return
        self._looks -= 1
        now = {name: value for name, value in variables_of(frame).items() if type(value) is int}
        before, self._counters = self._counters, now
        rising = {name for name, value in now.items() if before is not None and before.get(name) == value - 1}
        self._rising = rising if self._looks == self._LOOKS - 2 else self._rising & rising
        if self._looks == 0 and self._rising:
            self._runtime.warn_once(
                "counter",
                f"{', '.join(sorted(self._rising))} rises by one in each body of state.batches(), which runs once per "
                f"micro-batch, {position.per_step} times per optimizer step over all workers; count steps with "
                "state.step, or write the loop with `for step in state.steps(loader):`",
            )
