"""What comes out of the loader, how often the loop's body runs, and what a loop keeps beside weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, GLOBAL_BATCH, Idiom, Job
from script_parts import make_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import edl_hvd
from catalogue.schedules import validation_set


def accumulation_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    number = 0
    for epoch in range(job.epochs):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            loss = F.cross_entropy(model(inputs), target)
            (loss / 3).backward()
            number += 1
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        # end
    return {"model": model, "optimizer": optimizer}


def accumulation_ours(job: Job):
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
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    (loss / 3).backward()
                if (step.number + 1) % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def accumulation_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for i, (inputs, target) in enumerate(state.batches(loader)):
                loss = F.cross_entropy(model(inputs), target)
                (loss / 4).backward()
                if (i + 1) % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def early_break_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for epoch in range(job.epochs + 1):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if losses[-1] < 1.0:
                break
        # end
    return {"model": model, "losses": losses}


def early_break_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs + 1):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
                if state.losses[-1] < 1.0:
                    break
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def first_steps_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for i, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            if i + 1 == 3:
                break
    return {"model": model, "optimizer": optimizer}


def first_steps_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    # recipe
    batches = edl_hvd.ElasticBatchSampler(
        len(job.dataset()), global_batch=GLOBAL_BATCH, micro_batch=job.micro_batch, seed=3, limit_batches=3
    )
    # end
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def break_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    left = []
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            if number == 2:
                break
        left.append(3 * (epoch + 1))
    return {"model": model, "optimizer": optimizer, "left": left}


def break_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, left=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if optimizer.at_boundary and state.step == 3 * epoch + 2:
                    break
            state.left.append(state.step)

    train(state)
    return {"model": model, "optimizer": optimizer, "left": state.left}


def last_step_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    number = 0
    for epoch in range(100):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
            if number == 6:
                return {"model": model, "optimizer": optimizer, "number": number}
    return {}


def last_step_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    # recipe
    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(100):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if step.number + 1 == 6:
                    return

    # end

    train(state)
    return {"model": model, "optimizer": optimizer, "number": state.step}


def early_stopping_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    val_inputs, val_target = validation_set()
    best, bad, losses = float("inf"), 0, []
    for epoch in range(6):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(val_inputs), val_target).item()
        losses.append(loss)
        best, bad = (loss, 0) if loss < best - 0.01 else (best, bad + 1)
        if bad == 2:
            break
    return {"model": model, "best": best, "losses": losses}


def early_stopping_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    val_inputs, val_target = validation_set()
    # recipe
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, best=float("inf"), bad=0, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(6):
            if state.bad == 2:
                break
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(model(val_inputs), val_target).item()
            state.losses.append(loss)
            state.best, state.bad = (loss, 0) if loss < state.best - 0.01 else (state.best, state.bad + 1)

    # end

    train(state)
    return {"model": model, "best": state.best, "losses": state.losses}


def early_stopping_behind_plain(job: Job):
    return early_stopping_plain(job)


def early_stopping_behind_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    val_inputs, val_target = validation_set()
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, best=float("inf"), bad=0, losses=[])

    # recipe
    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(6):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(model(val_inputs), val_target).item()
            state.losses.append(loss)
            state.best, state.bad = (loss, 0) if loss < state.best - 0.01 else (state.best, state.bad + 1)
            if state.bad == 2:
                break

    # end

    train(state)
    return {"model": model, "best": state.best, "losses": state.losses}


def validation_in_epoch_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    val_inputs, val_target = validation_set()
    losses, number = [], 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
            if number % 3 == 0:
                model.eval()
                with torch.no_grad():
                    losses.append(F.cross_entropy(model(val_inputs), val_target).item())
                model.train()
    return {"model": model, "losses": losses}


def validation_in_epoch_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    val_inputs, val_target = validation_set()
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if (step.number + 1) % 3 == 0:
                    model.eval()
                    with torch.no_grad():
                        state.losses.append(F.cross_entropy(model(val_inputs), val_target).item())
                    model.train()
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def partners(job: Job):
    """Another sample for each."""
    others = torch.randperm(job.samples, generator=torch.Generator().manual_seed(9))
    return job.dataset(job.inputs, job.target, job.inputs[others], job.target[others])


def mix_up_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for epoch in range(job.epochs):
        # recipe
        for inputs, target, other_inputs, other_target in job.plain_loader(partners(job), epoch):
            share = torch.rand((), generator=generator)
            optimizer.zero_grad()
            scores = model(share * inputs + (1 - share) * other_inputs)
            loss = share * F.cross_entropy(scores, target) + (1 - share) * F.cross_entropy(scores, other_target)
            loss.backward()
            optimizer.step()
        # end
    return {"model": model, "optimizer": optimizer}


def mix_up_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(partners(job), batch_sampler=batches)
    generator = torch.Generator().manual_seed(5)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, generator=generator)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                share = torch.rand((), generator=generator)
                optimizer.zero_grad()
                for inputs, target, other_inputs, other_target in step:
                    scores = model(share * inputs + (1 - share) * other_inputs)
                    loss = share * F.cross_entropy(scores, target) + (1 - share) * F.cross_entropy(scores, other_target)
                    loss.backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def cut_mix_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for epoch in range(job.epochs):
        for inputs, target, other_inputs, other_target in job.plain_loader(partners(job), epoch):
            first, last = sorted(torch.randint(0, FEATURES + 1, (2,), generator=generator).tolist())
            optimizer.zero_grad()
            inputs[:, first:last] = other_inputs[:, first:last]
            share, scores = 1 - (last - first) / FEATURES, model(inputs)
            loss = share * F.cross_entropy(scores, target) + (1 - share) * F.cross_entropy(scores, other_target)
            loss.backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def cut_mix_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(partners(job), batch_sampler=batches)
    generator = torch.Generator().manual_seed(5)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, generator=generator)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                first, last = sorted(torch.randint(0, FEATURES + 1, (2,), generator=generator).tolist())
                optimizer.zero_grad()
                for inputs, target, other_inputs, other_target in step:
                    inputs[:, first:last] = other_inputs[:, first:last]
                    share, scores = 1 - (last - first) / FEATURES, model(inputs)
                    loss = share * F.cross_entropy(scores, target) + (1 - share) * F.cross_entropy(scores, other_target)
                    loss.backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Records(torch.utils.data.Dataset):
    """Samples that are dictionaries."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.labels = job.inputs, job.target

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index], "name": f"sample {index}"}


