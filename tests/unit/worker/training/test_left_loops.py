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


def test_a_loop_over_a_step_that_is_closed_in_the_next_world_does_not_disturb_the_present_one() -> None:
    state, loader = make()
    with alone():
        steps = state.steps(loader)
        abandoned = iter(next(steps))
        next(abandoned)
        state._runtime.begin_attempt()  # as after a world that has broken
        for step in state.steps(loader):
            for (inputs,) in step:
                abandoned = steps = iter(())  # closed, as by a collection of garbage
                assert position.place is LoopPlace.MICRO_BATCH
                state.model(inputs).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
    assert state.step == 4


def test_an_evaluation_that_is_closed_in_the_next_world_does_not_end_the_present_one() -> None:
    sampler = edl_hvd.EvaluationSampler(4, batch_size=2)
    state = edl_hvd.State(model=torch.nn.Linear(1, 1), val_batches=sampler)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_sampler=sampler)
    with alone():
        abandoned = state.evaluate(loader)
        next(abandoned)
        state._runtime.begin_attempt()
        for _ in state.evaluate(loader):
            abandoned = iter(())
            assert position.place is LoopPlace.EVALUATION
