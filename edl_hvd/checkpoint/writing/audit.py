"""Whether all ranks hold the same weights: each digests its own whole state, and rank 0 compares.

A checkpoint is put together from shares of all ranks, and a join hands the state of one rank to another. Both are right
only as long as the replicas are equal, and nothing else looks: gradients are summed whatever the weights are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import xxhash

from edl_hvd.checkpoint.writing.shares import Rows


def digests_of(
    tensors: Mapping[str, torch.Tensor],
    shares: Iterable[Sequence[Rows]],
    checksums: Callable[[Rows], Iterable[str]],
) -> dict[str, str]:
    """64 bits of each tensor of floating-point or complex numbers, equal for equal contents.

    They are those of the checksums that its pieces have in the checkpoint, whoever writes them: so what a rank has
    looked at for its own share counts here, too. Whole numbers are left out: they are counters and states of random
    generators, which may be a rank's own.

    Args:
        tensors: Host tensors by name.
        shares: Rows of them that each rank writes, by rank.
        checksums: Function that gives the checksums of a piece as this rank holds it.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for share in shares:
        for rows in share:
            if tensors[rows.name].is_floating_point() or tensors[rows.name].is_complex():
                found[rows.name] += checksums(rows)
    return {name: xxhash.xxh3_64_hexdigest(" ".join(words).encode()) for name, words in found.items()}


def drifted(digests: Mapping[int, Mapping[str, str]]) -> dict[int, list[str]]:
    """The tensors in which ranks differ from most others, by rank.

    >>> drifted({0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "2"}, 2: {"a": "1", "b": "3"}})
    {2: ['b']}

    Where no content is held by more ranks than any other, that of the lowest rank counts as the right one.
    """
    found: dict[int, list[str]] = {}
    ranks = sorted(digests)
    for name in digests[ranks[0]]:
        held = Counter(digests[rank].get(name) for rank in ranks)
        usual = max(held, key=lambda content: held[content])  # the first of several, and so that of the lowest rank
        for rank in ranks:
            if digests[rank].get(name) != usual:
                found.setdefault(rank, []).append(name)
    return dict(sorted(found.items()))
