"""What scripts change at the top of an epoch, before its loop over batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from script_parts import momentum_sgd, prepare
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import edl_hvd
from catalogue.kept import Tempered


def cut_at_top_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    rates = []
    for epoch in range(job.epochs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"model": model, "optimizer": optimizer, "rates": rates}


def cut_at_top_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, rates=[])

    @edl_hvd.elastic
    def train(state):
        # recipe
        for _ in state.epochs(job.epochs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end
            state.rates.append(optimizer.param_groups[0]["lr"])

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def cut_at_top_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, rates=[])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            state.rates.append(optimizer.param_groups[0]["lr"])

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def begun_at_top_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    weight, history, seen, losses = 1.0, [], 0, torch.zeros(2)
    for epoch in range(job.epochs):
        weight *= 0.5
        history.append(epoch)
        seen, losses = 0, losses * 0.1
        model.temperature *= 0.8
        model.beta.mul_(0.7)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            (weight * F.cross_entropy(model(inputs), target)).backward()
            optimizer.step()
            seen += 1
            losses = losses + weight
    return {"model": model, "weight": weight, "history": history, "seen": seen, "losses": losses,
            "temperature": model.temperature, "beta": model.beta}  # fmt: skip


def begun_at_top_ours(job: Job):
    more = {"weight": 1.0, "history": [], "seen": 0, "losses": torch.zeros(2)}
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **more)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(job.epochs):
            state.weight *= 0.5
            state.history.append(epoch)
            state.seen, state.losses = 0, state.losses * 0.1
            model.temperature *= 0.8
            model.beta.mul_(0.7)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    (state.weight * F.cross_entropy(model(inputs), target)).backward()
                optimizer.step()
                state.seen += 1
                state.losses = state.losses + state.weight
            # end

    train(state)
    return {"model": model, "weight": state.weight, "history": state.history, "seen": state.seen,
            "losses": state.losses, "temperature": model.temperature, "beta": model.beta}  # fmt: skip


def warm_restart_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (epoch + 1)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
    return {"model": model, "optimizer": optimizer}


def warm_restart_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(job.epochs):
            for group in optimizer.param_groups:
                group["lr"] = 0.2 / (epoch + 1)  # each epoch begins with a high rate
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def refreshed_at_top_plain(job: Job):
    model, target = Tempered(), Tempered()
    target.requires_grad_(False)
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        target.load_state_dict(model.state_dict())
        with torch.no_grad():
            for parameter in model.head.parameters():
                parameter.mul_(0.5)
        for inputs, labels in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            output = model(inputs)
            (F.cross_entropy(output, labels) + F.mse_loss(output, target(inputs))).backward()
            optimizer.step()
    return {"model": model, "target": target}


def refreshed_at_top_ours(job: Job):
    target: nn.Module = Tempered()
    target.requires_grad_(False)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, target=target)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for _ in state.epochs(job.epochs):
            target.load_state_dict(model.state_dict())
            with torch.no_grad():
                for parameter in model.head.parameters():
                    parameter.mul_(0.5)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, labels in step:
                    output = model(inputs)
                    (F.cross_entropy(output, labels) + F.mse_loss(output, target(inputs))).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "target": target}


def judged_behind_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    tops, losses = 0, []
    for epoch in range(job.epochs):
        optimizer.param_groups[0]["lr"] *= 0.5
        tops += 1
        model.temperature *= 0.8
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(job.inputs[:20]), job.target[:20]).item())
    return {"model": model, "optimizer": optimizer, "tops": tops, "losses": losses, "temperature": model.temperature}


def judged_behind_ours(job: Job):
    val_set = job.dataset(job.inputs[:20], job.target[:20])
    val_batches = edl_hvd.EvaluationSampler(len(val_set), batch_size=4)
    val_loader = DataLoader(val_set, batch_sampler=val_batches)
    more = {"val_batches": val_batches, "val_loss": edl_hvd.metrics.Mean(), "tops": 0, "losses": []}
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **more)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            optimizer.param_groups[0]["lr"] *= 0.5
            state.tops += 1
            model.temperature *= 0.8
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                for inputs, target in state.evaluate(val_loader):
                    state.val_loss.update(F.cross_entropy(model(inputs), target), weight=len(inputs))
            state.losses.append(state.val_loss.compute())

    train(state)
    return {"model": model, "optimizer": optimizer, "tops": state.tops, "losses": state.losses,
            "temperature": model.temperature}  # fmt: skip


def drawn_at_top_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    generator = torch.Generator().manual_seed(7)
    for epoch in range(job.epochs):
        mixing = 0.2 * torch.randn(FEATURES, FEATURES, generator=generator)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs + inputs @ mixing), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer, "next": torch.rand(3, generator=generator)}


def drawn_at_top_ours(job: Job):
    generator = torch.Generator().manual_seed(7)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, generator=generator)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for _ in state.epochs(job.epochs):
            mixing = 0.2 * torch.randn(FEATURES, FEATURES, generator=generator)  # given to State
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs + inputs @ mixing), target).backward()
                optimizer.step()
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "next": torch.rand(3, generator=generator)}


def rollout(model: nn.Module, observations: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> None:
    """An episode in an environment, which the present policy plays."""
    with torch.no_grad():
        observations.copy_(torch.randn(observations.shape, generator=generator))
        labels.copy_((model(observations) + torch.randn(CLASSES, generator=generator)).argmax(1))


def buffers_of_rollouts(job: Job) -> dict[str, torch.Tensor]:
    return {"observations": torch.zeros(job.samples, FEATURES), "labels": torch.zeros(job.samples, dtype=torch.long)}


def rollouts_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    generator, buffers = torch.Generator().manual_seed(7), buffers_of_rollouts(job)
    dataset = TensorDataset(*buffers.values())
    for epoch in range(job.epochs):
        rollout(model, generator=generator, **buffers)
        for inputs, target in job.plain_loader(dataset, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer, **buffers}


def rollouts_ours(job: Job):
    generator, buffers = torch.Generator().manual_seed(7), buffers_of_rollouts(job)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, generator=generator, buffers=buffers)
    # recipe
    loader = DataLoader(TensorDataset(*buffers.values()), batch_sampler=loader.batch_sampler)  # given to State

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            rollout(model, generator=generator, **buffers)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, **buffers}


class Selected(Dataset):
    """Samples of which the training keeps some; the others are left out."""

    def __init__(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        self.inputs, self.target = inputs, target
        self.kept = torch.arange(len(inputs))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int):
        sample = self.kept[place % len(self.kept)]
        return self.inputs[sample], self.target[sample]


def small_loss_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    dataset = Selected(job.inputs, job.target)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(dataset, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        # recipe
        with torch.no_grad():
            losses = F.cross_entropy(model(dataset.inputs), dataset.target, reduction="none")
        dataset.kept = losses.argsort()[: 3 * len(losses) // 4]
        # end
    return {"model": model, "optimizer": optimizer, "kept": dataset.kept}


def small_loss_ours(job: Job):
    dataset = Selected(job.inputs, job.target)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, kept=dataset.kept)
    loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for _ in state.epochs(job.epochs):
            dataset.kept = state.kept
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                losses = F.cross_entropy(model(dataset.inputs), dataset.target, reduction="none")
            state.kept = losses.argsort()[: 3 * len(losses) // 4]
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "kept": state.kept}


def pseudo_labels_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    samples, labels = job.inputs, job.target
    for epoch in range(job.epochs):
        # recipe
        if epoch > 0:
            labels = model(samples).detach().argmax(1)
        dataset = TensorDataset(samples, labels)
        # end
        for inputs, target in job.plain_loader(dataset, epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer, "labels": labels}


def pseudo_labels_ours(job: Job):
    samples, first_labels = job.inputs, job.target
    # recipe
    labels = first_labels.clone()
    dataset = TensorDataset(samples, labels)
    # end
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, labels=labels)
    loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        # recipe
        # State(labels=labels, …)
        for epoch in state.epochs(job.epochs):
            if epoch > 0:
                state.labels[:] = model(samples).detach().argmax(1)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "labels": labels}


IDIOMS = [
    Idiom(
        "A rate that is cut at the top of an epoch",
        "Where an epoch is continued in another world, its top runs again. What it changes of the objects in `State` "
        "is put back when the loop over batches goes on, so that the rate is cut once.",
        cut_at_top_plain,
        cut_at_top_ours,
    ),
    Idiom("A rate that is cut at the top of an epoch, in the flat form", "", cut_at_top_plain, cut_at_top_flat_ours),
    Idiom(
        "Attributes, numbers of a module and buffers that change at the top of an epoch",
        "",
        begun_at_top_plain,
        begun_at_top_ours,
    ),
    Idiom(
        "A rate that begins anew in each epoch and falls in its steps",
        "The top of an epoch that is continued does not begin it anew.",
        warm_restart_plain,
        warm_restart_ours,
    ),
    Idiom(
        "A rate that is cut at the top of an epoch, with an evaluation behind its loop",
        "",
        judged_behind_plain,
        judged_behind_ours,
    ),
    Idiom(
        "Weights that change at the top of an epoch",
        "Where an epoch is continued, they are put back, too.",
        refreshed_at_top_plain,
        refreshed_at_top_ours,
    ),
    Idiom(
        "Numbers that are drawn at the top of an epoch",
        "A generator in `State` draws the same numbers again where an epoch is continued.",
        drawn_at_top_plain,
        drawn_at_top_ours,
    ),
    Idiom(
        "A rollout at the top of an epoch, and a data set on its buffers",
        "As in PPO. What `State` is given stays the same object, in all worlds and on workers that join, unless the "
        "script sets the attribute to another; so the data set reads the tensors that `State` keeps.",
        rollouts_plain,
        rollouts_ours,
    ),
    Idiom(
        "Samples that are kept by their losses",
        "As in a curriculum, or where labels are noisy. What is set on a data set behind the loop, a worker that joins "
        "does not have: it is kept in `State`, and the top of each epoch sets it from there. A warning names what is "
        "not. Each worker computes all losses here; for many samples divide them by `state.evaluate`.",
        small_loss_plain,
        small_loss_ours,
    ),
    Idiom(
        "Pseudo-labels at the top of an epoch",
        "The tensor is given to `State`, and the top writes into it: where it runs again, its labels come from weights "
        "in mid-training, and are put back. A warning names a data set whose labels are set to others then.",
        pseudo_labels_plain,
        pseudo_labels_ours,
    ),
]
