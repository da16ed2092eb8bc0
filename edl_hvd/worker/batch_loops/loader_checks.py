"""Whether what a script has given fits together: loader, sampler, models, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import UsageError
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.training.reduction import Reduction
from edl_hvd.worker.training.scheduler import built_on


def check_models(store: StateStore, reduction: Reduction) -> None:
    """Check that what an optimizer moves is part of the state; else a worker that joins begins with other weights.

    Raises:
        UsageError: A model was not given, or one moves its weights by itself.
    """
    kept = {id(parameter) for model in store.of_kind(torch.nn.Module) for parameter in model.parameters()}
    kept.update(id(value) for value in store.attributes.values())
    lost = [name for parameter, name in reduction.names.items() if id(parameter) not in kept]
    models = [f"{name}." for name, handler in store.handlers.items() if isinstance(handler.value, torch.nn.Module)]
    replaced = [name for name in lost if name.startswith(tuple(models))]
    if replaced:
        raise UsageError(
            f"{replaced[0]} (and {len(replaced) - 1} more) is moved by an optimizer, and is no part of the model any "
            "more: something else was put in its place after State(…) was made, which a worker that joins would lack; "
            "give the model all of its layers before State(…), and choose among them in forward()"
        )
    if lost:
        raise UsageError(
            f"State(…) was given an optimizer, and not the model whose parameters it moves ({lost[0]!r} and "
            f"{len(lost) - 1} more), so a worker that joins would begin with other weights; add it: State(model=model, "
            "…)"
        )
    for name, handler in store.handlers.items():
        for path, module in handler.value.named_modules() if isinstance(handler.value, torch.nn.Module) else ():
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
                weight = f"{name}.{path}.weight" if path else f"{name}.weight"
                raise UsageError(
                    f"{type(module).__name__}(max_norm={module.max_norm:g}) rescales those rows of {weight} that a "
                    "worker looks up, on this worker alone, so that the workers' weights come apart; leave max_norm "
                    "out, and write behind optimizer.step(): with torch.no_grad(): "
                    f"{weight}.copy_(torch.renorm({weight}, {module.norm_type:g}, 0, {module.max_norm:g}))"
                )
            if getattr(module, "scale_grad_by_freq", False):
                raise UsageError(
                    f"state.{name}{'.' if path else ''}{path} is an {type(module).__name__} with "
                    "scale_grad_by_freq=True: it divides a row's gradient by how often the row is in the micro-batch, "
                    "and not in the global batch, so what it learns would depend on how many workers there are; leave "
                    "that option out"
                )


def check_schedulers(store: StateStore) -> None:
    """Check that the state has all schedulers; another is forgotten with a worker, and moves with every micro-batch.

    Raises:
        UsageError: One was not given.
    """
    kept = {id(scheduler) for scheduler in _schedulers(store)}
    for name, handler in store.handlers.items():
        for scheduler in built_on(handler.value) if isinstance(handler.value, torch.optim.Optimizer) else ():
            if id(scheduler) not in kept:
                raise UsageError(
                    f"a {type(scheduler).__name__} was built on the optimizer state.{name}, and State(…) was not given "
                    "it, so its position would be lost with a worker; add it: State(scheduler=scheduler, …)"
                )


def _schedulers(store: StateStore) -> Iterator[Any]:
    """Those in State, and those that they are made of, such as SequentialLR's."""
    found = list(store.of_kind(torch.optim.lr_scheduler.LRScheduler))
    seen = set()
    while found:
        scheduler = found.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            yield scheduler
            parts = [part for value in vars(scheduler).values() for part in (value if type(value) is list else [value])]
            found += [part for part in parts if isinstance(part, torch.optim.lr_scheduler.LRScheduler)]


def sampler_of(store: StateStore, loader: Any, call: str) -> ElasticBatchSampler:
    """The sampler that deals the loader's batches.

    Args:
        store: What the state keeps.
        loader: Loader that the script has given.
        call: Call of the script, for the message.

    Raises:
        UsageError: It is not part of the state, deals for a data set of another length, or has a number in place of a
            method.
    """
    given = list(store.of_kind(ElasticBatchSampler))
    used = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset) and used not in given:
        raise UsageError(
            f"{call} got a loader of {type(loader.dataset).__name__}, an IterableDataset, of which nobody can tell "
            "what it has dealt to whom, so samples would be lost or come twice; give its files to "
            "edl_hvd.ElasticShards: shards = ElasticShards(paths, counts, read=…), batches = "
            "shards.sampler(global_batch=…), and DataLoader(shards, batch_sampler=batches)"
        )
    if len(given) > 1:
        raise UsageError(
            f"{call}: State holds {len(given)} ElasticBatchSamplers, and a job deals from one, so that a commit holds "
            "one position; make folds and phases epochs of one sampler with an Order of your own, and let one data set "
            "return what belongs together (docs/recipes.md: Folds, and several data sets in one job)"
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
    replaced = {"global_batch", "micro_batch"} & vars(given[0]).keys()
    if replaced:
        raise UsageError(
            f"{call}: {min(replaced)} of the sampler was set to a number, which changes no batch; expected a new "
            "policy at the top of an epoch, on every worker: batches.policy = edl_hvd.GlobalBatch(global_batch, "
            "micro_batch)"
        )
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
