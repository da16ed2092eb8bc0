"""The loop over batches: deals global batches out, counts them once the world has stepped, commits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler, GlobalStep
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import GlobalBatch
from edl_hvd.worker import process
from edl_hvd.worker.progress import progress
from edl_hvd.worker.training.exact import ExactReduction
from edl_hvd.worker.training.noise import observed
from edl_hvd.worker.training.optimizer import is_distributed
from edl_hvd.worker.training.reduction import MicroBatch
from edl_hvd.worker.training.running_statistics import RunningStatistics
from edl_hvd.worker.training.tuning import choose, is_auto, is_due

if TYPE_CHECKING:
    from edl_hvd.worker.state import State


def batches(state: State, loader: Any) -> Iterator[Any]:
    """See :meth:`edl_hvd.State.batches`."""
    sampler = _sampler_of(state, loader)
    optimizers = list(state.memory.of_kind(is_distributed))
    if not optimizers:
        raise UsageError(
            "state.batches() found no DistributedOptimizer in State; expected State(optimizer="
            "edl_hvd.DistributedOptimizer(…), …), because the optimizer has to know how a batch is dealt out"
        )
    sampler.set_epoch(state.epoch)
    if state.counting.is_evaluated(state.epoch, state.step) and not any(True for _ in sampler.steps()):
        return  # all of it, and the commit after it, was before the evaluation
    life = state.life
    state.counting.enter_pass(f"batches/{state.epoch}")
    models = _trained(state, optimizers)
    statistics = _exact_statistics(state, sampler, optimizers)
    progress.is_validating = lambda: not all(model.training for model in models)
    for step, items in _steps(state, sampler, loader):
        unit = sampler.policy.micro_batch or step.samples
        statistics.begin_step()
        optimizers[0].reduction.wishes = state.wishes(step.samples, apart=not step.share)
        optimizers[0].reduction.answer = None
        _measure_noise(state, sampler, optimizers)
        for i, (first, last) in enumerate(step.share):
            micro_batch = MicroBatch(
                last - first, step.samples, first=i == 0, last=i == len(step.share) - 1, index=first // unit, unit=unit
            )
            progress.enter("input")
            item = next_item(items)
            progress.enter("compute")
            progress.batches += 1
            seed_everything(sampler.seed, sampler.epoch, step.offset + first)
            for optimizer in optimizers:
                optimizer.reduction.begin(micro_batch)
                optimizer.reduction.learning_rate_factor = state.learning_rate_factor
            try:
                yield item
            except GeneratorExit:
                # The script left its loop early. What the world has stepped through counts; a loop that
                # ended because its world broke (a later life has begun) does not.
                if state.life == life:
                    progress.enter("script")
                    state.counting.leave_pass()
                    statistics.end_pass()
                    if micro_batch.last and all(o.reduction.done for o in optimizers):
                        statistics.end_step()
                        _count(state, sampler, optimizers, step)
                raise
            statistics.end_pass()
        _complete(state, optimizers, step, unit)
        statistics.end_step()
        _count(state, sampler, optimizers, step)
        if state.step % state.commit_every == 0:
            with progress.during("commit"):
                state.commit_step(optimizers[0].reduction.answer)
        _choose_batch(state, sampler)
    for optimizer in optimizers:
        optimizer.reduction.forget()
    progress.enter("commit")
    state.level_buffers()
    state.counting.end_training_pass()
    state.commit_whole()
    progress.enter("script")


def _exact_statistics(state: State, sampler: ElasticBatchSampler, optimizers: list[Any]) -> RunningStatistics:
    """Of the models, where the optimizers are exact; of nothing elsewhere."""
    exact = [optimizer.reduction for optimizer in optimizers if isinstance(optimizer.reduction, ExactReduction)]
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
    scalers = state.memory.of_kind(torch.amp.GradScaler)
    for reduction in exact:
        reduction.passes_infinity = any(scaler.is_enabled() for scaler in scalers)
    return RunningStatistics(state.memory.of_kind(torch.nn.Module))


def _steps(state: State, sampler: ElasticBatchSampler, loader: Any) -> Iterator[tuple[GlobalStep, Iterator[Any]]]:
    """The steps left in the epoch, with the loader's items; both begin anew where the batch has changed."""
    dealt: Any = None
    while sampler.policy is not dealt:
        dealt, items = sampler.policy, iter(loader)
        state.step_timer.pause()
        for step in sampler.steps():
            yield step, items
            if sampler.policy is not dealt:
                break  # what the loader has prefetched is divided as before


