"""Whether all ranks hold the same weights: each digests its own whole state, and rank 0 compares.

A checkpoint is put together from shares of all ranks, and a join hands the state of one rank to another. Both are right
only as long as the replicas are equal, and nothing else looks: gradients are summed whatever the weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
import xxhash

from edl_hvd.checkpoint.checksum import CHUNK_BYTES, chunks
from edl_hvd.checkpoint.shards import bytes_of


def digests_of(
    tensors: Mapping[str, torch.Tensor], guard: Callable[[], AbstractContextManager[None]]
) -> dict[str, str]:
    """Of each tensor of floating-point or complex numbers, 64 bits that are equal for equal contents.

    Whole numbers are left out: they are counters and states of random generators, which may be a rank's own.

    Args:
        tensors: Host tensors by name.
        guard: Entered for each look at a chunk of them; an exception from it ends the work.
    """
    digests = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            digest = xxhash.xxh3_64()
            with guard():
                elements = bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
            for start, stop in chunks(elements.size, CHUNK_BYTES):
                with guard():
                    digest.update(elements[start:stop].data)
            digests[name] = digest.hexdigest()
    return digests


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
