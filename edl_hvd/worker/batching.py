"""The loop over batches: deals global batches out, counts them once the world has stepped, commits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from edl_hvd.data.randomness import seed_everything
from edl_hvd.data.sampler import ElasticBatchSampler, GlobalStep
from edl_hvd.errors import UsageError
from edl_hvd.worker.optimizer import MicroBatch, is_distributed
from edl_hvd.worker.progress import progress

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
    life = state.life
    models = _trained(state, optimizers)
    progress.is_validating = lambda: not all(model.training for model in models)
    items = iter(loader)
    for step in sampler.steps():
        optimizers[0].reduction.wishes = state.wishes(step.samples, apart=not step.share)
        optimizers[0].reduction.answer = None
        for i, (first, last) in enumerate(step.share):
            micro_batch = MicroBatch(last - first, step.samples, first=i == 0, last=i == len(step.share) - 1)
            progress.enter("input")
            item = _next(items)
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
                    if micro_batch.last and all(o.reduction.done for o in optimizers):
                        _count(state, sampler, step)
                raise
        _complete(state, optimizers, step)
        _count(state, sampler, step)
        if state.step % state.commit_every == 0:
            with progress.during("commit"):
                state.commit_step(optimizers[0].reduction.answer)
    for optimizer in optimizers:
        optimizer.reduction.forget()
    progress.enter("commit")
    state.level_buffers()
    state.commit()
    progress.enter("script")


def _sampler_of(state: State, loader: Any) -> ElasticBatchSampler:
    given = list(state.memory.of_kind(ElasticBatchSampler))
    used = getattr(loader, "batch_sampler", None)
    if len(given) != 1 or (used is not None and used is not given[0]):
        raise UsageError(
            f"state.batches() cannot tell how batches are dealt: State holds {len(given)} ElasticBatchSampler(s) and "
            f"the loader's batch_sampler is {type(used).__name__}; expected one sampler, given to both: "
            "DataLoader(dataset, batch_sampler=batches) and State(batches=batches, …)"
        )
    return given[0]


def _trained(state: State, optimizers: list[Any]) -> list[torch.nn.Module]:
    """The models that learn; others, such as a teacher, may be in evaluation mode all the time."""
    learning = {parameter for optimizer in optimizers for parameter in optimizer.reduction.names}
    return [model for model in state.memory.of_kind(torch.nn.Module) if not learning.isdisjoint(model.parameters())]


def _next(items: Iterator[Any]) -> Any:
    try:
        return next(items)
    except StopIteration:
        raise UsageError(
            "the loader ended before the epoch did; expected one item per micro-batch of its batch_sampler"
        ) from None


def _complete(state: State, optimizers: list[Any], step: GlobalStep) -> None:
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
            reduction.take_part(step.samples)
        if scaler is not None and scaler.is_enabled():
            parameter = optimizer.param_groups[0]["params"][0]
            scaler.scale(torch.zeros(1, device=parameter.device))  # makes its scale exist, on every rank alike
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def _count(state: State, sampler: ElasticBatchSampler, step: GlobalStep) -> None:
    sampler.advance(step)
    progress.steps += 1
    state.memory.step += 1
    state.memory.samples += step.samples