def _choose_batch(state: State, sampler: ElasticBatchSampler) -> None:
    """With ``WorkerBatch("auto")``, now and then: see ``tuning.py``. The change is part of the next commit."""
    memory = state.memory
    if not is_auto(sampler.policy):
        return
    state.step_timer.step()
    world = process.current().world
    committed = state.step % state.commit_every == 0
    if world is not None and committed and is_due(memory.learning, state.step):
        collectives = process.current().collectives
        chosen = choose(
            sampler.policy, memory.learning, state.step, state.step_timer, state.announce, collectives, world
        )
        if chosen is not None:
            sampler.policy = chosen
            factor = chosen.learning_rate_factor(world.size)
            memory.ramp = memory.ramp.toward(factor, memory.samples, chosen.warmup_samples)


def _measure_noise(state: State, sampler: ElasticBatchSampler, optimizers: list[Any]) -> None:
    """Have the noise of the coming step measured, if somebody wants to know."""
    if sampler.policy.needs_noise:
        for optimizer in optimizers:
            optimizer.reduction.measure_noise()
    meters = [optimizer.reduction.noise for optimizer in optimizers if optimizer.reduction.noise is not None]
    scaler = next(iter(state.memory.of_kind(torch.amp.GradScaler)), None)
    for meter in meters:
        meter.loss_scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0


def _sampler_of(state: State, loader: Any) -> ElasticBatchSampler:
    given = list(state.memory.of_kind(ElasticBatchSampler))
    used = getattr(loader, "batch_sampler", None)
    # A loader of another make may use the sampler in a way that cannot be seen from here.
    unknown = used is None and not isinstance(loader, torch.utils.data.DataLoader)
    if len(given) != 1 or (used is not given[0] and not unknown):
        raise UsageError(
            f"state.batches() cannot tell how batches are dealt: State holds {len(given)} ElasticBatchSampler(s) and "
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


def _trained(state: State, optimizers: list[Any]) -> list[torch.nn.Module]:
    """The models that learn; others, such as a teacher, may be in evaluation mode all the time."""
    learning = {parameter for optimizer in optimizers for parameter in optimizer.reduction.names}
    return [model for model in state.memory.of_kind(torch.nn.Module) if not learning.isdisjoint(model.parameters())]


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


def _complete(state: State, optimizers: list[Any], step: GlobalStep, unit: int) -> None:
    """Take part in the step where the script did not: nothing was dealt here, or it skipped its last batch."""
    scaler = next(iter(state.memory.of_kind(torch.amp.GradScaler)), None)
    for optimizer in optimizers:
        reduction = optimizer.reduction
        if step.share and reduction.done:
            continue
        reduction.learning_rate_factor = state.learning_rate_factor
        if step.share:
            reduction.complete()
        else:
            reduction.take_part(MicroBatch(0, step.samples, first=True, last=True, unit=unit))
        if scaler is not None and scaler.is_enabled():
            parameter = optimizer.param_groups[0]["params"][0]
            scaler.scale(torch.zeros(1, device=parameter.device))  # makes its scale exist, on every rank alike
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def _count(state: State, sampler: ElasticBatchSampler, optimizers: list[Any], step: GlobalStep) -> None:
    scale = step.samples / sampler.policy.base_samples
    state.memory.learning.count(state.learning_rate_factor, observed(optimizers), scale)
    sampler.advance(step)
    progress.steps += 1
    state.memory.step += 1
    state.memory.samples += step.samples
    state.move_schedulers()
