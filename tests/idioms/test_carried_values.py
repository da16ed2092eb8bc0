"""What the flat loop carries from one micro-batch into the next, and into the loss, is named."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import FEATURES, Job
from script_parts import momentum_sgd, prepare
from simulation import Simulation
from torch import nn

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, inputs, hidden):
        hidden = self.cell(inputs, tuple(one.expand(len(inputs), 8) for one in hidden))
        return self.head(hidden[0]), hidden


def hidden_state(job: Job) -> None:
    """As in the language model of PyTorch's examples."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Recurrent)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            hidden = (torch.zeros(1, 8), torch.zeros(1, 8))
            for inputs, target in state.batches(loader):
                hidden = hidden[0][-1:].detach(), hidden[1][-1:].detach()
                optimizer.zero_grad()
                output, hidden = model(inputs, hidden)
                loss = F.cross_entropy(output, target)
                loss.backward()
                optimizer.step()

    train(state)


def moving_baseline(job: Job) -> None:
    """As in REINFORCE."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        baseline = 0.0
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                reward = (target == 0).float()
                (-(reward - baseline) * model(inputs).log_softmax(1)[:, 0]).mean().backward()
                baseline = 0.9 * baseline + 0.1 * reward.mean()
                optimizer.step()

    train(state)


def hidden_state_in_steps(job: Job) -> None:
    """The same with a loop over steps, where it begins anew in each step."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Recurrent)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                hidden = (torch.zeros(1, 8), torch.zeros(1, 8))
                optimizer.zero_grad()
                for inputs, target in step:
                    hidden = hidden[0][-1:].detach(), hidden[1][-1:].detach()
                    output, hidden = model(inputs, hidden)
                    F.cross_entropy(output, target).backward()
                optimizer.step()

    train(state)


def baseline_of_the_step(job: Job) -> None:
    """A baseline that moves once per step, from what all workers have recorded."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        baseline = 0.0
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                total = 0.0
                for inputs, target in step:
                    reward = (target == 0).float()
                    loss = (-(reward - baseline) * model(inputs).log_softmax(1)[:, 0]).mean()
                    loss.backward()
                    total = total + loss.item()
                    step.record(reward=reward.mean())
                baseline = 0.9 * baseline + 0.1 * step.mean("reward")
                optimizer.step()

    train(state)


def nothing_in_the_loss(job: Job) -> None:
    """Sums, means that are shown, what is computed again when a size changes, and what moves with the step."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        total, shown, mask, weight, loss = 0.0, 0.0, None, 1.0, None
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                if mask is None or len(mask) != len(inputs):
                    mask = torch.ones(len(inputs), 1)
                if loss is not None:
                    print(f"{loss:.3f} {shown:.3f}")
                loss = weight * F.cross_entropy(model(mask * inputs), target)
                loss.backward()
                total += loss.item()
                shown = 0.9 * shown + 0.1 * loss.item()
                optimizer.step()
                if optimizer.at_boundary:
                    weight = 0.9 * weight
            print(total)

    train(state)


def said(script, job: Job, size: int) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: script(job))
    return {str(warning.message) for warning in caught if "goes from each body" in str(warning.message)}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("script", "name", "loop"),
    [
        (hidden_state, "hidden", "state.batches()"),
        (moving_baseline, "baseline", "state.batches()"),
        (hidden_state_in_steps, "hidden", "the loop over a step"),
    ],
)
def test_what_goes_into_the_loss_is_named(script, name: str, loop: str, size: int) -> None:
    [message] = said(script, Job(3, samples=80), size)
    assert message.startswith(f"{name} goes from each body of {loop} into the next one, and into the loss")
    assert "4 times per optimizer step over all workers" in message


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("script", [nothing_in_the_loss, baseline_of_the_step])
def test_what_does_not_is_not_named(script, size: int) -> None:
    assert said(script, Job(3, samples=80), size) == set()


@pytest.mark.parametrize("script", [hidden_state, moving_baseline, hidden_state_in_steps])
def test_where_a_step_is_one_micro_batch_nothing_is_said(script) -> None:
    assert said(script, Job(None, samples=80), 1) == set()
