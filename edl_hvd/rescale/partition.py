"""Dealing one global batch out to the workers of a world. Pure integers; original here."""

from __future__ import annotations

Slice = tuple[int, int]


def partition(samples: int, rank: int, size: int, micro_batch: int | None = None) -> tuple[Slice, ...]:
    """The parts of a global batch that one rank computes, as half-open sample ranges.

    With ``micro_batch`` = m the batch is always the same M = ceil(samples / m) micro-batches, whoever
    is there; rank r of W gets those numbered floor(r·M/W) to floor((r+1)·M/W) - 1. Without it the
    samples themselves are split the same way, so shares differ by at most one. Over all ranks every
    sample is dealt exactly once, in order; a rank's share may be empty.

    >>> partition(10, rank=1, size=3)
    ((3, 6),)
    >>> partition(10, rank=0, size=2, micro_batch=4)
    ((0, 4),)
    >>> partition(10, rank=1, size=2, micro_batch=4)
    ((4, 8), (8, 10))
    >>> partition(2, rank=0, size=3)
    ()

    Args:
        samples: Samples in this global batch, at least 0.
        rank: In [0, size).
        size: Workers in the world, at least 1.
        micro_batch: Largest number of samples in one forward and backward pass, at least 1.
    """
    unit = micro_batch or 1
    first, last = partition_range(-(-samples // unit), rank, size)
    if micro_batch is None:
        return ((first, last),) if first < last else ()
    return tuple((i * unit, min((i + 1) * unit, samples)) for i in range(first, last))


def partition_range(units: int, rank: int, size: int) -> Slice:
    """The range of numbered units that one rank gets: ``floor(r·M/W)`` up to, not including, ``floor((r+1)·M/W)``.

    >>> [partition_range(8, rank, size=3) for rank in range(3)]
    [(0, 2), (2, 5), (5, 8)]
    """
    return rank * units // size, (rank + 1) * units // size
