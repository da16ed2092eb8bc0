"""Who writes which rows: every byte once, evenly, and the same answer on every rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from edl_hvd.checkpoint.writing.shares import WHOLE_BELOW_BYTES, Extent, Rows, share_out

MIB = 1024 * 1024


def extent(rows: int, row_bytes: int) -> Extent:
    return Extent(rows * row_bytes, rows)


# Scalars, empty tensors, those around the threshold, embeddings, and those of few but enormous rows.
EXTENTS = some.one_of(
    some.builds(extent, some.integers(0, 3), some.integers(0, 2**31)),
    some.builds(extent, some.integers(0, 2000), some.integers(0, 3000)),
    some.builds(extent, some.integers(1, 10**7), some.integers(1, 10**5)),
)
TENSORS = some.dictionaries(some.text(max_size=5), EXTENTS, max_size=30)
SIZES = some.integers(1, 64)


def bytes_of(extents: Mapping[str, Extent], share: list[Rows]) -> int:
    return sum(extents[rows.name].size_bytes // extents[rows.name].rows * rows.count for rows in share if rows.count)


def is_split(extent: Extent) -> bool:
    return extent.rows > 1 and extent.size_bytes >= WHOLE_BELOW_BYTES


def grain_bytes(extents: Mapping[str, Extent]) -> int:
    """The largest thing that is not divided: a row, or a whole tensor."""
    return max(
        (extent.size_bytes // extent.rows if is_split(extent) else extent.size_bytes for extent in extents.values()),
        default=0,
    )


@given(extents=TENSORS, size=SIZES)
@example(extents={"w": extent(3, MIB)}, size=64)
@example(extents={}, size=2)
def test_every_row_is_in_exactly_one_share_and_the_pieces_of_a_tensor_follow_the_ranks(
    extents: dict[str, Extent], size: int
) -> None:
    shares = share_out(extents, size)
    assert len(shares) == size
    pieces: dict[str, list[Rows]] = {name: [] for name in extents}
    for share in shares:
        assert len({rows.name for rows in share}) == len(share), "no rank has two pieces of a tensor"
        for rows in share:
            pieces[rows.name].append(rows)
    for name, extent in extents.items():
        assert pieces[name][0].first == 0
        assert all(before.first + before.count == after.first for before, after in pairwise(pieces[name]))
        assert pieces[name][-1].first + pieces[name][-1].count == extent.rows
        assert all(rows.count > 0 for rows in pieces[name]) or extent.rows == 0


@given(extents=TENSORS, size=SIZES)
@example(extents={str(n): extent(2, 600_000_000) for n in range(7)}, size=5)
@example(extents={"a": extent(1, 10**9), "b": extent(10**6, 1000)}, size=64)
def test_no_share_is_larger_than_the_mean_by_more_than_a_row_or_a_tensor_that_stays_whole(
    extents: dict[str, Extent], size: int
) -> None:
    loads = [bytes_of(extents, share) for share in share_out(extents, size)]
    assert sum(loads) == sum(extent.size_bytes for extent in extents.values())
    assert max(loads) <= sum(loads) / size + grain_bytes(extents) + 1


@given(extents=TENSORS, size=SIZES, seed=some.integers(0, 1000))
def test_ranks_agree_whatever_order_they_know_the_tensors_in(extents: dict[str, Extent], size: int, seed: int) -> None:
    shuffled = list(extents.items())
    random.Random(seed).shuffle(shuffled)
    assert share_out(dict(shuffled), size) == share_out(extents, size)


@given(extents=TENSORS, size=SIZES)
def test_small_tensors_and_single_rows_stay_whole_and_there_are_fewer_cuts_than_ranks(
    extents: dict[str, Extent], size: int
) -> None:
    pieces = [rows for share in share_out(extents, size) for rows in share]
    assert len(pieces) < len(extents) + size
    for rows in pieces:
        assert is_split(extents[rows.name]) or (rows.first, rows.count) == (0, extents[rows.name].rows)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_an_embedding_that_holds_most_of_the_bytes_is_shared_out_evenly(size: int) -> None:
    numbers = random.Random(3)
    extents = {f"layer.{n}": extent(numbers.randrange(1, 200), 4000) for n in range(300)}
    extents["embedding"] = extent(1_000_000, 4096)
    loads = [bytes_of(extents, share) for share in share_out(extents, size)]
    mean = sum(loads) / size
    assert all(abs(load - mean) <= 4097 for load in loads), "a row, and a byte of rounding"


def test_tensors_as_large_as_the_threshold_are_split_and_those_below_are_not() -> None:
    assert share_out({"w": extent(4, MIB // 4)}, 2) == [[Rows("w", 0, 2)], [Rows("w", 2, 2)]]
    assert share_out({"w": extent(3, MIB // 3)}, 2) == [[Rows("w", 0, 3)], []]
    assert share_out({"w": extent(1, 10 * MIB)}, 2) == [[Rows("w", 0, 1)], []]
