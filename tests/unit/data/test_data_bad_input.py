"""Loader, sampler, data set and checkpoint that do not fit together: one error each, with what to do."""

from __future__ import annotations

import pytest
import torch
from fake_world import alone
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import edl_hvd
from edl_hvd.errors import StateError, UsageError


def make(samples=20, dataset_samples=None, **arguments):
    model = torch.nn.Linear(1, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(samples, global_batch=8, **arguments)
    loader = DataLoader(TensorDataset(torch.zeros(dataset_samples or samples, 1)), batch_sampler=batches)
    return edl_hvd.State(model=model, optimizer=optimizer, batches=batches), loader


@pytest.mark.parametrize("name", ["global_batch", "micro_batch"])
def test_a_batch_that_is_set_on_the_sampler_says_how_to_change_it(name):
    state, loader = make()
    batches = loader.batch_sampler
    setattr(batches, name, 4)
    with alone(), pytest.raises(UsageError, match=rf"{name} of the sampler was set to a number.*expected a new policy"):
        next(state.batches(loader))
    delattr(batches, name)
    batches.policy = edl_hvd.GlobalBatch(4)
    with alone():
        assert len(next(state.batches(loader))[0]) == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(20, 1))


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda dataset: DataLoader(dataset, batch_size=4),
        lambda dataset: DataLoader(dataset, batch_size=None),
        lambda dataset: DataLoader(dataset, batch_sampler=edl_hvd.ElasticBatchSampler(20, global_batch=8)),
    ],
)
def test_a_loader_that_does_not_use_the_sampler(make_loader):
    state, loader = make()
    with alone(), pytest.raises(UsageError, match=r"expected one sampler, given to both: DataLoader\(dataset, batch_"):
        next(state.batches(make_loader(loader.dataset)))


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_iterable_data_set(batch_size):
    state, _ = make()
    with alone(), pytest.raises(UsageError, match=r"of Stream, an IterableDataset, .* edl_hvd\.ElasticShards"):
        next(state.batches(DataLoader(Stream(), batch_size=batch_size)))


@pytest.mark.parametrize("samples", [19, 21])
def test_a_data_set_of_another_length_than_the_sampler(samples):
    state, loader = make(20, samples)
    with alone(), pytest.raises(UsageError, match=f"data set has {samples} samples, and its batch_sampler deals 20"):
        next(state.batches(loader))


def test_a_data_set_that_does_not_know_its_length_is_taken():
    class Unsized:
        def __getitem__(self, index):
            return torch.zeros(1)

    state, loader = make()
    with alone():
        assert len(next(state.batches(DataLoader(Unsized(), batch_sampler=loader.batch_sampler)))) == 8


def test_a_data_set_whose_length_changed_since_the_checkpoint(tmp_path):
    def train(samples, limit):
        state, loader = make(samples)

        @edl_hvd.elastic(checkpoint=str(tmp_path), checkpoint_every="1 steps")
        def run(state):
            for _ in state.epochs(1):
                for (inputs,) in state.batches(loader):
                    state.optimizer.zero_grad()
                    state.model(inputs).sum().backward()
                    state.optimizer.step()
                    if state.step >= limit:
                        return

        with alone():
            run(state)

    train(20, limit=1)
    with pytest.raises(StateError, match=r"20 samples in the order of seed 0, this sampler has 24[\s\S]*same data set"):
        train(24, limit=10)


def test_a_global_batch_that_is_no_multiple_of_the_micro_batch():
    with pytest.raises(UsageError, match="the nearest are a micro batch of 2 or 4, or a global batch of 6 or 9"):
        make(micro_batch=3)
