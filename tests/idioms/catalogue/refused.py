"""Code that cannot learn the same in every world, and is refused in a sentence."""

from __future__ import annotations

import copy
import itertools
import random

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import edl_hvd


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def prepare(job: Job, **more):
    """A script up to its elastic function."""
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, **more)
    return model, optimizer, loader, state


def step_inside_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for inputs, target in step:
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
            # end

    train(state)


def scheduler_inside_ours(job: Job):
    model, optimizer, loader, _ = prepare(job)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                    scheduler.step()
                optimizer.step()
            # end

    train(state)


def average_inside_ours(job: Job):
    model, optimizer, loader, _ = prepare(job)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    state = edl_hvd.State(model=model, optimizer=optimizer, ema=ema, batches=loader.batch_sampler)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                    ema.update_parameters(model)
                optimizer.step()
            # end

    train(state)


def epochs_around_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    # recipe
    @edl_hvd.elastic
    def train(state):
        for step in state.steps(loader):
            optimizer.zero_grad()
            for inputs, target in step:
                F.cross_entropy(model(inputs), target).backward()
            optimizer.step()

    for _ in range(job.epochs):
        train(state)
    # end


def loop_forgotten_ours(job: Job):
    model, optimizer, loader, state = prepare(job)
    whole_inputs, whole_target = job.inputs, job.target

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(whole_inputs), whole_target).backward()
                optimizer.step()
            # end

    train(state)


def backward_after_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                loss = torch.zeros(())
                for inputs, target in step:
                    loss = loss + F.cross_entropy(model(inputs), target) / len(step)
                loss.backward()
                optimizer.step()
            # end

    train(state)


def kept_losses_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                activities = [torch.zeros(())]
                for inputs, target in step:
                    output = model(inputs)
                    F.cross_entropy(output, target).backward(retain_graph=True)
                    activities.append(output.square().mean())
                torch.stack(activities).mean().backward()
                optimizer.step()
            # end

    train(state)


def penalty_first_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)


def break_in_step_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    if loss > 0.5:
                        break
                    loss.backward()
                optimizer.step()
            # end

    train(state)


def return_in_step_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    if state.step == 2:
                        return
                    loss.backward()
                optimizer.step()
            # end

    train(state)


def next_of_step_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                inputs, target = next(iter(step))
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)


def scheduler_not_given_ours(job: Job):
    model, optimizer, loader, state = prepare(job)
    # recipe
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # end

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            scheduler.step()

    train(state)


def range_of_epochs_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in range(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)


def range_of_epochs_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in range(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)


def list_in_flat_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job, losses=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                state.losses.append(loss.item())
            # end

    train(state)


def running_loss_in_flat_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job, running_loss=0.0)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                state.running_loss += loss.item()
            # end

    train(state)


def tensor_in_flat_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job, seen=torch.zeros(CLASSES))

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.seen += torch.bincount(target, minlength=CLASSES)
            # end

    train(state)


def ema_in_flat_loop_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    ema = copy.deepcopy(model)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                with torch.no_grad():
                    for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                        average.mul_(0.9).add_(p, alpha=0.1)
            # end

    train(state)


def ema_by_data_in_flat_loop_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    ema = copy.deepcopy(model)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                    average.data.mul_(0.9).add_(p.data, alpha=0.1)
            # end

    train(state)


def ema_by_state_dict_in_flat_loop_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                for name, value in model.state_dict().items():
                    state.ema[name].mul_(0.9).add_(value, alpha=0.1)
            # end

    train(state)


def clipping_weights_in_flat_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.99)
            # end

    train(state)


def sparse_embedding_ours(job: Job):
    edl_hvd.init()
    torch.manual_seed(0)
    # recipe
    model = nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, CLASSES))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    # end
    words = torch.randint(0, 10, (job.samples, 4), generator=torch.Generator().manual_seed(4))
    batches = job.batches()
    loader = DataLoader(job.dataset(words, job.target), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)


