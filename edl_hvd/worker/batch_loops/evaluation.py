"""The loop over a validation set: each sample on one rank, going on where the last commit was.

Between commits no rank waits for another. All ranks go through the same rounds, one batch each, and commit after the
same ones: rank 0 measures how long rounds take, and with each commit tells the others after how many the next one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.data.randomness import seed_everything
from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.batch_loops.loader_checks import next_item
from edl_hvd.worker.position import LoopPlace, position
from edl_hvd.worker.progress import progress
from edl_hvd.worker.runtime import Runtime

_COMMIT_S = 1.0
# Between commits. This much is done twice after a death, and a change of the world waits for this long; a commit
# takes milliseconds.


def evaluate(runtime: Runtime, loader: Any, clock: Clock = SYSTEM_CLOCK) -> Iterator[Any]:
    """See :meth:`edl_hvd.State.evaluate`."""
    process.refuse_broken_world()
    name, sampler = _sampler_of(runtime, loader)
    if runtime.counting.is_in_loop:
        raise UsageError(
            "state.evaluate() was called inside a loop of state.steps(), state.batches() or state.evaluate(), whose "
            "position it would share; call it after that loop, in `for epoch in state.epochs(n):` (epochs get shorter "
            "with ElasticBatchSampler(…, limit_batches=…)), or, at step level of state.steps(), have every worker go "
            "through a small validation set with its own DataLoader"
        )
    number = sampler.begin(runtime.store.epoch, runtime.store.step)
    if number is None:
        return
    runtime.counting.begin_loop(f"{name}/{runtime.store.epoch}/{runtime.store.step}/{number}")
    attempt, was_validating = runtime.attempt, progress.is_validating
    progress.is_validating = lambda: True
    position.place = LoopPlace.EVALUATION
    runtime.reruns.begin_evaluation(is_begun=sampler.offset > 0)
    try:
        yield from _rounds(runtime, sampler, loader, _Pace(clock))
        sampler.finish()
        with progress.during("commit"):
            runtime.counting.end_loop()
            runtime.commit_light()
        runtime.reruns.end_evaluation()
    except GeneratorExit:
        if runtime.attempt == attempt:
            runtime.reruns.end_evaluation()
        raise
    finally:
        if runtime.attempt == attempt:  # else the loop was left in an earlier run of the function
            if position.place is LoopPlace.EVALUATION:
                position.place = LoopPlace.OUTSIDE
            runtime.counting.leave_loop()
            progress.is_validating = was_validating
            progress.enter("script")


def _rounds(runtime: Runtime, sampler: EvaluationSampler, loader: Any, pace: _Pace) -> Iterator[Any]:
    items = iter(loader)
    for round_ in sampler.rounds():
        for first, _ in round_.share:
            progress.enter("input")
            item = next_item(items, "evaluation")
            progress.enter("compute")
            progress.batches += 1
            seed_everything(0, runtime.store.epoch, first)
            yield item
            process.refuse_broken_world()
        sampler.offset = round_.end
        if pace.is_due() and round_.end < sampler.length:
            with progress.during("commit"):
                pace.next(runtime.counting.sync(pace.proposal() if sampler.rank == 0 else 0))
                runtime.commit_light()


class _Pace:
    """When to commit; the same on every rank."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds, self._left = 1, 1
        self._since_s = clock.monotonic_s()

    def is_due(self) -> bool:
        """A round has passed."""
        self._left -= 1
        return self._left == 0

    def proposal(self) -> int:
        """After how many rounds to commit next, as far as this rank can tell; at most twice as many as last time."""
        seconds = max(self._clock.monotonic_s() - self._since_s, 1e-6)
        return max(1, min(2 * self._rounds, round(self._rounds * _COMMIT_S / seconds)))

    def next(self, rounds: int) -> None:
        """Note how many rounds all ranks have agreed on."""
        self._rounds = self._left = rounds
        self._since_s = self._clock.monotonic_s()


def _sampler_of(runtime: Runtime, loader: Any) -> tuple[str, EvaluationSampler]:
    used = getattr(loader, "batch_sampler", None)
    if not isinstance(used, EvaluationSampler):
        raise UsageError(
            f"state.evaluate() got a loader whose batch_sampler is {type(used).__name__}; expected DataLoader(dataset, "
            "batch_sampler=EvaluationSampler(len(dataset), batch_size=…)), and that sampler given to State"
        )
    names = [name for name, handler in runtime.store.handlers.items() if handler.value is used]
    if not names:
        raise UsageError(
            "state.evaluate() got a loader whose EvaluationSampler is not part of the state, so its position would be "
            "lost with a worker; expected State(…, val_batches=sampler) with the sampler of the loader"
        )
    length = len(loader.dataset) if hasattr(getattr(loader, "dataset", None), "__len__") else used.length
    if length != used.length:
        raise UsageError(
            f"state.evaluate() got a data set of {length} samples and an EvaluationSampler of {used.length}; expected "
            "EvaluationSampler(len(dataset), …)"
        )
    return names[0], used
