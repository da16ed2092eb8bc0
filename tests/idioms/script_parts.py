"""What the scripts of the catalogue and of the tests begin with: a model, an optimizer, a loader and a state."""

from __future__ import annotations

import torch
from idioms import CLASSES, FEATURES, Job
from torch import nn
from torch.utils.data import DataLoader

import edl_hvd


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def prepare(job: Job, optimizer_of, make=make_model, **more):
    """A script up to its elastic function: model, optimizer, loader and state."""
    edl_hvd.init()
    model = make()
    optimizer = edl_hvd.DistributedOptimizer(optimizer_of(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    return model, optimizer, loader, edl_hvd.State(model=model, optimizer=optimizer, batches=batches, **more)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
