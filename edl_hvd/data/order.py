"""Orders of an epoch: which sample stands at which position. Any stretch of one is computed by itself."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy

from edl_hvd.data.permutation import Permutation, random_words
from edl_hvd.data.randomness import seed_of
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import BatchPolicy


class Order(ABC):
    """Which sample stands at each position of an epoch; given to ``ElasticBatchSampler`` as ``order``.

    All of it has to follow from the constructor's arguments, seed and epoch: the members of a world, and those that
    come after them, compute their parts of it alone.

    Attributes:
        length: Samples in the data set; what is dealt are indices below it.
        positions: In one epoch, at least 1. As many as samples, or fewer or more.
        name: Saved with every position, which another order refuses. Change it when a position would mean another
            sample.
        repeats: A sample may come more than once in an epoch. Each time it then has random numbers of its own.
    """

    length: int
    positions: int
    name: str
    repeats: bool = False

    @abstractmethod
    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        """The indices at the positions ``first`` to ``last - 1`` of an epoch, 0 <= first < last <= positions."""

    def check(self, policy: BatchPolicy) -> None:  # noqa: B027  # most orders suit any
        """Refuse a batch policy that this order cannot be dealt by.

        Raises:
            UsageError: With what to change.
        """


class IndexOrder(Order):
    """The samples as they are numbered, in every epoch."""

    name = "index"

    def __init__(self, length: int) -> None:
        self.length = self.positions = length

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        return list(range(first, last))


class ShuffledOrder(Order):
    """Each sample once, in an order that seed and epoch choose; takes no memory, however many there are."""

    name = "feistel-1"

    def __init__(self, length: int) -> None:
        self.length = self.positions = length
        self._epoch: tuple[int, int] | None = None

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        if self._epoch != (seed, epoch):
            self._epoch, self._permutation = (seed, epoch), Permutation(self.length, seed, epoch)
        indices: list[int] = self._permutation(numpy.arange(first, last)).tolist()
        return indices


class WeightedOrder(Order):
    """Draws with replacement, each sample as often as its weight says; torch's ``WeightedRandomSampler``, elastic.

    P(sample i at a position) = w_i / sum of w, independently of all other positions: u is a uniform number that seed,
    epoch and position choose, and the draw is the first i with w_0 + … + w_i > u · (sum of w).

    Memory: the cumulative weights, 8 bytes per sample; each process that holds the sampler has them, the loader's
    processes do not.

    Args:
        weights: One per sample, finite, at least 0, not all of them 0; any sequence, array or CPU tensor.
        draws: Positions in one epoch, at least 1; as many as samples if left out.

    Raises:
        UsageError: A weight or ``draws`` is out of range.
    """

    repeats = True

    def __init__(self, weights: Sequence[float] | Any, draws: int | None = None) -> None:
        values = _row("weights", weights, numpy.float64)
        wrong = numpy.flatnonzero(~(numpy.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise UsageError(
                f"weights[{wrong[0]}] is {values[wrong[0]]}; expected finite numbers, 0 or more ({len(wrong)} are not)"
            )
        self._cumulative = numpy.cumsum(values)
        if not 0 < self._cumulative[-1] < numpy.inf:
            raise UsageError(f"the weights add up to {self._cumulative[-1]}; expected a finite number greater than 0")
        if draws is not None and draws < 1:
            raise UsageError(f"draws={draws}; expected at least 1, or None for as many as there are samples")
        self.length = len(values)
        self.positions = draws if draws is not None else self.length
        self.name = f"weighted-1 {self.positions} {_digest(values)}"

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        key = numpy.array(seed_of(seed, epoch), dtype=numpy.uint64)
        words = random_words(numpy.arange(first, last, dtype=numpy.uint64), key)
        uniform = (words >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53  # in [0, 1), all 53 bits of a float64
        total = self._cumulative[-1]
        drawn = numpy.minimum(uniform * total, numpy.nextafter(total, 0))  # the product may be rounded up to the total
        indices: list[int] = numpy.searchsorted(self._cumulative, drawn, side="right").tolist()
        return indices


class GroupedOrder(Order):
    """Each sample once, and those of one group, such as texts of like length, side by side in micro-batches.

    Every group is shuffled and cut into micro-batches; these are shuffled over the whole epoch. What is left of each
    group, less than a micro-batch, is strung together by ascending group and cut in turn, so a mixed micro-batch holds
    neighbouring groups: number them so that neighbours get along (lengths rounded up, say). There are fewer mixed ones
    than groups. Where a mixed one is of no use (images of unlike size in one tensor), ``leftovers="drop"`` leaves those
    samples out of this epoch; the next one leaves out others.

    Memory: 8 bytes per sample (4 below 2**31 samples) and 32 per group, in each process that holds the sampler.

    Args:
        groups: The group of each sample, whole numbers; any sequence, array or CPU tensor.
        micro_batch: Samples per micro-batch, that of the batch policy.
        leftovers: "mix" or "drop".

    Raises:
        UsageError: An argument is out of range, or every group is smaller than a micro-batch and dropped.
    """

    def __init__(self, groups: Sequence[int] | Any, micro_batch: int, leftovers: str = "mix") -> None:
        values = _row("groups", groups, numpy.int64)
        if micro_batch < 1:
            raise UsageError(f"micro_batch={micro_batch}; expected at least 1 sample")
        if leftovers not in ("mix", "drop"):
            raise UsageError(f"leftovers={leftovers!r}; expected 'mix' or 'drop'")
        self.length = len(values)
        self._micro_batch = micro_batch
        _, counts = numpy.unique(values, return_counts=True)
        small = numpy.int32 if self.length < 2**31 else numpy.int64
        self._members = numpy.argsort(values, kind="stable").astype(small)
        self._counts = counts
        self._starts = _starts(counts)
        self._chunks = _starts(counts // micro_batch)  # whole micro-batches of the groups before
        self._rests = _starts(counts % micro_batch)  # samples left over from the groups before
        self._whole = int(self._chunks[-1])
        left = int(self._rests[-1]) if leftovers == "mix" else 0
        self._mixed = left // micro_batch
        self.positions = self._whole * micro_batch + left
        if not self.positions:
            raise UsageError(
                f"none of the {len(counts)} groups has as many samples as a micro-batch, {micro_batch}, and "
                "leftovers='drop' leaves out smaller ones; expected larger groups, a smaller micro-batch or 'mix'"
            )
        self.name = f"grouped-1 {micro_batch} {leftovers} {_digest(values)}"

    def check(self, policy: BatchPolicy) -> None:
        if policy.micro_batch != self._micro_batch or policy.global_batch(1) % self._micro_batch:
            raise UsageError(
                f"the samples are grouped for micro-batches of {self._micro_batch}, and {policy} deals others; "
                "expected the same micro_batch for both, of which a worker's or the global batch is a multiple"
            )

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        size = self._micro_batch
        chunks, inside = numpy.divmod(numpy.arange(first, last), size)
        shuffled = self._whole + self._mixed
        if shuffled:
            # The tail, shorter than a micro-batch, stays where it is, at the end.
            moving = chunks < shuffled
            chunks[moving] = Permutation(shuffled, seed, epoch)(chunks[moving])
        rest = (chunks - self._whole) * size + inside
        group = numpy.where(
            rest < 0,
            numpy.searchsorted(self._chunks, chunks, side="right"),
            numpy.searchsorted(self._rests, rest, side="right"),
        ) - 1  # fmt: skip
        whole = self._chunks[group + 1] - self._chunks[group]
        place = numpy.where(rest < 0, chunks - self._chunks[group], whole) * size
        place += numpy.where(rest < 0, inside, rest - self._rests[group])
        for number in numpy.unique(group):
            mine = group == number
            place[mine] = Permutation(int(self._counts[number]), seed, epoch, int(number))(place[mine])
        indices: list[int] = self._members[self._starts[group] + place].tolist()
        return indices


def _starts(counts: Any) -> Any:
    """Where each of some stretches laid end to end begins, and where the last one ends."""
    return numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(counts)])


def _row(what: str, values: Any, kind: Any) -> Any:
    try:
        row = numpy.asarray(values)
        if row.ndim != 1 or not len(row):
            raise ValueError(f"shape {row.shape}")
        return row.astype(kind, casting="same_kind" if row.dtype.kind != "b" else "unsafe")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be used ({error}); expected one number per sample of the data set") from error


def _digest(values: Any) -> str:
    return hashlib.blake2b(values.astype(values.dtype.newbyteorder("<")).tobytes(), digest_size=8).hexdigest()
