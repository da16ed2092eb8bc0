"""Who writes which tensor: pure arithmetic, the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def share_out(sizes_bytes: Mapping[str, int], size: int) -> list[list[str]]:
    """Deal the tensors to ``size`` ranks so that each writes about as many bytes.

    The largest remaining tensor goes to the rank with the fewest bytes so far, ties to the first name
    and the lowest rank. The fullest rank then has at most 4/3 - 1/(3 size) of the bytes of the best
    possible deal (Graham 1969, "Bounds on multiprocessing timing anomalies"). Tensors are not split.

    >>> share_out({"a": 5, "b": 4, "c": 3, "d": 3}, 2)
    [['a', 'd'], ['b', 'c']]

    Args:
        sizes_bytes: Size of each tensor; equal on all ranks, in any order.
        size: Number of ranks, at least 1.

    Returns:
        The names of each rank's tensors, in rank order; a rank may have none.
    """
    shares: list[list[str]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        load_bytes, rank = loads[0]
        shares[rank].append(name)
        heapq.heapreplace(loads, (load_bytes + sizes_bytes[name], rank))
    return shares