class Reentrant(nn.Module):
    """Its layers are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 8)
        self.hidden = nn.Sequential(nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # recipe
        return checkpoint(self.hidden, self.first(inputs), use_reentrant=True)
        # end


def reentrant_checkpoint_flat_ours(job: Job):
    edl_hvd.init()
    model = Reentrant()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
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


def two_backwards_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                output = model(inputs)
                F.cross_entropy(output, target).backward(retain_graph=True)
                (0.1 * output.square().mean()).backward()
                optimizer.step()
            # end

    train(state)


def plain_optimizer_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.5))
    head_optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, head_optimizer=head_optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                head_optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                head_optimizer.step()

    train(state)


def optimizer_not_given_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.5))
    # recipe
    head_optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9))
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                head_optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                head_optimizer.step()

    train(state)


def plain_optimizer_not_given_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.5))
    # recipe
    head_optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                head_optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                head_optimizer.step()

    train(state)


def model_not_given_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    state = edl_hvd.State(optimizer=optimizer, batches=batches)
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


class Sam(torch.optim.Optimizer):
    """Holds another optimizer, as most SAM implementations do."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups


def sam_without_inner_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=job.batches())
    # end
    return state


def part_of_step_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in itertools.islice(step, 1):
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)


def optimizer_in_backward_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    # recipe
    optimizers = {p: edl_hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5)) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    # end
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    named = {f"optimizer{number}": optimizer for number, optimizer in enumerate(optimizers.values())}
    state = edl_hvd.State(model=model, batches=batches, **named)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()

    train(state)


def evaluation_inside_ours(job: Job):
    val_batches = edl_hvd.EvaluationSampler(job.samples, batch_size=8)
    model, optimizer, loader, state = prepare(job, val_batches=val_batches)
    val_loader = DataLoader(job.dataset(), batch_sampler=val_batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if step.number == 2:
                    for inputs, target in state.evaluate(val_loader):
                        model(inputs)
            # end

    train(state)


def closure_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):

                def closure(inputs=inputs, target=target):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            # end

    train(state)


def next_of_batches_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            inputs, target = next(iter(state.batches(loader)))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            # end

    train(state)


def zipped_loaders_ours(job: Job):
    others = job.batches()
    model, optimizer, loader, state = prepare(job, others=others)
    other_loader = DataLoader(job.dataset(), batch_sampler=others)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step, other_step in zip(state.steps(loader), state.steps(other_loader), strict=True):
                optimizer.zero_grad()
                for (inputs, target), (more, _) in zip(step, other_step, strict=True):
                    (F.cross_entropy(model(inputs), target) + model(more).square().mean()).backward()
                optimizer.step()
            # end

    train(state)


def list_of_steps_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in list(state.steps(loader)):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)


def gradient_in_loop_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                    step.record(norm=sum(p.grad.norm() for p in model.parameters()))
                optimizer.step()
            # end

    train(state)


WHY_FLAT = (
    "The body of `state.batches` runs once per micro-batch, so what it does to the state would depend on the number of "
    "workers: it is refused where a step has several micro-batches. Write the loop with `state.steps`."
)
IN_FLAT = r"in the body of state\.batches\(\), which runs once per micro-batch"


def replaced_layer_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                model[2] = nn.Linear(8, CLASSES)
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model}


def max_norm_ours(job: Job):
    edl_hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, 8, max_norm=1.0), nn.Linear(8, CLASSES))
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    batches = job.batches()
    loader = DataLoader(job.dataset(job.target, job.target), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model}


def growing_model_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            if epoch == 1 and len(model) == 3:
                model.append(nn.Linear(CLASSES, CLASSES))
                optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.1})
            # end
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)


def drawn_inside_ours(job: Job):
    generator = torch.Generator().manual_seed(5)
    model, optimizer, loader, state = prepare(job, generator=generator)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    noise = torch.randn(inputs.shape, generator=generator)
                    F.cross_entropy(model(inputs + noise), target).backward()
                optimizer.step()
            # end

    train(state)


def drawn_inside_flat_ours(job: Job):
    generator = random.Random(5)
    model, optimizer, loader, state = prepare(job, generator=generator)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            # recipe
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs * generator.uniform(0.5, 2.0)), target).backward()
                optimizer.step()
            # end

    train(state)


