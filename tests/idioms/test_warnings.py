"""What is no error, since it may be meant, is said once."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.steps import make_model
from idioms import Job
from simulation import Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


def counted_by_hand(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        global_step = 0
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                global_step += 1

    train(state)


def counted_by_enumerate(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    printed = []

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for i, (inputs, target) in enumerate(state.batches(loader)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if i % 2 == 0:
                    printed.append(i)

    train(state)


def said_about_counters(script, job: Job, size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: script(job))
    return [str(warning.message) for warning in caught if "rises by one" in str(warning.message)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("script", "name"), [(counted_by_hand, "global_step"), (counted_by_enumerate, "i")])
def test_a_counter_of_bodies_is_said_once_on_each_worker(script, name, size):
    said = said_about_counters(script, Job(3), size)
    assert len(said) == size
    assert all(message.startswith(f"{name} rises by one in each body of state.batches()") for message in said)
    assert all("state.step" in message for message in said)


def test_where_a_step_is_one_micro_batch_a_counter_counts_steps():
    assert not said_about_counters(counted_by_hand, Job(12), 1)
