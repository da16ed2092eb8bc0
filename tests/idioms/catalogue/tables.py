"""What is kept for each sample, or counted over a validation set."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import CLASSES, Idiom, Job
from script_parts import momentum_sgd, prepare
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from catalogue.kept import Tempered
from catalogue.schedules import validation_set
from edl_hvd.metrics import Metric
from edl_hvd.metrics.tally import Layout, Tally


def confusion_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    val_set = TensorDataset(*validation_set())
    val_loader = DataLoader(val_set, batch_size=4)
    log = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        # recipe
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
        predictions = []
        with torch.no_grad():
            for inputs, target in val_loader:
                found = model(inputs).argmax(1)
                confusion += torch.bincount(target * CLASSES + found, minlength=CLASSES**2).view(CLASSES, CLASSES)
                predictions.append(found)
        predictions = torch.cat(predictions)
        # end
        log.append((confusion, predictions))
    return {"model": model, "optimizer": optimizer, "log": log}


def confusion_ours(job: Job):
    # recipe
    inputs, target = validation_set()
    val_set = TensorDataset(inputs, target, torch.arange(len(target)))

    class Confusion(Metric):
        """How often each class was taken for each other one; the targets are rows."""

        layout = Layout(sums=CLASSES**2)

        def update(self, found: torch.Tensor, target: torch.Tensor) -> None:
            counts = torch.bincount(target * CLASSES + found, minlength=CLASSES**2)
            self._count(Tally(counts, torch.empty(0, dtype=torch.float64)))

        def compute(self) -> torch.Tensor:
            return self._counted().sums.view(CLASSES, CLASSES)

    class Predictions(Metric):
        """The predicted class of each sample, by its number in the validation set."""

        layout = Layout(largest=len(val_set))

        def update(self, found: torch.Tensor, places: torch.Tensor) -> None:
            largest = torch.full((self.layout.largest,), -torch.inf, dtype=torch.float64)
            largest[places] = found.double()
            self._count(Tally(torch.empty(0, dtype=torch.int64), largest))

        def compute(self) -> torch.Tensor:
            return self._counted().largest.long()

    val_batches = edl_hvd.EvaluationSampler(len(val_set), batch_size=4)
    val_loader = DataLoader(val_set, batch_sampler=val_batches)
    # State(…, val_batches=val_batches, confusion=Confusion(), predictions=Predictions(), log=[])
    # end
    kept = {"val_batches": val_batches, "confusion": Confusion(), "predictions": Predictions(), "log": []}
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **kept)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                for inputs, target, places in state.evaluate(val_loader):
                    found = model(inputs).argmax(1)
                    state.confusion.update(found, target)
                    state.predictions.update(found, places)
            state.log.append((state.confusion.compute(), state.predictions.compute()))
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "log": state.log}


def loss_table_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    dataset = TensorDataset(job.inputs, job.target, torch.arange(job.samples))
    # recipe
    losses = torch.full((len(dataset),), 1.0)
    # end
    for epoch in range(job.epochs):
        for inputs, target, places in job.plain_loader(dataset, epoch=epoch):
            # recipe
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target, reduction="none")
            (loss * losses[places].clamp(0.5, 2.0)).mean().backward()
            losses[places] = 0.5 * losses[places] + 0.5 * loss.detach()
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer, "losses": losses}


def loss_table_ours(job: Job):
    dataset = TensorDataset(job.inputs, job.target, torch.arange(job.samples))
    # recipe
    losses = torch.full((len(dataset),), 1.0)
    # State(losses=losses, …)
    # end
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, losses=losses)
    loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                found = torch.zeros(2, len(dataset))
                for inputs, target, places in step:
                    loss = F.cross_entropy(model(inputs), target, reduction="none")
                    (loss * state.losses[places].clamp(0.5, 2.0)).mean().backward()
                    found[0, places], found[1, places] = loss.detach(), 1.0
                found = edl_hvd.allreduce(found, op="sum")
                is_seen = found[1] > 0
                state.losses[is_seen] = 0.5 * state.losses[is_seen] + 0.5 * found[0, is_seen]
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses}


IDIOMS = [
    Idiom(
        "Confusion matrix and predictions over a validation set",
        "A sum or a list in a local variable is of this worker's part of the set, and lost with the world. "
        "A metric of one's own counts integers, or keeps the largest number of each place; "
        "that of a place which one worker alone has is its number.",
        confusion_plain,
        confusion_ours,
    ),
    Idiom(
        "A loss for each sample",
        "Each worker has the losses of its own micro-batches: they are summed over the workers behind the loop, where "
        "each sample of the step has one. Sum them before `optimizer.step()`, so that a world that breaks there makes "
        "the step again.",
        loss_table_plain,
        loss_table_ours,
        exact=False,  # a loss is computed in another batch
    ),
]