def replaced_optimizer_ours(job: Job):
    model, optimizer, loader, state = prepare(job)

    @edl_hvd.elastic
    def train(state):
        nonlocal optimizer
        # recipe
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)


IDIOMS = [
    Idiom(
        "`optimizer.step()` in the loop over micro-batches",
        "The gradient is complete behind the loop over the step. Move `optimizer.step()` there.",
        None,
        step_inside_ours,
        refused=r"optimizer\.step\(\) was called in the loop over a step's micro-batches",
    ),
    Idiom(
        "`scheduler.step()` in the loop over micro-batches",
        "It belongs to the optimizer step, as that does.",
        None,
        scheduler_inside_ours,
        refused=r"StepLR\.step\(\) was called in the loop over a step's micro-batches",
    ),
    Idiom(
        "`ema.update_parameters()` in the loop over micro-batches",
        "The same.",
        None,
        average_inside_ours,
        refused=r"update_parameters\(\) was called in the loop over a step's micro-batches",
    ),
    Idiom(
        "The elastic function called once per epoch",
        "The epochs belong into it: `for epoch in state.epochs(n):` counts them.",
        None,
        epochs_around_ours,
        refused="an elastic function was called after one had returned",
    ),
    Idiom(
        "No loop over the step",
        "`backward()` outside of the loop over the step is for what every worker computes alike, in addition to "
        "the loop; without one it is refused, since no sample of the step was used.",
        None,
        loop_forgotten_ours,
        refused="outside the loop over the step's micro-batches",
    ),
    Idiom(
        "Losses summed up, with one `backward()` behind the loop",
        "Call `backward()` in the loop over the step, where the micro-batch's part of the gradient is weighed and "
        "summed.",
        None,
        backward_after_loop_ours,
        refused="outside the loop over the step's micro-batches for a loss that was computed in it",
    ),
    Idiom(
        "A second `backward()` behind the loop, through what the loop has computed",
        "Every worker has kept other losses, or none. Call both in the loop over the step, or loop over it again.",
        None,
        kept_losses_ours,
        refused="outside the loop over the step's micro-batches for a loss that was computed in it",
    ),
    Idiom(
        "A penalty in front of the loop over the step",
        "What every worker computes alike stands behind that loop, or in the micro-batches' loss.",
        None,
        penalty_first_ours,
        refused="move what every worker computes alike, such as a penalty on weights, behind that loop",
    ),
    Idiom(
        "`break` in the loop over micro-batches",
        "Each worker would leave at a place of its own. To leave a sample out, do not call `backward()` for it; to "
        "stop, do so at step level.",
        None,
        break_in_step_ours,
        refused="left before its end, by break",
    ),
    Idiom(
        "`return` in the loop over micro-batches",
        "Return at step level, behind or before the loop over the step.",
        None,
        return_in_step_ours,
        refused="left before its end, by break, return",
    ),
    Idiom(
        "`next(iter(step))`",
        "A worker may have none, one or several micro-batches; loop over all of them.",
        None,
        next_of_step_ours,
        refused=r"outside the loop over the step's micro-batches, .* write `for batch in step:`",
    ),
    Idiom(
        "`itertools.islice(step, …)`",
        "The same: go through all micro-batches of the step.",
        None,
        part_of_step_ours,
        refused="left before its end",
    ),
    Idiom(
        "Optimizers that step within `backward()`",
        "A hook that steps an optimizer as soon as its parameter has a gradient would do so before the others have "
        "theirs.",
        None,
        optimizer_in_backward_ours,
        refused=r"optimizer\.step\(\) was called in the loop over a step's micro-batches",
    ),
    Idiom(
        "A scheduler that `State` was not given",
        "Its position would be lost with a worker. Add it to `State`.",
        None,
        scheduler_not_given_ours,
        refused=r"State\(…\) was not given it",
    ),
    Idiom(
        "`for epoch in range(n)`",
        "After a failure it would start with epoch 0 again. Write `for epoch in state.epochs(n)`.",
        None,
        range_of_epochs_ours,
        refused=r"called again in epoch 0",
    ),
    Idiom(
        "`for epoch in range(n)`, flat",
        "The same in the flat loop.",
        None,
        range_of_epochs_flat_ours,
        refused=r"called again in epoch 0",
    ),
    Idiom(
        "A list of losses in the flat loop",
        WHY_FLAT,
        None,
        list_in_flat_loop_ours,
        refused=rf"state\.losses was changed {IN_FLAT}",
        micro_batches=(3, 6),
    ),
    Idiom(
        "A running loss in the flat loop",
        WHY_FLAT,
        None,
        running_loss_in_flat_loop_ours,
        refused=rf"state\.running_loss was changed {IN_FLAT}",
        micro_batches=(3, 6),
    ),
    Idiom(
        "A tensor that counts in the flat loop",
        WHY_FLAT,
        None,
        tensor_in_flat_loop_ours,
        refused=rf"state\.seen was changed {IN_FLAT}",
        micro_batches=(3, 6),
    ),
    Idiom(
        "EMA by hand in the flat loop",
        "An `AveragedModel` in `State` moves once per step in the flat loop, too; an average made by hand does "
        "not, and is refused where a step has several micro-batches.",
        None,
        ema_in_flat_loop_ours,
        refused=f"a model in State that no distributed optimizer moves was changed {IN_FLAT}",
        micro_batches=(3, 6),
    ),
    Idiom(
        "EMA by hand through `.data` in the flat loop",
        WHY_FLAT,
        None,
        ema_by_data_in_flat_loop_ours,
        refused=IN_FLAT,
        micro_batches=(3, 6),
    ),
    Idiom(
        "EMA in a dictionary in the flat loop",
        WHY_FLAT,
        None,
        ema_by_state_dict_in_flat_loop_ours,
        refused=IN_FLAT,
        micro_batches=(3, 6),
    ),
    Idiom(
        "Weights changed by hand in the flat loop",
        WHY_FLAT,
        None,
        clipping_weights_in_flat_loop_ours,
        refused=IN_FLAT,
        micro_batches=(3, 6),
    ),
    Idiom(
        "Sparse gradients",
        "Build the module with `sparse=False`.",
        None,
        sparse_embedding_ours,
        refused="is sparse, which cannot be summed over a changing world",
    ),
    Idiom(
        "Re-entrant activation checkpointing in the flat loop",
        "`use_reentrant=True` runs a backward pass inside another; use `use_reentrant=False`, or `state.steps`.",
        None,
        reentrant_checkpoint_flat_ours,
        refused="use_reentrant=True runs a backward pass inside another",
    ),
    Idiom(
        "Two `backward()` calls in the flat loop",
        "Where a step has several micro-batches the second call is refused. Add the losses, or use `state.steps`.",
        None,
        two_backwards_flat_ours,
        refused=r"a second time in one body of state\.batches\(\)",
        micro_batches=(3, 6),
    ),
    Idiom(
        "A plain optimizer beside a distributed one",
        "It would step with the gradients of one worker. Wrap every optimizer in `DistributedOptimizer`.",
        None,
        plain_optimizer_ours,
        refused="DistributedOptimizer",
    ),
    Idiom(
        "A distributed optimizer that `State` was not given",
        "Its momentum would be lost with a worker. Give every optimizer to `State`.",
        None,
        optimizer_not_given_ours,
        refused=r"State\(…\)|in State",
    ),
    Idiom(
        "An optimizer that is made in the loop",
        "It is not in `State`: see [Another optimizer from an epoch on](#another-optimizer-from-an-epoch-on).",
        None,
        replaced_optimizer_ours,
        refused=r"SGD\.step\(\) was called in the loop, and State\(…\) was not given this DistributedOptimizer",
    ),
    Idiom(
        "A plain optimizer that `State` was not given",
        "It would step with the gradients of one worker. Wrap every optimizer, and give it to `State`.",
        None,
        plain_optimizer_not_given_ours,
        refused=r"State\(…\)|in State",
    ),
    Idiom(
        "A model that `State` was not given",
        "A worker that joins would start with other weights. Give every trained model to `State`.",
        None,
        model_not_given_ours,
        refused=r"State\(…\)|in State",
    ),
    Idiom(
        "SAM whose inner optimizer `State` was not given",
        "An optimizer that holds another one needs both in `State`.",
        None,
        sam_without_inner_ours,
        refused=r"whose attribute 'base_optimizer' is another optimizer",
    ),
    Idiom(
        "`state.evaluate` in the loop over steps",
        "It has a position of its own in the epoch, which comes after the batches. Make epochs shorter, or have every "
        "worker go through a small validation set at step level.",
        None,
        evaluation_inside_ours,
        refused=r"state\.evaluate\(\) was called inside a loop of state\.steps\(\)",
    ),
    Idiom(
        "`optimizer.step(closure)` in the flat loop",
        "The closure sees one micro-batch. Loop over the step in it, in `state.steps`.",
        None,
        closure_flat_ours,
        refused=r"optimizer\.step\(closure\) was called in the body of state\.batches\(\)",
        micro_batches=(3, 6),
    ),
    Idiom(
        "`next(iter(state.batches(loader)))`",
        "It leaves the loop before its body has run. Train in the body.",
        None,
        next_of_batches_ours,
        refused=r"left before its first backward\(\), as next\(iter\(state\.batches\(loader\)\)\) does",
    ),
    Idiom(
        "Two samplers, for two data sets or for folds",
        "A job deals from one, so that a commit holds one position: see [Folds of a cross-validation]"
        "(#folds-of-a-cross-validation) and [Labelled and unlabelled samples side by side]"
        "(#labelled-and-unlabelled-samples-side-by-side).",
        None,
        zipped_loaders_ours,
        refused="State holds 2 ElasticBatchSamplers, and a job deals from one",
    ),
    Idiom(
        "`list(state.steps(loader))`",
        "A step is over when the next one comes; so it is with `itertools.cycle`.",
        None,
        list_of_steps_ours,
        refused="begun after the step was over",
    ),
    Idiom(
        "`.grad` in the loop over micro-batches",
        "The gradient of the global batch is complete behind that loop; in it, `.grad` is `None` once a worker's last "
        "micro-batch is computed.",
        None,
        gradient_in_loop_ours,
        refused=r"in the loop over micro-batches \.grad is None",
    ),
    Idiom(
        "A layer that is put in the place of another",
        "A worker that joins would have the first one; give the model all layers before `State`.",
        None,
        replaced_layer_ours,
        refused=r"model\.2\.weight \(and 1 more\) is moved by an optimizer, and is no part of the model any more",
    ),
    Idiom(
        "`Embedding(max_norm=…)`",
        "It rescales the rows that a worker looks up; scale all rows behind `optimizer.step()`, with `torch.renorm`.",
        None,
        max_norm_ours,
        refused=r"Embedding\(max_norm=1\) rescales those rows of model\.0\.weight .* leave max_norm out",
    ),
    Idiom(
        "A model that grows in the elastic function",
        "A worker that joins would lack the new layers. Build the whole model before `State`, freeze what comes later, "
        "and give it to the optimizer with `add_param_group` when it is used.",
        None,
        growing_model_ours,
        refused=r"add_param_group\(\) was given 2 parameter\(s\) that no model in State had when State was made",
    ),
    Idiom(
        "A generator in `State` that is drawn from for each micro-batch",
        "Workers compute different ones. Draw at step level, or from `torch`, `numpy` or `random` themselves, which "
        "are seeded for each micro-batch.",
        None,
        drawn_inside_ours,
        refused=r"state\.generator was drawn from in the loop over a step's micro-batches, .* draw from it",
    ),
    Idiom(
        "A generator in `State` that is drawn from in the flat loop",
        "",
        None,
        drawn_inside_flat_ours,
        refused=r"state\.generator was drawn from in the body of state\.batches\(\), .* draw from it at step level",
        micro_batches=(3, 6),
    ),
]
