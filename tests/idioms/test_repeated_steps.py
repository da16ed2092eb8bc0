"""A step that is made again, in another world, has a top that runs again; what it changes counts once."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job, differences
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

ONCE = (4,)  # steps; the commit before it holds neither weights nor momentum


@torch.no_grad()
def weights(model, average, optimizer) -> None:
    model.head.weight.mul_(0.5)
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 0.5)


def momentum(model, average, optimizer) -> None:
    for kept in optimizer.state.values():
        kept["momentum_buffer"].mul_(0.5)


def momentum_replaced(model, average, optimizer) -> None:
    for kept in optimizer.state.values():
        kept["momentum_buffer"] = kept["momentum_buffer"] * 0.5


def plain(job: Job, change, steps) -> dict:
    model = Tempered()
    average = copy.deepcopy(model)
    optimizer = momentum_sgd(model)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            if number in steps:
                change(model, average, optimizer)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
    return {"model": model, "average": average, "optimizer": optimizer}


def ours(job: Job, change, steps) -> dict:
    model = Tempered()
    average = copy.deepcopy(model).requires_grad_(False)
    _, optimizer, loader, state = prepare(job, momentum_sgd, lambda: model, average=average)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                if step.number in steps:
                    change(model, average, optimizer)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "average": average, "optimizer": optimizer}


def check(change, steps, joins: int, at: range) -> None:
    job = Job(samples=120)
    torch.manual_seed(0)
    expected = plain(job, change, steps)
    for collective in at:
        simulation = Simulation(3, Fault(collective, worker=1, leaves=(1,), joins=joins))
        with warnings.catch_warnings():
            warnings.simplefilter("error", EdlHvdWarning)
            outcomes = simulation.run(lambda: ours(job, change, steps))
        assert len(simulation.worlds) == 2, "the fault did not come"
        for outcome in outcomes:
            assert not differences(outcome, expected, 1e-5), collective


@pytest.mark.parametrize("joins", [0, 1])
@pytest.mark.parametrize("change", [weights, momentum, momentum_replaced])
def test_what_the_top_of_a_step_changes_once_counts_once(change, joins: int) -> None:
    check(change, ONCE, joins, range(22, 46, 3))


@pytest.mark.parametrize("change", [weights, momentum, momentum_replaced])
def test_what_the_top_of_every_step_changes_counts_once(change) -> None:
    check(change, range(20), 1, range(12, 56, 8))


def test_what_is_changed_between_two_loops_over_a_step_cannot_be_undone_and_is_said() -> None:
    def script() -> None:
        model, optimizer, loader, state = prepare(Job(samples=120), momentum_sgd, Tempered)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for _ in range(2):
                        for inputs, target in step:
                            F.cross_entropy(model(inputs), target).backward()
                        if step.number == 3:
                            weights(model, model, optimizer)
                    optimizer.step()

        train(state)

    said = []
    for collective in range(32, 58, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EdlHvdWarning)
            Simulation(3, Fault(collective, worker=1, leaves=(1,))).run(script)
        said += {str(warning.message) for warning in caught}
    assert said, "no fault came between the change and the optimizer's step"
    assert all(message.startswith("the script has changed state.model.") for message in said)
    assert all("the step that is made again changes it twice; change weights behind" in message for message in said)
