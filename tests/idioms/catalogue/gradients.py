"""Penalties, gradients of inputs, and gradients that the script changes or makes itself."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from idioms import CLASSES, Idiom, Job
from script_parts import make_model, momentum_sgd, prepare

import edl_hvd

with warnings.catch_warnings():
    # torch says once per process that backward(create_graph=True) makes a cycle.
    warnings.simplefilter("ignore")
    torch.ones((), requires_grad=True).square().backward(create_graph=True)


def regulariser_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            penalty = 0.01 * sum(p.abs().sum() for p in model.parameters())
            penalty.backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def regulariser_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                penalty = 0.01 * sum(p.abs().sum() for p in model.parameters())
                penalty.backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def regulariser_first_plain(job: Job):
    return regulariser_plain(job)


def regulariser_first_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    penalty = 0.01 * sum(p.abs().sum() for p in model.parameters())
                    (F.cross_entropy(model(inputs), target) + penalty).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def input_gradient_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            inputs.requires_grad_(True)
            loss = F.cross_entropy(model(inputs), target, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            penalty = gradient.pow(2).sum(1).mean()
            (F.cross_entropy(model(inputs), target) + 0.1 * penalty).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def input_gradient_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    inputs.requires_grad_(True)
                    loss = F.cross_entropy(model(inputs), target, reduction="sum")
                    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
                    penalty = gradient.pow(2).sum(1).mean()
                    (F.cross_entropy(model(inputs), target) + 0.1 * penalty).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def create_graph_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            inputs.requires_grad_(True)
            F.cross_entropy(model(inputs), target).backward(create_graph=True)
            penalty = (len(inputs) * inputs.grad).pow(2).sum(1).mean()
            (0.1 * penalty).backward()
            optimizer.step()
            inputs.grad = None
    return {"model": model}


def create_graph_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    inputs.requires_grad_(True)
                    F.cross_entropy(model(inputs), target).backward(create_graph=True)
                    penalty = (len(inputs) * inputs.grad).pow(2).sum(1).mean()
                    (0.1 * penalty).backward()
                    inputs.grad = None
                optimizer.step()
            # end

    train(state)
    return {"model": model}


def adversarial_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            inputs.requires_grad_(True)
            F.cross_entropy(model(inputs), target, reduction="sum").backward()
            attacked = (inputs + 0.1 * inputs.grad).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(attacked), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def adversarial_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    inputs.requires_grad_(True)
                    loss = F.cross_entropy(model(inputs), target, reduction="sum")
                    (gradient,) = torch.autograd.grad(loss, inputs)
                    attacked = (inputs + 0.1 * gradient).detach()
                    F.cross_entropy(model(attacked), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def adversarial_zero_grad_plain(job: Job):
    return adversarial_plain(job)


def adversarial_zero_grad_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for inputs, target in step:
                    inputs.requires_grad_(True)
                    F.cross_entropy(model(inputs), target, reduction="sum").backward()
                    attacked = (inputs + 0.1 * inputs.grad).detach()
                    model.zero_grad()
                    F.cross_entropy(model(attacked), target).backward()
                optimizer.step()
                optimizer.zero_grad()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def gradient_thrown_away_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            if number < 3:
                for p in model[2].parameters():
                    p.grad = None
            model[0].weight.grad.mul_(torch.tensor([1.0, 0.0]).repeat(4)[:, None])
            optimizer.step()
            number += 1
    return {"model": model, "optimizer": optimizer}


def gradient_thrown_away_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                if step.number < 3:
                    for p in model[2].parameters():
                        p.grad = None
                model[0].weight.grad.mul_(torch.tensor([1.0, 0.0]).repeat(4)[:, None])
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def masked_by_hook_plain(job: Job):
    model = make_model()
    mask = torch.tensor([1.0, 0.5]).repeat(4)[:, None]
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def masked_by_hook_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)
    # recipe
    mask = torch.tensor([1.0, 0.5]).repeat(4)[:, None]
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


def surgery(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[torch.Tensor]:
    """Take from one gradient what is against the other (PCGrad)."""
    dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    norm = sum(b.square().sum() for b in other)
    return [a - (dot / norm) * b if dot < 0 else a for a, b in zip(one, other, strict=True)]


def gradient_surgery_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            output = model(inputs)
            losses = F.cross_entropy(output, target), F.mse_loss(output, -inputs[:, :CLASSES])
            one, other = ([*torch.autograd.grad(loss, model.parameters(), retain_graph=True)] for loss in losses)
            for p, a, b in zip(model.parameters(), surgery(one, other), surgery(other, one), strict=True):
                p.grad = a + b
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def gradient_surgery_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                one = [p.grad for p in model.parameters()]
                optimizer.zero_grad()
                for inputs, target in step:
                    F.mse_loss(model(inputs), -inputs[:, :CLASSES]).backward()
                other = [p.grad for p in model.parameters()]
                for p, a, b in zip(model.parameters(), surgery(one, other), surgery(other, one), strict=True):
                    p.grad = a + b
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def gradient_by_hand_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            loss = F.cross_entropy(model(inputs), target)
            gradients = torch.autograd.grad(loss, model.parameters())
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def gradient_by_hand_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    gradients = torch.autograd.grad(loss, model.parameters())
                    for p, gradient in zip(model.parameters(), gradients, strict=True):
                        p.grad = gradient
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def gradient_by_hand_flat_plain(job: Job):
    return gradient_by_hand_plain(job)


def gradient_by_hand_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                loss = F.cross_entropy(model(inputs), target)
                gradients = torch.autograd.grad(loss, model.parameters())
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.grad = gradient
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "A penalty on the weights",
        "What every worker computes alike can stand at step level, once: its gradient is added to that of the loop.",
        regulariser_plain,
        regulariser_ours,
    ),
    Idiom(
        "A penalty on the weights within the loss",
        "It may be part of each micro-batch's loss as well; that is the mean over them.",
        regulariser_first_plain,
        regulariser_first_ours,
    ),
    Idiom(
        "A penalty on the gradient of the inputs",
        "Take the gradient with `torch.autograd.grad`, which leaves the parameters' alone.",
        input_gradient_plain,
        input_gradient_ours,
    ),
    Idiom(
        "`backward(create_graph=True)`",
        "The same with `inputs.grad`, if both gradients are wanted. A loss that is a mean makes `inputs.grad` "
        "depend on the size of the micro-batch: multiply by it.",
        create_graph_plain,
        create_graph_ours,
    ),
    Idiom(
        "Adversarial training",
        "The attack needs no gradient of the parameters: `torch.autograd.grad` makes none.",
        adversarial_plain,
        adversarial_ours,
    ),
    Idiom(
        "Adversarial training with `zero_grad()`",
        "In the loop over micro-batches `.grad` is the gradient of the present micro-batch alone, so that of the "
        "attack can be thrown away by `model.zero_grad()`.",
        adversarial_zero_grad_plain,
        adversarial_zero_grad_ours,
    ),
    Idiom(
        "Gradients that are masked or thrown away",
        "Behind the loop `.grad` is complete and yours; a parameter whose `.grad` is `None` is left out, as ever.",
        gradient_thrown_away_plain,
        gradient_thrown_away_ours,
    ),
    Idiom(
        "A hook on a gradient",
        "`register_hook` is called once per micro-batch. That makes no difference for what is linear, such as a "
        "mask or a factor; clip at step level.",
        masked_by_hook_plain,
        masked_by_hook_ours,
    ),
    Idiom(
        "Gradient surgery (PCGrad)",
        "What is not linear in the gradient needs that of the whole batch: loop over the step once per loss, and "
        "combine behind it.",
        gradient_surgery_plain,
        gradient_surgery_ours,
    ),
    Idiom(
        "Gradients that are put into `.grad` by hand",
        "In the loop over micro-batches that is the gradient of the micro-batch; it is summed as that of `backward()`.",
        gradient_by_hand_plain,
        gradient_by_hand_ours,
    ),
    Idiom(
        "Gradients that are put into `.grad` by hand, in the flat loop",
        "The same in the flat loop.",
        gradient_by_hand_flat_plain,
        gradient_by_hand_flat_ours,
    ),
]
