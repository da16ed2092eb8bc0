"""``state.steps``, and what a script can do with one step: go through its micro-batches, weigh them, record numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from edl_hvd.data.sampler import GlobalStep
from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.batch_loops.batches import EpochLoop
from edl_hvd.worker.batch_loops.body_watch import NumbersWatch, carried_values, encoded, refuse_changes
from edl_hvd.worker.carried_values import CarriedValues
from edl_hvd.worker.commits.epoch_top import StepTop
from edl_hvd.worker.position import LeftLoop, LoopPlace, position
from edl_hvd.worker.runtime import Runtime
from edl_hvd.worker.training.kept_graphs import next_number


def steps(runtime: Runtime, loader: Any) -> Iterator[Step]:
    """See :meth:`edl_hvd.State.steps`."""
    loop = EpochLoop.of(runtime, loader, "state.steps()")
    if loop.is_over():
        loop.seed_end()
        return
    loop.begin()
    loop.reduction.deferred = True
    watch, counters = NumbersWatch(runtime), loop.counters("step.number")
    carried = carried_values(runtime, "the loop over a step")
    for global_step, items in loop.global_steps():
        loop.deal(global_step)
        position.place = LoopPlace.STEP
        loop.begin_step(global_step)
        loop.seed_step(global_step, 0)
        runtime.schedules.allow_step()
        runtime.store.is_behind_step_top = False
        step = Step(loop, runtime.store.step, global_step, items, watch, carried)
        try:
            yield step
        except GeneratorExit:
            # The script left its loop early. One that ended as its world broke belongs to an earlier attempt.
            if loop.is_present:
                loop.leave()
                if step.was_gone_through:
                    loop.count(global_step)
            raise
        process.refuse_broken_world()
        position.refuse_left_early()
        if counters is not None:
            counters.look(loop.right_counts(global_step))
        position.place = LoopPlace.OUTSIDE
        step.end()
        loop.count(global_step)
        loop.commit()
    loop.end()


class Step:
    """One optimizer step: iterate over it for this worker's micro-batches, as often as the step needs.

    Items of ``state.steps(loader)``; a script does not make one. Every loop over it ends in a sum over the workers.
    After the loop each parameter's ``.grad`` is the gradient of the whole global batch, the same on every worker, and
    ``None`` where no worker has used the parameter. A second loop goes over the same micro-batches again (a GAN's
    generator, SAM, a closure of LBFGS).

    Collective: every rank makes the same number of loops over it, each to its end, and blocks there.
    ``len(step)`` is the number of this worker's micro-batches, at least 0, and not collective.

    Attributes:
        number: Number of optimizer steps of the run before this one; 0 for the first. The same on every worker.
        samples: Number of samples in the global batch, over all workers.
    """

    def __init__(
        self, loop: EpochLoop, number: int, global_step: GlobalStep, items: Iterator[Any], watch: NumbersWatch,
        carried: CarriedValues,
    ) -> None:  # fmt: skip
        self.number = number
        self.samples = global_step.samples
        self._epoch, self._step, self._items = loop, global_step, items
        self._watch, self._carried = watch, carried
        self._kept: list[Any] = []
        self._loops = 0
        self._is_over = False
        self._top = StepTop.of(loop.runtime.store)

    def __len__(self) -> int:
        """The number of micro-batches of this worker, at least 0. Any rank; not collective."""
        return len(self._step.share)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's micro-batches. Collective: every rank goes to the end, and blocks there.

        Raises:
            WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
            UsageError: The step is over, another loop over it is under way, or one was left before its end.
        """
        self._epoch.runtime.store.is_behind_step_top = not self._loops and not self._is_over
        process.refuse_broken_world()
        position.refuse_left_early()
        if self._is_over:
            raise UsageError(
                "a loop over a step was begun after the step was over, whose samples are counted; loop over it in the "
                "body of `for step in state.steps(loader):` (list(…) and itertools.cycle(…) take the steps out of it)"
            )
        if position.place.in_micro_batch:
            raise UsageError(
                "a loop over a step was begun inside another one; finish the first, and loop over the step again after "
                "it"
            )
        return self._loop()

    def weigh(self, weight: float | torch.Tensor) -> None:
        """Set the weight of the present micro-batch in the sum of the gradients. Not collective.

        For a loss that is a mean over something other than samples, such as tokens or pixels: give their number, before
        ``backward()``. The gradient of the step is then that of the mean over all tokens of the global batch. Waits for
        a GPU if ``weight`` is a tensor there.

        Args:
            weight: Weight instead of the number of samples, finite and at least 0: a number, or a tensor of one
                element. 0 leaves the micro-batch out, whatever its gradient is; where all are 0, that of the step is 0.

        Raises:
            UsageError: No micro-batch is being computed, or its gradient has been already; or the weight is no number.
        """
        weigh(self._epoch.runtime, weight, "step.weigh()")

    def record(self, **values: float | torch.Tensor) -> None:
        """Add numbers of the present micro-batch, such as its loss, to their mean over the global batch.

        They travel with the gradients; :meth:`mean` tells the result after the loop. Call :meth:`weigh` before it, if
        at all. Not collective; does not wait for a GPU.

        Args:
            **values: Numbers, or tensors of one element on any device, by name.

        Raises:
            UsageError: No micro-batch is being computed, or a tensor has more elements.
        """
        _refuse_outside("step.record()")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"step.record({name}=…) was given a tensor of shape {tuple(value.shape)}; expected a number, or a "
                    "tensor of one element, such as a loss"
                )
            self._epoch.reduction.record(name, value.detach() if isinstance(value, torch.Tensor) else value)

    def mean(self, name: str) -> float:
        """The mean of what all workers have recorded by a name, weighted as the gradients are. Not collective.

        Args:
            name: Name that :meth:`record` was given in the last loop over this step.

        Returns:
            The sum of w_j · v_j over the sum of w_j, where v_j was recorded for micro-batch j of weight w_j; the same
            on every worker. NaN where that is 0, as where all labels of the step are to be ignored.

        Raises:
            UsageError: Nothing was ever recorded by that name, or the loop is still under way.
        """
        means = self._epoch.reduction.recorded.means
        if position.place.in_micro_batch or name not in means:
            raise UsageError(
                f"step.mean({name!r}) is not known; expected a name that step.record(…) was given in the loop over "
                f"this step, after that loop; recorded were {', '.join(sorted(means)) or 'none'}"
            )
        return means[name]

    def _loop(self) -> Iterator[Any]:
        epoch, number = self._epoch, self._loops
        self._loops += 1
        if self._top is not None:
            self._top.close(epoch.runtime.store)
            self._top = None
        epoch.buffers.begin_step()
        before = position.left
        position.left = LeftLoop.EARLY  # stays so where the script leaves the loop
        begin = next_number()
        for i, part in enumerate(epoch.parts(self._step)):
            if i == len(self._kept):
                self._kept.append(epoch.next_item(self._items))
            epoch.begin_micro_batch(part, self._step, number)
            position.place = LoopPlace.MICRO_BATCH
            attributes = encoded(epoch.runtime)
            self._watch.begin()
            try:
                yield self._kept[i]
            finally:
                # Python may close a loop that was left when another one is under way.
                if position.place is LoopPlace.MICRO_BATCH and epoch.is_present:
                    position.place = LoopPlace.STEP
            process.refuse_broken_world()
            if position.per_step > 1:
                self._carried.look(sys._getframe(1), ends_step=False)
            self._watch.end()
            refuse_changes(attributes, encoded(epoch.runtime))
            epoch.buffers.end_pass()
        if not self._step.share:
            epoch.begin_empty(self._step)
        position.loops.append((begin, next_number()))
        epoch.reduction.complete()
        epoch.buffers.end_step()
        epoch.runtime.store.is_behind_step_top = False
        epoch.seed_step(self._step, number + 1)
        position.left = before

    @property
    def was_gone_through(self) -> bool:
        """Whether a loop over the step was begun, and none was left before its end. Not collective."""
        return self._loops > 0 and position.left is not LeftLoop.EARLY

    def end(self) -> None:
        """Take from the loader what the script has not asked for, and drop the micro-batches. Not collective.

        ``state.steps`` calls it when the body has run; a script does not.
        """
        for _ in range(len(self._kept), len(self._step.share)):
            self._epoch.next_item(self._items)
        self._kept.clear()
        self._is_over = True


def weigh(runtime: Runtime, weight: float | torch.Tensor, call: str) -> None:
    """See :meth:`Step.weigh` and :meth:`edl_hvd.State.weigh`."""
    _refuse_outside(call)
    value = float(weight)
    if not 0 <= value < float("inf"):
        raise UsageError(f"{call} was given {value}; expected a finite number of at least 0, such as a count")
    assert runtime.store.reduction is not None
    runtime.store.reduction.weigh(value)


def _refuse_outside(call: str) -> None:
    if not position.place.in_micro_batch:
        raise UsageError(
            f"{call} was called where no micro-batch is computed; call it in the body of `for batch in step:`, before "
            "backward()"
        )
