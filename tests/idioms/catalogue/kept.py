"""What scripts change besides weights."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque

import numpy
import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, GLOBAL_BATCH, Idiom, Job
from script_parts import momentum_sgd, prepare
from torch import nn

import edl_hvd
from edl_hvd.data.randomness import seed_everything

_EPOCH_LEVEL, _LOOP_ENDS = -1, -2


class Tempered(nn.Module):
    """A network with all that a module may hold besides parameters and buffers of its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.gate = Gate()
        self.head = nn.Linear(8, CLASSES)
        self.temperature = 1.0
        self.calls_of_step = 0
        self.register_buffer("beta", torch.ones(()), persistent=False)
        self.register_buffer("gamma", torch.ones(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.head(self.gate(self.body(inputs)))
        return output * self.temperature * self.beta + self.gamma[0] + 0.01 * self.calls_of_step


class Gate(nn.Module):
    """Does something else in training, as dropout and BatchNorm do, but nothing random."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 0.5 if self.training else inputs


def tempered_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        model.train()
        if epoch == 1:
            model.gate.eval()
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            model.temperature *= 0.9
            model.calls_of_step += 1
            model.beta.mul_(0.95)
            model.gamma = model.gamma * 0.9
    return {"model": model, "temperature": model.temperature, "calls": model.calls_of_step, "beta": model.beta,
            "gamma": model.gamma}  # fmt: skip


def tempered_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            model.train()
            # recipe
            if epoch == 1:
                model.gate.eval()
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                model.temperature *= 0.9  # an attribute of the module
                model.calls_of_step += 1
                model.beta.mul_(0.95)  # buffers with persistent=False
                model.gamma = model.gamma * 0.9
            # end

    train(state)
    return {"model": model, "temperature": model.temperature, "calls": model.calls_of_step, "beta": model.beta,
            "gamma": model.gamma}  # fmt: skip


class Annealed(nn.Module):
    """A network whose numbers are not all there, or not all of Python, from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0), nn.Linear(8, CLASSES))
        self.tau = 2.0
        self.margin = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.body(inputs) / float(self.tau)
        return output * getattr(self, "gain", 1.0) if self.margin is None else output * self.margin


def anneal(model: Annealed, step: int) -> None:
    model.tau = numpy.maximum(model.tau * 0.9, 0.5)  # a number of NumPy's
    if step == 2:
        model.gain = 1.5  # was not there before
    elif step == 4:
        model.margin = 2.0  # was None


def annealed_plain(job: Job):
    model = Annealed()
    optimizer = momentum_sgd(model)
    step = 0
    for epoch in range(job.epochs):
        model.body[1].negative_slope += 0.1
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            step += 1
            anneal(model, step)
    return {"model": model, "tau": float(model.tau), "slope": model.body[1].negative_slope, "gain": model.gain,
            "margin": model.margin}  # fmt: skip


def annealed_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Annealed)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            model.body[1].negative_slope += 0.1
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                anneal(model, step.number + 1)

    train(state)
    return {"model": model, "tau": float(model.tau), "slope": model.body[1].negative_slope, "gain": model.gain,
            "margin": model.margin}  # fmt: skip


def frozen_once_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for number, (inputs, target) in enumerate(job.plain_loader(epoch=epoch)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            if (epoch, number) == (0, 2):
                model.gate.eval()
    return {"model": model, "training": model.gate.training}


def frozen_once_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if state.step == 2:
                    model.gate.eval()
            # end

    train(state)
    return {"model": model, "training": model.gate.training}


def drawn_per_epoch_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    drawn = []
    for epoch in range(job.epochs):
        seed_everything(3, epoch, _EPOCH_LEVEL)  # as state.epochs does
        scale = random.uniform(0.5, 2.0)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(scale * inputs), target).backward()
            optimizer.step()
        seed_everything(3, epoch, _LOOP_ENDS)
        drawn.append((scale, float(torch.rand(()))))
    return {"model": model, "drawn": drawn}


def drawn_per_epoch_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, drawn=[])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            scale = random.uniform(0.5, 2.0)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(scale * inputs), target).backward()
                optimizer.step()
            state.drawn.append((scale, float(torch.rand(()))))
            # end

    train(state)
    return {"model": model, "drawn": state.drawn}


def drawn_per_epoch_flat_plain(job: Job):
    return drawn_per_epoch_plain(job)


def drawn_per_epoch_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, drawn=[])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            scale = random.uniform(0.5, 2.0)
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(scale * inputs), target).backward()
                optimizer.step()
            state.drawn.append((scale, float(torch.rand(()))))

    train(state)
    return {"model": model, "drawn": state.drawn}


def history_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    history, last = defaultdict(list), OrderedDict()
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            history[f"bias {epoch}"].append(float(model.head.bias.detach()[0]))
        last[f"epoch {epoch}"] = epoch
        last.move_to_end(f"epoch {epoch}", last=False)
    return {"model": model, "history": history, "last": last}


def history_ours(job: Job):
    history, last = defaultdict(list), OrderedDict()
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, history=history, last=last)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.history[f"bias {epoch}"].append(float(model.head.bias.detach()[0]))
            state.last[f"epoch {epoch}"] = epoch
            state.last.move_to_end(f"epoch {epoch}", last=False)
            # end

    train(state)
    return {"model": model, "history": state.history, "last": state.last}


def memory_and_generators_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    memory, rng, old, draws = (
        deque(maxlen=4),
        numpy.random.default_rng(7),
        numpy.random.RandomState(8),
        random.Random(9),
    )
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            scale = mixed(memory, rng, old, draws)
            optimizer.zero_grad()
            F.cross_entropy(model(scale * inputs), target).backward()
            optimizer.step()
            memory.append((model.head.bias.detach().clone(), scale))
    return {"model": model, "memory": list(memory), "next": mixed(memory, rng, old, draws)}


