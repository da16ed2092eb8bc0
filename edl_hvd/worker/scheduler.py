"""Schedulers that move only when the optimizer did."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class GatedScheduler:
    """Mixed into the class of a scheduler that is given to ``State``.

    Attributes:
        edl_moves: How often it moved; the same on every rank at a commit.
        edl_ready: The optimizer has stepped since it last moved.
    """

    edl_moves: int
    edl_ready: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move, if an optimizer step really happened since the last move; else do nothing."""
        if self.edl_ready:
            self.edl_ready = False
            self.edl_moves += 1
            super().step(*args, **kwargs)  # type: ignore[misc]


def gate(scheduler: LRScheduler) -> None:
    """Extend the class of a scheduler in place; its state then includes the two attributes."""
    if isinstance(scheduler, GatedScheduler):
        return
    kind = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (GatedScheduler, kind), {})
    scheduler.edl_moves = 0  # type: ignore[attr-defined]
    scheduler.edl_ready = False  # type: ignore[attr-defined]


def catch_up(scheduler: Any, moves: int) -> None:
    """Move a scheduler that its user did not step here, because this worker was dealt no batch."""
    while scheduler.edl_moves < moves:
        scheduler.edl_ready = True
        scheduler.step()
