"""Variables that a loop changes through ``nonlocal`` or ``global`` begin anew on a worker that joins: it is said."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import CLASSES, Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

FAULTS = [Fault(40, worker=1, leaves=(1,), joins=1), Fault(30, worker=1, joins=1, politely=True)]

smoothing, best, width, rate = 0.3, 0.0, CLASSES, 1.0


def trained(step, model, optimizer, smoothing: float = 0.0, weight=None) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        F.cross_entropy(model(inputs), target, weight=weight, label_smoothing=smoothing).backward()
    optimizer.step()


def by_nonlocal(job: Job) -> None:
    """Smoothing that falls with the steps, and weights of classes that are made anew behind each epoch."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    eps, weight = 0.3, torch.ones(CLASSES)

    @edl_hvd.elastic
    def train(state):
        nonlocal eps, weight
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, eps, weight)
                eps *= 0.8
            weight = weight + model.head.bias.detach().abs()

    train(state)


def by_global(job: Job) -> None:
    """As in PyTorch's example of ImageNet, which has the best accuracy in a variable of the module."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        global best
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer)
            accuracy = 1.0 + best
            best = max(best, accuracy)

    train(state)


def in_a_function(job: Job) -> None:
    """Functions that the loop calls change them."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    seen = 0

    def count():
        nonlocal seen
        seen += 1

    def cool():
        global smoothing
        smoothing *= 0.9
        return smoothing

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, cool() if seen > 2 else 0.0)
                count()

    train(state)


def written_into(job: Job) -> None:
    """A tensor, and a number in a dictionary."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    options, task_weights = {"beta": 0.3, "name": "linear"}, torch.ones(2)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, options["beta"] * float(task_weights[0]))
                task_weights.mul_(0.9)
            options["beta"] *= 0.5
            options["beta"] = options["beta"] + 0.01

    train(state)


def written_into_anew(job: Job) -> None:
    """What State keeps, what is set in each epoch or each step before it is read, and what nothing reads."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, kept=torch.ones(2), counts={"steps": 0})
    moments = {"shown": time.time()}
    sums, noise, total, kept, counts = (
        {"loss": 0.0, "all": 0.0},
        torch.zeros(2),
        torch.zeros(1),
        state.kept,
        state.counts,
    )

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            sums["loss"] = 0.0
            for step in state.steps(loader):
                noise.normal_().mul_(0.1)
                trained(step, model, optimizer, 0.1 * abs(float(kept[0] + noise[0])) / (1 + counts["steps"]))
                sums["loss"] += 1.0
                sums["all"] += 1.0
                total.add_(1.0)
                kept.mul_(0.9)
                counts["steps"] += 1
            print(sums["loss"])
            if time.time() > moments["shown"] + 0.001:
                moments["shown"] = time.time()

    train(state)


def set_before_it_is_read(job: Job) -> None:
    """What is set from the number of the step, from the time, or from nothing else than State; and what stays."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, eps=0.3)
    last, accuracy, history = 0.0, 0.0, []

    def choose(number: int) -> float:
        global rate
        rate = 0.3 / (1 + number)
        return rate

    @edl_hvd.elastic
    def train(state):
        nonlocal last, accuracy
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer, choose(step.number) if width else rate)
                if time.time() > last + 0.001:
                    last = time.time()
                history.append(state.eps)
                state.eps *= 0.9
            accuracy = float(model.head.bias.detach().sum())
            print(accuracy)

    train(state)


def said(script, fault: Fault | None) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(2, fault).run(lambda: script(Job(epochs=3)))
    return {str(warning.message) for warning in caught if "nonlocal or global" in str(warning.message)}


@pytest.mark.parametrize("fault", FAULTS, ids=["one dies, and another joins", "joins"])
@pytest.mark.parametrize(
    ("script", "names"),
    [
        (by_nonlocal, "eps, weight"),
        (by_global, "best"),
        (in_a_function, "seen, smoothing"),
        (set_before_it_is_read, ""),
        (written_into, "options, task_weights"),
        (written_into_anew, ""),
    ],
)
def test_what_a_loop_changes_around_its_function_is_named(script, names: str, fault: Fault) -> None:
    found = said(script, fault)
    if not names:
        assert found == set()
        return
    assert found
    assert all(f"where a step is made again: {names}; keep in State" in message for message in found)


def test_nothing_is_said_where_no_world_changes() -> None:
    assert said(by_nonlocal, None) == set()
