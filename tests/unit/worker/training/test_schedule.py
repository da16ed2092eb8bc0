"""Schedulers that State moves by samples, epochs or scale-invariant steps."""

from __future__ import annotations

import pytest
import torch
from fake_world import alone
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import WorkerBatch


def make(every: str, make_scheduler=lambda o: StepLR(o, 1, 0.5), samples: int = 60, **sampler):
    model = nn.Linear(2, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    scheduler = edl_hvd.schedule(make_scheduler(optimizer), every)
    batches = edl_hvd.ElasticBatchSampler(samples, **(sampler or {"global_batch": 10}))
    loader = DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)
    return state, loader


def run(state, loader, epochs: int = 1, rates: list[float] | None = None, **arguments):
    @edl_hvd.elastic(**arguments)
    def train(state):
        for _ in state.epochs(epochs):
            for (inputs,) in state.batches(loader):
                if rates is not None:
                    rates.append(state.optimizer.param_groups[0]["lr"])
                state.optimizer.zero_grad()
                state.model(inputs).sum().backward()
                state.optimizer.step()

    with alone():
        train(state)


@pytest.mark.parametrize(
    ("every", "moves"),
    [("10 samples", 6), ("15 samples", 4), ("5 samples", 12), ("1 epoch", 1), ("0.1 epochs", 10), ("2 steps", 3)],
)
def test_a_scheduler_moves_by_what_was_trained(every, moves):
    state, loader = make(every)
    run(state, loader)
    assert state.scheduler.last_epoch == moves


def test_it_moves_between_the_steps_it_falls_between():
    rates: list[float] = []
    state, loader = make("20 samples")
    run(state, loader, rates=rates)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("batch", [4, 12, 60])
def test_the_rate_after_so_many_samples_does_not_depend_on_the_batch(batch):
    state, loader = make("1 epoch", lambda o: CosineAnnealingLR(o, 10), global_batch=batch)
    run(state, loader, epochs=3)
    expected = CosineAnnealingLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 10)
    expected.optimizer.step()
    for _ in range(3):
        expected.step()
    assert state.scheduler.last_epoch == 3
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(expected.get_last_lr()[0])


def test_an_epoch_that_ends_early_counts_as_one():
    state, loader = make("1 epoch", global_batch=10, limit_batches=2)
    run(state, loader, epochs=3)
    assert state.scheduler.last_epoch == 3


def test_scale_invariant_steps_are_counted_in_steps_of_the_scripts_own_batch(monkeypatch):
    monkeypatch.setattr("edl_hvd.worker.training.tuning.EVERY_STEPS", 10**9)
    state, loader = make("6 scale-invariant steps", policy=WorkerBatch("auto", min=5, max=15))
    state._runtime.store.learning.worker_batch = 15  # each step is worth three, by the linear rule
    run(state, loader, epochs=2)
    assert (state.step, state.scale_invariant_steps) == (8, 24)
    assert state.scheduler.last_epoch == 4


@pytest.mark.parametrize(
    "kind",
    [
        lambda o: OneCycleLR(o, max_lr=2.0, total_steps=50),
        lambda o: LambdaLR(o, lambda move: 1 / (move + 1)),
        lambda o: SequentialLR(o, [StepLR(o, 2, 0.5), CosineAnnealingLR(o, 10)], milestones=[4]),
    ],
)
def test_any_scheduler_goes_on_from_a_checkpoint(tmp_path, kind):
    whole, loader = make("10 samples", kind)
    run(whole, loader, epochs=4)
    for epochs in (2, 4):
        state, loader = make("10 samples", kind)
        run(state, loader, epochs=epochs, checkpoint=tmp_path)
    assert state.scheduler.edl_moves == 24
    assert state.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_another_interval_counts_from_the_start_of_the_run(tmp_path):
    for every, epochs, moves in (("10 samples", 1, 6), ("5 samples", 2, 24)):
        state, loader = make(every)
        run(state, loader, epochs=epochs, checkpoint=tmp_path)
        assert state.scheduler.edl_moves == moves


def test_a_script_that_moves_it_too_is_told_so():
    state, _ = make("10 samples")
    with pytest.raises(UsageError, match=r"StepLR.step\(\) was called.*every 10 samples; remove the call"):
        state.scheduler.step()


@pytest.mark.parametrize("every", ["", "10", "3 minutes", "0 samples", "1.5 samples", "auto", "-1 epochs", "x epochs"])
def test_an_interval_that_makes_no_sense_is_refused(every):
    with pytest.raises(UsageError, match="expected what a scheduler moves after"):
        make(every)


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (lambda o: ReduceLROnPlateau(o), "so not ReduceLROnPlateau"),
        (lambda o: edl_hvd.schedule(StepLR(o, 1), "1 epoch"), "scheduled already"),
        (lambda o: o, "was given SGD"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(scheduler, said):
    with pytest.raises(UsageError, match=said):
        make("1 epoch", scheduler)
