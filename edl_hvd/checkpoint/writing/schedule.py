"""When a checkpoint is due: after an interval that the user gave, or after the one that loses the least time."""

from __future__ import annotations

import math

from edl_hvd.clock import Clock
from edl_hvd.values import Interval

_SHORTEST_S, _LONGEST_S = 10.0, 3600.0
# Below, listings and deletions cost more than the copy that is measured; above, a whole lost hour surprises people.
_DAY_S = 86400.0
# Until losses have been seen, one a day is expected: jobs on spot hosts see more, on others fewer.
_FORGET = 0.9
# The usual time between commits is that of the last ten or so.
_LONGEST_GAP = 3.0
# Longer ones hold something else than a step, such as a validation.


def least_loss_interval_s(cost_s: float, between_failures_s: float) -> float:
    """The interval between checkpoints with which the least time is expected to be lost.

    Of the time between two failures, checkpoints cost ``cost_s`` each, and a failure the work since the last one. The
    higher-order estimate of the optimum by Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps" (equation 37); its first term is Young's of 1974.

    >>> round(least_loss_interval_s(1.0, 86400.0))
    415

    Args:
        cost_s: Time by which one checkpoint prolongs training, in seconds.
        between_failures_s: Mean time between failures, in seconds.
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = cost_s / (2 * between_failures_s)
    return math.sqrt(2 * cost_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def mean_time_between_losses_s(watched_s: float, losses: int) -> float:
    """What "auto" expects: by what was seen, and one loss a day where nothing was.

    >>> round(mean_time_between_losses_s(watched_s=86400.0, losses=3) / 3600)
    12

    Args:
        watched_s: For how long the job has been watched, in seconds.
        losses: How often all holders of its state were lost meanwhile.
    """
    return (watched_s + _DAY_S) / (losses + 1)


def auto_interval_s(cost_s: float, between_losses_s: float) -> float:
    """What "auto" stands for: the interval that loses least, between ten seconds and an hour.

    >>> [round(auto_interval_s(cost_s, 86400.0)) for cost_s in (0.0, 0.18, 100.0)]
    [10, 176, 3600]

    Args:
        cost_s: Time by which one checkpoint prolongs training, in seconds.
        between_losses_s: Mean time between losses of all holders of the state, in seconds.
    """
    return min(max(least_loss_interval_s(cost_s, between_losses_s), _SHORTEST_S), _LONGEST_S)


class CheckpointSchedule:
    """When one worker's checkpoints are due; that of rank 0 decides.

    The interval "auto" follows from what is measured: how long training stands still for a checkpoint, by how much its
    steps take longer while one is written, and how often the job has lost all holders of its state at once. A world
    that breaks and has survivors goes on from their memory, and needs no checkpoint.

    Args:
        every: Interval between checkpoints.
        clock: Clock that measures it.
    """

    def __init__(self, every: Interval, clock: Clock) -> None:
        self._every = every
        self._clock = clock
        self._begun_s = self._commit_s = clock.monotonic_s()
        self._marks = {"seconds": self._begun_s, "steps": 0.0, "samples": 0.0, "epochs": 0.0}
        self._losses, self._watched_before_s = 0, 0.0
        self._usual_s: float | None = None  # between two commits
        self._stall_s = self._slowdown_s = 0.0  # of the last checkpoint

    def mark(self, step: int, samples: int, epoch_position: float) -> None:
        """Count the interval from here."""
        self._marks = self._present(step, samples, epoch_position)

    def is_due(self, step: int, samples: int, epoch_position: float) -> bool:
        """Whether the interval will have passed at this point of the run."""
        present = self._present(step, samples, epoch_position)
        unit, count = ("seconds", self.interval_s) if self._every.is_auto else (self._every.unit, self._every.count)
        return present[unit] - self._marks[unit] >= count

    @property
    def interval_s(self) -> float:
        """What "auto" stands for at the moment, in seconds."""
        return auto_interval_s(self.cost_s, self.between_losses_s)

    @property
    def cost_s(self) -> float:
        """Time by which the last checkpoint has prolonged training, in seconds."""
        return self._stall_s + max(0.0, self._slowdown_s)

    @property
    def between_losses_s(self) -> float:
        """Mean time between losses of all holders, in seconds, by what is known and the expectation of one a day."""
        return mean_time_between_losses_s(self.watched_s, self._losses)

    @property
    def watched_s(self) -> float:
        """For how long the job has been watched, in seconds: by this worker, and before it began."""
        return self._watched_before_s + self._clock.monotonic_s() - self._begun_s

    @property
    def losses(self) -> int:
        """How often the job has lost all holders of its state, as far as is known."""
        return self._losses

    def learn(self, losses: int, watched_s: float) -> None:
        """Take over what another worker, or the storage, knows of the job, if it is more than is known here.

        Args:
            losses: How often the job has lost all holders of its state.
            watched_s: For how long it has been watched, in seconds.
        """
        self._losses = max(self._losses, losses)
        self._watched_before_s += max(0.0, watched_s - self.watched_s)

    def note_stall(self, seconds: float) -> None:
        """Note that a checkpoint has begun, for which training stood still for ``seconds``."""
        self._stall_s, self._slowdown_s = seconds, 0.0
        self._commit_s = self._clock.monotonic_s()

    def note_commit(self, writing: bool) -> None:
        """Note a commit; ``writing`` says whether a checkpoint was being written since the one before."""
        now_s = self._clock.monotonic_s()
        gap_s, self._commit_s = now_s - self._commit_s, now_s
        if self._usual_s is None:
            self._usual_s = gap_s
        elif gap_s > _LONGEST_GAP * self._usual_s:
            return
        elif writing:
            self._slowdown_s += gap_s - self._usual_s
        else:
            self._usual_s += (1 - _FORGET) * (gap_s - self._usual_s)

    def _present(self, step: int, samples: int, epoch_position: float) -> dict[str, float]:
        seconds = self._clock.monotonic_s()
        return {"seconds": seconds, "steps": step, "samples": samples, "epochs": epoch_position}
