"""Telling a deadlock from a slow network."""

from __future__ import annotations

import pytest

from edl_hvd.deadlock import Waiting, describe_deadlock, is_deadlock


def waiting(*workers: tuple[str, dict[str, int]]) -> list[Waiting]:
    return [Waiting(rank, f"{'abcdefghijkl'[rank]}:0", *worker) for rank, worker in enumerate(workers)]


@pytest.mark.parametrize(
    ("workers", "deadlock"),
    [
        pytest.param([("A", {"A": 1}), ("B", {"B": 1})], True, id="each in its own"),
        pytest.param([("A", {"A": 3, "B": 2}), ("B", {"A": 2, "B": 3})], True, id="in another order, names of before"),
        pytest.param([("A", {"A": 1}), ("B", {"B": 1}), ("B", {"B": 1})], True, id="one of three alone"),
        pytest.param([("A", {"A": 1}), ("A", {"A": 1})], False, id="the same"),
        pytest.param([("B", {"A": 1, "B": 1}), ("A", {"A": 1})], False, id="one has what the other waits for"),
        pytest.param([("B", {"A": 1, "B": 1}), ("A", {"A": 1, "B": 1})], False, id="the same, all started beforehand"),
        pytest.param([("A", {"A": 2}), ("A", {"A": 1})], False, id="one more often: the other's may still end"),
        pytest.param([("A", {"A": 1}), ("B", {"B": 1, "C": 1}), ("C", {"B": 1, "C": 1})], True, id="all for rank 0"),
        pytest.param([("", {}), ("", {})], False, id="nobody knows"),
        pytest.param([], False, id="nobody"),
    ],
)  # fmt: skip
def test_a_deadlock_is_that_nobodys_collective_was_started_by_all(workers, deadlock):
    assert is_deadlock(waiting(*workers)) == deadlock


def test_workers_at_one_place_are_named_together_and_not_all_of_many():
    workers = [
        Waiting(rank, f"h{rank}:0", "edl_hvd.gradient.0.bias", {}, "train.py:7 in train") for rank in range(1, 11)
    ]
    alone = Waiting(0, "h0:0", "edl_hvd.max.(2, 3)", {}, "train.py:9 in report")
    text = describe_deadlock([*workers, alone], 61.3)
    assert text.startswith(
        "the workers wait for each other in different collectives, for 61 s by now (EDL_HVD_COLLECTIVE_TIMEOUT): "
        "rank 0 (h0:0) in allreduce 'max' of shape (2, 3) at train.py:9 in report; "
        "ranks 1 (h1:0), 2 (h2:0), 3 (h3:0), 4 (h4:0), 5 (h5:0), 6 (h6:0), 7 (h7:0), 8 (h8:0) and 2 more "
        "in the sum of gradients, that of '0.bias' at train.py:7 in train; every worker has to make the same "
    )
    assert text.endswith("; correct the script, then start the job again")
    assert "\n" not in text
