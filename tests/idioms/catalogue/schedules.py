"""Learning rates: schedulers that move per step, per epoch or by a metric, and rates set by hand."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from script_parts import make_model
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import edl_hvd


def validation_set():
    """The same in every process."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(20, FEATURES, generator=generator), torch.randint(0, CLASSES, (20,), generator=generator)


def one_cycle_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = job.epochs * len(job.plain_loader())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "betas": optimizer.param_groups[0]["betas"]}


def one_cycle_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=job.epochs * len(loader))
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "betas": optimizer.param_groups[0]["betas"]}


def total_steps_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    total, number, rates = job.epochs * len(job.plain_loader()), 0, []
    for epoch in range(job.epochs):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * (1 - number / total)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            rates.append(group["lr"])
            number += 1
        # end
    return {"model": model, "optimizer": optimizer, "rates": rates}


def total_steps_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, rates=[])

    # recipe
    @edl_hvd.elastic
    def train(state):
        total = state.total_steps(job.epochs)
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for group in optimizer.param_groups:
                    group["lr"] = 0.5 * (1 - step.number / total)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.rates.append(group["lr"])

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def one_cycle_total_steps_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    total = job.epochs * len(job.plain_loader())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
    return {"model": model, "optimizer": optimizer}


def one_cycle_total_steps_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    total = edl_hvd.State(batches=batches).total_steps(job.epochs)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def rate_by_hand_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (number + 1) / 5) * 0.5
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
    return {"model": model, "optimizer": optimizer}


def rate_by_hand_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, (state.step + 1) / 5) * 0.5
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def rate_multiplied_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def rate_multiplied_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    return {"model": model, "optimizer": optimizer}


def rate_multiplied_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
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
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def warm_up_lambda_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    rates = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
    return {"model": model, "optimizer": optimizer, "rates": rates}


def warm_up_lambda_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, rates=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()
                state.rates.append(scheduler.get_last_lr())

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def plateau_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    inputs_seen, target_seen = validation_set()
    losses = []
    for epoch in range(job.epochs + 2):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs_seen), target_seen).item()
        scheduler.step(loss)
        losses.append((loss, optimizer.param_groups[0]["lr"]))
    return {"model": model, "optimizer": optimizer, "losses": losses, "best": scheduler.best}


def plateau_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    inputs_seen, target_seen = validation_set()
    # recipe
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 2):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(model(inputs_seen), target_seen).item()
            scheduler.step(loss)
            state.losses.append((loss, optimizer.param_groups[0]["lr"]))

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses, "best": scheduler.best}


def plateau_summed_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    losses = []
    for epoch in range(job.epochs + 3):
        loader = job.plain_loader(epoch=epoch)
        # recipe
        running_loss = 0.0
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        scheduler.step(running_loss / len(loader))
        # end
        losses.append((running_loss / len(loader), optimizer.param_groups[0]["lr"]))
    return {"model": model, "optimizer": optimizer, "losses": losses, "best": scheduler.best}


def plateau_summed_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    state = edl_hvd.State(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, running_loss=0.0, losses=[]
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 3):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.running_loss += step.mean("loss")
            mean_loss = state.running_loss / batches.steps_per_epoch
            state.running_loss = 0.0
            scheduler.step(mean_loss)
            state.losses.append((mean_loss, optimizer.param_groups[0]["lr"]))

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses, "best": scheduler.best}


def rate_finder_plain(job: Job):
    model = make_model()
    # recipe
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    first = copy.deepcopy(model.state_dict())
    # end
    loader = job.plain_loader(epoch=0)
    # recipe
    curve = []
    for i, (inputs, target) in enumerate(loader):
        optimizer.param_groups[0]["lr"] = 1e-3 * 10 ** (4 * i / len(loader))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        curve.append((loss.item(), optimizer.param_groups[0]["lr"]))
    model.load_state_dict(first)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = min(curve)[1] / 10
    # end
    for epoch in range(1, job.epochs + 1):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer, "curve": curve}


def rate_finder_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), exact=job.exact
    )
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    first = copy.deepcopy(model.state_dict())
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, first=first, curve=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(1 + job.epochs):
            for step in state.steps(loader):
                if epoch == 0:
                    optimizer.param_groups[0]["lr"] = 1e-3 * 10 ** (4 * step.number / len(loader))
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                if epoch == 0:
                    state.curve.append((step.mean("loss"), optimizer.param_groups[0]["lr"]))
            if epoch == 0:
                model.load_state_dict(state.first)
                optimizer.state.clear()
                optimizer.param_groups[0]["lr"] = min(state.curve)[1] / 10

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "curve": state.curve}


