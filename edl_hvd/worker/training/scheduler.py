"""Schedulers that move when the optimizer did, or by what was trained: samples, epochs, scale-invariant steps."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from edl_hvd.compat import patching
from edl_hvd.errors import SettingsError, UsageError
from edl_hvd.values import Interval, IntervalUnit
from edl_hvd.worker.position import position

_Scheduler = TypeVar("_Scheduler", bound=LRScheduler)

SCALE_INVARIANT: Final = "scale-invariant steps"
_UNITS: tuple[IntervalUnit, ...] = ("samples", "epochs", "steps")
_SCALE_INVARIANT = re.compile(r"(\S+)\s*scale-invariant steps?")
# What is a sum of fractions may be short of a whole number by its rounding.
_ROUNDING = 1e-9


# By the optimizers that they were built on, as long as both live.
_built: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[LRScheduler]] = weakref.WeakKeyDictionary()


def built_on(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """The schedulers that a script has built on an optimizer since this module was imported."""
    return list(_built.get(optimizer, ()))


def _noting(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noting_init(scheduler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(scheduler, optimizer, *args, **kwargs)
        _built.setdefault(optimizer, weakref.WeakSet()).add(scheduler)

    return noting_init


# For the whole process: else nobody would see a scheduler that is not part of the state.
patching.replace("schedulers", LRScheduler, "__init__", _noting)
patching.replace("schedulers", ReduceLROnPlateau, "__init__", _noting)


class GatedScheduler:
    """Mixed into the class of a scheduler that is given to ``State``.

    Attributes:
        edl_ready: A step's gradient has been summed since it last moved.
    """

    edl_ready: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, at most once per optimizer step; in the body of ``state.batches`` at the end of a global batch.

        After an interruption a script may come by once more without having trained in between: then it stays.

        Raises:
            UsageError: It was called in the loop over a step's micro-batches.
        """
        position.refuse_in_step(f"{type(self).__name__}.step()")
        if self.edl_ready and not position.waits:
            self.edl_ready = False
            super().step(*args, **kwargs)  # type: ignore[misc]


def gate(scheduler: LRScheduler) -> None:
    """Extend the class of a scheduler in place; its state then includes the attribute."""
    if isinstance(scheduler, (GatedScheduler, PacedScheduler)):
        return
    kind = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (GatedScheduler, kind), {})
    scheduler.edl_ready = False  # type: ignore[attr-defined]


class PacedScheduler:
    """Mixed into the class of a scheduler that :func:`schedule` is given; ``State`` moves it.

    Attributes:
        edl_every: How often. Of the class, so that what a checkpoint says does not replace it.
        edl_moves: How often it moved.
    """

    edl_every: Interval
    edl_moves: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            f"{type(self).__name__}.step() was called, but edl_hvd.schedule has State move it every "
            f"{self.edl_every.count:g} {self.edl_every.unit}; remove the call"
        )

    def edl_move(self, positions: Mapping[IntervalUnit, float]) -> None:
        """Move as often as the run has come by now.

        Args:
            positions: Where the run is, by each unit.
        """
        target = int(positions[self.edl_every.unit] / self.edl_every.count + _ROUNDING)
        while self.edl_moves < target:
            self.edl_moves += 1
            super().step()  # type: ignore[misc]


def schedule(scheduler: _Scheduler, every: str) -> _Scheduler:
    """Have ``State`` move a scheduler by what was trained, instead of by calls in the script's loop.

    With a batch per worker (``WorkerBatch``) the number of optimizer steps in an epoch depends on the world; the
    numbers of samples and epochs do not. Scale-invariant steps are those that the script would have made with its own
    batch (Johnson et al. 2020, arXiv:2007.05105, section 3). Do not call ``scheduler.step()`` then: it raises.

    After each optimizer step the scheduler has moved ``floor(p / every)`` times, where p is the position of the whole
    run in the unit of ``every``. So it moves at the step that reaches a multiple, not after it: with "1000 samples" and
    steps of 600 samples it moves at 1,200, 2,400 and 3,000 samples, the last one exactly at its boundary. A step that
    crosses two multiples moves it twice.

    Every rank calls it once, before ``State(…)``. Not collective; does not block.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    >>> halving = schedule(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), every="1000 samples")
    >>> rates = {}
    >>> for samples in (0, 600, 1200, 1800, 2400, 3000):  # what ``State`` does after each optimizer step
    ...     optimizer.step()
    ...     halving.edl_move({"samples": samples})
    ...     rates[samples] = optimizer.param_groups[0]["lr"]
    >>> rates
    {0: 0.8, 600: 0.8, 1200: 0.4, 1800: 0.4, 2400: 0.2, 3000: 0.1}

    Args:
        scheduler: Any scheduler of ``torch.optim.lr_scheduler`` whose ``step()`` takes no argument. Give it to
            ``State``, which moves it.
        every: Interval greater than 0, such as "1000 samples", "1 epoch", "0.1 epochs", "100 steps" or
            "100 scale-invariant steps".

    Returns:
        The same object, its class extended.

    Raises:
        UsageError: ``every`` is not understood, or the scheduler cannot be moved like that.
    """
    interval = _interval(every)
    if isinstance(scheduler, (GatedScheduler, PacedScheduler)):
        raise UsageError(
            f"this {type(scheduler).__name__} is scheduled already, or State has it; call edl_hvd.schedule once, "
            "before State(…)"
        )
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"edl_hvd.schedule was given {type(scheduler).__name__}, which it cannot move; expected a scheduler of "
            "torch.optim.lr_scheduler whose step() takes no argument, so not ReduceLROnPlateau"
        )
    kind = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (PacedScheduler, kind), {"edl_every": interval})
    scheduler.edl_moves = 0  # type: ignore[attr-defined]
    return scheduler


def _interval(every: str) -> Interval:
    text = str(every).strip().lower()
    scale_invariant = _SCALE_INVARIANT.fullmatch(text)
    try:
        interval = Interval.parse(f"{scale_invariant[1]} steps" if scale_invariant else text)
    except SettingsError:
        interval = None
    if interval is None or interval.unit not in _UNITS:
        raise UsageError(
            f"edl_hvd.schedule was given every={every!r}; expected what a scheduler moves after, such as "
            "'1000 samples', '1 epoch', '100 steps' or '100 scale-invariant steps'"
        )
    return Interval(interval.count, SCALE_INVARIANT) if scale_invariant else interval
