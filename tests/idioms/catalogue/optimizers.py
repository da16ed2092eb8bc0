"""Optimizers of torch and others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from idioms import Idiom, Job
from script_parts import make_model
from torch import nn
from torch.utils.data import DataLoader

import edl_hvd

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from lamb import LAMB


class LARS(torch.optim.Optimizer):
    """Layer-wise rates (You et al. 2017), with the rate outside of the momentum."""

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                ratio = group["trust"] * parameter.norm() / (parameter.grad.norm() + 1e-8)
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                moment.mul_(group["momentum"]).add_(parameter.grad * ratio)
                parameter.sub_(moment * group["lr"])


class PublishedLARS(torch.optim.Optimizer):
    """As published: the momentum has the rate in it."""

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                rate = group["lr"] * group["trust"] * parameter.norm() / (parameter.grad.norm() + 1e-8)
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad * rate)
                parameter.sub_(velocity)


Build = Callable[[nn.Module], torch.optim.Optimizer]


def with_optimizer(name: str, title: str, text: str, build: Build, wrapping: dict | None = None) -> Idiom:
    """An idiom whose optimizer is ``build(model)``."""

    def plain(job: Job):
        model = make_model()
        optimizer = build(model)
        for epoch in range(job.epochs):
            for inputs, target in job.plain_loader(epoch=epoch):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        return {"model": model} if wrapping else {"model": model, "optimizer": optimizer}

    def ours(job: Job):
        edl_hvd.init()
        model = make_model()
        optimizer = edl_hvd.DistributedOptimizer(build(model), exact=job.exact, **(wrapping or {}))
        batches = job.batches()
        loader = DataLoader(job.dataset(), batch_sampler=batches)
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

        @edl_hvd.elastic
        def train(state):
            for epoch in state.epochs(job.epochs):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()

        train(state)
        return {"model": model} if wrapping else {"model": model, "optimizer": optimizer}

    ours.__name__ = f"{name}_ours"
    return Idiom(title, text, plain, ours)


def groups(model: nn.Module) -> list[dict]:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.03}]


def parameter_groups_plain(job: Job):
    model = make_model()
    # recipe
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    # end
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
    return {"model": model, "optimizer": optimizer}


def parameter_groups_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.AdamW(groups(model), lr=0.01), exact=job.exact)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def changed_options_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    number, seen = 0, []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            if number == 3:
                optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.01)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            seen.append((optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]))
            number += 1
    return {"model": model, "optimizer": optimizer, "seen": seen}


def changed_options_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, seen=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                if step.number == 3:
                    optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.01)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.seen.append((optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"]))
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "seen": state.seen}


def later_group_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        for inputs, target in job.plain_loader(epoch=epoch):
            model.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def later_group_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.3, momentum=0.9), exact=job.exact
    )
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            if epoch >= 1 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
            for step in state.steps(loader):
                model.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def make_worded(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"words": nn.Embedding(10, 8, sparse=sparse), "head": nn.Linear(8, 3)})


def words_of(job: Job) -> torch.Tensor:
    return torch.randint(0, 10, (job.samples, 2), generator=torch.Generator().manual_seed(4))


def sparse_adam_plain(job: Job):
    model = make_worded(sparse=True)
    # recipe
    # words: nn.Embedding(…, sparse=True)
    sparse = torch.optim.SparseAdam(model["words"].parameters(), lr=0.1)
    # end
    dense = torch.optim.SGD(model["head"].parameters(), lr=0.5)
    for epoch in range(job.epochs):
        for words, target in job.plain_loader(job.dataset(words_of(job), job.target), epoch=epoch):
            sparse.zero_grad()
            dense.zero_grad()
            F.cross_entropy(model["head"](model["words"](words).mean(1)), target).backward()
            sparse.step()
            dense.step()
    return {"model": model, "sparse": sparse, "dense": dense}


def sparse_adam_ours(job: Job):
    edl_hvd.init()
    model = make_worded(sparse=False)
    # recipe
    # words: nn.Embedding(…, sparse=False)
    sparse = edl_hvd.DistributedOptimizer(torch.optim.SparseAdam(model["words"].parameters(), lr=0.1), exact=job.exact)
    # end
    dense = edl_hvd.DistributedOptimizer(torch.optim.SGD(model["head"].parameters(), lr=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(words_of(job), job.target), batch_sampler=batches)
    state = edl_hvd.State(model=model, sparse=sparse, dense=dense, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                sparse.zero_grad()
                dense.zero_grad()
                for words, target in step:
                    F.cross_entropy(model["head"](model["words"](words).mean(1)), target).backward()
                weight = model["words"].weight
                weight.grad = weight.grad.to_sparse(1)  # without the rows of zeros
                sparse.step()
                dense.step()
            # end

    train(state)
    return {"model": model, "sparse": sparse, "dense": dense}


IDIOMS = [
    with_optimizer("adamw", "AdamW", "", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)),
    with_optimizer(
        "fused_adamw",
        "AdamW, fused, AMSGrad",
        "Fused kernels need nothing else either.",
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True, amsgrad=True),
    ),
    with_optimizer("radam", "RAdam", "", lambda m: torch.optim.RAdam(m.parameters(), lr=0.01)),
    with_optimizer("nadam", "NAdam", "", lambda m: torch.optim.NAdam(m.parameters(), lr=0.01)),
    with_optimizer("adagrad", "Adagrad", "", lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05)),
    with_optimizer("adadelta", "Adadelta", "", lambda m: torch.optim.Adadelta(m.parameters())),
    with_optimizer("adamax", "Adamax", "", lambda m: torch.optim.Adamax(m.parameters(), lr=0.01)),
    with_optimizer(
        "rmsprop",
        "RMSprop",
        "",
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    ),
    with_optimizer("asgd", "ASGD", "", lambda m: torch.optim.ASGD(m.parameters(), lr=0.1, t0=3)),
    with_optimizer("rprop", "Rprop", "", lambda m: torch.optim.Rprop(m.parameters(), lr=0.01)),
    with_optimizer(
        "nesterov",
        "SGD with Nesterov momentum",
        "",
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    with_optimizer(
        "tensor_rate",
        "A rate that is a tensor",
        "",
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False),
    ),
    with_optimizer("adafactor", "Adafactor", "", lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05)),
    with_optimizer(
        "lamb",
        "LAMB",
        "An optimizer of another package needs nothing but the methods of `torch.optim.Optimizer`.",
        lambda m: LAMB(m.parameters(), lr=0.02),
    ),
    with_optimizer(
        "lars",
        "LARS",
        "So does one of your own.",
        lambda m: LARS(m.parameters(), lr=0.5),
    ),
    with_optimizer(
        "published_lars",
        "LARS as published",
        "`velocity=` names a momentum that has the learning rate in it; "
        "it matters only where the batch grows with the world (`docs/batch_and_rate.md`).",
        lambda m: PublishedLARS(m.parameters(), lr=0.5),
        {"velocity": "velocity"},
    ),
    Idiom(
        "Groups of parameters, each with a rate and a schedule",
        "Groups are kept as they are; names are not needed.",
        parameter_groups_plain,
        parameter_groups_ours,
    ),
    Idiom(
        "Other options from a certain step on",
        "What a script sets in `param_groups` is kept.",
        changed_options_plain,
        changed_options_ours,
    ),
    Idiom(
        "Layers that are trained later",
        "`add_param_group` may be called in the loop. "
        "Whether the group is there already need not be asked; asking does no harm.",
        later_group_plain,
        later_group_ours,
    ),
    Idiom(
        "Sparse embeddings with SparseAdam",
        "A sparse gradient is not summed over a world, so the embedding is built with `sparse=False`. "
        "Behind the loop its gradient is made sparse, for an optimizer that moves the rows of the batch alone.",
        sparse_adam_plain,
        sparse_adam_ours,
    ),
]
