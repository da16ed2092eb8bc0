"""The two batch policies: a fixed global batch, or a batch per worker, fixed or chosen while the job runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from edl_hvd.errors import UsageError
from edl_hvd.rescale.goodput import batch_plan
from edl_hvd.rescale.noise import Noise

RULES = ("linear", "sqrt", "adascale")


class BatchPolicy(Protocol):
    """How many samples an optimizer step takes, and how the learning rate follows."""

    @property
    def micro_batch(self) -> int | None:
        """The largest number of samples in one forward and backward pass; ``None`` for a worker's whole share."""

    @property
    def warmup_samples(self) -> int:
        """The number of samples over which the learning-rate factor moves to a new value; 0 for at once."""

    @property
    def base_samples(self) -> int:
        """The number of samples of the batch that the script's own learning rate was tuned for."""

    @property
    def needs_noise(self) -> bool:
        """Whether the noise of the gradient has to be measured."""

    def global_batch(self, size: int) -> int:
        """The number of samples per optimizer step in a world of ``size`` workers."""

    def learning_rate_factor(self, size: int) -> float:
        """The factor of the learning rate in a world of ``size`` workers, after warm-up.

        Where it depends on the noise: its largest value, which is the scale of the batch.
        """

    def adapted(self, factor: float, noise: Noise) -> float:
        """The factor for the next step, where the factor of the warm-up stands at ``factor``."""


@dataclass(frozen=True)
class GlobalBatch:
    """Batch policy: every optimizer step takes ``size`` samples over the whole world, for any number of workers.

    So a change of the world changes neither the steps nor the learning rate. Every rank makes an equal one.

    >>> policy = GlobalBatch(1024, micro_batch=64)
    >>> policy.global_batch(size=3), policy.learning_rate_factor(size=3)
    (1024, 1.0)

    Attributes:
        size: Samples per optimizer step, at least 1.
        micro_batch: Samples per forward and backward pass, a divisor of ``size``; only the last batch of an epoch
            may end with a shorter one. ``None`` splits the batch evenly over the workers instead (fastest; the same
            up to rounding, except for BatchNorm).

    Raises:
        UsageError: ``size`` is less than 1, or ``micro_batch`` is not a divisor of it.
    """

    size: int
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        _positive("global batch", self.size)
        _check_micro_batch(self.micro_batch, self.size, "global batch")
        _check_divisible(self.size, self.micro_batch or 1)

    @property
    def warmup_samples(self) -> int:
        """The number of samples of a warm-up: 0, because the learning rate does not change."""
        return 0

    @property
    def base_samples(self) -> int:
        """The number of samples of the batch that the script's own learning rate was tuned for: ``size``."""
        return self.size

    @property
    def needs_noise(self) -> bool:
        """Whether the noise of the gradient has to be measured: it does not."""
        return False

    def global_batch(self, size: int) -> int:
        """The number of samples per optimizer step, the same in every world.

        Args:
            size: Number of workers, at least 1.
        """
        return self.size

    def learning_rate_factor(self, size: int) -> float:
        """The factor of the learning rate: 1 in every world.

        Args:
            size: Number of workers, at least 1.
        """
        return 1.0

    def adapted(self, factor: float, noise: Noise) -> float:
        """The factor for the next step, ``factor`` itself.

        Args:
            factor: Factor after the warm-up.
            noise: Noise of the gradient, which is not used.
        """
        return factor


