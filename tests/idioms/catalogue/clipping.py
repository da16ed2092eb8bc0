"""What is done with gradients between backward and the optimizer's step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import Idiom, Job
from script_parts import make_model
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader

import edl_hvd


def clip_norm_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        # end
    return {"model": model, "optimizer": optimizer}


def clip_norm_flat_ours(job: Job):
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
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def clip_value_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def clip_value_ours(job: Job):
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
                clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def zero_grad_after_step_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def zero_grad_after_step_flat_ours(job: Job):
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
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                optimizer.zero_grad()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def model_zero_grad_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            model.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def model_zero_grad_flat_ours(job: Job):
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
                model.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def grad_is_none_flat_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            for parameter in model.parameters():
                parameter.grad = None
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def grad_is_none_flat_ours(job: Job):
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
                for parameter in model.parameters():
                    parameter.grad = None
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


class Switched(torch.nn.Module):
    """Uses its second branch only for samples whose first feature is large, so in some batches not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = make_model(), make_model()

    def forward(self, inputs):
        large = inputs[:, 0] > 1.3
        scores = self.always(inputs)
        if large.any():
            scores = scores + self.sometimes(inputs) * large[:, None]
        return scores


def zeros_kept_plain(job: Job):
    model = Switched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def zeros_kept_ours(job: Job):
    edl_hvd.init()
    model = Switched()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1), exact=job.exact
    )
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad(set_to_none=False)
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def unused_branch_flat_plain(job: Job):
    model = Switched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def unused_branch_flat_ours(job: Job):
    edl_hvd.init()
    model = Switched()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1), exact=job.exact
    )
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
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def logged_norms_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for epoch in range(job.epochs):
        # recipe
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            norms.append({name: p.grad.norm().item() for name, p in model.named_parameters()})
            optimizer.step()
        # end
    return {"model": model, "norms": norms}


def logged_norms_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, norms=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                state.norms.append({name: p.grad.norm().item() for name, p in model.named_parameters()})
                optimizer.step()
            # end

    train(state)
    return {"model": model, "norms": state.norms}


def gradient_noise_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            for parameter in model.parameters():
                parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def gradient_noise_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    generator = torch.Generator().manual_seed(7)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, generator=generator)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                for parameter in model.parameters():
                    parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)
                optimizer.step()

    # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def clip_in_micro_batch_ours(job: Job):
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
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                    clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
            # end

    train(state)
    return {"model": model}


IDIOMS = [
    Idiom(
        "Clipping by norm in the flat loop",
        "In the body of `state.batches` clipping stands where it always stood. "
        "In the body that ends a step `.grad` is the gradient of the whole global batch, and what is clipped is that. "
        "Before that there is nothing in `.grad` to clip, and `optimizer.step()` does nothing.",
        clip_norm_flat_plain,
        clip_norm_flat_ours,
    ),
    Idiom(
        "Clipping by value",
        "Clip behind the loop over the micro-batches: a clipped sum is not the sum of clipped parts.",
        clip_value_plain,
        clip_value_ours,
    ),
    Idiom(
        "Clearing gradients after the step",
        "`optimizer.zero_grad()` may stand before `backward()` or after `optimizer.step()`: what a worker has "
        "computed of a step that is not complete does not lie in `.grad`, so it cannot be cleared too early.",
        zero_grad_after_step_flat_plain,
        zero_grad_after_step_flat_ours,
    ),
    Idiom(
        "Clearing gradients through the model",
        "`model.zero_grad()` does what `optimizer.zero_grad()` does.",
        model_zero_grad_flat_plain,
        model_zero_grad_flat_ours,
    ),
    Idiom(
        "Clearing gradients by hand",
        "So does a loop that sets each `.grad` to `None`.",
        grad_is_none_flat_plain,
        grad_is_none_flat_ours,
    ),
    Idiom(
        "Gradients set to zero instead of None",
        "With `set_to_none=False` an optimizer also moves parameters that no sample of the batch has used, by weight "
        "decay and momentum, once they have had a gradient. "
        "After a worker was lost the gradients that it had are gone; where that matters use `zero_grad()` as it is.",
        zeros_kept_plain,
        zeros_kept_ours,
    ),
    Idiom(
        "Parameters that some batches do not use",
        "A parameter that no sample of the global batch has used keeps `.grad` at `None`, on every worker, and no "
        "optimizer moves it. If only some workers have used it, all get its gradient.",
        unused_branch_flat_plain,
        unused_branch_flat_ours,
    ),
    Idiom(
        "Logging norms of gradients",
        "Read `.grad` behind the loop over the step: there it is the gradient of the global batch, the same on every "
        "worker. A list given to `State` is kept when a worker is lost; a local one would begin anew.",
        logged_norms_plain,
        logged_norms_ours,
    ),
    Idiom(
        "Noise added to gradients",
        "What is drawn at step level is the same on every worker. "
        "A generator of your own goes into `State`, which puts it back when a step is made again.",
        gradient_noise_plain,
        gradient_noise_ours,
    ),
    Idiom(
        "Clipping each micro-batch",
        "The gradient of a micro-batch is no gradient of a step: what is clipped must not depend on `micro_batch`. "
        "Clip behind the loop over the micro-batches; `torch.autograd.grad` gives the gradient of one of them.",
        None,
        clip_in_micro_batch_ours,
        refused=r"clip",
    ),
]
