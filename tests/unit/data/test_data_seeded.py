"""What is random in a sample follows the sample: not the rank, not the loader's process, not what was loaded before."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import edl_hvd
from edl_hvd.data.order import Order
from edl_hvd.data.sampler import BatchIndices
from edl_hvd.errors import UsageError

SAMPLES, EPOCHS = 23, 2


class Noisy(Dataset):
    """Draws from all three generators, and more the first time that a process sees a sample, as caches do."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        sample = index, torch.rand(2, dtype=torch.float64), random.random(), numpy.random.rand()
        if index not in self.seen:
            self.seen.add(index)
            torch.rand(3), random.random(), numpy.random.rand()
        return sample


def mixing(samples):
    """As MixUp does: what is drawn belongs to the batch."""
    return [*default_collate(samples), torch.rand(1), random.random(), numpy.random.rand()]


def epochs_of(size, epochs=EPOCHS, order=None, seed=3, **options):
    """Of each epoch, all micro-batches of a world by their first position; every rank with a loader of its own."""
    found = [{} for _ in range(epochs)]
    for rank in range(size):
        sampler = edl_hvd.ElasticBatchSampler(SAMPLES, global_batch=8, micro_batch=4, seed=seed, order=order)
        sampler.set_world(rank, size)
        loader = DataLoader(edl_hvd.SeededDataset(Noisy()), batch_sampler=sampler, collate_fn=mixing, **options)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            places = [step.offset + first for step in sampler.steps() for first, _ in step.share]
            found[epoch] |= dict(zip(places, loader, strict=True))
    return found


def raw(epochs):
    """Everything drawn, as bytes."""
    numbers = [(epoch, place, [torch.as_tensor(value, dtype=torch.float64).numpy().tobytes() for value in batch])
               for epoch, batches in enumerate(epochs) for place, batch in sorted(batches.items())]  # fmt: skip
    return pickle.dumps(numbers)


@pytest.fixture(scope="module")
def alone():
    """One worker without loader processes."""
    return epochs_of(size=1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("processes", [0, 2])
def test_the_same_bytes_for_each_world_with_processes_that_live_on_and_prefetch(alone, size, processes):
    options = {"num_workers": processes, "persistent_workers": True, "prefetch_factor": 3} if processes else {}
    assert raw(epochs_of(size, **options)) == raw(alone)


def test_neither_the_past_of_a_process_nor_its_seed_matters(alone):
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    assert raw(epochs_of(size=1)) == raw(alone)


def test_each_sample_epoch_and_seed_draws_its_own(alone):
    other = epochs_of(size=1, seed=4)
    drawn = [tuple(sample) for epochs in (alone, other) for batches in epochs for batch in batches.values()
             for sample in batch[1].tolist()]  # fmt: skip
    assert len(drawn) == 2 * EPOCHS * SAMPLES
    assert len(set(drawn)) == len(drawn)
    of_batches = [batch[-3].item() for batches in alone for batch in batches.values()]
    assert len(set(of_batches)) == len(of_batches)


def test_a_sample_that_is_drawn_twice_in_an_epoch_has_numbers_of_its_own_each_time():
    order = edl_hvd.WeightedOrder([1.0] + [0.0] * (SAMPLES - 1))
    (batches,) = epochs_of(1, epochs=1, order=order)
    assert {index for batch in batches.values() for index in batch[0].tolist()} == {0}
    assert len({value for batch in batches.values() for value in batch[2].tolist()}) == SAMPLES


def test_the_numbers_of_a_sample_do_not_depend_on_its_place():
    """Another batch size puts it next to others; another order elsewhere."""

    class Backwards(Order):
        length, positions, name = SAMPLES, SAMPLES, "backwards"

        def samples(self, seed, epoch, first, last):
            return [SAMPLES - 1 - position for position in range(first, last)]

    def by_sample(order):
        (batches,) = epochs_of(1, epochs=1, order=order)
        return {
            int(i): value for batch in batches.values() for i, value in zip(batch[0], batch[2].tolist(), strict=True)
        }

    assert by_sample(None) == by_sample(Backwards())


def test_no_gpu_is_touched(monkeypatch):
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds the GPUs"))
    epochs_of(1, epochs=1)


def test_indices_say_whose_they_are_after_a_journey_to_another_process():
    sampler = edl_hvd.ElasticBatchSampler(SAMPLES, global_batch=8, seed=3)
    sampler.set_epoch(5)
    indices = pickle.loads(pickle.dumps(next(iter(sampler))))
    assert isinstance(indices, BatchIndices)
    assert indices == next(iter(sampler))
    assert (indices.seed, indices.epoch, indices.position, indices.order) == (3, 5, 0, "feistel-1")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_loader_that_does_not_use_the_sampler_is_told_so(processes):
    loader = DataLoader(edl_hvd.SeededDataset(Noisy()), batch_size=4, num_workers=processes)
    with pytest.raises(UsageError, match=r"given a list of 4 indices[\s\S]*batch_sampler=batches"):
        next(iter(loader))


def test_a_single_index_is_told_so():
    with pytest.raises(UsageError, match="given the index 3, which says nothing of seed and epoch"):
        edl_hvd.SeededDataset(Noisy())[3]
