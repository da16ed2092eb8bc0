"""The order of an epoch over shards: shuffled shard by shard, and such that each process reads whole shards in turn.

The shards of an epoch, shuffled, are thought of as one long row of samples, and the row is cut into as many **lanes**,
alike but for one micro-batch. Micro-batches are taken from the lanes in turn: number c comes from lane c mod L. A
worker whose world stays has the same lanes in every step, and so has each process of its loader, as long as L is a
multiple of both numbers; it then reads them from front to back. Nothing depends on who reads, so any world can go on
anywhere. Original here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy

from edl_hvd.data.order import Order
from edl_hvd.data.permutation import Permutation
from edl_hvd.rescale.policy import BatchPolicy

# Without micro-batches a step comes from this many lanes, or a few more, so that workers seldom share one.
_PARTS = 16
# Where the step grows with the world, lanes are dealt evenly to 1, 2, 4 and 8 workers.
_WORKERS = 8
# A lane begins anywhere in a shard, whose front is for another one. This many shards to a lane keep such parts rare.
_SHARDS_PER_LANE = 4


class ShardOrder(Order):
    """Numbers samples shard by shard in the order that the shards were given in, and deals them lane by lane.

    Memory: 32 bytes per shard.

    Args:
        counts: Samples in each shard, at least 0, and 1 in all.
        micro_batch: Samples taken from a lane at a time.
        lanes: L, at least 1.
        shuffle: ``False`` takes the shards as they were given, in every epoch.
    """

    def __init__(self, counts: Sequence[int] | Any, micro_batch: int, lanes: int, shuffle: bool = True) -> None:
        self._counts = numpy.asarray(counts, numpy.int64)
        self._starts = numpy.cumsum(self._counts) - self._counts
        self.length = self.positions = int(self._counts.sum())
        self.micro_batch = micro_batch
        self.lanes = lanes
        self._shuffle = shuffle
        digest = hashlib.blake2b(self._counts.astype("<i8").tobytes(), digest_size=8).hexdigest()
        self.name = f"shards-1 {micro_batch} {lanes} {'shuffled' if shuffle else 'in turn'} {digest}"
        self._row: tuple[tuple[int, int], Any, Any] | None = None

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        shards, ends = self._row_of(seed, epoch)
        places = self._places(numpy.arange(first, last))
        turn = numpy.searchsorted(ends, places, side="right")
        shard = shards[turn]
        indices: list[int] = (self._starts[shard] + places - (ends[turn] - self._counts[shard])).tolist()
        return indices

    def _places(self, positions: Any) -> Any:
        """Where in the row the samples at some positions stand."""
        chunks, inside = numpy.divmod(positions, self.micro_batch)
        whole = self.length // self.micro_batch
        turn, lane = numpy.divmod(chunks, self.lanes)
        each, longer = divmod(whole, self.lanes)
        begin = lane * each + numpy.minimum(lane, longer)  # the first lanes have one micro-batch more
        # What is left at the end, less than a micro-batch, is the end of the row, too.
        return numpy.where(chunks < whole, (begin + turn) * self.micro_batch + inside, positions)

    def _row_of(self, seed: int, epoch: int) -> tuple[Any, Any]:
        """The shards as this epoch has them, and where each of them ends in the row."""
        if self._row is None or self._row[0] != (seed, epoch):
            shards = numpy.arange(len(self._counts))
            if self._shuffle:
                shards = Permutation(len(shards), seed, epoch)(shards)
            self._row = ((seed, epoch), shards, numpy.cumsum(self._counts[shards]))
        return self._row[1:]


def lanes_for(policy: BatchPolicy, shards: int, interleave: int) -> tuple[int, int]:
    """Samples taken from a lane at a time, and the number of lanes.

    As many lanes as a step has micro-batches, M, times ``interleave``; fewer when there are less than four shards for
    each, but a multiple of M, and the factor a divisor of ``interleave``.

    >>> from edl_hvd.rescale.policy import GlobalBatch, WorkerBatch
    >>> lanes_for(GlobalBatch(1024, micro_batch=64), shards=10_000, interleave=8)
    (64, 128)
    >>> lanes_for(GlobalBatch(1024, micro_batch=64), shards=300, interleave=8)
    (64, 64)
    >>> lanes_for(GlobalBatch(100), shards=10_000, interleave=1)
    (5, 20)
    >>> lanes_for(WorkerBatch(32), shards=10_000, interleave=4)
    (32, 32)
    """
    batch = policy.global_batch(1)
    grows = policy.global_batch(2) != batch
    micro_batch = policy.micro_batch
    if micro_batch is None:
        micro_batch = batch if grows else max(n for n in range(1, max(1, batch // _PARTS) + 1) if batch % n == 0)
    parts = _WORKERS if grows else max(1, batch // micro_batch)
    fitting = [n for n in range(1, interleave + 1) if interleave % n == 0 and parts * n * _SHARDS_PER_LANE <= shards]
    return micro_batch, parts * max(fitting, default=1)
