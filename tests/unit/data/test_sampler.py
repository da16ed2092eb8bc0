import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from edl_hvd.data.sampler import BatchIndices, ElasticBatchSampler
from edl_hvd.errors import StateError, UsageError
from edl_hvd.rescale.policy import GlobalBatch, WorkerBatch


def consume(sampler: ElasticBatchSampler, sizes: list[int], steps_each: int) -> list[int]:
    """The indices of one epoch in a world that changes its size every few steps, in the order consumed."""
    seen: list[int] = []
    while True:
        for size in sizes:
            for _ in range(steps_each):
                of_step = []
                for rank in range(size):
                    sampler.set_world(rank, size)
                    step = next(sampler.steps(), None)
                    if step is None:
                        return seen
                    batches = iter(sampler)
                    of_step += [index for _ in step.share for index in next(batches)]
                seen += of_step
                sampler.advance(step)


@given(
    length=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    policy=st.builds(GlobalBatch, st.integers(8, 40))
    | st.builds(lambda parts, micro_batch: GlobalBatch(parts * micro_batch, micro_batch), *[st.integers(1, 8)] * 2)
    | st.builds(WorkerBatch, st.integers(1, 20)),
)
def test_every_sample_counts_once_whatever_the_sequence_of_worlds(length, sizes, policy):
    sampler = ElasticBatchSampler(length, policy=policy, seed=3)
    seen = consume(sampler, sizes, steps_each=2)
    assert sorted(seen) == list(range(length))


def test_the_order_of_samples_does_not_depend_on_the_world():
    orders = [consume(ElasticBatchSampler(100, global_batch=16, seed=5), sizes, 1) for sizes in ([1], [3, 2], [8])]
    assert orders[0] == orders[1] == orders[2]


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        sampler = ElasticBatchSampler(50, global_batch=50, seed=seed)
        sampler.set_epoch(epoch)
        return next(iter(sampler))

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_without_shuffle_samples_come_in_index_order():
    assert [i for batch in ElasticBatchSampler(10, global_batch=4, shuffle=False) for i in batch] == list(range(10))


def test_fewer_samples_left_than_workers_are_dealt_to_some():
    shares = []
    for rank in range(4):
        sampler = ElasticBatchSampler(10, global_batch=8)
        sampler.set_world(rank, 4)
        shares.append([len(step.share) for step in sampler.steps()])
    assert [share[0] for share in shares] == [1, 1, 1, 1]
    assert sum(share[1] for share in shares) == 2  # the 2 samples left go to 2 of the 4 workers


def test_drop_last_leaves_out_the_short_batch_also_after_a_resize():
    sampler = ElasticBatchSampler(23, policy=WorkerBatch(4), drop_last=True)
    sampler.set_world(0, 2)
    sampler.advance(next(sampler.steps()))
    sampler.set_world(0, 1)
    assert [step.samples for step in sampler.steps()] == [4, 4, 4]


def test_drop_last_leaves_out_other_samples_in_each_epoch():
    sampler = ElasticBatchSampler(23, global_batch=4, drop_last=True)
    seen = set()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        of_epoch = [index for batch in sampler for index in batch]
        assert len(of_epoch) == len(set(of_epoch)) == 20
        seen |= set(of_epoch)
    assert seen == set(range(23))


def test_drop_last_that_leaves_nothing_is_refused():
    with pytest.raises(UsageError, match="drop_last leaves nothing of 7 samples in batches of 8"):
        ElasticBatchSampler(7, global_batch=8, drop_last=True)


@given(
    length=st.integers(1, 100),
    policy=st.builds(GlobalBatch, st.integers(1, 40)),
    size=st.integers(1, 6),
    drop_last=st.booleans(),
    limit=st.none() | st.integers(1, 5),
)
def test_the_length_is_the_number_of_steps_of_an_epoch_in_every_world(length, policy, size, drop_last, limit):
    drop_last = drop_last and length >= policy.size
    sampler = ElasticBatchSampler(length, policy=policy, drop_last=drop_last, limit_batches=limit)
    sampler.set_world(size - 1, size)
    steps = list(sampler.steps())
    assert len(sampler) == sampler.steps_per_epoch == len(steps)
    for step in steps:
        sampler.advance(step)
        assert len(sampler) == len(steps)
    assert len(DataLoader(range(length), batch_sampler=sampler)) == len(steps)


