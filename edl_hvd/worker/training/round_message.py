"""What the ranks tell each other in a round, beside the gradients: one small vector, which is summed over the ranks.

In it are a fixed part, the recorded values (``recorded.py``), and one flag for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Floats count exactly up to 2^24 only; weights are sent in two parts.
_HALF_WEIGHT = 4096
# A rank that has a gradient of a parameter counts 1, and this more where the script had left one in ``.grad``.
_HAD_GRADIENT = 1024.0


class Vote(NamedTuple):
    """What a rank wants at the coming commit, as 0 or 1; summed over the ranks it says how many want it.

    Attributes:
        resize: A change of the world is pending.
        checkpoint: A checkpoint is due.
        writing: A checkpoint is being written.
        stop: The job is to end.
        metrics: Metrics have counted something that the other ranks do not know of.
        failed: This rank's share of the checkpoint could not be written.
        teachers: This rank has met a model of teachers that the others have not heard of.
    """

    resize: float = 0.0
    checkpoint: float = 0.0
    writing: float = 0.0
    stop: float = 0.0
    metrics: float = 0.0
    failed: float = 0.0
    teachers: float = 0.0


class _Fixed(NamedTuple):
    """The part behind the vote that every message has; names as in :class:`RoundMessage`."""

    skipped: float
    late: float
    unnamed: float
    weight_high: float
    weight_low: float


_VOTE_WIDTH = len(Vote._fields)
_WIDTH = _VOTE_WIDTH + len(_Fixed._fields)


def gradient_flag(has_gradient: bool, was_set: bool) -> float:
    """A rank's flag for one parameter; flags are summed over the ranks.

    >>> [gradient_flag(False, False), gradient_flag(True, False), gradient_flag(True, True)]
    [0.0, 1.0, 1025.0]

    Args:
        has_gradient: Whether the rank has a gradient of the parameter in this round.
        was_set: Whether the script had left a gradient in ``.grad`` before.
    """
    return has_gradient * (1.0 + _HAD_GRADIENT * was_set)


def is_computed(flag: float) -> bool:
    """Whether any rank has a gradient of the parameter, by the sum of its flags."""
    return flag > 0


def is_computed_anew(flag: float) -> bool:
    """Whether some rank has one, and the script of none of these had left another in ``.grad``."""
    return 0 < flag < _HAD_GRADIENT


@dataclass(frozen=True)
class RoundMessage:
    """The message of one rank, or the sum of those of all ranks.

    Attributes:
        vote: Vote for the coming commit.
        skipped: Number of ranks whose script has left the body of ``state.batches`` without ``backward()``.
        late: Number of ranks with gradients that came after their sums had started.
        unnamed: Number of ranks that have recorded values by names that the other ranks do not know.
        weight: Weight of all micro-batches.
        recorded: Recorded values, by the names that all ranks know.
        gradients: Flags, one for each parameter; see :func:`gradient_flag`.
    """

    vote: Vote
    skipped: float
    late: float
    unnamed: float
    weight: float
    recorded: Sequence[float]
    gradients: Sequence[float]

    def to_tensor(self) -> torch.Tensor:
        """The message of this rank as it travels: float32, one dimension."""
        fixed = _Fixed(self.skipped, self.late, self.unnamed, *divmod(self.weight, _HALF_WEIGHT))
        return torch.tensor([*self.vote, *fixed, *self.recorded, *self.gradients], dtype=torch.float32)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, parameters: int) -> RoundMessage:
        """Read the sum of the ranks' messages.

        >>> own = RoundMessage(Vote(stop=1.0), 0.0, 1.0, 0.0, 5000.0, [0.5], [1.0, 0.0])
        >>> total = RoundMessage.from_tensor(3 * own.to_tensor(), parameters=2)
        >>> total.vote.stop, total.late, total.weight, total.recorded, total.gradients
        (3.0, 3.0, 15000.0, [1.5], [3.0, 0.0])

        Args:
            tensor: Sum of what ``to_tensor`` returned on each rank.
            parameters: Number of parameters, equal on all ranks.
        """
        numbers: list[float] = tensor.tolist()
        fixed = _Fixed(*numbers[_VOTE_WIDTH:_WIDTH])
        flags = len(numbers) - parameters
        return cls(
            Vote(*numbers[:_VOTE_WIDTH]),
            fixed.skipped,
            fixed.late,
            fixed.unnamed,
            fixed.weight_high * _HALF_WEIGHT + fixed.weight_low,
            numbers[_WIDTH:flags],
            numbers[flags:],
        )