@dataclass(frozen=True)
class WorkerBatch:
    """Batch policy: every worker takes ``size`` samples per optimizer step; the global batch grows with the world.

    The learning rate follows the scale S, the ratio of the global batch to the batch that the script's own learning
    rate was tuned for. With W workers S = W / base_size; with "auto" also times the present batch / ``min``. Every rank
    makes an equal one.

    Tuned on one worker, run on four:

    >>> policy = WorkerBatch(32, learning_rate="linear", base_size=1)
    >>> policy.global_batch(size=4), policy.learning_rate_factor(size=4)
    (128, 4.0)

    Attributes:
        size: Samples per worker and optimizer step, at least 1. Or "auto": the number in [min, max] with which training
            makes the most progress per second (Qiao et al., "Pollux", OSDI 2021, section 3); it begins with ``min``.
        learning_rate: Rule for the factor of the learning rate: "linear", S (Goyal et al. 2017, arXiv:1706.02677,
            section 2.1); "sqrt", the root of S (Krizhevsky 2014, arXiv:1404.5997); "adascale", between 1 and
            S by the noise of the gradient (Johnson et al. 2020, arXiv:2007.05105, section 3); or a function from S
            (greater than 0) to the factor (finite, greater than 0).
        warmup_samples: Samples, at least 0, over which the factor moves linearly to its new value, at the start (from
            1) and after every change of the batch (from where it stands). The new value holds from the step that begins
            at or behind that many samples; 0 changes it at once. With "adascale" it is S that moves.
        base_size: World size that the script's own learning rate was tuned for, at least 1.
        micro_batch: Samples per forward and backward pass, in [1, size], as in :class:`GlobalBatch`; with "auto" the
            largest number that fits into memory, in [1, max].
        min: With "auto": least number of samples per worker, at least 1. The script's own learning rate was tuned for
            ``base_size`` times as many.
        max: With "auto": largest number of samples per worker, at least ``min``.
        chosen: With "auto": present number of samples per worker. Set by ``State``, not for scripts.
        largest_micro_batch: With "auto": ``micro_batch`` as the script gave it. Set by ``State``, not for scripts.

    Raises:
        UsageError: An argument is out of range, or contradicts another.
    """

    size: int | Literal["auto"]
    learning_rate: str | Callable[[float], float] = "linear"
    warmup_samples: int = 0
    base_size: int = 1
    micro_batch: int | None = None
    min: int | None = None
    max: int | None = None
    chosen: int | None = None
    largest_micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.size == "auto":
            self._check_bounds()
        else:
            _positive("worker batch", self.size)
            _check_micro_batch(self.micro_batch, self.size, "worker batch")
            if self.min is not None or self.max is not None:
                raise UsageError(
                    f"WorkerBatch({self.size}) was given bounds, which are for a batch that is chosen while the job "
                    "runs; expected WorkerBatch('auto', min=…, max=…), or a size alone"
                )
        _positive("base size", self.base_size)
        if not callable(self.learning_rate) and self.learning_rate not in RULES:
            raise UsageError(
                f"learning_rate={self.learning_rate!r} is not a rule; expected one of "
                f"{', '.join(map(repr, RULES))}, or a function of the scale"
            )
        if self.warmup_samples < 0:
            raise UsageError(f"warmup_samples={self.warmup_samples} is negative; expected 0 or more samples")

    def _check_bounds(self) -> None:
        if self.min is None or self.max is None:
            raise UsageError(
                f"WorkerBatch('auto') was given min={self.min} and max={self.max}; expected both, the least and the "
                "most samples per worker: the learning rate is for the least, memory bounds the most"
            )
        _positive("min", self.min)
        _positive("max", self.max)
        if self.max < self.min:
            raise UsageError(f"max={self.max} is less than min={self.min}; expected at least as many samples")
        _check_micro_batch(self.micro_batch, self.max, "largest worker batch")

    @property
    def worker_batch(self) -> int:
        """The number of samples per worker and optimizer step now."""
        return self.size if isinstance(self.size, int) else self.chosen or self.least

    @property
    def least(self) -> int:
        """The smallest value that ``worker_batch`` can have: ``size``, or ``min`` with "auto"."""
        return self.size if isinstance(self.size, int) else self.min or 1

    @property
    def base_samples(self) -> int:
        """The number of samples of the batch that the script's own learning rate was tuned for."""
        return self.least * self.base_size

    @property
    def needs_noise(self) -> bool:
        """Whether the noise of the gradient has to be measured: with "auto" and with "adascale"."""
        return self.size == "auto" or self.learning_rate == "adascale"

    def with_batch(self, worker_batch: int, size: int) -> WorkerBatch:
        """The same policy with another present batch. With "auto" only; called by ``State``.

        >>> WorkerBatch("auto", min=16, max=64, micro_batch=32).with_batch(48, size=2).micro_batch
        24

        Args:
            worker_batch: Samples per worker, in [min, max].
            size: Number of workers that the batch is divided for, at least 1.
        """
        largest = self.largest_micro_batch if self.chosen is not None else self.micro_batch
        plan = batch_plan(worker_batch, size, largest)
        return replace(self, chosen=worker_batch, micro_batch=plan.micro_batch, largest_micro_batch=largest)

    def global_batch(self, size: int) -> int:
        """The number of samples per optimizer step: ``worker_batch * size``.

        Args:
            size: Number of workers, at least 1.
        """
        return self.worker_batch * size

    def learning_rate_factor(self, size: int) -> float:
        """The factor of the learning rate after warm-up, by the rule of the class; for "adascale" it is S.

        >>> WorkerBatch(64, learning_rate="sqrt", base_size=2).learning_rate_factor(8)
        2.0
        >>> WorkerBatch(64, learning_rate=lambda scale: 1 + (scale - 1) / 2).learning_rate_factor(8)
        4.5

        Args:
            size: Number of workers, at least 1.

        Raises:
            UsageError: The script's function gives no finite number greater than 0.
        """
        scale = self.global_batch(size) / self.base_samples
        if callable(self.learning_rate):
            return _checked_factor(self.learning_rate, scale)
        return math.sqrt(scale) if self.learning_rate == "sqrt" else scale

    def adapted(self, factor: float, noise: Noise) -> float:
        """The factor for the next step: AdaScale's gain with "adascale", else ``factor`` itself.

        Args:
            factor: Factor after the warm-up; S with "adascale".
            noise: Noise of the gradient, as measured so far.
        """
        return noise.gain(factor, self.base_samples) if self.learning_rate == "adascale" else factor