def plateau_evaluated_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    losses = []
    for epoch in range(job.epochs + 1):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        with torch.no_grad():
            inputs, target = validation_set()
            loss = F.cross_entropy(model(inputs), target).item()
        scheduler.step(loss)
        losses.append((loss, optimizer.param_groups[0]["lr"]))
    return {"model": model, "optimizer": optimizer, "losses": losses}


def plateau_evaluated_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    val_set = job.dataset(*validation_set())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
    # recipe
    val_batches = edl_hvd.EvaluationSampler(len(val_set), batch_size=4)
    val_loader = DataLoader(val_set, batch_sampler=val_batches)
    state = edl_hvd.State(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        val_batches=val_batches,
        val_loss=edl_hvd.metrics.Mean(),
        losses=[],
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 1):
            model.train()
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for inputs, target in state.evaluate(val_loader):
                    state.val_loss.update(F.cross_entropy(model(inputs), target), weight=len(inputs))
            scheduler.step(state.val_loss.compute())
            state.losses.append((state.val_loss.compute(), optimizer.param_groups[0]["lr"]))

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses}


def warm_restarts_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1)
    rates = []
    for epoch in range(job.epochs):
        # recipe
        loader = job.plain_loader(epoch=epoch)
        for i, (inputs, target) in enumerate(loader):
            scheduler.step(epoch + i / len(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
        # end
    return {"model": model, "optimizer": optimizer, "rates": rates}


def warm_restarts_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, rates=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                scheduler.step(step.number / len(loader))
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.rates.append(optimizer.param_groups[0]["lr"])
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def sequential_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
    rates = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
    return {"model": model, "optimizer": optimizer, "rates": rates}


def sequential_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, rates=[])
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()
                state.rates.append(scheduler.get_last_lr())

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def chained_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    warm_up = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=2)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scheduler = lr_scheduler.ChainedScheduler([warm_up, decay], optimizer=optimizer)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
    return {"model": model, "optimizer": optimizer}


def chained_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    warm_up = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=2)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    scheduler = lr_scheduler.ChainedScheduler([warm_up, decay], optimizer=optimizer)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def two_schedulers_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    decay = lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    rates = []
    for epoch in range(job.epochs + 1):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            warm_up.step()
            rates.append(optimizer.param_groups[0]["lr"])
        decay.step()
    return {"model": model, "optimizer": optimizer, "rates": rates}


def two_schedulers_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    decay = lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, warm_up=warm_up, decay=decay, rates=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 1):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                warm_up.step()
                state.rates.append(optimizer.param_groups[0]["lr"])
            decay.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def multi_step_per_epoch_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.1)
    rates = []
    for epoch in range(job.epochs + 2):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return {"model": model, "optimizer": optimizer, "rates": rates}


def multi_step_per_epoch_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.1)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, rates=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 2):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            scheduler.step()
            state.rates.append(scheduler.get_last_lr())

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def cyclic_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=0.5, step_size_up=3, cycle_momentum=True)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "momentum": optimizer.param_groups[0]["momentum"]}


def cyclic_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=0.5, step_size_up=3, cycle_momentum=True)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                scheduler.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "momentum": optimizer.param_groups[0]["momentum"]}


def scheduled_by_state_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    rates, moved, samples = [], 0, 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            samples += len(inputs)
            while moved < samples // 8:
                scheduler.step()
                moved += 1
    return {"model": model, "optimizer": optimizer, "rates": rates}


def scheduled_by_state_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = edl_hvd.schedule(lr_scheduler.CosineAnnealingLR(optimizer, 20), every="8 samples")
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, rates=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.rates.append(optimizer.param_groups[0]["lr"])

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "rates": state.rates}


def plateau_not_in_state_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            scheduler.step(math.pi)

    train(state)
    return {"model": model}


