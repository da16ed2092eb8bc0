"""What belongs to an optimizer step: clipping, averages of weights, schedules, logging."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import Idiom, Job
from script_parts import make_model
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import edl_hvd


def classifier_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=job.epochs * len(job.plain_loader()))
    losses = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"model": model, "optimizer": optimizer, "ema": ema, "losses": losses}


def classifier_ours(job: Job):
    edl_hvd.init()
    # recipe
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=job.epochs * len(loader))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, scheduler=scheduler, ema=ema, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                ema.update_parameters(model)
                optimizer.zero_grad()
                state.losses.append(step.mean("loss"))

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "ema": ema, "losses": state.losses}


def global_step_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, global_step=0)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.global_step += 1
            # end

    train(state)
    return {"model": model}


IDIOMS = [
    Idiom(
        "Clipping, EMA, OneCycle and a logged loss",
        "Everything that belongs to an optimizer step stands in the body of `state.steps`, behind the loop over the "
        "step's micro-batches: there `.grad` is the gradient of the whole global batch. `len(loader)` counts optimizer "
        "steps. `step.record` takes numbers of a micro-batch; `step.mean` gives their mean over the global batch.",
        classifier_plain,
        classifier_ours,
    ),
    Idiom(
        "Counting steps in the flat loop",
        "The body of `state.batches` runs once per micro-batch, so a counter in it would depend on the number of "
        "workers: it is refused where a step has several micro-batches. Use `state.step`, or `state.steps`.",
        None,
        global_step_flat_ours,
        refused=r"state\.global_step was changed in the body of state\.batches\(\)",
        micro_batches=(3, 6),
    ),
]
