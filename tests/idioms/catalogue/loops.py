"""Loops that end early, loops of one's own, batches that fail, and random numbers in a loop."""

from __future__ import annotations

import contextlib
import random

import torch
import torch.nn.functional as F
from idioms import FEATURES, GLOBAL_BATCH, Idiom, Job
from script_parts import make_model, momentum_sgd, prepare
from torch.utils.data import DataLoader

import edl_hvd
from catalogue.passes import zero_grad_inside_plain
from edl_hvd.data.randomness import seed_everything


def randomness_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    drawn = []
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            seed_everything(3, epoch, GLOBAL_BATCH * number, -1, 0)  # as state.steps does
            scale = random.uniform(0.5, 1.5)
            noise = 0.1 * torch.randn(FEATURES)
            optimizer.zero_grad()
            F.cross_entropy(model(scale * inputs + noise), target).backward()
            seed_everything(3, epoch, GLOBAL_BATCH * number, -1, 1)
            if torch.rand(()) < 0.7:
                optimizer.step()
            drawn.append(scale)
    return {"model": model, "optimizer": optimizer, "drawn": drawn}


def randomness_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, drawn=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                scale = random.uniform(0.5, 1.5)
                noise = 0.1 * torch.randn(FEATURES)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(scale * inputs + noise), target).backward()
                if torch.rand(()) < 0.7:
                    optimizer.step()
                state.drawn.append(scale)
            # end

    train(state)
    return {"model": model, "optimizer": optimizer, "drawn": state.drawn}


def stops_early_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    steps = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            if steps == 6:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            steps += 1
    return {"model": model, "optimizer": optimizer, "steps": steps}


def stops_early_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                if step.number == 6:
                    return
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "steps": state.step}


def short_epochs_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            if number == 1:
                break
    return {"model": model, "optimizer": optimizer, "steps": 2 * job.epochs}


def short_epochs_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if step.number % 2 == 1:
                    break
        # end

    train(state)
    return {"model": model, "optimizer": optimizer, "steps": state.step}


def own_loop_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    inputs, target = job.inputs, job.target
    for _ in range(job.epochs):
        for batch in range(3):
            mine = slice(12 * batch, 12 * batch + 12)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[mine]), target[mine]).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 3 * job.epochs}


def own_loop_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters(), exact=job.exact)
    inputs, target = job.inputs, job.target
    # recipe
    state = edl_hvd.State(model, optimizer, epoch=0, batch=0)

    @edl_hvd.elastic
    def train(state):
        while state.epoch < job.epochs:
            while state.batch < 3:
                mine = slice(12 * state.batch + edl_hvd.rank(), 12 * state.batch + 12, edl_hvd.size())
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[mine]), target[mine]).backward()
                optimizer.step()
                state.batch += 1
                state.commit()
            state.epoch, state.batch = state.epoch + 1, 0

    # end
    train(state)
    return {"model": model, "optimizer": optimizer, "step": state.step}


def random_crops_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    inputs, target = job.inputs, job.target
    # recipe
    generator = torch.Generator().manual_seed(7)
    for iteration in range(8):
        where = torch.randint(len(inputs), (12,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[where]), target[where]).backward()
        optimizer.step()
    # end
    return {"model": model, "optimizer": optimizer}


def random_crops_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters(), exact=job.exact)
    inputs, target = job.inputs, job.target
    # recipe
    generator = torch.Generator().manual_seed(7)
    state = edl_hvd.State(model=model, optimizer=optimizer, generator=generator, iteration=0)

    @edl_hvd.elastic
    def train(state):
        while state.iteration < 8:
            where = torch.randint(len(inputs), (12,), generator=generator)
            mine = where[edl_hvd.rank() :: edl_hvd.size()]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[mine]), target[mine]).backward()
            optimizer.step()
            state.iteration += 1
            state.commit()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def names_of_state_plain(job: Job):
    return {**zero_grad_inside_plain(job), "names": [1, 2, 3, 4, 5]}


def names_of_state_ours(job: Job):
    model, optimizer, loader, state = prepare(
        job, momentum_sgd, memory=0, schedulers=0, counting=0, life=0, warn_once=0
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        state.memory, state.schedulers, state.counting, state.life, state.warn_once = 1, 2, 3, 4, 5

    train(state)
    return {
        "model": model,
        "optimizer": optimizer,
        "names": [state.memory, state.schedulers, state.counting, state.life, state.warn_once],
    }


def failed_batches_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            with contextlib.suppress(Exception):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


def failed_batches_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                with contextlib.suppress(Exception):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def failed_batches_flat_plain(job: Job):
    return failed_batches_plain(job)


def failed_batches_flat_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                with contextlib.suppress(Exception):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), target).backward()
                with contextlib.suppress(Exception):
                    optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "Random numbers at step level",
        "Before and behind the loop over a step all workers draw the same numbers from `torch`, `random` and "
        "NumPy, also when the step is made again after a failure.",
        randomness_plain,
        randomness_ours,
    ),
    Idiom(
        "A fixed number of steps",
        "Return at step level, by `step.number` or `state.step`, which are the same on every worker.",
        stops_early_plain,
        stops_early_ours,
    ),
    Idiom(
        "Short epochs",
        "`break` at step level ends the epoch; `state.epochs` goes on with the next one. Decide by `step.number`: "
        "`enumerate` starts anew when the function runs again after a failure.",
        short_epochs_plain,
        short_epochs_ours,
    ),
    Idiom(
        "A loop of one's own",
        "Without a loader, as in scripts for `hvd.elastic`: deal the samples out by rank and size, in equal "
        "shares, and call `state.commit()`, which counts the steps.",
        own_loop_plain,
        own_loop_ours,
        exact=False,  # the shares, and so the terms of the sum, are those of the world
        micro_batches=(None,),
    ),
    Idiom(
        "Batches that the script draws by itself, as in nanoGPT",
        "In a loop of one's own nobody seeds the random numbers, and a step that is made again would draw others: "
        "draw from a generator in `State`. Every worker draws the whole batch, and takes its part of it.",
        random_crops_plain,
        random_crops_ours,
        exact=False,  # the shares, and so the terms of the sum, are those of the world
        micro_batches=(None,),
    ),
    Idiom(
        "Names in `State`",
        "Any name that is not a method of `State` may be given.",
        names_of_state_plain,
        names_of_state_ours,
    ),
    Idiom(
        "A batch that fails is skipped, by `except Exception` around the body of the loop",
        "The error that a lost worker causes is raised again by the loop itself.",
        failed_batches_plain,
        failed_batches_ours,
    ),
    Idiom(
        "A batch that fails is skipped, in the flat loop",
        "The same in the flat loop.",
        failed_batches_flat_plain,
        failed_batches_flat_ours,
    ),
]