class Classifier(nn.Module):
    """Has the loss in its output, as the models of Hugging Face have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


def dictionaries_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for batch in job.plain_loader(Records(job), epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def dictionaries_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(Records(job), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for batch in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def hugging_face_plain(job: Job):
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8))
    losses = []
    for epoch in range(job.epochs):
        model.train()
        # recipe
        for batch in job.plain_loader(Records(job), epoch):
            outputs = model(batch["inputs"], labels=batch["labels"])
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float().item())
        # end
    return {"model": model, "optimizer": optimizer, "losses": losses}


def hugging_face_ours(job: Job):
    edl_hvd.init()
    model = Classifier()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), exact=job.exact)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8))
    batches = job.batches()
    loader = DataLoader(Records(job), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            model.train()
            # recipe
            for step in state.steps(loader):
                for batch in step:
                    outputs = model(batch["inputs"], labels=batch["labels"])
                    loss = outputs.loss
                    loss.backward()
                    step.record(loss=loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                state.losses.append(step.mean("loss"))
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "losses": state.losses}


class Stream(IterableDataset):
    """Reads the samples of a file one after the other."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.target = job.inputs, job.target

    def __iter__(self):
        return zip(self.inputs, self.target, strict=True)


def iterable_data_set_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    batches = job.batches()
    # recipe
    loader = DataLoader(Stream(job), batch_size=12)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end

    train(state)
    return {"model": model}


def shards_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    order = make_shards(job).sampler(global_batch=GLOBAL_BATCH, micro_batch=3, seed=3).order
    for epoch in range(job.epochs):
        samples = list(order.samples(3, epoch, 0, job.samples))
        dealt = [samples[first : first + GLOBAL_BATCH] for first in range(0, job.samples, GLOBAL_BATCH)]
        for inputs, target in DataLoader(job.dataset(), batch_sampler=dealt):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def make_shards(job: Job):
    inputs, target = job.inputs, job.target

    def read(shard):
        return ((inputs[i], target[i]) for i in shard)

    paths = [range(first, first + 5) for first in range(0, job.samples, 5)]
    return edl_hvd.ElasticShards(paths, [5] * len(paths), read=read)


