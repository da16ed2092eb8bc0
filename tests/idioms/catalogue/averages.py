"""Averages of weights, and other second sets of weights that move with the steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from script_parts import make_model
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

import edl_hvd
from catalogue.schedules import validation_set


def ema_by_hand_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ema = copy.deepcopy(model).requires_grad_(False)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
    return {"model": model, "ema": ema}


def ema_by_hand_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    ema = copy.deepcopy(model).requires_grad_(False)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                with torch.no_grad():
                    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                        average.lerp_(parameter, 0.1)

    # end

    train(state)
    return {"model": model, "ema": ema}


def ema_of_data_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ema = copy.deepcopy(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.data = 0.9 * average.data + 0.1 * parameter.data
    return {"model": model, "ema": ema}


def ema_of_data_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    ema = copy.deepcopy(model)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                    average.data = 0.9 * average.data + 0.1 * parameter.data
            # end

    train(state)
    return {"model": model, "ema": ema}


def shadow_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                shadow[name].lerp_(parameter.detach(), 0.1)
    return {"model": model, "shadow": shadow}


def shadow_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, shadow=shadow)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for name, parameter in model.named_parameters():
                    state.shadow[name].lerp_(parameter.detach(), 0.1)

    # end

    train(state)
    return {"model": model, "shadow": state.shadow}


def averaged_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            ema.update_parameters(model)
    return {"model": model, "ema": ema}


def averaged_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                ema.update_parameters(model)

    # end

    train(state)
    return {"model": model, "ema": ema}


def step_hook_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "ema": ema}


def step_hook_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end

    train(state)
    return {"model": model, "ema": ema}


def swa_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    averaged = AveragedModel(model)
    averaged_rate = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for epoch in range(job.epochs + 2):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        if epoch >= 1:
            averaged.update_parameters(model)
            averaged_rate.step()
        else:
            scheduler.step()
    return {"model": model, "averaged": averaged, "optimizer": optimizer}


def swa_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    averaged = AveragedModel(model)
    averaged_rate = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    state = edl_hvd.State(
        model=model,
        optimizer=optimizer,
        batches=batches,
        scheduler=scheduler,
        averaged=averaged,
        averaged_rate=averaged_rate,
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 2):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            if epoch >= 1:
                averaged.update_parameters(model)
                averaged_rate.step()
            else:
                scheduler.step()

    # end

    train(state)
    return {"model": model, "averaged": averaged, "optimizer": optimizer}


def make_normalised_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, CLASSES))


def swa_batch_norm_plain(job: Job):
    model = make_normalised_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    averaged = AveragedModel(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        averaged.update_parameters(model)
    update_bn(DataLoader(job.dataset(), batch_size=10), averaged)
    return {"averaged": averaged}


def swa_batch_norm_ours(job: Job):
    edl_hvd.init()
    model = make_normalised_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), exact=job.exact)
    batches = job.batches()
    dataset = job.dataset()
    loader = DataLoader(dataset, batch_sampler=batches)
    averaged = AveragedModel(model)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, averaged=averaged)

    # recipe
    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            averaged.update_parameters(model)

    train(state)
    update_bn(DataLoader(dataset, batch_size=10), averaged)
    # end
    return {"averaged": averaged}


def evaluated_ema_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    best, best_weights = float("inf"), {}
    for epoch in range(job.epochs + 1):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            ema.update_parameters(model)
        inputs, target = validation_set()
        with torch.no_grad():
            loss = F.cross_entropy(ema(inputs), target).item()
        if loss < best:
            best, best_weights = loss, copy.deepcopy(ema.module.state_dict())
    return {"model": model, "best": best, "best_weights": dict(best_weights)}


def evaluated_ema_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    val_inputs, val_target = validation_set()
    # recipe
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = edl_hvd.State(
        model=model, optimizer=optimizer, batches=batches, ema=ema, best=float("inf"), best_weights={}
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 1):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                ema.update_parameters(model)
            with torch.no_grad():
                loss = F.cross_entropy(ema(val_inputs), val_target).item()
            if loss < state.best:
                state.best, state.best_weights = loss, copy.deepcopy(ema.module.state_dict())

    # end

    train(state)
    return {"model": model, "best": state.best, "best_weights": dict(state.best_weights)}


def lookahead_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    slow, number = copy.deepcopy(model), 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
            if number % 3 == 0:
                with torch.no_grad():
                    for kept, parameter in zip(slow.parameters(), model.parameters(), strict=True):
                        kept.lerp_(parameter, 0.5)
                        parameter.copy_(kept)
    return {"model": model, "slow": slow}


def lookahead_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    slow = copy.deepcopy(model)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, slow=slow)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if (step.number + 1) % 3 == 0:
                    with torch.no_grad():
                        for kept, parameter in zip(slow.parameters(), model.parameters(), strict=True):
                            kept.lerp_(parameter, 0.5)
                            parameter.copy_(kept)

    # end

    train(state)
    return {"model": model, "slow": slow}


def clamped_weights_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True).clamp(min=0.5))
    return {"model": model, "optimizer": optimizer}


def clamped_weights_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                with torch.no_grad():
                    model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True).clamp(min=0.5))
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def average_not_in_state_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                ema.update_parameters(model)

    # end

    train(state)
    return {"model": model, "ema": ema}


IDIOMS = [
    Idiom(
        "An average of weights by hand",
        "A second model in `State` is kept and restored like the first one. "
        "Move it at step level, behind `optimizer.step()`, where it moves once per step on every worker.",
        ema_by_hand_plain,
        ema_by_hand_ours,
    ),
    Idiom(
        "An average of weights through .data",
        "Assigning `.data` works as well.",
        ema_of_data_plain,
        ema_of_data_ours,
    ),
    Idiom(
        "A dictionary of shadow weights",
        "A dictionary of tensors is kept, too.",
        shadow_plain,
        shadow_ours,
    ),
    Idiom(
        "AveragedModel in the flat loop",
        "Given to `State`, an `AveragedModel` moves once per optimizer step, in the flat loop as well.",
        averaged_flat_plain,
        averaged_flat_ours,
    ),
    Idiom(
        "An average that a hook of the optimizer moves",
        "Hooks of the optimizer's step are called once per optimizer step.",
        step_hook_plain,
        step_hook_ours,
    ),
    Idiom(
        "Stochastic weight averaging",
        "Behind the loop over the epoch's steps, everything is as in plain PyTorch. "
        "Both schedulers and the average are given to `State`.",
        swa_plain,
        swa_ours,
    ),
    Idiom(
        "Statistics of BatchNorm for averaged weights",
        "`update_bn` runs after the training, on every worker, with a loader of its own. "
        "While BatchNorm trains, its statistics are those of a micro-batch; here one micro-batch is the whole batch.",
        swa_batch_norm_plain,
        swa_batch_norm_ours,
        exact=False,  # its micro-batches of 3 leave one of a single sample, which BatchNorm refuses
        micro_batches=(12,),
    ),
    Idiom(
        "The best weights of an average",
        "Where every worker validates all of a small set, all find the same best epoch.",
        evaluated_ema_plain,
        evaluated_ema_ours,
    ),
    Idiom(
        "Slow weights (Lookahead)",
        "A script may also set the weights that the optimizer moves, at step level, where every worker does the same.",
        lookahead_plain,
        lookahead_ours,
    ),
    Idiom(
        "Weights brought back to a constraint",
        "So it is with a projection after each step.",
        clamped_weights_plain,
        clamped_weights_ours,
    ),
    Idiom(
        "An average that is not in State",
        "It would move with each micro-batch, and be lost with its worker.",
        None,
        average_not_in_state_ours,
        refused=r"AveragedModel",
        micro_batches=(3, 6),
    ),
]
