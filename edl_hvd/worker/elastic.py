"""The decorator that makes a training function elastic."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, overload

from edl_hvd.horovod_names import explain_elastic
from edl_hvd.settings import Settings
from edl_hvd.worker.loop import Session
from edl_hvd.worker.state import State

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@overload
def elastic(function: Callable[Arguments, Result], /) -> Callable[Arguments, Result]: ...


@overload
def elastic(
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: str | float | None = None,
    keep: int | None = None,
    keep_every: str | None = None,
    keep_best: str | None = None,
    checkpoint_memory_mb: int | None = None,
    checkpoint_share: float | None = None,
    on_checkpoint_failure: str | None = None,
    take_over: bool | None = None,
    commit_every: int | None = None,
    events: str | os.PathLike[str] | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]: ...


def elastic(
    function: Callable[..., Any] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: str | float | None = None,
    keep: int | None = None,
    keep_every: str | None = None,
    keep_best: str | None = None,
    checkpoint_memory_mb: int | None = None,
    checkpoint_share: float | None = None,
    on_checkpoint_failure: str | None = None,
    take_over: bool | None = None,
    commit_every: int | None = None,
    events: str | os.PathLike[str] | None = None,
) -> Callable[..., Any]:
    """Make ``train(state, …)`` survive changes of the world. Use it bare or with arguments.

    The function is run again from its top whenever the world has changed, on every worker, with the
    freshest state in place; ``state.epochs`` and ``state.batches`` then go on where the last commit was.
    Each argument left out is taken from the environment (see :mod:`edl_hvd.settings`).

    Args:
        checkpoint: Folder or URL for checkpoints; at start the newest valid one is restored.
        checkpoint_every: Seconds, or such as "10min", "500 steps", "100000 samples", "1 epoch", or "auto", the
            interval that is expected to lose the least time (see :mod:`edl_hvd.checkpoint.schedule`).
        keep: Newest checkpoints to keep, at least 1.
        keep_every: Such as "10000 steps", "1000000 samples" or "5 epochs": of the checkpoints from one multiple of it
            up to the next, the first is kept for good.
        keep_best: A metric given to ``state.report``, and which of its values is best, such as "loss:min" or
            "accuracy:max": the checkpoint that has it is kept.
        checkpoint_share: Share of this host's processors that writing may take beside the training, above 0 and at most
            1, which is no limit. What takes longer than a tenth of the time between two checkpoints, or is waited for,
            is not held back.
        checkpoint_memory_mb: Memory in megabytes that a transfer of a checkpoint may take beside the data itself; less
            means fewer connections to S3.
        on_checkpoint_failure: "warn" goes on when a checkpoint cannot be written, "stop" ends the job with an error.
        take_over: Take ``checkpoint`` from another job that lives, and so end that job.
        commit_every: Optimizer steps between commits in ``state.batches``, at least 1.
        events: File to append events to.

    Raises:
        SettingsError: An argument or variable is invalid; raised when the function is decorated.
    """
    settings = Settings.from_environment(
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        checkpoint_every=checkpoint_every,
        keep=keep,
        keep_every=keep_every,
        keep_best=keep_best,
        checkpoint_memory_mb=checkpoint_memory_mb,
        checkpoint_share=checkpoint_share,
        on_checkpoint_failure=on_checkpoint_failure,
        take_over=take_over,
        commit_every=commit_every,
        events=None if events is None else os.fspath(events),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(state: State, *args: Any, **kwargs: Any) -> Any:
            session = Session(state, settings)
            try:
                return session.run(lambda: function(state, *args, **kwargs))
            finally:
                session.close()

        return run

    return decorate if function is None else decorate(function)


class _Decorator:
    """A function that explains the names which ``horovod.torch.elastic``, a module, has in its place."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(explain_elastic(name))


if not TYPE_CHECKING:
    elastic = _Decorator(elastic)
