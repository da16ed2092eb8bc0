"""The loops over batches: deal global batches out, count them once the world has stepped, commit.

``steps`` is the loop over optimizer steps: its body runs once per step on every worker, and a loop inside it goes over
the worker's micro-batches. ``batches`` is the flat form, whose body runs once per micro-batch: what belongs to a step
waits for the body that ends it (``position.py``), and what cannot be told apart is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler, GlobalStep
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import GlobalBatch
from edl_hvd.worker import process
from edl_hvd.worker.codec import encode
from edl_hvd.worker.position import position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.trace import Trace
from edl_hvd.worker.training.alike import is_due as is_compared
from edl_hvd.worker.training.exact import ExactReduction
from edl_hvd.worker.training.kept_graphs import next_number
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.other_buffers import OtherBuffers
from edl_hvd.worker.training.power_iterations import Buffers, PowerIterations
from edl_hvd.worker.training.reduction import MicroBatch, Reduction
from edl_hvd.worker.training.running_statistics import RunningStatistics
from edl_hvd.worker.training.scheduler import built_on
from edl_hvd.worker.training.tuning import choose, is_auto, is_due

if TYPE_CHECKING:
    from edl_hvd.worker.runtime import Runtime

# What random numbers at step level are seeded with, behind the place of the step; a micro-batch has its own place.
_STEP_LEVEL = -1
_FLAT = "state.batches()"


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

    def __init__(self, run: _Run, number: int, global_step: GlobalStep, items: Iterator[Any]) -> None:
        self.number = number
        self.samples = global_step.samples
        self._run, self._step, self._items = run, global_step, items
        self._kept: list[Any] = []
        self._loops = 0
        self._is_over = False

    def __len__(self) -> int:
        """The number of micro-batches of this worker, at least 0. Any rank; not collective."""
        return len(self._step.share)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's micro-batches. Collective: every rank goes to the end, and blocks there.

        Raises:
            UsageError: The step is over, another loop over it is under way, or one was left before its end.
        """
        position.refuse_left_early()
        if self._is_over:
            raise UsageError(
                "a loop over a step was begun after the step was over, whose samples are counted; loop over it in the "
                "body of `for step in state.steps(loader):` (list(…) and itertools.cycle(…) take the steps out of it)"
            )
        if position.in_micro_batch:
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
                element. 0 leaves the micro-batch out, whatever its gradient is.

        Raises:
            UsageError: No micro-batch is being computed, or its gradient has been already; or the weight is no number.
        """
        weigh(self._run.runtime, weight, "step.weigh()")

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
            self._run.reduction.record(name, value.detach() if isinstance(value, torch.Tensor) else value)

    def mean(self, name: str) -> float:
        """The mean of what all workers have recorded by a name, weighted as the gradients are. Not collective.

        Args:
            name: Name that :meth:`record` was given in the last loop over this step.

        Returns:
            The sum of w_j · v_j over the sum of w_j, where v_j was recorded for micro-batch j of weight w_j; the same
            on every worker.

        Raises:
            UsageError: Nothing was recorded by that name in this step's last loop, or the loop is still under way.
        """
        means = self._run.reduction.means
        if position.in_micro_batch or name not in means:
            raise UsageError(
                f"step.mean({name!r}) is not known; expected a name that step.record(…) was given in the loop over "
                f"this step, after that loop; recorded were {', '.join(sorted(means)) or 'none'}"
            )
        return means[name]

    def _loop(self) -> Iterator[Any]:
        run, loop = self._run, self._loops
        self._loops += 1
        run.statistics.begin_step()
        position.left_early = True
        begin = next_number()
        for number, part in enumerate(run.parts(self._step)):
            if number == len(self._kept):
                self._kept.append(run.next_item(self._items))
            run.begin(part, self._step, loop)
            before = encoded(run.runtime)
            try:
                yield self._kept[number]
            finally:
                position.in_micro_batch = False
            _refuse_changes(before, encoded(run.runtime))
            run.statistics.end_pass()
        if not self._step.share:
            run.begin_nothing(self._step)
        position.loops.append((begin, next_number()))
        run.reduction.complete()
        run.statistics.end_step()
        run.seed_step(self._step, loop + 1)
        position.left_early = False

    def end(self) -> None:
        """Take from the loader what the script has not asked for, and drop the micro-batches. Not collective.

        ``state.steps`` calls it when the body has run; a script does not.
        """
        for _ in range(len(self._kept), len(self._step.share)):
            self._run.next_item(self._items)
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
    if not position.in_micro_batch:
        raise UsageError(
            f"{call} was called where no micro-batch is computed; call it in the body of `for batch in step:`, before "
            "backward()"
        )


def steps(runtime: Runtime, loader: Any) -> Iterator[Step]:
    """See :meth:`edl_hvd.State.steps`."""
    run = _Run.of(runtime, loader, "state.steps()")
    if run.is_over():
        return
    life = run.begin_pass()
    run.reduction.deferred = True
    for global_step, items in run.global_steps():
        run.place(global_step)
        position.in_step = True
        run.begin_step(global_step)
        run.seed_step(global_step, 0)
        runtime.schedulers_may_move()
        step = Step(run, runtime.store.step, global_step, items)
        try:
            yield step
        except GeneratorExit:
            # The script left its loop early. One that ended as its world broke belongs to an earlier life.
            if runtime.life == life:
                run.leave()
                if step._loops and not position.left_early:
                    run.count(global_step)
            raise
        position.refuse_left_early()
        position.in_step = False
        step.end()
        run.count(global_step)
        run.commit()
    run.end_pass()


def batches(runtime: Runtime, loader: Any) -> Iterator[Any]:
    """See :meth:`edl_hvd.State.batches`."""
    run = _Run.of(runtime, loader, _FLAT)
    if run.is_over():
        return
    life = run.begin_pass()
    watch = _BodyWatch(runtime)
    trains = None
    for global_step, items in run.global_steps():
        has_idle = run.place(global_step)
        run.begin_step(global_step, announces=has_idle)
        run.statistics.begin_step()
        for part in run.parts(global_step):
            item = run.next_item(items)
            position.in_batches, position.ends_step = True, part.last
            run.begin(part, global_step, 0)
            watch.begin()
            try:
                yield item
            except GeneratorExit as left:
                if runtime.life == life:
                    run.statistics.end_pass()
                    if part.last and run.reduction.rounds:
                        try:
                            if left.__context__ is None:  # not an error of the script, which the others do not share
                                run.join_others(global_step, has_idle, leaves=True)
                            run.statistics.end_step()
                            run.count(global_step)
                        except Exception as error:  # a loop that is left cannot raise it
                            runtime.failure = error
                    is_unused = part.first and not run.reduction.has_computed
                    is_inside = not (is_unused or part.last)
                    is_meant = left.__context__ is None  # and no error
                    if is_meant and not is_inside:
                        run.tell_of_leaving()
                    run.leave()
                    position.left_unused, position.left_inside = is_meant and is_unused, is_meant and is_inside
                raise
            watch.end(sys._getframe(1), part.first)
            position.in_micro_batch = position.in_batches = False
            run.statistics.end_pass()
        position.in_batches = False
        others_leave = run.join_others(global_step, has_idle)
        trains = trains or run.reduction.step_has_gradient
        run.statistics.end_step()
        run.count(global_step)
        if others_leave:
            run.leave()
            return
        run.commit()
    if trains is False:
        runtime.warn_once(
            "untrained",
            "state.batches() has come to the end of the epoch, and no backward() was called in its body, so nothing "
            "was learned from these samples; train in the body itself (list(…) goes through all batches before)",
        )
    run.end_pass()


@dataclass
class _Run:
    """One loop over the batches of an epoch."""

    runtime: Runtime
    loader: Any
    call: str
    sampler: ElasticBatchSampler
    reduction: Reduction
    statistics: Buffers

    @classmethod
    def of(cls, runtime: Runtime, loader: Any, call: str) -> _Run:
        sampler = _sampler_of(runtime, loader, call)
        reduction = runtime.store.reduction
        if reduction is None:
            raise UsageError(
                f"{call} found no DistributedOptimizer in State; expected State(optimizer="
                "edl_hvd.DistributedOptimizer(…), …), because the optimizer has to know how a batch is dealt out"
            )
        _check_schedulers(runtime)
        handlers = runtime.store.handlers
        models = {name: kept.value for name, kept in handlers.items() if isinstance(kept.value, torch.nn.Module)}
        iterations = PowerIterations(models.values())
        if iterations and call == _FLAT:
            # With an idle worker there are collectives behind the optimizer's step. A world that breaks there goes
            # through the step again, and these would be made again from the weights behind it.
            runtime.store.tracker.stepped.never_clean()
        statistics = Buffers(
            _exact_statistics(runtime, sampler),
            iterations,
            OtherBuffers(models, runtime.warn_once),
        )
        _check_models(runtime, reduction)
        sampler.set_epoch(runtime.store.epoch)
        return cls(runtime, loader, call, sampler, reduction, statistics)

    def is_over(self) -> bool:
        """Nothing is left of the epoch, and what comes after it has begun before the script was run again.

        Raises:
            UsageError: The script has gone through this epoch already.
        """
        runtime = self.runtime
        store = runtime.store
        # By an earlier call of the elastic function, or by this one, whose world has stayed since.
        session, life, epoch = runtime.finished_pass
        if epoch == store.epoch and (life == runtime.life or session is not runtime.session):
            raise UsageError(
                f"{self.call} was called again in epoch {runtime.store.epoch}, whose samples are all consumed; write "
                "`for epoch in state.epochs(n):` around the loop, which counts the epochs"
            )
        is_left = any(True for _ in self.sampler.steps())
        return runtime.counting.is_evaluated(store.epoch, store.step) and not is_left

    def begin_pass(self) -> int:
        """The loop begins; the life that it belongs to."""
        runtime = self.runtime
        runtime.counting.enter_pass(f"batches/{runtime.store.epoch}")
        trained = set(self.reduction.names)
        models = [m for m in runtime.store.of_kind(torch.nn.Module) if not trained.isdisjoint(m.parameters())]
        # Others, such as a teacher, may be in evaluation mode all the time.
        progress.is_validating = lambda: not all(model.training for model in models)
        self.reduction.forget()
        self._tell_of_hooks()
        self.reduction.refresh()
        for scaler in runtime.store.of_kind(torch.amp.GradScaler):
            if scaler.is_enabled() and scaler._scale is None:
                # Else it exists on the workers alone that have computed a loss.
                parameter = next(iter(self.reduction.names))
                scaler.scale(torch.zeros(1, device=parameter.device))
        return runtime.life

    def _tell_of_hooks(self) -> None:
        policy, size = self.sampler.policy, process.size()
        if size == 1 and (policy.micro_batch is None or policy.global_batch(1) <= policy.micro_batch):
            return
        hooked = self.reduction.hooked_by_script()
        if hooked:
            self.runtime.warn_once(
                "hook",
                f"the hook of the script on the gradient of {hooked[0]!r} is called with that of each micro-batch; a "
                "factor or a mask comes to the same, but what is not linear, such as clipping, belongs behind the loop "
                "over a step, in `for step in state.steps(loader):`",
            )

    def global_steps(self) -> Iterator[tuple[GlobalStep, Iterator[Any]]]:
        """The steps left in the epoch, with the loader's items; both begin anew where the batch has changed."""
        dealt: Any = None
        while self.sampler.policy is not dealt:
            dealt = self.sampler.policy
            with self.sampler.dealing():
                items = iter(self.loader)
            self.runtime.step_timer.pause()
            for step in self.sampler.steps():
                yield step, items
                if self.sampler.policy is not dealt:
                    break  # what the loader has prefetched is divided as before

    def place(self, step: GlobalStep) -> bool:
        """Note how the step is dealt; whether some worker gets nothing of it."""
        policy, size = self.sampler.policy, process.size()
        if policy.micro_batch is None:
            position.per_step, here = 1, min(step.samples, size)
        else:
            position.per_step = -(-policy.global_batch(size) // policy.micro_batch)
            here = -(-step.samples // policy.micro_batch)
        position.is_even = here == size and position.per_step <= size
        if here < size and position.per_step < size and policy.micro_batch is not None:
            self.runtime.warn_once(
                "idle",
                f"{size} workers share {position.per_step} micro-batches per step, so {size - position.per_step} of "
                "them compute nothing; give ElasticBatchSampler(…) a smaller micro_batch, or a larger global batch",
            )
        position.has_idle = here < size
        return here < size

    def begin_step(self, step: GlobalStep, announces: bool = False) -> None:
        """A global batch begins."""
        self.reduction.begin_step(announces)
        self.reduction.learning_rate_factor = self.runtime.learning_rate_factor
        if self.sampler.policy.needs_noise:
            self.reduction.measure_noise()
        if self.reduction.noise is not None:
            scaler = next(iter(self.runtime.store.of_kind(torch.amp.GradScaler)), None)
            self.reduction.noise.loss_scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0

    def parts(self, step: GlobalStep) -> Iterator[MicroBatch]:
        """This worker's micro-batches of a step."""
        unit = self.sampler.policy.micro_batch or step.samples
        count = len(step.share)
        for number, (first, last) in enumerate(step.share):
            yield MicroBatch(
                last - first, step.samples, number == 0, number == count - 1, first // unit, unit, step.offset + first
            )

    def next_item(self, items: Iterator[Any]) -> Any:
        """The loader's next item."""
        progress.enter("input")
        item = next_item(items)
        progress.enter("compute")
        return item

    def begin(self, part: MicroBatch, step: GlobalStep, loop: int) -> None:
        """The script is about to compute a micro-batch."""
        progress.batches += 1
        self.runtime.passes += 1
        seed_everything(self.sampler.seed, self.sampler.epoch, part.offset, *([loop] if loop else []))
        if part.last:
            self.reduction.vote = functools.partial(self.runtime.vote, step.samples)
        self.reduction.begin(part)
        self.runtime.has_computed = True
        position.in_micro_batch = True

    def begin_nothing(self, step: GlobalStep) -> None:
        """This worker has nothing to compute in the step."""
        unit = self.sampler.policy.micro_batch or step.samples
        self.reduction.vote = functools.partial(self.runtime.vote, step.samples)
        self.reduction.begin(MicroBatch(0, step.samples, first=True, last=True, unit=unit))

    def seed_step(self, step: GlobalStep, loop: int) -> None:
        """What the script draws at step level is the same on every worker."""
        seed_everything(self.sampler.seed, self.sampler.epoch, step.offset, _STEP_LEVEL, loop)

    def join_others(self, step: GlobalStep, has_idle: bool, leaves: bool = False) -> bool:
        """Take part in what the other workers do in this step of ``batches``, where the script did not.

        Args:
            step: Whose body has run, on workers that have a part of it.
            has_idle: Some have none.
            leaves: The script has left the loop here.

        Returns:
            Whether the scripts that ran the body have left the loop, so that this one has to as well.
        """
        reduction = self.reduction
        ran, others_leave = bool(step.share), False
        if not ran:
            self.begin_nothing(step)
        elif not reduction.rounds:
            reduction.complete(skipped=True)
            ran = False
        if has_idle:
            others_leave = reduction.follow(leaves)
        if has_idle or reduction.skipped:
            self.runtime.take_over(ran)
        return others_leave

    def count(self, step: GlobalStep) -> None:
        """The world has stepped."""
        runtime, store = self.runtime, self.runtime.store
        noise = self.reduction.noise
        scale = step.samples / self.sampler.policy.base_samples
        store.learning.count(runtime.learning_rate_factor, None if noise is None else noise.observation, scale)
        self.sampler.advance(step)
        progress.steps += 1
        runtime.steps_here += 1
        store.step += 1
        store.samples += step.samples
        runtime.move_schedulers()

    def commit(self) -> None:
        """Between two steps."""
        runtime = self.runtime
        if runtime.store.step % runtime.commit_every == 0:
            before = progress.enter("commit")
            runtime.commit_step(self.reduction.answer)
            if is_compared(runtime.store.step):
                # After the commit: a world that broke before it would go through a step that is made already, and what
                # the script logs of it would be computed with the weights behind it.
                runtime.check_alike()
            progress.enter(before)
        _choose_batch(runtime, self.sampler)

    def leave(self) -> None:
        """The script has left the loop early."""
        progress.enter("script")
        self.runtime.counting.leave_pass()
        left_early = position.left_early
        position.leave()
        position.left_early = left_early

    def tell_of_leaving(self) -> None:
        """Note that the script leaves the loop of ``batches``, by a count of its own perhaps."""
        if position.per_step > 1 and not position.knows_step:
            self.runtime.left = (
                "the loop of state.batches() was left before the end of the epoch, and its body runs once per "
                f"micro-batch, {position.per_step} times per optimizer step over all workers, so where it ends depends "
                "on how many workers there are; decide by state.step, or write the loop with `for step in "
                "state.steps(loader):`"
            )

    def end_pass(self) -> None:
        """The loop is through, on every rank."""
        runtime = self.runtime
        position.leave()
        self.reduction.forget()
        progress.enter("commit")
        runtime.check_alike()
        runtime.sync_buffers()
        runtime.counting.end_training_pass()
        runtime.finished_pass = (runtime.session, runtime.life, runtime.store.epoch)
        runtime.commit_whole()
        progress.enter("script")


def encoded(runtime: Runtime) -> dict[str, Any]:
    """The plain attributes of a state, such that a change in place shows."""
    found = {}
    for name, value in runtime.store.attributes.items():
        if not name.startswith("_"):
            plain, tensors = encode(value, name)
            found[name] = plain, [(tensor.data_ptr(), tensor._version) for tensor in tensors.values()]
    return found


def _refuse_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Workers compute different micro-batches, so what they change there differs."""
    changed = [name for name in after if after[name] != before.get(name)]
    if changed:
        raise UsageError(
            f"state.{changed[0]} was changed in the loop over a step's micro-batches, of which every worker has "
            "others; change it after that loop, in the body of `for step in state.steps(loader):`, and use "
            "step.record(…) and step.mean(…) for numbers of micro-batches"
        )


class _BodyWatch:
    """Sees what the body of ``state.batches`` does once per micro-batch that ordinary code means once per step.

    Where a global batch is several micro-batches, the body runs as often as this worker has some. What is given to
    ``State`` must not change then but by what waits for the end of the step; and a counter of the script's own counts
    something else than steps, which is said once.
    """

    _LOOKS = 4  # at the script's variables, in which a counter rises each time

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._attributes: dict[str, Any] = {}
        self._others = Trace([])
        self._disturbances = -1
        self._has_stepped: bool | None = None
        self._rates: list[Any] = []
        self._rising: set[str] = set()
        self._counters: dict[str, int] | None = None
        self._looks = self._LOOKS

    def begin(self) -> None:
        """A body is about to run."""
        position.is_asked, position.steps_in_body = False, 0
        if position.per_step > 1:
            self._attributes = encoded(self._runtime)
            self._others = self._look()
            watch = self._runtime.store.tracker.stepped
            self._disturbances = -1 if watch.is_dirty() else watch.dirty_count

    def end(self, frame: Any, is_first: bool) -> None:
        """It has run.

        Args:
            frame: Of the script.
            is_first: Of this worker's bodies in the step.

        Raises:
            UsageError: It has changed what it may change once per step only.
        """
        self._check_steps()
        if position.per_step <= 1 or (position.is_asked and position.ends_step):
            return
        now = encoded(self._runtime)
        changed = [name for name in now if now[name] != self._attributes.get(name)]
        if changed:
            self._refuse(f"state.{changed[0]} was changed")
        if not self._others.fits():
            self._refuse("a model in State that no distributed optimizer moves was changed")
        watch = self._runtime.store.tracker.stepped
        if self._disturbances >= 0 and (watch.is_dirty() or watch.dirty_count > self._disturbances):
            self._refuse("a parameter was changed by something else than its optimizer")
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

    def _look(self) -> Trace:
        """At parameters in State that the optimizers do not move, but for averages that move with the steps."""
        store = self._runtime.store
        trained = store.reduction.names if store.reduction is not None else {}
        models = [m for m in store.of_kind(torch.nn.Module) if not isinstance(m, torch.optim.swa_utils.AveragedModel)]
        return Trace([parameter for model in models for parameter in model.parameters() if parameter not in trained])

    def _refuse(self, what: str) -> None:
        raise UsageError(
            f"{what} in the body of state.batches(), which runs once per micro-batch ({position.per_step} per step, "
            "over all workers), so the result would depend on how many workers there are; write the loop with `for "
            "step in state.steps(loader):`, or change it after the loop, or under `if optimizer.at_boundary:`"
        )

    def _look_for_counters(self, frame: Any) -> None:
        if self._looks <= 0 or frame is None:
            return
        self._looks -= 1
        now = {name: value for name, value in frame.f_locals.items() if type(value) is int}
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


def _exact_statistics(runtime: Runtime, sampler: ElasticBatchSampler) -> RunningStatistics:
    """The running statistics of the models, where the optimizers are exact; of nothing elsewhere."""
    store, optimizers = runtime.store, runtime.optimizers
    exact = [optimizer for optimizer in optimizers if optimizer.stepping.exact]
    if not exact:
        return RunningStatistics(())
    if (
        len(exact) < len(optimizers)
        or not isinstance(sampler.policy, GlobalBatch)
        or sampler.policy.micro_batch is None
    ):
        raise UsageError(
            f"{len(exact)} of the {len(optimizers)} optimizers in State have exact=True, and the batch policy is "
            f"{sampler.policy}; expected all of them, and ElasticBatchSampler(…, global_batch=…, micro_batch=…): the "
            "same micro-batches in every world"
        )
    assert isinstance(store.reduction, ExactReduction)
    store.reduction.passes_infinity = any(s.is_enabled() for s in store.of_kind(torch.amp.GradScaler))
    return RunningStatistics(store.of_kind(torch.nn.Module))


def _choose_batch(runtime: Runtime, sampler: ElasticBatchSampler) -> None:
    """With ``WorkerBatch("auto")``, now and then: see ``tuning.py``. The change is part of the next commit."""
    store = runtime.store
    if not is_auto(sampler.policy):
        return
    runtime.step_timer.step()
    world = process.current().world
    committed = store.step % runtime.commit_every == 0
    if world is not None and committed and is_due(store.learning, store.step):
        collectives = process.current().collectives
        chosen = choose(
            sampler.policy, store.learning, store.step, runtime.step_timer, runtime.announce, collectives, world
        )
        if chosen is not None:
            sampler.policy = chosen
            factor = chosen.learning_rate_factor(world.size)
            store.ramp = store.ramp.toward(factor, store.samples, chosen.warmup_samples)


def _check_models(runtime: Runtime, reduction: Reduction) -> None:
    """What an optimizer moves has to be part of the state, or a worker that joins begins with other weights."""
    store = runtime.store
    kept = {id(parameter) for model in store.of_kind(torch.nn.Module) for parameter in model.parameters()}
    kept.update(id(value) for value in store.attributes.values())
    lost = [name for parameter, name in reduction.names.items() if id(parameter) not in kept]
    if lost:
        raise UsageError(
            f"State(…) was given an optimizer, and not the model whose parameters it moves ({lost[0]!r} and "
            f"{len(lost) - 1} more), so a worker that joins would begin with other weights; add it: State(model=model, "
            "…)"
        )


def _check_schedulers(runtime: Runtime) -> None:
    """A scheduler that State was not given would be forgotten with a worker, and move with every micro-batch."""
    kept = {id(scheduler) for scheduler in _schedulers(runtime)}
    for name, handler in runtime.store.handlers.items():
        for scheduler in built_on(handler.value) if isinstance(handler.value, torch.optim.Optimizer) else ():
            if id(scheduler) not in kept:
                raise UsageError(
                    f"a {type(scheduler).__name__} was built on the optimizer state.{name}, and State(…) was not given "
                    "it, so its position would be lost with a worker; add it: State(scheduler=scheduler, …)"
                )


def _schedulers(runtime: Runtime) -> Iterator[Any]:
    """Those in State, and those that they are made of, such as SequentialLR's."""
    found = list(runtime.store.of_kind(torch.optim.lr_scheduler.LRScheduler))
    seen = set()
    while found:
        scheduler = found.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            yield scheduler
            parts = [part for value in vars(scheduler).values() for part in (value if type(value) is list else [value])]
            found += [part for part in parts if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]


def _sampler_of(runtime: Runtime, loader: Any, call: str) -> ElasticBatchSampler:
    given = list(runtime.store.of_kind(ElasticBatchSampler))
    used = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset) and used not in given:
        raise UsageError(
            f"{call} got a loader of {type(loader.dataset).__name__}, an IterableDataset, of which nobody can tell "
            "what it has dealt to whom, so samples would be lost or come twice; give its files to "
            "edl_hvd.ElasticShards: shards = ElasticShards(paths, counts, read=…), batches = "
            "shards.sampler(global_batch=…), and DataLoader(shards, batch_sampler=batches)"
        )
    # A loader of another make may use the sampler in a way that cannot be seen from here.
    unknown = used is None and not isinstance(loader, torch.utils.data.DataLoader)
    if len(given) != 1 or (used is not given[0] and not unknown):
        raise UsageError(
            f"{call} cannot tell how batches are dealt: State holds {len(given)} ElasticBatchSampler(s) and "
            f"the loader's batch_sampler is {type(used).__name__}; expected one sampler, given to both: "
            "DataLoader(dataset, batch_sampler=batches) and State(batches=batches, …)"
        )
    _check_length(given[0], getattr(loader, "dataset", None))
    return given[0]


def _check_length(sampler: ElasticBatchSampler, dataset: Any) -> None:
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):  # there is none, or it does not know
        return
    if length != sampler.length:
        raise UsageError(
            f"the loader's data set has {length} samples, and its batch_sampler deals {sampler.length}; expected "
            "ElasticBatchSampler(len(dataset), …) with the data set of the loader"
        )


def next_item(items: Iterator[Any], of: str = "epoch") -> Any:
    """The loader's next item.

    Raises:
        UsageError: There is none, in the middle of the epoch, or of what ``of`` names.
    """
    try:
        return next(items)
    except StopIteration:
        raise UsageError(
            f"the loader ended before the {of} did; expected one item per micro-batch of its batch_sampler"
        ) from None
