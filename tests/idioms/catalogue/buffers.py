"""Buffers that training changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

import edl_hvd


def make_model(norm=spectral_norm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(FEATURES, 8)), nn.Tanh(), norm(nn.Linear(8, CLASSES)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loss_of(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), target) + 0.1 * model(-inputs).square().mean()


def classifier_plain(job: Job, model: nn.Module):
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, inputs, target).backward()
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


def classifier_ours(job: Job, model: nn.Module):
    edl_hvd.init()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for _ in range(2):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        loss_of(model, inputs, target).backward()
                    optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def spectral_norm_plain(job: Job):
    return classifier_plain(job, make_model())


def spectral_norm_ours(job: Job):
    return classifier_ours(job, make_model())


def spectral_norm_hook_plain(job: Job):
    return classifier_plain(job, make_model(nn.utils.spectral_norm))


def spectral_norm_hook_ours(job: Job):
    return classifier_ours(job, make_model(nn.utils.spectral_norm))


def spectral_norm_flat_plain(job: Job):
    model = make_model()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss_of(model, inputs, target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def spectral_norm_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                loss_of(model, inputs, target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


class Centred(nn.Module):
    """A head whose outputs have their running mean taken off, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) - self.center


def centre_plain(job: Job):
    model = Centred()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            # recipe
            optimizer.zero_grad()
            output = model(inputs)
            F.cross_entropy(output, target).backward()
            model.center = 0.9 * model.center + 0.1 * output.detach().mean(0)
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer}


def centre_ours(job: Job):
    edl_hvd.init()
    model = Centred()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                total = torch.zeros_like(model.center)
                for inputs, target in step:
                    output = model(inputs)
                    F.cross_entropy(output, target).backward()
                    total += output.detach().sum(0)
                total = edl_hvd.allreduce(total, op="sum")
                model.center = 0.9 * model.center + 0.1 * total / step.samples
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Prototypes(nn.Module):
    """A classifier that is kept away from its own mean outputs of former steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("bank", torch.ones(1, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(1.0, len(self.bank) + 1).unsqueeze(1)  # the newest entries count most
        away = (output @ (weights / weights.sum() * self.bank).sum(0)).square().mean()
        return F.cross_entropy(output, target) + 0.1 * away


def growing_bank_plain(job: Job):
    model = Prototypes()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            # recipe
            optimizer.zero_grad()
            output = model(inputs)
            model.loss(output, target).backward()
            model.bank = torch.cat([model.bank, output.detach().mean(0, keepdim=True)])[-5:]
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer}


def growing_bank_ours(job: Job):
    edl_hvd.init()
    model = Prototypes()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                total = torch.zeros(1, CLASSES)
                for inputs, target in step:
                    output = model(inputs)
                    model.loss(output, target).backward()
                    total += output.detach().sum(0, keepdim=True)
                total = edl_hvd.allreduce(total, op="sum")
                model.bank = torch.cat([model.bank, total / step.samples])[-5:]
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Ring(nn.Module):
    """A model whose buffer is longer in each epoch, and has not been made before the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("ring", None)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) - self.ring.sum(0) * self.scale.sum()

    def lengthen(self, length: int) -> None:
        before = self.ring if self.ring is not None else torch.zeros(0, CLASSES)
        self.ring = torch.cat([before, torch.full((length, CLASSES), 0.1) * torch.arange(CLASSES)])
        self.scale = torch.linspace(0.1, 0.3, length)


def lengthened_ring_plain(job: Job):
    model = Ring()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        model.lengthen(epoch + 1)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            model.ring = model.ring * 0.9
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def lengthened_ring_ours(job: Job):
    edl_hvd.init()
    model = Ring()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            model.lengthen(epoch + 1)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                model.ring = model.ring * 0.9
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def prepared_for_pruning() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    for layer in (model[0], model[2]):
        prune.identity(layer, "weight")
    return model


def pruned_plain(job: Job):
    model = prepared_for_pruning()
    optimizer = sgd(model)
    for epoch in range(job.epochs):
        # recipe
        for layer in (model[0], model[2]) if epoch > 0 else ():
            prune.l1_unstructured(layer, "weight", amount=0.2, importance_scores=layer.weight_orig)
        # end
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def pruned_ours(job: Job):
    edl_hvd.init()
    model = prepared_for_pruning()
    optimizer = edl_hvd.DistributedOptimizer(sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for layer in (model[0], model[2]) if epoch > 0 else ():
                prune.l1_unstructured(layer, "weight", amount=0.2, importance_scores=layer.weight_orig)
            # end
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "Pruning",
        "Call `prune.identity` for each layer before `State` is made, so that every worker has the masks. "
        "Give the scores by the parameter (`weight_orig`): without them torch takes `weight`, "
        "which is that of this worker's last forward pass, and another one on a worker that was idle.",
        pruned_plain,
        pruned_ours,
    ),
    Idiom(
        "Spectral norm",
        "Its vectors depend on the weights alone: each loop over a step moves them as one pass with the whole batch "
        "would.",
        spectral_norm_plain,
        spectral_norm_ours,
    ),
    Idiom(
        "Spectral norm by `torch.nn.utils.spectral_norm`",
        "The older form.",
        spectral_norm_hook_plain,
        spectral_norm_hook_ours,
    ),
    Idiom(
        "Spectral norm in the flat loop",
        "The same in the flat loop.",
        spectral_norm_flat_plain,
        spectral_norm_flat_ours,
    ),
    Idiom(
        "The centre of DINO, the codebook of a VQ-VAE",
        "A buffer of one's own that is made of the batch is changed at step level, from sums over the workers. "
        "Where a forward pass changes it, it sees one micro-batch only, and a warning says so once. "
        "At the end of an epoch floating-point buffers are averaged over the workers, as running statistics of "
        "BatchNorm are.",
        centre_plain,
        centre_ours,
        exact=False,  # the sums of the micro-batches are added in another order
    ),
    Idiom(
        "A memory bank that grows",
        "A buffer may change its shape behind the loop over a step, or at the top of an epoch: "
        "a worker that joins gets it as it is. "
        "It has to be registered before `State` is made, and may be `None` then.",
        growing_bank_plain,
        growing_bank_ours,
        exact=False,  # the sums of the micro-batches are added in another order
    ),
    Idiom(
        "A buffer that is longer in each epoch, and `None` at first",
        "",
        lengthened_ring_plain,
        lengthened_ring_ours,
    ),
]
