"""Folds, and several data sets in one job."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from idioms import FEATURES, GLOBAL_BATCH, SAMPLES, Idiom, Job
from script_parts import make_model
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import edl_hvd

FOLDS = 2
FOLD_EPOCHS = 2
HELD_OUT = [list(range(SAMPLES))[fold::FOLDS] for fold in range(FOLDS)]
TRAINED_ON = [[index for index in range(SAMPLES) if index not in held_out] for held_out in HELD_OUT]


def loss_on(indices: list[int], model: torch.nn.Module) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(Job().inputs[indices]), Job().target[indices]).item()


def folds_plain(job: Job):
    losses = []
    for fold in range(FOLDS):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        # recipe
        loader = DataLoader(Subset(job.dataset(), TRAINED_ON[fold]), batch_size=GLOBAL_BATCH)
        for _ in range(FOLD_EPOCHS):
            for inputs, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        losses.append(loss_on(HELD_OUT[fold], model))
        # end
    return {"model": model, "optimizer": optimizer, "losses": losses}


def folds_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)

    # recipe
    class Folds(edl_hvd.Order):
        length = SAMPLES
        positions = SAMPLES // FOLDS
        name = "folds"

        def samples(self, seed, epoch, first, last):
            return TRAINED_ON[epoch // FOLD_EPOCHS][first:last]

    batches = edl_hvd.ElasticBatchSampler(
        SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=job.micro_batch, order=Folds(), seed=3
    )
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])
    first = copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(FOLDS * FOLD_EPOCHS):
            fold, epoch_of_fold = divmod(epoch, FOLD_EPOCHS)
            if epoch_of_fold == 0:
                model.load_state_dict(first[0])
                optimizer.load_state_dict(copy.deepcopy(first[1]))
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            if epoch_of_fold == FOLD_EPOCHS - 1:
                state.losses.append(loss_on(HELD_OUT[fold], model))

    # end
    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses}


def unlabelled() -> torch.Tensor:
    return torch.randn(3 * SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5))


def two_losses(model, inputs, target, others):
    return F.cross_entropy(model(inputs), target) + 0.1 * (model(others) - model(others + 0.1)).square().mean()


def labelled_and_not_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    dataset = TensorDataset(job.inputs, job.target, unlabelled()[: job.samples])
    for epoch in range(job.epochs):
        for inputs, target, others in job.plain_loader(dataset, epoch):
            # recipe
            optimizer.zero_grad()
            two_losses(model, inputs, target, others).backward()
            optimizer.step()
            # end
    return {"model": model, "optimizer": optimizer}


def labelled_and_not_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    images, labels, others = job.inputs, job.target, unlabelled()

    # recipe
    class Both(Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return images[index], labels[index], others[index % len(others)]

    batches = job.batches()
    loader = DataLoader(Both(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target, more in step:
                    two_losses(model, inputs, target, more).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "Folds of a cross-validation",
        "A job deals from one sampler. Make the folds epochs of one elastic function, and let an `Order` of your own "
        "say which samples an epoch has: as many in each.",
        folds_plain,
        folds_ours,
    ),
    Idiom(
        "Labelled and unlabelled samples side by side",
        "A second loader that the script advances with `next` would deal other samples for each number of "
        "micro-batches. Let one data set return both: what belongs together follows from the index.",
        labelled_and_not_plain,
        labelled_and_not_ours,
    ),
]
