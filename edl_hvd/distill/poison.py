"""Whether an input is to blame that teachers are lost with it, or the teachers are. Pure.

A task that several teachers were lost with is **poisonous**: after ``k`` losses the window says so, and does not lose
the rest of the fleet to it. After the first loss a task is alone at its teacher, so that the next one is its own.
Teachers that come and go are lost with innocent tasks, too, so with f teachers lost with one other task alone, and n
tasks given out

    k = 3 for f = 0, else max(3, ceil(log(1e-6) / log(f / n)))

which an innocent task reaches once in a million. A task that a teacher itself declines counts, too: then k = 3, and 6
while one process alone has declined it, since the fault may be its own, and others may be about to join.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_LOSSES, _MOST_LOSSES = 3, 12
_ODDS = 1e-6
_LEAST_OF_ONE = 6
# A teacher is set aside for 10 s after three failures in a row, so it takes that long at least.


@dataclass(frozen=True)
class Failure:
    """Why a task is to be given again.

    Attributes:
        process: Process of the teacher.
        why: Reason in words.
        is_loss: Whether the teacher was lost, rather than said why.
        is_shared: Whether the teacher had other tasks, too.
        at_s: When that was.
    """

    process: str
    why: str
    is_loss: bool
    is_shared: bool
    at_s: float


def own_losses(failures: Sequence[Failure]) -> int:
    """Number of teachers that were lost with this task alone."""
    return sum(failure.is_loss and not failure.is_shared for failure in failures)


def is_poisonous(failures: Sequence[Failure], lost: int, given: int) -> bool:
    """Whether these are more failures than an innocent task has.

    Args:
        failures: Failures of the task.
        lost: Number of teachers that were lost with one other task alone.
        given: Number of times that tasks were given out, this one included.
    """
    losses = sum(failure.is_loss for failure in failures)
    declining = {failure.process for failure in failures if not failure.is_loss}
    enough = _LEAST_LOSSES if len(declining) > 1 else _LEAST_OF_ONE
    return len(failures) - losses >= enough or losses >= losses_allowed(lost, max(1, given - losses))


def losses_allowed(lost: int, given: int) -> int:
    """The number of teachers lost with one task that make it poisonous.

    Args:
        lost: Number of teachers that were lost with other tasks.
        given: Number of times that other tasks were given out, at least 1.

    >>> losses_allowed(0, 10), losses_allowed(1, 1000), losses_allowed(16, 100), losses_allowed(10, 10)
    (3, 3, 8, 12)
    """
    if not lost:
        return _LEAST_LOSSES
    rate = min(lost / given, 0.5)
    return min(_MOST_LOSSES, max(_LEAST_LOSSES, math.ceil(math.log(_ODDS) / math.log(rate))))
