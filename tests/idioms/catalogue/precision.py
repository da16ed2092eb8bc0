"""Mixed precision: autocast, and gradients of a scaled loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import SAMPLES, Idiom, Job
from script_parts import make_model
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import edl_hvd


def autocast_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"model": model, "losses": losses}


def autocast_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def bfloat16_model_plain(job: Job):
    model = make_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.bfloat16()).float(), target).backward()
            optimizer.step()
    return {"model": model}


def bfloat16_model_ours(job: Job):
    edl_hvd.init()
    # recipe
    model = make_model().bfloat16()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), exact=job.exact)
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs.bfloat16()).float(), target).backward()
                optimizer.step()

    train(state)
    return {"model": model}


def scaler_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales = []
    for epoch in range(job.epochs):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        # end
    return {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict(), "scales": scales}


def scaler_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scaler=scaler, scales=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                state.scales.append(scaler.get_scale())

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict(), "scales": state.scales}


def scaler_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict()}


def scaler_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    # recipe
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scaler=scaler, scheduler=scheduler)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict()}


def sample_weights() -> torch.Tensor:
    """One sample's loss overflows as long as it is scaled with more than 8."""
    weights = torch.ones(SAMPLES)
    weights[17] = 2.0**122
    return weights


def overflow_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    dataset = job.dataset(job.inputs, job.target, sample_weights())
    scales = []
    for epoch in range(job.epochs):
        for inputs, target, weights in job.plain_loader(dataset, epoch):
            optimizer.zero_grad()
            loss = (F.cross_entropy(model(inputs), target, reduction="none") * weights).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return {"model": model, "optimizer": optimizer, "scales": scales}


def overflow_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, job.target, sample_weights()), batch_sampler=batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scaler=scaler, scales=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target, weights in step:
                    loss = (F.cross_entropy(model(inputs), target, reduction="none") * weights).mean()
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                state.scales.append(scaler.get_scale())
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "scales": state.scales}


def overflow_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    dataset = job.dataset(job.inputs, job.target, sample_weights())
    for epoch in range(job.epochs):
        for inputs, target, weights in job.plain_loader(dataset, epoch):
            loss = (F.cross_entropy(model(inputs), target, reduction="none") * weights).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"optimizer": len(optimizer.state), "scaler": scaler.state_dict()}


def overflow_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, job.target, sample_weights()), batch_sampler=batches)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scaler=scaler)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target, weights in state.batches(loader):
                loss = (F.cross_entropy(model(inputs), target, reduction="none") * weights).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            # end

    train(state)
    return {"optimizer": len(optimizer.state), "scaler": scaler.state_dict()}


def skip_not_finite_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    inputs_seen = job.inputs
    inputs_seen[17] = float("nan")
    dataset, skipped = job.dataset(inputs_seen, job.target), 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(dataset, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            if torch.isfinite(norm):
                optimizer.step()
            else:
                skipped += 1
    return {"model": model, "optimizer": optimizer, "skipped": skipped}


def skip_not_finite_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    inputs_seen = job.inputs
    inputs_seen[17] = float("nan")
    loader = DataLoader(job.dataset(inputs_seen, job.target), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, skipped=0)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                norm = clip_grad_norm_(model.parameters(), 0.5)
                if torch.isfinite(norm):
                    optimizer.step()
                else:
                    state.skipped += 1
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "skipped": state.skipped}


IDIOMS = [
    Idiom(
        "autocast",
        "Forward passes and losses under `torch.autocast` need no change. "
        "bfloat16 rounds the gradient of each micro-batch by itself, so against one process with the whole batch the "
        "difference is that of bfloat16, about 1 %; with `exact=True` all worlds have the same bits.",
        autocast_plain,
        autocast_ours,
        tolerance=3e-2,  # bfloat16
    ),
    Idiom(
        "A model in bfloat16",
        "Horovod has no bfloat16, so its gradients are summed over the workers in float32, and rounded once.",
        bfloat16_model_plain,
        bfloat16_model_ours,
        tolerance=5e-2,  # bfloat16
    ),
    Idiom(
        "GradScaler, with clipping",
        "Scale the loss of each micro-batch; `unscale_`, clipping, `step` and `update` stand behind the loop over "
        "them. Give the scaler to `State`.",
        scaler_plain,
        scaler_ours,
    ),
    Idiom(
        "GradScaler in the flat loop",
        "In the flat loop they may stay where they are.",
        scaler_flat_plain,
        scaler_flat_ours,
    ),
    Idiom(
        "A step that the scaler skips",
        "If the gradient of one micro-batch overflows, that of the global batch does, on every worker: all of them "
        "skip the step, and lower the scale alike.",
        overflow_plain,
        overflow_ours,
    ),
    Idiom(
        "A step that the scaler skips, in the flat loop",
        "So it is in the flat loop.",
        overflow_flat_plain,
        overflow_flat_ours,
    ),
    Idiom(
        "Leaving out a step whose gradient is not finite",
        "A step may be left out at step level by anything that is the same on every worker, such as `.grad`.",
        skip_not_finite_plain,
        skip_not_finite_ours,
        # Exact sums refuse values that are not finite, unless a GradScaler is there to look for them.
        exact=False,
    ),
]
