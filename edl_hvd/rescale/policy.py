"""The two batch policies: a fixed global batch, or a fixed batch per worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from edl_hvd.errors import UsageError


class BatchPolicy(Protocol):
    """How many samples an optimizer step takes, and how the learning rate follows."""

    @property
    def micro_batch(self) -> int | None:
        """Largest number of samples in one forward and backward pass; ``None`` for a worker's whole share."""

    @property
    def warmup_samples(self) -> int:
        """Samples over which the learning-rate factor moves to a new value."""

    def global_batch(self, size: int) -> int:
        """Samples per optimizer step in a world of ``size`` workers."""

    def learning_rate_factor(self, size: int) -> float:
        """What the learning rate is multiplied with in a world of ``size`` workers, after warm-up."""


@dataclass(frozen=True)
class GlobalBatch:
    """Every optimizer step takes ``size`` samples, whatever the world: resizing changes nothing learned.

    Attributes:
        size: Samples per optimizer step, at least 1.
        micro_batch: Samples per forward and backward pass, in [1, size]. ``None`` splits the batch
            evenly over the workers instead (fastest; the same up to rounding, BatchNorm aside).
    """

    size: int
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        _positive("global batch", self.size)
        _check_micro_batch(self.micro_batch, self.size, "global batch")

    @property
    def warmup_samples(self) -> int:
        return 0

    def global_batch(self, size: int) -> int:
        return self.size

    def learning_rate_factor(self, size: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WorkerBatch:
    """Every worker takes ``size`` samples per optimizer step; the global batch grows with the world.

    Attributes:
        size: Samples per worker and optimizer step, at least 1.
        learning_rate: "linear" (Goyal et al. 2017, arXiv:1706.02677: factor = W / base_size) or
            "sqrt" (Krizhevsky 2014, arXiv:1404.5997: factor = sqrt(W / base_size)), W workers.
        warmup_samples: Samples over which the factor moves linearly to its new value, at the start
            (from 1) and after every resize (from where it stands); 0 changes it at once.
        base_size: World size that the script's own learning rate was tuned for, at least 1.
        micro_batch: As in :class:`GlobalBatch`, in [1, size].
    """

    size: int
    learning_rate: str = "linear"
    warmup_samples: int = 0
    base_size: int = 1
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        _positive("worker batch", self.size)
        _positive("base size", self.base_size)
        _check_micro_batch(self.micro_batch, self.size, "worker batch")
        if self.learning_rate not in ("linear", "sqrt"):
            raise UsageError(f"learning_rate={self.learning_rate!r} is not a rule; expected 'linear' or 'sqrt'")
        if self.warmup_samples < 0:
            raise UsageError(f"warmup_samples={self.warmup_samples} is negative; expected 0 or more samples")

    def global_batch(self, size: int) -> int:
        return self.size * size

    def learning_rate_factor(self, size: int) -> float:
        """See the class.

        >>> WorkerBatch(64, learning_rate="sqrt", base_size=2).learning_rate_factor(8)
        2.0
        """
        ratio = size / self.base_size
        return ratio if self.learning_rate == "linear" else math.sqrt(ratio)


def _positive(what: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{what} is {value!r}; expected a whole number of samples or workers, at least 1")


def _check_micro_batch(micro_batch: int | None, size: int, of: str) -> None:
    if micro_batch is not None and not 1 <= micro_batch <= size:
        raise UsageError(f"micro batch is {micro_batch}; expected 1 to {size}, the {of}, or None to leave it out")
