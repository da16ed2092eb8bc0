"""A loop over batches that was left, and that Python closes while another one is under way."""

from __future__ import annotations

import torch
from fake_world import alone
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.worker.position import LoopPlace, position


def make() -> tuple[edl_hvd.State, DataLoader]:
    model = torch.nn.Linear(1, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = edl_hvd.ElasticBatchSampler(16, global_batch=4, micro_batch=4)
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_sampler=batches)
    return edl_hvd.State(model=model, optimizer=optimizer, batches=batches), loader


def test_a_loop_that_is_closed_late_does_not_disturb_another_one() -> None:
    left, loader = make()
    present, others = make()
    with alone():
        abandoned = left.batches(loader)
        next(abandoned)
        for number, (inputs,) in enumerate(present.batches(others)):
            present.optimizer.zero_grad()
            present.model(inputs).sum().backward()
            if number == 1:
                del abandoned  # closed, as by a collection of garbage
            present.optimizer.step()
    assert present.step == 4
    assert position.place is LoopPlace.OUTSIDE
