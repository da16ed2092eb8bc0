"""What modules and objects outside State remember of the training is said once the first epoch is over."""

from __future__ import annotations

import copy
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import CLASSES, FEATURES, Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import EdlHvdWarning, UsageError


def said(script, fault: Fault | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(2, fault).run(lambda: script(Job(epochs=3)))
    return sorted({str(warning.message) for warning in caught if "is not in State" in str(warning.message)})


def trained(step, model, optimizer, criterion) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        criterion(model(inputs), target).backward()
    optimizer.step()


def falling_smoothing(job: Job, **kept) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.3)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, criterion)
            criterion.label_smoothing *= 0.7

    train(state)


class Centered(nn.Module):
    """A loss with a center, as that of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output - self.center, target)

    @torch.no_grad()
    def move(self, center: torch.Tensor) -> None:
        self.center = self.center * 0.9 + center * 0.1


def centered(job: Job, is_kept: bool = False) -> None:
    criterion = Centered()
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **({"loss": criterion} if is_kept else {}))

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, criterion)
                criterion.move(model.head.bias.detach())

    train(state)


def centered_in_state(job: Job) -> None:
    centered(job, is_kept=True)


class Ensemble:
    """Predictions of each sample that the loss remembers, as in temporal ensembling."""

    def __init__(self, samples: int) -> None:
        self.target = torch.zeros(samples, CLASSES)

    def __call__(self, output: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        self.target[places] = 0.7 * self.target[places] + 0.3 * output.detach().softmax(1)
        return (output.softmax(1) - self.target[places]).square().mean()


def ensembled(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    dataset = TensorDataset(job.inputs, job.target, torch.arange(job.samples))
    loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)
    consistency = Ensemble(job.samples)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target, places in step:
                    output = model(inputs)
                    (F.cross_entropy(output, target) + consistency(output, places)).backward()
                optimizer.step()

    train(state)


class RunningMeans:
    """As in libraries of reinforcement learning, in NumPy."""

    def __init__(self) -> None:
        self.mean, self.count = numpy.zeros(FEATURES), 1e-4

    def update(self, inputs: numpy.ndarray) -> None:
        self.count += len(inputs)
        self.mean = self.mean + (inputs.mean(0) - self.mean) * len(inputs) / self.count

    def normalised(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - torch.from_numpy(self.mean).float()


def normalised(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    means = RunningMeans()

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                means.update(inputs.numpy())
                optimizer.zero_grad()
                F.cross_entropy(model(means.normalised(inputs)), target).backward()
                optimizer.step()

    train(state)


class Accuracy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.right += (output.argmax(1) == target).sum()


def measured(job: Job) -> None:
    """What only measures, and modules that nothing changes, are not named."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    accuracy, teacher, scratch = Accuracy(), copy.deepcopy(model).eval(), [torch.zeros(2), 0]
    table = torch.zeros(CLASSES)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    output = model(inputs)
                    (F.cross_entropy(output, target) + F.mse_loss(output, teacher(inputs).detach())).backward()
                    accuracy(output, target)
                    scratch[0] = scratch[0] + 1
                    table[target] = 1.0
                optimizer.step()

    train(state)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (falling_smoothing, "criterion.label_smoothing"),
        (centered, "criterion.center"),
        (ensembled, "consistency.target"),
        (normalised, "means.mean"),
    ],
)
@pytest.mark.parametrize("fault", [None, Fault(5, worker=1, joins=1, politely=True)], ids=["no change", "joins"])
def test_a_memory_outside_state_is_named(script, name: str, fault: Fault | None) -> None:
    [message] = said(script, fault)
    assert message.startswith(f"{name} has changed in the training and is not in State: each worker has its own")


@pytest.mark.parametrize("script", [centered_in_state, measured])
def test_what_state_keeps_or_what_only_measures_is_not_named(script) -> None:
    assert not said(script)


def test_a_step_that_takes_no_closure_is_called_without_one() -> None:
    """As people write optimizers by hand, such as Muon."""

    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad.sign())

    def script(job: Job) -> nn.Module:
        model, optimizer, loader, state = prepare(job, lambda model: Signs(model.parameters()), Tempered)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for step in state.steps(loader):
                    trained(step, model, optimizer, F.cross_entropy)

        train(state)
        return model

    [expected] = Simulation(1).run(lambda: script(Job()))
    for model in Simulation(2, Fault(5, worker=1, joins=1, politely=True)).run(lambda: script(Job())):
        for here, there in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(here, there)


def test_an_embedding_that_divides_by_frequency_is_refused() -> None:
    def script(job: Job) -> None:
        embedding = nn.Embedding(CLASSES, 4, scale_grad_by_freq=True)
        model, optimizer, loader, state = prepare(job, momentum_sgd, lambda: nn.Sequential(embedding))

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for step in state.steps(loader):
                    trained(step, model, optimizer, F.cross_entropy)

        train(state)

    with pytest.raises(UsageError, match=r"state\.model\.0 is an Embedding with scale_grad_by_freq=True: it divides"):
        Simulation(1).run(lambda: script(Job()))
