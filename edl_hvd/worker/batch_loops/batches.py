"""The loops over the batches of an epoch: how they are dealt out, computed, counted and committed; ``state.batches``.

``state.steps`` (``steps.py``) is the loop over optimizer steps: its body runs once per step on every worker, and a loop
inside it goes over the worker's micro-batches. ``state.batches`` is the flat form, whose body runs once per
micro-batch: what belongs to a step waits for the body that ends it (``position.py``), and what cannot be told apart is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler, GlobalStep
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import GlobalBatch
from edl_hvd.worker import process
from edl_hvd.worker.batch_loops.body_watch import BodyWatch
from edl_hvd.worker.batch_loops.loader_checks import check_models, check_schedulers, next_item, sampler_of
from edl_hvd.worker.loop_counters import LoopCounters
from edl_hvd.worker.position import LeftLoop, LoopPlace, position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.runtime import FinishedEpoch, Runtime
from edl_hvd.worker.training.buffers import Buffers, OtherBuffers, PowerIterations, RunningStatistics, SetParameters
from edl_hvd.worker.training.exact import ExactGradientSum
from edl_hvd.worker.training.micro_batch import MicroBatch
from edl_hvd.worker.training.reduction import Reduction
from edl_hvd.worker.training.tuning import choose, is_auto, is_due, work_report

FLAT = "state.batches()"
# What random numbers at step level are seeded with, behind the place of the step; a micro-batch has its own place.
_STEP_LEVEL = -1
# What those behind the loop are seeded with.
_LOOP_ENDS = -2


@dataclass
class EpochLoop:
    """One loop over the batches of an epoch.

    Attributes:
        global_batch: Samples per step in this world, by the present policy; it and the next three change with it alone.
        base_samples: Number of samples of the batch that the learning rate was tuned for.
        needs_noise: Whether the noise of the gradient has to be measured.
        is_auto: Whether the batch is chosen while the job runs.
    """

    runtime: Runtime
    loader: Any
    call: str
    sampler: ElasticBatchSampler
    reduction: Reduction
    buffers: Buffers
    global_batch: int = 0
    base_samples: int = 1
    needs_noise: bool = False
    is_auto: bool = False
    _attempt: int = -1
    _number: int = -1

    @classmethod
    def of(cls, runtime: Runtime, loader: Any, call: str) -> EpochLoop:
        process.refuse_broken_world()
        runtime.reruns.begin_batches(getattr(loader, "dataset", None))
        sampler = sampler_of(runtime.store, loader, call)
        reduction = runtime.store.reduction
        if reduction is None:
            raise UsageError(
                f"{call} found no DistributedOptimizer in State; expected State(optimizer="
                "edl_hvd.DistributedOptimizer(…), …), because the optimizer has to know how a batch is dealt out"
            )
        check_schedulers(runtime.store)
        handlers = runtime.store.handlers
        models = {name: kept.value for name, kept in handlers.items() if isinstance(kept.value, torch.nn.Module)}
        iterations = PowerIterations(models.values(), runtime.group)
        if iterations and call == FLAT:
            # With an idle worker there are collectives behind the optimizer's step. A world that breaks there goes
            # through the step again, and these would be made again from the weights behind it.
            runtime.store.tracker.stepped.never_clean()
        buffers = Buffers(
            _exact_statistics(runtime, sampler),
            iterations,
            OtherBuffers(models, runtime.group, runtime.warn_once),
            # In the flat form, optimizers step in the body.
            *([] if call == FLAT else [SetParameters(reduction.names, runtime.group, runtime.warn_once)]),
        )
        check_models(runtime.store, reduction)
        sampler.set_epoch(runtime.store.epoch)
        return cls(runtime, loader, call, sampler, reduction, buffers)

    def is_over(self) -> bool:
        """Nothing is left of the epoch, and what comes after it has begun before the script was run again.

        Raises:
            UsageError: The script has gone through this epoch already.
        """
        runtime = self.runtime
        store = runtime.store
        # By an earlier call of the elastic function, or by this one, whose world has stayed since.
        last = runtime.finished_epoch
        is_same_call = last.coordinator is runtime.coordinator
        if last.epoch == store.epoch and (last.attempt == runtime.attempt or not is_same_call):
            raise UsageError(
                f"{self.call} was called again in epoch {runtime.store.epoch}, whose samples are all consumed; write "
                "`for epoch in state.epochs(n):` around the loop, which counts the epochs"
            )
        is_left = any(True for _ in self.sampler.steps())
        return runtime.counting.is_evaluated(store.epoch, store.step) and not is_left

    @property
    def is_present(self) -> bool:
        """Whether its world is there, and no other loop has begun: Python may close a loop that was left much later."""
        return self.runtime.attempt == self._attempt and position.loop_number == self._number

    def begin(self) -> None:
        """The loop begins."""
        runtime = self.runtime
        position.loop_number += 1
        self._attempt, self._number = runtime.attempt, position.loop_number
        runtime.counting.begin_loop(f"batches/{runtime.store.epoch}")
        trained = set(self.reduction.names)
        models = [m for m in runtime.store.of_kind(torch.nn.Module) if not trained.isdisjoint(m.parameters())]
        # Others, such as a teacher, may be in evaluation mode all the time.
        progress.is_validating = lambda: not all(model.training for model in models)
        self.reduction.forget()
        self._tell_of_hooks()
        self.reduction.parameters.refresh()
        for scaler in runtime.store.of_kind(torch.amp.GradScaler):
            if scaler.is_enabled() and scaler._scale is None:
                # Else it exists on the workers alone that have computed a loss.
                parameter = next(iter(self.reduction.names))
                scaler.scale(torch.zeros(1, device=parameter.device))

    def _tell_of_hooks(self) -> None:
        policy, size = self.sampler.policy, self.runtime.group.size
        if size == 1 and (policy.micro_batch is None or policy.global_batch(1) <= policy.micro_batch):
            return
        hooked = self.reduction.parameters.hooked_by_script()
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
            self.global_batch, self.base_samples = dealt.global_batch(self.runtime.group.size), dealt.base_samples
            self.needs_noise, self.is_auto = dealt.needs_noise, is_auto(dealt)
            with self.sampler.dealing():
                items = iter(self.loader)
            self.runtime.step_timer.pause()
            for step in self.sampler.steps():
                yield step, items
                if self.sampler.policy is not dealt:
                    break  # what the loader has prefetched is divided as before

    def deal(self, step: GlobalStep) -> None:
        """Note how the step is dealt out. Rank 0 warns where every step leaves some worker without a micro-batch."""
        unit, group = self.sampler.policy.micro_batch, self.runtime.group
        size = group.size
        if unit is None:
            position.deal(1, min(step.samples, size), size)
        else:
            position.deal(-(-self.global_batch // unit), -(-step.samples // unit), size)
        if unit is not None and position.has_idle and position.per_step < size and group.rank == 0:
            self.runtime.warn_once(
                "idle",
                f"{size} workers share {position.per_step} micro-batches per step, so {size - position.per_step} of "
                "them compute nothing; give ElasticBatchSampler(…) a smaller micro_batch, or a larger global batch",
            )

    def begin_step(self, step: GlobalStep, announces: bool = False) -> None:
        """A global batch begins."""
        self.runtime.has_begun_step = True
        self.reduction.begin_step(announces)
        self.reduction.learning_rate_factor = self.runtime.schedules.learning_rate_factor
        if self.needs_noise:
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
        with self.sampler.dealing():  # a loader of another make may begin to iterate only now
            item = next_item(items)
        progress.enter("compute")
        return item

    def begin_micro_batch(self, part: MicroBatch, step: GlobalStep, loop: int) -> None:
        """The script is about to compute a micro-batch."""
        progress.batches += 1
        self.runtime.buffers.passes += 1
        seed_everything(self.sampler.seed, self.sampler.epoch, part.offset, *([loop] if loop else []))
        if part.last:
            self.reduction.vote = self.runtime.vote_after(step.samples)
        self.reduction.begin(part)
        self.runtime.has_computed = True

    def begin_empty(self, step: GlobalStep) -> None:
        """This worker has nothing to compute in the step."""
        unit = self.sampler.policy.micro_batch or step.samples
        self.reduction.vote = self.runtime.vote_after(step.samples)
        self.reduction.begin(MicroBatch(0, step.samples, first=True, last=True, unit=unit))

    def counters(self, way: str, needs_two: bool = False) -> LoopCounters | None:
        """What looks at the script's counters of steps, where the epoch goes on; ``None`` where it begins.

        Args:
            way: How the script can count instead.
            needs_two: See ``LoopCounters``.
        """
        if not self.runtime.reruns.is_continued:
            return None
        epoch = self.runtime.store.epoch

        def warn(name: str, value: int) -> None:
            self.runtime.warn_once(
                "continued counter",
                f"{name} is {value} again in the middle of epoch {epoch}, which is continued after a change of the "
                "world or from a checkpoint, so what is computed from it differs from a job without interruption; "
                f"count with {way}, the number of steps of the whole run",
            )

        return LoopCounters(warn, needs_two)

    def right_counts(self, step: GlobalStep) -> set[int]:
        """What a counter may be in a step that has not begun anew: of the run or of the epoch, from 0 or from 1."""
        number, in_epoch = self.runtime.store.step, step.offset // self.global_batch
        return {number, number + 1, in_epoch, in_epoch + 1}

    def seed_step(self, step: GlobalStep, loop: int) -> None:
        """What the script draws at step level is the same on every worker."""
        seed_everything(self.sampler.seed, self.sampler.epoch, step.offset, _STEP_LEVEL, loop)

    def seed_end(self) -> None:
        """What the script draws behind the loop is the same on every worker, also where nothing is left of the loop."""
        seed_everything(self.sampler.seed, self.sampler.epoch, _LOOP_ENDS)

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
            self.begin_empty(step)
        elif not reduction.rounds:
            reduction.complete(skipped=True)
            ran = False
        if has_idle:
            others_leave = reduction.join_with_zeros(leaves)
        if has_idle or reduction.skipped:
            self.runtime.take_over(ran)
        return others_leave

    def count(self, step: GlobalStep) -> None:
        """The world has stepped."""
        runtime, store = self.runtime, self.runtime.store
        noise = self.reduction.noise
        scale = step.samples / self.base_samples
        factor = self.reduction.learning_rate_factor
        store.learning.count(factor, None if noise is None else noise.observation, scale)
        self.sampler.advance(step)
        progress.steps += 1
        runtime.steps_here += 1
        store.step += 1
        store.samples += step.samples
        runtime.schedules.move()

    def commit(self) -> None:
        """Between two steps."""
        runtime = self.runtime
        if runtime.store.step % runtime.commit_every == 0:
            before = progress.enter("commit")
            runtime.commit_step(self.reduction.answer)
            # After the commit: a world that broke before it would go through a step that is made already, and what the
            # script logs of it would be computed with the weights behind it.
            runtime.check_alike_after_step()
            progress.enter(before)
        if self.is_auto:
            _choose_batch(runtime, self.sampler)

    def leave(self, how: LeftLoop = LeftLoop.NOT) -> None:
        """The script has left the loop early.

        Args:
            how: How it has left it. Where it has left a loop over a step early before, that stays noted instead.
        """
        progress.enter("script")
        self.runtime.reruns.end_batches()
        self.runtime.counting.leave_loop()
        how = position.left if position.left is LeftLoop.EARLY else how
        position.leave()
        position.left = how

    def tell_of_leaving(self) -> None:
        """Note that the script leaves the loop of ``batches``, by a count of its own perhaps."""
        if position.per_step > 1 and not position.knows_step:
            self.runtime.left_warning = (
                "the loop of state.batches() was left before the end of the epoch, and its body runs once per "
                f"micro-batch, {position.per_step} times per optimizer step over all workers, so where it ends depends "
                "on how many workers there are; decide by state.step, or write the loop with `for step in "
                "state.steps(loader):`"
            )

    def end(self) -> None:
        """The loop is through, on every rank."""
        runtime = self.runtime
        runtime.reruns.end_batches()
        position.leave()
        self.reduction.forget()
        progress.enter("commit")
        answer = runtime.check_alike()
        runtime.buffers.sync()
        runtime.counting.end_training_loop()
        runtime.finished_epoch = FinishedEpoch(runtime.coordinator, runtime.attempt, runtime.store.epoch)
        runtime.commit_whole(answer)
        self.seed_end()
        progress.enter("script")


def batches(runtime: Runtime, loader: Any) -> Iterator[Any]:
    """See :meth:`edl_hvd.State.batches`."""
    loop = EpochLoop.of(runtime, loader, FLAT)
    if loop.is_over():
        loop.seed_end()
        return
    loop.begin()
    watch = BodyWatch(runtime)
    counters = loop.counters("state.step", needs_two=True)
    trains = None
    for global_step, items in loop.global_steps():
        loop.deal(global_step)
        has_idle = position.has_idle
        loop.begin_step(global_step, announces=has_idle)
        loop.buffers.begin_step()
        for part in loop.parts(global_step):
            item = loop.next_item(items)
            position.enter_batch(part.last)
            loop.begin_micro_batch(part, global_step, 0)
            watch.begin()
            try:
                yield item
            except GeneratorExit as left:
                if loop.is_present:
                    _leave_body(loop, part, global_step, is_meant=left.__context__ is None)
                raise
            process.refuse_broken_world()
            watch.end(sys._getframe(1), part.first)
            if counters is not None and position.per_step == 1:  # else it counts something else, which BodyWatch says
                counters.look(loop.right_counts(global_step))
            position.place = LoopPlace.OUTSIDE
            loop.buffers.end_pass()
        others_leave = loop.join_others(global_step, has_idle)
        trains = trains or loop.reduction.step_has_gradient
        loop.buffers.end_step()
        loop.count(global_step)
        if others_leave:
            loop.leave()
            return
        loop.commit()
    if trains is False:
        runtime.warn_once(
            "untrained",
            "state.batches() has come to the end of the epoch, and no backward() was called in its body, so nothing "
            "was learned from these samples; train in the body itself (list(…) goes through all batches before)",
        )
    loop.end()


def _leave_body(loop: EpochLoop, part: MicroBatch, global_step: GlobalStep, is_meant: bool) -> None:
    """The script has left the loop of ``batches`` in its body.

    Args:
        loop: Loop that was left.
        part: Micro-batch of the body.
        global_step: Step of the micro-batch.
        is_meant: Whether the script has left it by itself, and not by an error, which the other ranks do not share.
    """
    reduction, runtime = loop.reduction, loop.runtime
    loop.buffers.end_pass()
    if part.last and reduction.rounds:
        try:
            if is_meant:
                loop.join_others(global_step, position.has_idle, leaves=True)
            loop.buffers.end_step()
            loop.count(global_step)
        except Exception as error:  # a loop that is left cannot raise it
            runtime.failure = error
    how = LeftLoop.NOT
    if is_meant and part.first and not reduction.has_computed:
        how = LeftLoop.UNUSED
    elif is_meant and not part.last:
        how = LeftLoop.INSIDE
    if is_meant and how is not LeftLoop.INSIDE:
        loop.tell_of_leaving()
    loop.leave(how)


def _exact_statistics(runtime: Runtime, sampler: ElasticBatchSampler) -> RunningStatistics:
    """The running statistics of the models, where the optimizers are exact; of nothing elsewhere."""
    store, optimizers = runtime.store, runtime.optimizers
    exact = [optimizer for optimizer in optimizers if optimizer.stepping.exact]
    if not exact:
        return RunningStatistics((), runtime.group)
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
    assert store.reduction is not None
    assert isinstance(store.reduction.sum, ExactGradientSum)
    store.reduction.sum.passes_infinity = any(s.is_enabled() for s in store.of_kind(torch.amp.GradScaler))
    return RunningStatistics(store.of_kind(torch.nn.Module), runtime.group)


def _choose_batch(runtime: Runtime, sampler: ElasticBatchSampler) -> None:
    """With ``WorkerBatch("auto")``, now and then: see ``training/tuning.py``. The change is part of the next commit."""
    store, policy = runtime.store, sampler.policy
    assert is_auto(policy)
    runtime.step_timer.step()
    group = runtime.group
    committed = store.step % runtime.commit_every == 0
    if committed and is_due(store.learning, store.step):
        chosen = choose(policy, store.learning, store.step, runtime.step_timer, runtime.announce, group)
        if chosen is not None:
            sampler.policy = chosen
            store.ramp = store.ramp.follow(chosen, group.size, store.samples)
        progress.work = work_report(sampler.policy, store.learning, group)
