"""Numbers that a script counts on objects of its own, outside State, begin anew on a worker that joins: it is said."""

from __future__ import annotations

import argparse
import time
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch import nn

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

DIES = Fault(40, worker=1, leaves=(1,))
CHANGES = Fault(30, worker=1, joins=1, politely=True)


def train_step(step, model, optimizer, weight=1.0) -> float:
    optimizer.zero_grad()
    loss = torch.zeros(())
    for inputs, target in step:
        loss = F.cross_entropy(model(inputs), target) * weight
        loss.backward()
    optimizer.step()
    return loss.item()


class Trainer:
    """Weighs its loss by a count of its own."""

    def __init__(self, job: Job, **kept) -> None:
        self.job, self.global_step, self.seen = job, 0, 0
        self.model, self.optimizer, self.loader, self.state = prepare(job, momentum_sgd, Tempered, **kept)

    def weight(self) -> float:
        return min(1.0, self.global_step / 12)

    def fit(self, state) -> None:
        for _ in state.epochs(self.job.epochs):
            for step in state.steps(self.loader):
                train_step(step, self.model, self.optimizer, self.weight())
                self.global_step += 1
                self.seen += 1  # which nothing reads


def in_a_trainer(job: Job) -> None:
    trainer = Trainer(job)
    edl_hvd.elastic(trainer.fit)(trainer.state)


def in_a_trainer_by_name(job: Job) -> None:
    trainer = Trainer(job)

    @edl_hvd.elastic
    def train(state):
        trainer.fit(state)

    train(trainer.state)


class RunningMean:
    count = 1e-4

    def __init__(self) -> None:
        self.mean, self.least = torch.zeros(2), numpy.zeros(2)

    def update(self, inputs: torch.Tensor) -> None:
        total = self.count + len(inputs)
        self.mean = self.mean + (inputs.mean(0) - self.mean) * len(inputs) / total
        numpy.minimum(self.least, inputs.numpy().min(0), out=self.least)
        self.least *= 1
        self.count = total


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.running, self.inputs = 1.0, RunningMean()

    def move(self, loss: float) -> float:
        self.running = 0.9 * self.running + 0.1 * loss
        return self.running


def in_other_objects(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    criterion = Criterion()

    def one(step) -> None:
        train_step(step, model, optimizer)
        criterion.inputs.update(torch.full((3, 2), -float(step.number)))
        criterion.move(float(step.number))

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                one(step)

    train(state)


class EarlyStopping:
    def __init__(self) -> None:
        self.best = 1e9

    def is_over(self, loss: float) -> bool:
        if loss < self.best:
            self.best = loss
        return self.best < 0

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, saved: dict) -> None:
        self.best = saved["best"]


class Stopper:
    """As on GitHub: the best score is None at first. Another number is computed when it is needed, once."""

    def __init__(self) -> None:
        self.best_score: float | None = None
        self.size: int | None = None

    def __call__(self, score: float) -> bool:
        if self.size is None:
            self.size = 3
        if self.best_score is None:
            self.best_score = score
        elif score > self.best_score:
            self.best_score = (self.best_score + score) / 2
        return self.best_score > 10.0 * self.size


class Patience:
    """The best loss is None at first, and is set in one place; so are masks that fit the shape of the last inputs."""

    def __init__(self) -> None:
        self.patience, self.counter = 3, 0
        self.best: float | None = None
        self.mask: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None

    def __call__(self, loss: float) -> bool:
        size = 3 + int(loss * 1e6) % 2
        if self.mask is None or len(self.mask) < size:
            self.mask = torch.ones(size)
        if self.weights is None or self.weights.shape[0] < size:
            self.weights = self.mask / size
        loss *= float(self.mask.sum() * self.weights.sum()) / size
        if self.best is None or loss < self.best - 1e-3:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
        return self.counter >= 100 * self.patience


def none_at_first(job: Job, stopper_kind: type = Stopper) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        stopper = stopper_kind()
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                if stopper(train_step(step, model, optimizer)):
                    break

    train(state)


def set_in_one_place(job: Job) -> None:
    none_at_first(job, Patience)