IDIOMS = [
    Idiom(
        "OneCycleLR in the flat loop",
        "`len(loader)` is the number of optimizer steps of an epoch, however many micro-batches they have. "
        "A scheduler goes into `State`; its `step()` then acts once per optimizer step. "
        "Build it on what `DistributedOptimizer` returns.",
        one_cycle_flat_plain,
        one_cycle_flat_ours,
    ),
    Idiom(
        "The number of steps before there is a loader",
        "`state.total_steps(epochs)` is the same number; where a scheduler needs it before `State` is made, ask a "
        "`State` that has the sampler alone.",
        one_cycle_total_steps_plain,
        one_cycle_total_steps_ours,
    ),
    Idiom(
        "A rate set by hand, from the number of the step",
        "`step.number` counts the optimizer steps of the whole run, also across failures; a counter of your own, or "
        "`enumerate(state.steps(loader))`, begins anew when the script goes on after one.",
        total_steps_plain,
        total_steps_ours,
    ),
    Idiom(
        "A rate set by hand in the flat loop",
        "There `state.step` is the number of steps that are complete.",
        rate_by_hand_flat_plain,
        rate_by_hand_flat_ours,
    ),
    Idiom(
        "A rate multiplied in the loop",
        "What a script does to `param_groups` is part of the state of the optimizer. "
        "Multiply at step level, where it happens once per step.",
        rate_multiplied_plain,
        rate_multiplied_ours,
    ),
    Idiom(
        "A rate multiplied in the flat loop",
        "In the flat loop it would be multiplied for every micro-batch; "
        "it is refused where a worker has two of them in a step.",
        None,
        rate_multiplied_flat_ours,
        refused=r"a learning rate was changed in the body of state\.batches\(\)",
        micro_batches=(2,),
    ),
    Idiom(
        "Warm-up with LambdaLR",
        "The function is called with the number of optimizer steps.",
        warm_up_lambda_plain,
        warm_up_lambda_ours,
    ),
    Idiom(
        "ReduceLROnPlateau, validated by every worker",
        "All workers have to give the scheduler the same number. "
        "The simplest way, for a small validation set: each of them computes all of it.",
        plateau_plain,
        plateau_ours,
    ),
    Idiom(
        "ReduceLROnPlateau by the loss of the epoch's steps",
        "`running_loss = 0.0` at the top of an epoch would be the sum of the epoch's rest where that is continued, and "
        "the scheduler would take it for progress; a warning names it. The sum in `State` is set back behind the loop.",
        plateau_summed_plain,
        plateau_summed_ours,
        exact=False,  # step.mean("loss") is summed in another order
        seen=("losses", "best"),
    ),
    Idiom(
        "A search of the learning rate (LR finder)",
        "The search is the first epoch, and behind it the first weights are loaded. They are in `State`, as the "
        "losses are: a worker that joins has made others, unless it draws the same.",
        rate_finder_plain,
        rate_finder_ours,
        exact=False,  # step.mean("loss") is summed in another order
        seen=("curve",),
    ),
    Idiom(
        "ReduceLROnPlateau, with a validation that is divided",
        "`state.evaluate` deals the validation set out; a metric in `State` is complete, and the same on every worker, "
        "after the loop.",
        plateau_evaluated_plain,
        plateau_evaluated_ours,
    ),
    Idiom(
        "Warm restarts at fractions of an epoch",
        "`step.number / len(loader)` takes the place of `epoch + i / len(loader)`: `enumerate` would begin at 0 again "
        "when an epoch is continued.",
        warm_restarts_plain,
        warm_restarts_ours,
    ),
    Idiom(
        "SequentialLR",
        "Only the outer scheduler is given to `State`, and only it is stepped.",
        sequential_plain,
        sequential_ours,
    ),
    Idiom(
        "ChainedScheduler in the flat loop",
        "The same holds for `ChainedScheduler`.",
        chained_flat_plain,
        chained_flat_ours,
    ),
    Idiom(
        "One scheduler per step, another per epoch",
        "Each of them is an attribute of `State`, by any name.",
        two_schedulers_plain,
        two_schedulers_ours,
    ),
    Idiom(
        "MultiStepLR per epoch",
        "Behind the loop over the epoch's batches `scheduler.step()` acts once per epoch.",
        multi_step_per_epoch_plain,
        multi_step_per_epoch_ours,
    ),
    Idiom(
        "CyclicLR, which moves the momentum, too",
        "Everything in `param_groups` is kept, not only the rate.",
        cyclic_flat_plain,
        cyclic_flat_ours,
    ),
    Idiom(
        "A scheduler that State moves",
        "`edl_hvd.schedule` has a scheduler move by samples, steps or parts of an epoch; the script does not call "
        "`scheduler.step()`. It moves when a step is complete, at the end of the loop's body.",
        scheduled_by_state_plain,
        scheduled_by_state_ours,
    ),
    Idiom(
        "ReduceLROnPlateau that is not in State",
        "Likewise its best value, and how long that was ago.",
        None,
        plateau_not_in_state_ours,
        refused=r"a ReduceLROnPlateau was built on the optimizer state\.optimizer",
    ),
]
