"""The decorator that makes a training function elastic."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, overload

from edl_hvd.horovod_names import explain_elastic
from edl_hvd.settings import Settings
from edl_hvd.worker.loop import ElasticLoop
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
    keep_newest: int | None = None,
    keep_every: str | None = None,
    keep_best: str | None = None,
    checkpoint_memory_mb: int | None = None,
    checkpoint_cpu_fraction: float | None = None,
    on_checkpoint_failure: str | None = None,
    take_over: bool | None = None,
    commit_every: int | None = None,
    events: str | os.PathLike[str] | None = None,
    keep: int | None = None,
    checkpoint_share: float | None = None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]: ...


def elastic(
    function: Callable[..., Any] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: str | float | None = None,
    keep_newest: int | None = None,
    keep_every: str | None = None,
    keep_best: str | None = None,
    checkpoint_memory_mb: int | None = None,
    checkpoint_cpu_fraction: float | None = None,
    on_checkpoint_failure: str | None = None,
    take_over: bool | None = None,
    commit_every: int | None = None,
    events: str | os.PathLike[str] | None = None,
    keep: int | None = None,
    checkpoint_share: float | None = None,
) -> Callable[..., Any]:
    """Make a training function ``train(state, …)`` survive changes of the world. Use it bare or with arguments.

    ::

        @edl_hvd.elastic(checkpoint="s3://bucket/run", checkpoint_every="10min")
        def train(state, epochs):
            for epoch in state.epochs(epochs):
                ...

        train(state, epochs=90)

    The decorated function is collective: every rank calls it, with a :class:`~edl_hvd.State` as its first argument. It
    joins a world, puts the newest state in place and runs the function. When the world has changed, it runs the
    function again from its top on every worker; ``state.epochs``, ``state.steps`` and ``state.batches`` then go on
    where the last commit was. Its local variables begin anew, so what its loop changes belongs into the state; a
    warning names those that are lost. It blocks until the function has returned on every rank and the last checkpoint
    is written, and returns what the function returned on this rank.

    Decorating is not collective and reads the environment: each argument that is left out comes from its variable (see
    :mod:`edl_hvd.settings`), or else from its default.

    A worker that has to leave ends with ``SystemExit`` out of the decorated call, after it has saved what no other
    worker holds. The code is 0 when the launcher has removed this worker, 75 ("run me again") when its host goes or
    the job is drained, and 143 after SIGTERM without a launcher.

    Args:
        function: Function to decorate, when it is used bare. Its first parameter is the state.
        checkpoint: Folder or URL for checkpoints; at start the newest valid one is restored. Without it there are none.
        checkpoint_every: Interval between checkpoints, greater than 0: a number of seconds, or a string such as
            "10min", "500 steps", "100000 samples" or "1 epoch". "auto", the default, is the interval that is expected
            to lose the least time (Daly 2006; see :mod:`edl_hvd.checkpoint.writing.schedule`).
        keep_newest: Number of newest checkpoints to keep, at least 1.
        keep_every: Interval such as "10000 steps", "1000000 samples" or "5 epochs". Of the checkpoints from one
            multiple of it up to, not including, the next one, the first is kept for good.
        keep_best: Name of a metric given to ``state.report``, with the direction that is best, such as "loss:min" or
            "accuracy:max". The checkpoint with the best value is kept.
        checkpoint_memory_mb: Megabytes of memory that a transfer of a checkpoint may take beside the data itself. Less
            memory means fewer connections to S3.
        checkpoint_cpu_fraction: Fraction of this host's processors that writing may take beside the training, in
            (0, 1]; 1 is no limit. A write that takes longer than a tenth of the time between two checkpoints, or that a
            worker waits for, is not limited.
        on_checkpoint_failure: "warn" goes on when a checkpoint cannot be written, "stop" ends the job with an error.
        take_over: Whether to take ``checkpoint`` over from another job that is still running, which ends that job.
        commit_every: Optimizer steps between commits in ``state.steps`` and ``state.batches``, at least 1.
        events: Path of a file to append events to, one JSON object per line.
        keep: Former name of ``keep_newest``, accepted in this version only.
        checkpoint_share: Former name of ``checkpoint_cpu_fraction``, accepted in this version only.

    Returns:
        The function made elastic, with the same signature; or, when called with arguments, the decorator.

    Raises:
        SettingsError: An argument or variable is invalid; raised when the function is decorated.
        UsageError: Raised by the decorated call: :func:`~edl_hvd.init` was not called, the script misuses a loop, or an
            elastic function has returned before under a launcher whose worlds change.
        RendezvousError: Raised by the decorated call: no world could be formed in the time allowed.
        ProgressLostError: Raised by the decorated call: no worker holds the state any more, and no checkpoint has it.
        PlatformError: Raised by the decorated call: a worker of a world that is not elastic is gone, or several worlds
            in a row have broken before their first commit.
        StorageError: Raised by the decorated call: checkpoints cannot be read at the start, or written while
            ``on_checkpoint_failure`` is "stop".
        OwnedError: Raised by the decorated call: another job that is still running writes checkpoints there.
    """
    settings = Settings.from_environment(
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        checkpoint_every=checkpoint_every,
        keep_newest=keep_newest,
        keep_every=keep_every,
        keep_best=keep_best,
        checkpoint_memory_mb=checkpoint_memory_mb,
        checkpoint_cpu_fraction=checkpoint_cpu_fraction,
        on_checkpoint_failure=on_checkpoint_failure,
        take_over=take_over,
        commit_every=commit_every,
        events=None if events is None else os.fspath(events),
        keep=keep,
        checkpoint_share=checkpoint_share,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(state: State, *args: Any, **kwargs: Any) -> Any:
            loop = ElasticLoop(state, settings)
            try:
                return loop.run(lambda: function(state, *args, **kwargs))
            finally:
                loop.close()

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
