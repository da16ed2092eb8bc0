"""Parameters that are frozen or added in the course of the training, and optimizers that change then."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import Idiom, Job
from script_parts import make_model, momentum_sgd, prepare
from torch import nn
from torch.utils.data import DataLoader

import edl_hvd


def unfrozen_later_plain(job: Job):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        if epoch == 1:
            model[0].requires_grad_(True)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def unfrozen_later_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                model[0].requires_grad_(True)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def unfrozen_within_epoch_plain(job: Job):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = momentum_sgd(model)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            if number == 2:
                model[0].requires_grad_(True)
            if number == 5:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
    return {"model": model, "optimizer": optimizer}


def unfrozen_within_epoch_ours(job: Job):
    def make() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    model, optimizer, loader, state = prepare(job, momentum_sgd, make)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                if step.number == 2:
                    model[0].requires_grad_(True)
                if step.number == 5:
                    model[2].requires_grad_(False)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def group_added_later_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9)
    for epoch in range(job.epochs):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        for inputs, target in job.plain_loader(epoch=epoch):
            model.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def group_added_later_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9), exact=job.exact
    )
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            for step in state.steps(loader):
                model.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def later_optimizer_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(4):
        if epoch == 2:
            optimizer = momentum_sgd(model)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model}


def later_optimizer_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    adam = edl_hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), exact=job.exact)
    sgd = edl_hvd.DistributedOptimizer(momentum_sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, adam=adam, sgd=sgd, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(4):
            optimizer = adam if epoch < 2 else sgd
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model}


def cleared_state_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(4):
        if epoch == 2:
            optimizer.state.clear()
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def cleared_state_ours(job: Job):
    model, optimizer, loader, state = prepare(job, lambda model: torch.optim.Adam(model.parameters(), lr=0.05))

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(4):
            if epoch == 2:
                optimizer.state.clear()
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "A backbone that is unfrozen later",
        "`requires_grad` is part of what is kept: a worker that joins later has it, too. Give the optimizer all "
        "parameters from the beginning.",
        unfrozen_later_plain,
        unfrozen_later_ours,
    ),
    Idiom(
        "Parameters that are frozen and unfrozen within an epoch",
        "Do it at step level.",
        unfrozen_within_epoch_plain,
        unfrozen_within_epoch_ours,
    ),
    Idiom(
        "`add_param_group` later",
        "Where the elastic function runs again, a group that is there already is not added once more.",
        group_added_later_plain,
        group_added_later_ours,
    ),
    Idiom(
        "Another optimizer from an epoch on",
        "Such as SGD after Adam (SWATS). Give `State` both from the beginning, and choose by the epoch.",
        later_optimizer_plain,
        later_optimizer_ours,
    ),
    Idiom(
        "An optimizer whose state is cleared",
        "As in ReLoRA, or where a cycle begins anew.",
        cleared_state_plain,
        cleared_state_ours,
    ),
]