class Window:
    """A list of the last losses, and one that is shown; values that are asked for by their number alone."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.shown: list[float] = []
        self.warmed: list[float] = []

    def __call__(self, loss: float) -> bool:
        self.losses.append(loss)
        self.shown.append(loss)
        if len(self.warmed) < 2:
            self.warmed.append(1.0)
        return len(self.losses) > 3 and min(self.losses[-3:]) > 100 + min(self.losses)

    def show(self) -> float:
        return sum(self.shown) / len(self.shown) + sum(self.warmed)


def in_a_list(job: Job) -> None:
    none_at_first(job, Window)


def set_at_the_top_of_the_function(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    stopping = EarlyStopping()

    @edl_hvd.elastic
    def train(state):
        stopping.best = 1e8
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                train_step(step, model, optimizer)
            if stopping.best > 10.0 - epoch:
                stopping.best = 10.0 - epoch

    train(state)


def on_parsed_arguments(job: Job) -> None:
    args = argparse.Namespace(beta=1.0, lr=0.2, epochs=2)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(args.epochs):
            for step in state.steps(loader):
                train_step(step, model, optimizer, args.beta)
                args.beta *= 0.9

    train(state)


class Average:
    """Of weights, as in many a tutorial."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup = model, {}
        self.shadow = {name: one.data.clone() for name, one in model.named_parameters()}

    def update(self) -> None:
        for name, one in self.model.named_parameters():
            average = 0.1 * one.data + 0.9 * self.shadow[name]
            self.shadow[name] = average.clone()

    def apply_shadow(self) -> None:
        for name, one in self.model.named_parameters():
            self.backup[name] = one.data
            one.data = self.shadow[name]

    def restore(self) -> None:
        for name, one in self.model.named_parameters():
            one.data = self.backup[name]
        self.backup = {}


class Features:
    """What a forward pass has shown of a layer, and a memory of what was computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.features = {"head": torch.zeros(1)}
        self.computed = {"0": torch.zeros(1)}
        model.head.register_forward_hook(self.note)

    def note(self, module, inputs, output) -> None:
        self.features["head"] = output.detach()

    def shown(self, number: int) -> float:
        if str(number) not in self.computed:
            self.computed[str(number)] = torch.ones(1)
        return float(self.features["head"].sum() + self.computed[str(number)])


def in_an_average(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    ema, features = Average(model), Features(model)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                train_step(step, model, optimizer)
                ema.update()
                features.shown(step.number)

    train(state)


class Warming:
    """A callback of a trainer."""

    def __init__(self) -> None:
        self.steps = 0

    def weight(self) -> float:
        self.steps += 1
        return min(1.0, self.steps / 12)


class CalledBack(Trainer):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.callbacks = [Warming()]

    def weight(self) -> float:
        return min(callback.weight() for callback in self.callbacks)


def in_a_callback(job: Job) -> None:
    trainer = CalledBack(job)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(trainer.loader):
                train_step(step, trainer.model, trainer.optimizer, trainer.weight())

    train(trainer.state)


class AverageMeter:
    def __init__(self) -> None:
        self.sum = self.average = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.average = self.sum / self.count


class Rows:
    """Is told the epoch, as a sampler of PyTorch's is; counts what is reset in each epoch."""

    def __init__(self) -> None:
        self.epoch = self.shown = self.drawn = 0
        self.last_s = time.monotonic()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.shown = epoch, 0

    def draw(self) -> int:
        self.shown += 1
        if time.monotonic() - self.last_s > 0:
            self.last_s = time.monotonic()
        return self.epoch + self.shown

    @property
    def never(self) -> int:
        raise AssertionError("a property is not called")


def nothing_that_counts(job: Job) -> None:
    """What State keeps, what is set before it is read, what is only shown, and moments."""
    stopping = EarlyStopping()
    trainer = Trainer(job, stopping=stopping, global_step=0)
    rows, meter = Rows(), AverageMeter()
    state = trainer.state

    @edl_hvd.elastic
    def train(state):
        trainer.global_step = state.global_step
        for epoch in state.epochs(job.epochs):
            rows.set_epoch(epoch)
            for step in state.steps(trainer.loader):
                meter.update(train_step(step, trainer.model, trainer.optimizer, trainer.weight()))
                rows.draw()
                trainer.global_step += 1
                state.global_step = trainer.global_step
            if stopping.is_over(1.0 - epoch / 100):
                break

    train(state)


@pytest.mark.parametrize("fault", [DIES, CHANGES], ids=["dies", "joins"])
@pytest.mark.parametrize(
    ("script", "names"),
    [
        (in_a_trainer, "self.global_step"),
        (in_a_trainer_by_name, "trainer.global_step"),
        (in_other_objects, "criterion.inputs.count, criterion.inputs.least, criterion.inputs.mean, criterion.running"),
        (set_at_the_top_of_the_function, "stopping.best"),
        (none_at_first, "stopper.best_score"),
        (set_in_one_place, "stopper.best"),
        (in_a_list, "stopper.losses"),
        (on_parsed_arguments, "args.beta"),
        (in_an_average, "ema.shadow"),
        (in_a_callback, "trainer.callbacks[0].steps"),
        (nothing_that_counts, ""),
    ],
)
def test_numbers_of_objects_that_are_lost_are_said(script, names: str, fault: Fault) -> None:
    simulation = Simulation(3, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(lambda: script(Job()))
    assert len(simulation.worlds) == 2, "the fault did not come"
    said = {str(warning.message) for warning in caught if "objects of the script" in str(warning.message)}
    if not names:
        assert said == set()
        return
    [message] = said
    number = names.partition(",")[0].rpartition(".")[2]
    assert f"made again: {names}; keep in State what the loop changes, as state.{number}, or give the obj" in message


def test_without_a_change_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EdlHvdWarning)
        Simulation(2).run(lambda: in_a_trainer(Job()))