def memory_and_generators_ours(job: Job):
    rng, old, draws = numpy.random.default_rng(7), numpy.random.RandomState(8), random.Random(9)
    model, optimizer, loader, state = prepare(
        job, momentum_sgd, Tempered, memory=deque(maxlen=4), rng=rng, old=old, draws=draws
    )

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                scale = mixed(state.memory, rng, old, draws)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(scale * inputs), target).backward()
                optimizer.step()
                state.memory.append((model.head.bias.detach().clone(), scale))
            # end

    train(state)
    return {"model": model, "memory": list(state.memory), "next": mixed(state.memory, rng, old, draws)}


def mixed(memory: deque, rng: numpy.random.Generator, old: numpy.random.RandomState, draws: random.Random) -> float:
    """A scale by each of the generators and one of what is remembered."""
    of_memory = float(draws.choice(memory)[0][0]) if memory else 0.0
    return float(0.5 + rng.beta(0.4, 0.4) + 0.1 * old.normal() + 0.1 * of_memory)


def moved_tensor_ours(job: Job):
    edl_hvd.init()
    model = Tempered()
    # recipe
    log_variance = torch.zeros(2, requires_grad=True)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), log_variance], lr=0.1))
    edl_hvd.State(model=model, optimizer=optimizer, log_variance=log_variance)
    # end


def optimizer_beside_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    # recipe
    centers = nn.Parameter(torch.zeros(CLASSES))
    center_optimizer = torch.optim.SGD([centers], lr=0.5)
    # end

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                center_optimizer.zero_grad()
                for inputs, target in step:
                    output = model(inputs)
                    (F.cross_entropy(output, target) + (output - centers).square().mean()).backward()
                optimizer.step()
                center_optimizer.step()

    train(state)


def local_optimizer_plain(job: Job):
    model = Tempered()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs + found_noise(model)), target).backward()
            optimizer.step()
    return {"model": model, "steps": job.epochs * -(-job.samples // GLOBAL_BATCH)}


def local_optimizer_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                noise = found_noise(model)
                for inputs, target in step:
                    F.cross_entropy(model(inputs + noise), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "steps": state.step}


# recipe
def found_noise(model: nn.Module) -> torch.Tensor:
    """By an optimizer of its own, made anew in each step: the noise that the model answers most."""
    noise = nn.Parameter(torch.zeros(FEATURES))
    ascent = torch.optim.SGD([noise], lr=0.1, maximize=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(model(noise).square().sum(), [noise])
        noise.grad = gradient
        ascent.step()
    return noise.detach()


# end


IDIOMS = [
    Idiom(
        "Modes, numbers and buffers of modules",
        "A commit holds the mode of each module (`train()`, `eval()`), numbers and words that are attributes of a "
        "module, and buffers with `persistent=False` of at most 65,536 elements. So a worker that joins has those of "
        "the others, and a step that is made again changes them once.",
        tempered_plain,
        tempered_ours,
    ),
    Idiom(
        "Numbers of modules that are annealed",
        "Those of NumPy are kept as numbers of Python. Attributes that appear later, or are `None` at first, are kept, "
        "too, and so are those of PyTorch's own modules, such as `p` of `nn.Dropout(0)`. A tensor, a list or a "
        "dictionary that is an attribute of a module is not kept, which is said once: make it a buffer, or give it to "
        "`State`.",
        annealed_plain,
        annealed_ours,
    ),
    Idiom(
        "A layer that is frozen once",
        "By `eval()`, as BatchNorm's statistics are for fine-tuning. Decide by `state.step`, or by the epoch.",
        frozen_once_plain,
        frozen_once_ours,
    ),
    Idiom(
        "Random numbers at the level of an epoch",
        "All workers draw the same ones before the loop over batches, and behind it, also when an epoch is continued.",
        drawn_per_epoch_plain,
        drawn_per_epoch_ours,
    ),
    Idiom(
        "Random numbers at the level of an epoch, in the flat form",
        "",
        drawn_per_epoch_flat_plain,
        drawn_per_epoch_flat_ours,
    ),
    Idiom(
        "A history in a `defaultdict`",
        "`State` keeps dictionaries, `Counter`, `OrderedDict`, and `defaultdict` of `list`, `int` and the like.",
        history_plain,
        history_ours,
    ),
    Idiom(
        "A replay memory, and generators of NumPy and `random`",
        "`State` keeps a `deque` with its `maxlen`, `torch.Generator`, `numpy.random.Generator`, "
        "`numpy.random.RandomState` and `random.Random`. What is drawn from them at step level is the same on every "
        "worker, and counts once. Outside of `State` they begin anew on a worker that joins.",
        memory_and_generators_plain,
        memory_and_generators_ours,
    ),
    Idiom(
        "An optimizer that is made for one step",
        "One that is made in a step and moves what only this step needs is left alone.",
        local_optimizer_plain,
        local_optimizer_ours,
    ),
    Idiom(
        "A tensor that an optimizer moves, as an attribute of `State`",
        "A worker that joins gets tensors as copies, which its optimizer does not know. Make it part of a model.",
        None,
        moved_tensor_ours,
        refused=r"State\(…\) was given log_variance, a tensor that an optimizer moves",
    ),
    Idiom(
        "A plain optimizer of parameters that `State` does not have",
        "Such as the centers of a loss, or the discriminator of a GAN: each worker would move its own.",
        None,
        optimizer_beside_ours,
        refused=r"SGD\.step\(\) moves parameters of no model in State",
    ),
]
