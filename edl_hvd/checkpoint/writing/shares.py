"""Which rank writes which rows of which tensor: pure arithmetic, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

WHOLE_BELOW_BYTES = 1024 * 1024
# Uploads in a few milliseconds: splitting smaller tensors would only make files of many entries.


@dataclass(frozen=True)
class Extent:
    """How large a tensor is: its bytes, and its rows, which lie along its first dimension; a scalar is one row."""

    size_bytes: int
    rows: int


@dataclass(frozen=True)
class Rows:
    """``count`` rows of the tensor ``name``, from row ``first`` on."""

    name: str
    first: int
    count: int


def share_out(extents: Mapping[str, Extent], size: int, whole_below_bytes: int = WHOLE_BELOW_BYTES) -> list[list[Rows]]:
    """Deal the tensors to ``size`` ranks so that each writes about as many bytes.

    Tensors of fewer bytes than ``whole_below_bytes``, and those of a single row, stay whole: the largest
    remaining one goes to the rank with the fewest bytes so far, ties to the first name and the lowest rank.
    The others fill the shares up like water: laid end to end, the largest first, they are cut where the next
    rank's turn begins, at the nearest row. So each is cut into neighbouring pieces, there are fewer cuts
    than ranks, and no share is larger than the mean by more than the largest row, or the largest tensor that
    stays whole (original here; the dealing of whole tensors is Graham 1969, "Bounds on multiprocessing timing
    anomalies").

    >>> share_out({"a": Extent(5, 1), "b": Extent(4, 1), "c": Extent(3, 1)}, 2)
    [[Rows(name='a', first=0, count=1)], [Rows(name='b', first=0, count=1), Rows(name='c', first=0, count=1)]]
    >>> share_out({"a": Extent(100, 50), "b": Extent(20, 1)}, 2, whole_below_bytes=10)
    [[Rows(name='b', first=0, count=1), Rows(name='a', first=0, count=20)], [Rows(name='a', first=20, count=30)]]

    Args:
        extents: Extent of each tensor, by name; equal on all ranks, in any order.
        size: Number of ranks, at least 1.
        whole_below_bytes: Number of bytes from which on a tensor is split.

    Returns:
        Each rank's pieces, in rank order; a rank may have none, and has at most one of any tensor. The pieces
        of a tensor, taken in rank order, are its rows in order.
    """
    shares: list[list[Rows]] = [[] for _ in range(size)]
    split: list[str] = []
    heap = [(0, rank) for rank in range(size)]
    for name in sorted(extents, key=lambda name: (-extents[name].size_bytes, name)):
        if extents[name].rows > 1 and extents[name].size_bytes >= whole_below_bytes:
            split.append(name)
            continue
        load_bytes, rank = heap[0]
        shares[rank].append(Rows(name, 0, extents[name].rows))
        heapq.heapreplace(heap, (load_bytes + extents[name].size_bytes, rank))
    loads_bytes = [load_bytes for load_bytes, _ in sorted(heap, key=lambda entry: entry[1])]
    rooms_bytes = _rooms(loads_bytes, sum(extents[name].size_bytes for name in split))
    for rank, rows in _cut(extents, split, list(accumulate(rooms_bytes))):
        shares[rank].append(rows)
    return shares


def _rooms(loads: Sequence[int], amount: int) -> list[int]:
    """What each load gets of ``amount``: the lowest ones are raised to one common level, the others get nothing.

    >>> _rooms([5, 0, 2], 6)
    [0, 4, 2]
    """
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    below, level, rest = 0, 0, 0
    raised: list[int] = []
    for place, rank in enumerate(order):
        raised.append(rank)
        below += loads[rank]
        level, rest = divmod(amount + below, len(raised))
        if place + 1 == len(order) or level <= loads[order[place + 1]]:
            break
    rooms = [0] * len(loads)
    for place, rank in enumerate(raised):
        rooms[rank] = level - loads[rank] + (place < rest)
    return rooms


def _cut(extents: Mapping[str, Extent], names: Sequence[str], ends: Sequence[int]) -> Iterator[tuple[int, Rows]]:
    """These tensors, laid end to end, cut at the row nearest to where each rank's bytes end."""
    rank, start = 0, 0
    for name in names:
        rows = extents[name].rows
        row_bytes = extents[name].size_bytes // rows
        first = 0
        while first < rows:
            last = rows
            if rank < len(ends) - 1:
                last = min(rows, max(first, (ends[rank] - start + row_bytes // 2) // row_bytes))
            if last > first:
                yield rank, Rows(name, first, last - first)
            first = last
            rank += first < rows
        start += extents[name].size_bytes
