"""Weighted and grouped orders, and orders of one's own."""

from __future__ import annotations

from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.data.order import GroupedOrder, IndexOrder, Order, ShuffledOrder, WeightedOrder
from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import StateError, UsageError
from edl_hvd.rescale.policy import GlobalBatch, WorkerBatch


def whole(order: Order, seed: int = 0, epoch: int = 0) -> list[int]:
    return order.samples(seed, epoch, 0, order.positions)


orders = st.one_of(
    st.builds(ShuffledOrder, st.integers(1, 300)),
    st.builds(IndexOrder, st.integers(1, 300)),
    st.builds(WeightedOrder, st.lists(st.floats(0.1, 10), min_size=1, max_size=50), st.none() | st.integers(1, 200)),
    st.builds(GroupedOrder, st.lists(st.integers(-3, 3), min_size=1, max_size=100), st.integers(1, 9)),
)


@given(order=orders, data=st.data())
def test_any_stretch_of_an_order_is_that_of_the_whole(order, data):
    first = data.draw(st.integers(0, order.positions - 1))
    last = data.draw(st.integers(first + 1, order.positions))
    assert order.samples(4, 2, first, last) == whole(order, 4, 2)[first:last]


# -- weighted --


def test_each_sample_is_drawn_as_often_as_its_weight_says():
    weights = numpy.array([0, 1, 2, 0, 4, 0.5, 0])
    order = WeightedOrder(weights, draws=200_000)
    drawn = Counter(whole(order))
    assert set(drawn) == {1, 2, 4, 5}
    for index, count in drawn.items():
        share = weights[index] / weights.sum()
        assert abs(count - order.positions * share) < 5 * (order.positions * share * (1 - share)) ** 0.5


def test_an_epoch_draws_as_many_as_there_are_samples_and_others_than_the_next():
    order = WeightedOrder([1.0] * 1000)
    assert len(whole(order)) == 1000
    assert whole(order) == whole(WeightedOrder(torch.ones(1000)))
    assert len({tuple(whole(order, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    # With replacement, 1 - 1/e of them come up.
    assert 600 < len(set(whole(order))) < 665


def test_neighbouring_draws_are_not_related():
    drawn = whole(WeightedOrder([1.0] * 100, draws=100_000))
    assert abs(numpy.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / 100_000**0.5


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, -1, 2], r"weights\[1\] is -1.0"),
        ([1, float("nan")], r"weights\[1\] is nan"),
        ([float("inf")], r"weights\[0\] is inf"),
        ([0, 0], "add up to 0"),
        ([1e308, 1e308], "add up to inf"),
        ([], "one number per sample"),
        ([[1.0]], "one number per sample"),
        (["a"], "one number per sample"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, said):
    with numpy.errstate(over="ignore"), pytest.raises(UsageError, match=said):
        WeightedOrder(weights)


def test_draws_below_one_are_refused():
    with pytest.raises(UsageError, match="draws=0"):
        WeightedOrder([1.0], draws=0)


# -- grouped --


@given(
    groups=st.lists(st.integers(-5, 5), min_size=1, max_size=200),
    micro_batch=st.integers(1, 12),
    epoch=st.integers(0, 5),
)
def test_each_grouped_sample_comes_once_and_fewer_micro_batches_than_groups_are_mixed(groups, micro_batch, epoch):
    order = GroupedOrder(groups, micro_batch)
    indices = whole(order, 3, epoch)
    assert sorted(indices) == list(range(len(groups)))
    mixed = 0
    for first in range(0, len(indices), micro_batch):
        kinds = {groups[index] for index in indices[first : first + micro_batch]}
        mixed += len(kinds) > 1
        between = {group for group in groups if min(kinds) <= group <= max(kinds)}
        rests = {group for group, count in Counter(groups).items() if count % micro_batch}
        assert kinds >= between & rests or len(kinds) == 1, "a mixed micro-batch skips a group that has leftovers"
    assert mixed < max(1, len(set(groups)))


@given(groups=st.lists(st.integers(0, 3), min_size=40, max_size=200), micro_batch=st.integers(1, 10))
def test_without_leftovers_no_micro_batch_is_mixed(groups, micro_batch):
    order = GroupedOrder(groups, micro_batch, leftovers="drop")
    indices = whole(order)
    assert len(set(indices)) == len(indices)
    assert len(indices) == sum(count // micro_batch * micro_batch for count in Counter(groups).values())
    for first in range(0, len(indices), micro_batch):
        assert len({groups[index] for index in indices[first : first + micro_batch]}) == 1


def test_what_one_epoch_leaves_over_comes_in_another():
    order = GroupedOrder([0] * 7 + [1] * 9, micro_batch=4, leftovers="drop")
    seen = set().union(*(whole(order, 0, epoch) for epoch in range(20)))
    assert seen == set(range(16))


def test_groups_are_shuffled_and_so_are_their_micro_batches():
    groups = numpy.repeat(numpy.arange(10), 100)
    order = GroupedOrder(groups, micro_batch=10)
    first, second = whole(order, 0, 0), whole(order, 0, 1)
    of_batches = groups[first[::10]]
    assert len(set(of_batches[:20].tolist())) > 4  # ten groups; in their own order these would be two
    assert {frozenset(first[i : i + 10]) for i in range(0, 1000, 10)}.isdisjoint(
        {frozenset(second[i : i + 10]) for i in range(0, 1000, 10)}
    )


@given(
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=100),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    policy=st.sampled_from([GlobalBatch(12, 4), WorkerBatch(8, micro_batch=4), GlobalBatch(4, 4)]),
)
def test_micro_batches_of_one_group_stay_so_whatever_the_worlds(groups, sizes, policy):
    order = GroupedOrder(groups, 4)
    expected = {tuple(whole(order, 1, 0)[i : i + 4]) for i in range(0, len(groups), 4)}
    sampler = ElasticBatchSampler(len(groups), policy=policy, order=order, seed=1)
    dealt = []
    for turn in range(1000):
        size = sizes[turn % len(sizes)]
        steps = []
        for rank in range(size):
            sampler.set_world(rank, size)
            steps.append(next(sampler.steps(), None))
            if steps[-1]:
                batches = iter(sampler)
                dealt += [tuple(next(batches)) for _ in steps[-1].share]
        if steps[0] is None:
            break
        sampler.advance(steps[0])
    assert set(dealt) == expected
    assert len(dealt) == len(expected)


@pytest.mark.parametrize("policy", [GlobalBatch(8), GlobalBatch(8, 2), WorkerBatch(6, micro_batch=4), WorkerBatch(4)])
def test_a_policy_that_cuts_otherwise_is_refused(policy):
    with pytest.raises(UsageError, match="grouped for micro-batches of 4"):
        ElasticBatchSampler(8, policy=policy, order=GroupedOrder([0] * 8, 4))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GroupedOrder([0, 1], 0), "micro_batch=0"),
        (lambda: GroupedOrder([0, 1], 2, "keep"), "leftovers='keep'"),
        (lambda: GroupedOrder([0, 1], 2, "drop"), "none of the 2 groups"),
        (lambda: GroupedOrder([0.5, 1.0], 2), "one number per sample"),
        (lambda: GroupedOrder([], 2), "one number per sample"),
    ],
)
def test_groups_that_make_no_sense_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


