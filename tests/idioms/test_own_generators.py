"""A random generator of the script's own that is not in State is named once the first epoch has drawn from it."""

from __future__ import annotations

import random
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Simulation
from torch.utils.data import DataLoader, Dataset

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


def script_of(generator, draw, level: str = "step", is_kept: bool = False, before=lambda number: None):
    """A script that scales its inputs by a number that it draws.

    Args:
        generator: Its generator.
        draw: Gives a number.
        level: Where it draws: "step", "micro-batch", or "epoch".
        is_kept: Whether State has the generator.
        before: Called at the top of each epoch with its number.
    """

    def script(job: Job) -> None:
        rng = generator
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **({"rng": rng} if is_kept else {}))

        @edl_hvd.elastic
        def train(state):
            for epoch in state.epochs(job.epochs):
                before(epoch)
                scale = draw(rng)
                for step in state.steps(loader):
                    scale = draw(rng) if level == "step" else scale
                    optimizer.zero_grad()
                    for inputs, target in step:
                        scale = draw(rng) if level == "micro-batch" else scale
                        F.cross_entropy(model(inputs * scale), target).backward()
                    optimizer.step()

        train(state)

    return script


def seeded_in_each_epoch(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    rng = torch.Generator()

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            rng.manual_seed(epoch)
            order = torch.randperm(5, generator=rng)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs * (1 + order[0])), target).backward()
                optimizer.step()

    train(state)


def of_a_loader(job: Job) -> None:
    """As PyTorch's notes on reproducibility have it."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    g = torch.Generator()
    g.manual_seed(0)
    loader = DataLoader(job.dataset(), batch_sampler=loader.batch_sampler, generator=g)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs * (1 + order[0])), target).backward()
                optimizer.step()
            print(g.initial_seed())

    train(state)


class Noisy(Dataset):
    """With a generator of its own."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.target, self.rng = job.inputs, job.target, numpy.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int):
        return self.inputs[place] + float(self.rng.normal()), self.target[place]


def of_a_data_set(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    dataset = Noisy(job)
    loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            print(len(dataset))

    train(state)


def exploring(job: Job) -> None:
    """A loop of its own, whose workers are to draw different numbers."""
    model = Tempered()
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters())
    state = edl_hvd.State(model=model, optimizer=optimizer)
    rng = numpy.random.default_rng(edl_hvd.rank())

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(job.inputs * rng.uniform()), job.target).backward()
                optimizer.step()
                state.commit()

    train(state)


def said(script, size: int = 2) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: script(Job()))
    return {str(warning.message) for warning in caught if "has been drawn from" in str(warning.message)}


KINDS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda rng: torch.rand((), generator=rng)),
    "numpy": (lambda: numpy.random.default_rng(0), lambda rng: rng.uniform()),
    "old numpy": (lambda: numpy.random.RandomState(0), lambda rng: rng.uniform()),
    "random": (lambda: random.Random(0), lambda rng: rng.random()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["epoch", "step", "micro-batch"])
def test_a_generator_that_state_does_not_keep_is_named(kind: str, level: str) -> None:
    make, draw = KINDS[kind]
    [message] = said(script_of(make(), draw, level))
    assert message.startswith("rng has been drawn from in the training and is not in State")
    assert "draw from torch, numpy or random themselves" in message


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_state_keeps_is_not(kind: str) -> None:
    make, draw = KINDS[kind]
    for size in (1, 2):
        assert said(script_of(make(), draw, is_kept=True), size) == set()


@pytest.mark.parametrize("script", [seeded_in_each_epoch, of_a_loader, exploring])
def test_one_that_is_seeded_in_the_loop_is_a_loaders_or_explores_is_not(script) -> None:
    assert said(script) == set()


def test_that_of_a_data_set_is() -> None:
    [message] = said(of_a_data_set)
    assert message.startswith("dataset.rng has been drawn from")


def test_one_that_is_not_drawn_from_is_not() -> None:
    assert said(script_of(random.Random(0), lambda rng: 1.0)) == set()
