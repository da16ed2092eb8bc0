import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from edl_hvd.data.sampler import ElasticBatchSampler
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
    policy=st.builds(GlobalBatch, st.integers(8, 40), st.none() | st.integers(1, 8))
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