# -- in the sampler --


def test_an_order_of_another_length_is_refused():
    with pytest.raises(UsageError, match="order is one of 5 samples, and the data set has 6"):
        ElasticBatchSampler(6, global_batch=2, order=WeightedOrder([1.0] * 5))


def test_an_order_without_shuffling_is_refused():
    with pytest.raises(UsageError, match="contradict"):
        ElasticBatchSampler(5, global_batch=2, order=WeightedOrder([1.0] * 5), shuffle=False)


def test_an_epoch_has_as_many_positions_as_its_order():
    sampler = ElasticBatchSampler(5, global_batch=4, order=WeightedOrder([1.0] * 5, draws=11))
    assert [step.samples for step in sampler.steps()] == [4, 4, 3]
    assert (sampler.positions, sampler.length, len(sampler)) == (11, 5, 3)


@pytest.mark.parametrize(
    "other",
    [WeightedOrder([1.0] * 7 + [2.0]), WeightedOrder([1.0] * 8, draws=9), GroupedOrder([0] * 8, 4), IndexOrder(8)],
)
def test_a_position_in_one_order_is_refused_by_another(other):
    sampler = ElasticBatchSampler(8, global_batch=4, micro_batch=4, order=WeightedOrder([1.0] * 8))
    sampler.advance(next(sampler.steps()))
    with pytest.raises(StateError, match=r"4 samples into epoch 0, belongs to the order 'weighted-1"):
        ElasticBatchSampler(8, global_batch=4, micro_batch=4, order=other).load_state_dict(sampler.state_dict())


def test_an_order_of_ones_own():
    class Backwards(Order):
        length, positions, name = 6, 6, "backwards"

        def samples(self, seed, epoch, first, last):
            return [5 - position for position in range(first, last)]

    assert list(ElasticBatchSampler(6, global_batch=4, order=Backwards())) == [[5, 4, 3, 2], [1, 0]]
