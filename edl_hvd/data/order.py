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
    """Which sample stands at each position of an epoch; base class of what ``ElasticBatchSampler`` takes as ``order``.

    Subclass it for an order of your own. The order has to follow from the constructor's arguments, seed and epoch, and
    what ``State`` keeps: every member of a world, and each one that joins later, computes its parts of it
    independently. Nothing of it is collective. Orders are compared after the first step in each world.

    Attributes:
        length: Number of samples in the data set; indices are in [0, length).
        positions: Number of positions in one epoch, at least 1; it may differ from ``length``.
        name: Text saved with every position; a sampler refuses a position of another name. Change it when a position
            would mean another sample.
        repeats: Whether a sample may come more than once in an epoch. Each time it then has random numbers of its own.
    """

    length: int
    positions: int
    name: str
    repeats: bool = False

    @abstractmethod
    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        """The indices of the samples at some neighbouring positions of an epoch.

        Args:
            seed: Seed of the sampler.
            epoch: Number of the epoch, from 0.
            first: First position, in [0, last).
            last: Position behind the last one, at most ``positions``.

        Returns:
            ``last - first`` indices, each in [0, length).
        """

    def check(self, policy: BatchPolicy) -> None:  # noqa: B027  # most orders suit any
        """Refuse a batch policy that does not fit this order. Most orders fit any. Called by the sampler.

        Args:
            policy: Batch policy of the sampler.

        Raises:
            UsageError: The policy does not fit; the message says what to change.
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
    """Order of draws with replacement, by weight: torch's ``WeightedRandomSampler``, elastic.

    P(sample i at a position) = w_i / sum of w, independently of all other positions. The draw is the first i with
    w_0 + … + w_i > u · (sum of w), where u is a uniform number in [0, 1) that seed, epoch and position choose. A sample
    of weight 0 is never drawn.

    Memory: the cumulative weights, 8 bytes per sample; each process that holds the sampler has them, the loader's
    processes do not.

    >>> order = WeightedOrder([1.0, 0.0, 3.0], draws=1000)
    >>> drawn = order.samples(seed=0, epoch=0, first=0, last=1000)
    >>> drawn.count(1), 200 < drawn.count(0) < 300, drawn[10:14] == order.samples(seed=0, epoch=0, first=10, last=14)
    (0, True, True)

    Args:
        weights: One weight per sample, shape [samples], any real type, finite, at least 0, not all of them 0; a
            sequence, an array or a CPU tensor.
        draws: Number of positions in one epoch, at least 1; the number of samples if left out.

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
    """Order in which each micro-batch has samples of one group, such as texts of similar length; original here.

    Each sample comes once. Every group is shuffled and cut into micro-batches, and these are shuffled over the whole
    epoch. The rest of each group, less than a micro-batch, is appended to the rests of the groups before, by ascending
    group, and cut likewise. So a mixed micro-batch has neighbouring groups: number similar groups alike (lengths
    rounded up, for instance). There are fewer mixed micro-batches than groups. Where they are of no use (images of
    different sizes in one tensor), ``leftovers="drop"`` leaves those samples out of the epoch; the next epoch leaves
    out others.

    Memory: 8 bytes per sample (4 below 2**31 samples) and 32 per group, in each process that holds the sampler.

    Five short texts and three long ones, in micro-batches of two: one is mixed.

    >>> groups = [0, 0, 0, 0, 0, 1, 1, 1]
    >>> order = GroupedOrder(groups, micro_batch=2)
    >>> epoch = [groups[index] for index in order.samples(seed=0, epoch=0, first=0, last=order.positions)]
    >>> sorted(epoch[i : i + 2] for i in range(0, 8, 2))
    [[0, 0], [0, 0], [0, 1], [1, 1]]
    >>> GroupedOrder(groups, micro_batch=2, leftovers="drop").positions
    6

    Args:
        groups: Group of each sample, integers of shape [samples]; a sequence, an array or a CPU tensor.
        micro_batch: Samples per micro-batch, at least 1; the same as in the batch policy.
        leftovers: "mix" or "drop", for the rests of groups that fill no micro-batch.

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