def _checked_factor(rule: Callable[[float], float], scale: float) -> float:
    factor = rule(scale)
    try:
        value = float(factor)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            f"learning_rate={getattr(rule, '__name__', rule)} gives {factor!r} for a batch of {scale:g} times the base "
            "batch; expected what the learning rate is to be multiplied with, a finite number greater than 0"
        )
    return value


def _positive(what: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{what} is {value!r}; expected a whole number of samples or workers, at least 1")


def _check_micro_batch(micro_batch: int | None, size: int, of: str) -> None:
    if micro_batch is not None and not 1 <= micro_batch <= size:
        raise UsageError(f"micro batch is {micro_batch}; expected 1 to {size}, the {of}, or None to leave it out")


def _check_divisible(size: int, micro_batch: int) -> None:
    """Every full step has to be the same micro-batches, all as large; the message names what comes nearest."""
    if size % micro_batch == 0:
        return
    divisors = [part for part in range(1, size + 1) if size % part == 0]
    below = max(part for part in divisors if part < micro_batch)
    above = min(part for part in divisors if part > micro_batch)
    whole = size // micro_batch * micro_batch
    raise UsageError(
        f"global batch {size} cannot be cut into micro batches of {micro_batch}; expected a multiple: the nearest "
        f"are a micro batch of {below} or {above}, or a global batch of {whole} or {whole + micro_batch}"
    )


@dataclass(frozen=True)
class Ramp:
    """Linear from ``start`` at ``begin`` to ``target`` at ``begin + length`` and after.

    factor(s) = start + (target - start) · (s - begin) / length   for begin <= s < begin + length
    factor(s) = target                                             for s >= begin + length

    where s is the number of samples consumed by the whole run. At s = begin the factor is ``start``
    when length > 0 and ``target`` when length = 0.

    >>> Ramp(start=1.0, target=3.0, begin=100, length=200).factor(200)
    2.0
    """

    start: float = 1.0
    target: float = 1.0
    begin: int = 0
    length: int = 0

    def factor(self, samples: int) -> float:
        if samples >= self.begin + self.length:
            return self.target
        return self.start + (self.target - self.start) * (samples - self.begin) / self.length

    def toward(self, target: float, samples: int, length: int) -> Ramp:
        """The ramp from where this one stands at ``samples`` to ``target``; itself if that is its target."""
        if target == self.target:
            return self
        return Ramp(self.factor(samples), target, samples, length)

    def follow(self, policy: BatchPolicy, size: int, samples: int) -> Ramp:
        """The ramp from where this one stands at ``samples`` to the policy's factor, over the policy's warm-up.

        Args:
            policy: Batch policy of the next steps.
            size: Number of workers, at least 1.
            samples: Samples consumed by the whole run, at least 0.
        """
        return self.toward(policy.learning_rate_factor(size), samples, policy.warmup_samples)

    def as_dict(self) -> dict[str, float]:
        return {"start": self.start, "target": self.target, "begin": self.begin, "length": self.length}