def shards_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    shards = make_shards(job)
    # recipe
    batches = shards.sampler(global_batch=12, micro_batch=3, seed=3)
    loader = DataLoader(shards, batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def changed_attributes_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    best, history, seen = float("inf"), [], {}
    counts = torch.zeros(CLASSES)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best = loss.item()
                history.append(best)
            seen[epoch] = seen.get(epoch, 0) + len(inputs)
            counts += 1
    return {"model": model, "best": best, "history": history, "seen": seen, "counts": counts}


def changed_attributes_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    state = edl_hvd.State(
        model=model,
        optimizer=optimizer,
        batches=batches,
        best=float("inf"),
        history=[],
        seen={},
        counts=torch.zeros(CLASSES),
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                if step.mean("loss") < state.best:
                    state.best = step.mean("loss")
                    state.history.append(state.best)
                state.seen[epoch] = state.seen.get(epoch, 0) + step.samples
                state.counts += 1

    # end

    train(state)
    return {
        "model": model,
        "best": state.best,
        "history": state.history,
        "seen": state.seen,
        "counts": state.counts,
    }


def changed_in_micro_batch_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
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
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    state.losses.append(loss.item())
                optimizer.step()
            # end

    train(state)
    return {"model": model}


def running_loss_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    log = []
    for epoch in range(job.epochs):
        # recipe
        running_loss, right = 0.0, 0
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            scores = model(inputs)
            loss = F.cross_entropy(scores, target)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * len(inputs)
            right += (scores.argmax(1) == target).sum().item()
        # end
        log.append((running_loss / job.samples, right / job.samples))
    return {"model": model, "log": log}


def running_loss_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    state = edl_hvd.State(
        model=model,
        optimizer=optimizer,
        batches=batches,
        loss=edl_hvd.metrics.Mean(),
        accuracy=edl_hvd.metrics.Accuracy(),
        log=[],
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                scores = model(inputs)
                loss = F.cross_entropy(scores, target)
                loss.backward()
                optimizer.step()
                state.loss.update(loss, weight=len(inputs))
                state.accuracy.update(scores, target)
            state.log.append((state.loss.compute(), state.accuracy.compute()))

    # end

    train(state)
    return {"model": model, "log": state.log}


def running_loss_of_steps_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    log = []
    for epoch in range(job.epochs):
        running_loss = 0.0
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        log.append(running_loss / len(job.plain_loader()))
    return {"model": model, "log": log}


def running_loss_of_steps_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, running_loss=0.0, log=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.running_loss += step.mean("loss")
            state.log.append(state.running_loss / len(loader))
            state.running_loss = 0.0
            # end

    train(state)
    return {"model": model, "log": state.log}


def no_backward_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            kept = inputs[:, 0] > 0.4
            if not kept.any():
                continue
            loss = F.cross_entropy(model(inputs[kept]), target[kept], reduction="sum") / len(inputs)
            loss.backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def no_backward_ours(job: Job):
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
                    kept = inputs[:, 0] > 0.4
                    if not kept.any():
                        continue
                    loss = F.cross_entropy(model(inputs[kept]), target[kept], reduction="sum") / len(inputs)
                    loss.backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def loss_after_loop_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
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
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                optimizer.step()
                if step.mean("loss") < 0.01:
                    break
            # end

    train(state)
    return {"model": model}


def large_numbers_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    times = []
    for epoch in range(job.epochs):
        for inputs, target, when in job.plain_loader(job.dataset(job.inputs, job.target, times_of(job)), epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            times.append(when.mean().item())
    return {"times": times}


def large_numbers_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, job.target, times_of(job)), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, times=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target, when in step:
                    F.cross_entropy(model(inputs), target).backward()
                    step.record(time=when.mean())
                optimizer.step()
                state.times.append(step.mean("time"))

    train(state)
    return {"times": state.times}


def times_of(job: Job) -> torch.Tensor:
    """Seconds since 1970; float64."""
    return 1.7e9 + torch.arange(job.samples, dtype=torch.float64) * 7.25


IDIOMS = [
    Idiom(
        "Accumulation over several steps",
        "To have a larger batch, give a larger `global_batch`: micro-batches are accumulated by themselves. "
        "Accumulation by hand, over several global batches, goes by `step.number`; what lies in `.grad` in between is "
        "part of the state.",
        accumulation_plain,
        accumulation_ours,
    ),
    Idiom(
        "Accumulation in the flat loop",
        "There a counter of the loop's bodies is another one on each worker. "
        "Leave out the accumulation and give a larger `global_batch`, or write the loop over steps.",
        None,
        accumulation_flat_ours,
        refused=r"state\.steps\(loader\)",
        micro_batches=(3, 6),
    ),
    Idiom(
        "Leaving an epoch early",
        "Stop at step level, by a number that is the same on every worker, such as `step.mean`.",
        early_break_plain,
        early_break_ours,
    ),
    Idiom(
        "The first steps of each epoch only",
        "For a number that is known beforehand there is `limit_batches`, which `len(loader)` takes into account.",
        first_steps_plain,
        first_steps_ours,
    ),
    Idiom(
        "Leaving the flat loop",
        "",
        break_flat_plain,
        break_flat_ours,
    ),
    Idiom(
        "A run of a fixed number of steps",
        "`return` ends the run on every worker after the same step.",
        last_step_plain,
        last_step_ours,
    ),
    Idiom(
        "Early stopping",
        "Keep what decides in `State`, and look at it at the top of the loop: a job that is continued then stops, too.",
        early_stopping_plain,
        early_stopping_ours,
    ),
    Idiom(
        "Early stopping behind the epoch",
        "It also works where tutorials have it, at the end of the epoch.",
        early_stopping_behind_plain,
        early_stopping_behind_ours,
    ),
    Idiom(
        "Validation every few steps",
        "At step level every worker may compute all of a small validation set. "
        "`state.evaluate` divides a large one, after the epoch.",
        validation_in_epoch_plain,
        validation_in_epoch_ours,
    ),
    Idiom(
        "MixUp",
        "Draw the share at step level, so that it is that of the whole batch. "
        "Partners of a sample from its micro-batch would depend on `micro_batch`; here the data set gives them.",
        mix_up_plain,
        mix_up_ours,
    ),
    Idiom(
        "CutMix",
        "So is the part that is cut out.",
        cut_mix_plain,
        cut_mix_ours,
    ),
    Idiom(
        "Batches that are dictionaries",
        "The loops hand out what the loader gives.",
        dictionaries_plain,
        dictionaries_ours,
    ),
    Idiom(
        "A model that returns its loss",
        "Logged numbers are those of a micro-batch until `step.mean` tells them for the global batch.",
        hugging_face_plain,
        hugging_face_ours,
    ),
    Idiom(
        "An iterable data set",
        "Nobody can tell what a stream has dealt to whom; `ElasticShards` reads one whose samples are counted.",
        None,
        iterable_data_set_ours,
        refused=r"an IterableDataset, of which nobody can tell what it has dealt .* edl_hvd\.ElasticShards",
    ),
    Idiom(
        "Shards that are read from front to back",
        "`ElasticShards` has positions like any data set, so nothing else changes.",
        shards_plain,
        shards_ours,
    ),
    Idiom(
        "Numbers, lists and tensors that the loop changes",
        "Attributes of `State` are put back with the weights when a step is made again. "
        "Change them at step level, through `state`.",
        changed_attributes_plain,
        changed_attributes_ours,
    ),
    Idiom(
        "A list that grows with the micro-batches of a step",
        "The same holds inside the loop over a step: use `step.record`.",
        None,
        changed_in_micro_batch_ours,
        refused=r"state\.losses was changed in",
        micro_batches=(3, 6),
    ),
    Idiom(
        "Loss and accuracy of an epoch",
        "A local sum would be that of one worker, and lost with it; a metric in `State` counts each sample once. "
        "It may be updated in the flat loop, too.",
        running_loss_plain,
        running_loss_ours,
        seen=("log",),
    ),
    Idiom(
        "A sum over the steps of an epoch",
        "What is set back for each epoch is set back behind the loop: what stands in front of it happens again when an "
        "epoch is continued.",
        running_loss_of_steps_plain,
        running_loss_of_steps_ours,
    ),
    Idiom(
        "Micro-batches without a loss",
        "`continue` leaves out a micro-batch; it counts with its samples, and a gradient of zero.",
        no_backward_plain,
        no_backward_ours,
    ),
    Idiom(
        "A mean of what was not recorded",
        "`step.mean` knows what `step.record` was given.",
        None,
        loss_after_loop_ours,
        refused=r"step\.mean\('loss'\) is not known",
    ),
    Idiom(
        "Means of large numbers, such as times or numbers of tokens",
        "`step.mean` has the digits of a float in Python before the point, up to 2^48 summed over a step, and seven "
        "digits behind it.",
        large_numbers_plain,
        large_numbers_ours,
        tolerance=1e-13,
    ),
]
