"""Numbers of modules that forward passes change, or that workers set from what only one of them has, are said once."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from idioms import Job
from script_parts import make_model, momentum_sgd, prepare
from simulation import Simulation
from torch import nn

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


class Cooled(nn.Module):
    """Its temperature falls with each forward pass; it notes how many samples it has seen."""

    rate = 0.95

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.tau = 2.0
        self.lowest = 10.0
        self.samples: int | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.samples = len(inputs)
        self.height = float(inputs.std())
        self.tau *= self.rate
        return self.body(inputs) / self.tau


class Still(Cooled):
    rate = 1.0


def in_steps(job: Job, make, behind=lambda model, loss: None) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, make)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                loss = torch.zeros(())
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                optimizer.step()
                behind(model, loss)

    train(state)


def in_batches(job: Job, make) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, make)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)


def said(size: int, script) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(script)
    return [str(warning.message) for warning in caught if "state.model" in str(warning.message)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loop", [in_steps, in_batches])
def test_a_number_that_each_forward_pass_changes_is_said_once_on_each_worker(loop, size) -> None:
    messages = [m for m in said(size, lambda: loop(Job(3), Cooled)) if "forward pass" in m]
    assert len(messages) == size
    assert all(m.startswith("state.model.tau changes with the forward pass of each micro-batch, 4 ") for m in messages)


@pytest.mark.parametrize("loop", [in_steps, in_batches])
def test_where_a_step_is_one_micro_batch_or_the_number_stays_nothing_is_said(loop) -> None:
    assert not said(1, lambda: loop(Job(12), Cooled))
    assert not said(2, lambda: loop(Job(3), Still))


def test_a_number_that_is_changed_once_per_step_is_not_said() -> None:
    def behind(model: Cooled, loss: torch.Tensor) -> None:
        model.tau *= 0.9

    assert not said(2, lambda: in_steps(Job(3), Still, behind))


def test_a_number_that_only_one_worker_has_is_said_once_on_each() -> None:
    def behind(model: Cooled, loss: torch.Tensor) -> None:
        model.lowest = min(model.lowest, float(loss.detach()))

    messages = said(2, lambda: in_steps(Job(3), Still, behind))
    assert len(messages) == 2
    assert all(m.startswith("state.model.lowest is not the same on all workers after step 1,") for m in messages)