def test_how_many_steps_an_epoch_has_is_not_known_where_it_depends_on_the_world():
    sampler = ElasticBatchSampler(100, policy=WorkerBatch(4))
    with pytest.raises(UsageError, match=r"depends on the number of workers with WorkerBatch.*edl_hvd\.schedule"):
        len(sampler)
    assert list(sampler), "a length that is not known is none to Python"


def test_a_billion_samples_take_no_memory_and_no_way_to_their_middle():
    tracemalloc.start()
    sampler = ElasticBatchSampler(1_300_000_000, global_batch=1024, micro_batch=64)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "offset": 650_000_384})
    sampler.set_world(1, 3)
    batch = next(iter(sampler))
    length = len(sampler)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(batch)) == 64
    assert max(batch) > 650_000_000
    assert length == 1_269_532
    assert peak_bytes < 1_000_000


def test_limit_batches_ends_the_epoch_early():
    sampler = ElasticBatchSampler(100, global_batch=10, limit_batches=3)
    assert [step.samples for step in sampler.steps()] == [10, 10, 10]
    assert sampler.epoch_samples() == 30


def test_what_a_loader_prefetches_is_not_consumed():
    sampler = ElasticBatchSampler(64, global_batch=8)
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_sampler=sampler, num_workers=2, prefetch_factor=4)
    next(iter(loader))
    assert sampler.state_dict()["offset"] == 0


def test_a_position_is_refused_by_another_data_set():
    state = ElasticBatchSampler(64, global_batch=8, seed=1).state_dict()
    with pytest.raises(StateError, match="64 samples in the order of seed 1, this sampler has 65 samples"):
        ElasticBatchSampler(65, global_batch=8, seed=1).load_state_dict(state)


def test_a_position_in_the_order_of_an_older_release_is_refused_inside_an_epoch():
    """Before orders had names, they were those of torch.randperm."""
    saved = {"epoch": 2, "offset": 8, "seed": 1, "length": 64}
    sampler = ElasticBatchSampler(64, global_batch=8, seed=1)
    with pytest.raises(StateError, match=r"8 samples into epoch 2, belongs to the order 'torch.randperm'"):
        sampler.load_state_dict(saved)
    assert (sampler.epoch, sampler.offset) == (0, 0)
    sampler.load_state_dict({**saved, "offset": 0})
    assert (sampler.epoch, sampler.offset) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"length": 0, "global_batch": 8}, "0 samples"),
        ({"length": 8}, "batch size is not clear"),
        ({"length": 8, "global_batch": 8, "policy": GlobalBatch(8)}, "batch size is not clear"),
        ({"length": 8, "policy": GlobalBatch(8), "micro_batch": 2}, "batch size is not clear"),
        ({"length": 8, "global_batch": 8, "limit_batches": 0}, "limit_batches is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        ElasticBatchSampler(**arguments)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("size", "repeated", "expected"),
    [(1, 12, [12, *[4] * 8, 1]), (2, 12, [12, 8, 8, 8, 8, 1]), (3, 8, [8, 12, 12, 12, 1])],
)
def test_a_step_that_was_made_in_another_world_is_dealt_again_as_large_as_it_was(size, repeated, expected, drop_last):
    for rank in range(size):
        sampler = ElasticBatchSampler(50, policy=WorkerBatch(4), drop_last=drop_last)
        sampler.set_world(rank, size)
        sampler.offset = 5
        sampler.repeat(repeated)
        steps = list(sampler.steps())
        assert [step.samples for step in steps] == expected[: -1 if drop_last else None]
        sampler.advance(steps[0])
        assert list(sampler.steps()) == steps[1:]


def test_micro_batches_are_named_without_their_indices_as_they_are_dealt() -> None:
    for rank, size, drop_last in ((0, 1, False), (1, 3, False), (2, 3, True)):
        sampler = ElasticBatchSampler(103, global_batch=12, micro_batch=2, seed=5, drop_last=drop_last)
        sampler.set_world(rank, size)
        sampler.epoch, sampler.offset = 2, 24
        batches, dealt = list(sampler), list(sampler.dealt())
        assert [one.indices() for one in dealt] == batches
        for one, indices in zip(dealt, batches, strict=True):
            assert isinstance(indices, BatchIndices)
            named = (indices.seed, indices.epoch, indices.position, len(indices), indices.order)
            assert (one.seed, one.epoch, one.position, one.samples, one.order.name) == named
