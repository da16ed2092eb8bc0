from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.rescale.partition import partition


@given(samples=st.integers(0, 500), size=st.integers(1, 12), micro_batch=st.none() | st.integers(1, 64))
def test_every_sample_is_dealt_once_and_in_order(samples, size, micro_batch):
    dealt = [part for rank in range(size) for part in partition(samples, rank, size, micro_batch)]
    assert [i for first, last in dealt for i in range(first, last)] == list(range(samples))
    assert all(first < last for first, last in dealt)


@given(samples=st.integers(1, 500), size=st.integers(1, 12), micro_batch=st.integers(1, 64))
def test_the_micro_batches_are_the_same_for_every_world(samples, size, micro_batch):
    def all_parts(size):
        return [part for rank in range(size) for part in partition(samples, rank, size, micro_batch)]

    assert all_parts(size) == all_parts(1)


@given(samples=st.integers(0, 500), size=st.integers(1, 12))
def test_an_even_split_differs_by_one_sample_at_most(samples, size):
    shares = [sum(last - first for first, last in partition(samples, rank, size)) for rank in range(size)]
    assert max(shares) - min(shares) <= 1
