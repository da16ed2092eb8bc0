"""What a script keeps in local variables of its elastic function is lost where that runs again, and it is said."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation

import edl_hvd
from edl_hvd.errors import EdlHvdWarning
from edl_hvd.worker.script_locals import SeenValue

DIES = Fault(40, worker=1, leaves=(1,))
CHANGES = Fault(30, worker=1, joins=1, politely=True)


def trained(step, model, optimizer) -> float:
    loss = torch.zeros(())
    optimizer.zero_grad()
    for inputs, target in step:
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
    optimizer.step()
    return loss.item()


def best_weights(job: Job) -> None:
    """As in PyTorch's tutorial on transfer learning."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        best_weights, best_loss = copy.deepcopy(model.state_dict()), 1e9
        for _ in state.epochs(job.epochs):
            losses = []
            for step in state.steps(loader):
                losses.append(trained(step, model, optimizer))
            if sum(losses) < best_loss:
                best_loss = sum(losses)
                best_weights = copy.deepcopy(model.state_dict())
        model.load_state_dict(best_weights)

    train(state)


def running_sum(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        seen, history, total = 0, [], torch.zeros(())
        while state.epoch < job.epochs:
            for step in state.steps(loader):
                history.append(trained(step, model, optimizer))
                seen += 1
                total += 1
            state.epoch += 1
            loader.batch_sampler.set_epoch(state.epoch)

    train(state)


def last_losses(job: Job) -> None:
    """The last losses, of which the mean decides."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        recent: deque = deque(maxlen=100)
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                recent.append(trained(step, model, optimizer))
                if sum(recent) / len(recent) < 0.1:
                    break

    train(state)


class Trainer:
    """The loop lies in a method, which the elastic function calls."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, self.optimizer, self.loader, self.state = prepare(job, momentum_sgd, Tempered)

    def fit(self, state) -> None:
        patience = 5
        for _ in state.epochs(self.job.epochs):
            for step in state.steps(self.loader):
                trained(step, self.model, self.optimizer)
            patience -= 1


def in_a_method(job: Job) -> None:
    trainer = Trainer(job)
    edl_hvd.elastic(trainer.fit)(trainer.state)


def nothing_that_counts(job: Job) -> None:
    """What is set before it is read, does not change, or is a moment."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, best=1e9)
    around = []

    with torch.inference_mode():
        scales = torch.ones(2)

    @edl_hvd.elastic
    def train(state):
        own_scales = scales  # which have no version
        around.append(own_scales)
        mean, began_s, last_s, criterion, options = 0.0, time.time(), time.time(), torch.nn.MSELoss(), {"a": 1}
        print(mean, began_s, criterion, options, sep="", end="")
        for epoch in state.epochs(job.epochs):
            total = 0.0
            for step in state.steps(loader):
                total += trained(step, model, optimizer)
                if time.time() - last_s > 0:
                    last_s = time.time()
            mean = total / len(loader)
            state.best = min(state.best, step.mean("x") if False else 1.0)
            print(mean, epoch, options, criterion, sep="", end="")

    train(state)


@pytest.mark.parametrize("fault", [DIES, CHANGES], ids=["dies", "joins"])
@pytest.mark.parametrize(
    ("script", "names"),
    [
        (best_weights, "best_weights, best_loss"),
        (running_sum, "seen, history, total"),
        (in_a_method, "patience"),
        (last_losses, "recent"),
        (nothing_that_counts, ""),
    ],
)
def test_local_variables_that_are_lost_are_said(script, names: str, fault: Fault) -> None:
    simulation = Simulation(3, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(lambda: script(Job()))
    assert len(simulation.worlds) == 2, "the fault did not come"
    said = {str(warning.message) for warning in caught if "local variables" in str(warning.message)}
    if not names:
        assert said == set()
        return
    [message] = said
    assert f"as on each worker that joins: {names}; keep in State what its loop changes, as state." in message


def test_what_the_script_lets_go_of_is_freed() -> None:
    """A first copy of the best weights may be as large as the model."""
    job, freed = Job(), []
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        best = torch.zeros(3)
        first = weakref.ref(best)
        for _ in state.epochs(job.epochs):
            best = torch.ones(3)
            freed.append(first() is None)
            for step in state.steps(loader):
                trained(step, model, optimizer)
        return best

    Simulation(1).run(lambda: train(state))
    assert freed == [True] * job.epochs


def test_without_a_change_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EdlHvdWarning)
        Simulation(2).run(lambda: best_weights(Job()))


@pytest.mark.parametrize("clock", [time.monotonic, time.perf_counter])
def test_a_sum_is_no_time_where_the_machine_is_new(clock) -> None:
    """The clock of a machine that runs for a few minutes is near the sums and counts of a script."""
    for value in (1e-4, 0, 0.0, -60.0):
        assert SeenValue.of(value).has_changed(clock()), "a sum that has come to the clock's time"
    for before in (clock(), clock() - 1.0, None):
        assert not SeenValue.of(before).has_changed(clock()), "a time that is set anew"
    assert SeenValue.of(clock()).has_changed(clock() + 100.0), "what has not come yet is no time"
    assert not SeenValue.of(0.0).has_changed(time.time() + 100.0)
