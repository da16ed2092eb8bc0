"""Optimizers, losses and backward passes in other numbers than one of each."""

from __future__ import annotations

import contextlib
import random
import warnings

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, GLOBAL_BATCH, Idiom, Job
from torch import nn
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.data.randomness import seed_everything

with warnings.catch_warnings():
    # torch says once per process that backward(create_graph=True) makes a cycle.
    warnings.simplefilter("ignore")
    torch.ones((), requires_grad=True).square().backward(create_graph=True)


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


def two_losses_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            output = model(inputs)
            F.cross_entropy(output, target).backward(retain_graph=True)
            (0.1 * output.square().mean()).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def two_losses_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    output = model(inputs)
                    F.cross_entropy(output, target).backward(retain_graph=True)
                    (0.1 * output.square().mean()).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def two_losses_flat_plain(job: Job):
    return two_losses_plain(job)


def two_losses_flat_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                output = model(inputs)
                F.cross_entropy(output, target).backward(retain_graph=True)
                (0.1 * output.square().mean()).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


# --- actor and critic ---


def experience(job: Job):
    """States, actions and returns."""
    returns = torch.randn(job.samples, generator=torch.Generator().manual_seed(8))
    return job.dataset(job.inputs, job.target, returns)


def make_actor_critic():
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return actor, critic


def actor_critic_plain(job: Job):
    actor, critic = make_actor_critic()
    actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.2, momentum=0.9)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for epoch in range(job.epochs):
        for states, actions, returns in job.plain_loader(experience(job), epoch):
            actor_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            advantage = returns - critic(states).squeeze(1)
            log_prob = torch.distributions.Categorical(logits=actor(states)).log_prob(actions)
            actor_loss = -(log_prob * advantage.detach()).mean()
            critic_loss = advantage.pow(2).mean()
            actor_loss.backward()
            critic_loss.backward()
            actor_optimizer.step()
            critic_optimizer.step()
            losses.append((actor_loss.item(), critic_loss.item()))
    return {"models": [actor, critic], "optimizers": [actor_optimizer, critic_optimizer], "losses": losses}


def actor_critic_ours(job: Job):
    edl_hvd.init()
    actor, critic = make_actor_critic()
    # recipe
    actor_optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(actor.parameters(), lr=0.2, momentum=0.9), exact=job.exact
    )
    critic_optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5), exact=job.exact
    )
    batches = job.batches()
    loader = DataLoader(experience(job), batch_sampler=batches)
    state = edl_hvd.State(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
        batches=batches,
        losses=[],
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                actor_optimizer.zero_grad()
                critic_optimizer.zero_grad()
                for states, actions, returns in step:
                    advantage = returns - critic(states).squeeze(1)
                    log_prob = torch.distributions.Categorical(logits=actor(states)).log_prob(actions)
                    actor_loss = -(log_prob * advantage.detach()).mean()
                    critic_loss = advantage.pow(2).mean()
                    actor_loss.backward()
                    critic_loss.backward()
                    step.record(actor=actor_loss, critic=critic_loss)
                actor_optimizer.step()
                critic_optimizer.step()
                state.losses.append((step.mean("actor"), step.mean("critic")))

    # end
    train(state)
    return {"models": [actor, critic], "optimizers": [actor_optimizer, critic_optimizer], "losses": state.losses}


class ActorCritic(nn.Module):
    """Two heads on a trunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, states: torch.Tensor):
        features = self.trunk(states)
        return torch.distributions.Categorical(logits=self.actor(features)), self.critic(features).squeeze(1)


def shared_trunk_plain(job: Job):
    model = ActorCritic()
    actor_optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.actor.parameters()], lr=0.2, momentum=0.9)
    critic_optimizer = torch.optim.Adam([*model.trunk.parameters(), *model.critic.parameters()], lr=0.01, eps=1e-3)
    for epoch in range(job.epochs):
        for states, actions, returns in job.plain_loader(experience(job), epoch):
            policy, value = model(states)
            actor_optimizer.zero_grad()
            (-(policy.log_prob(actions) * (returns - value).detach()).mean()).backward(retain_graph=True)
            actor_optimizer.step()
            critic_optimizer.zero_grad()
            F.mse_loss(model(states)[1], returns).backward()
            critic_optimizer.step()
    return {"model": model, "optimizers": [actor_optimizer, critic_optimizer]}


def shared_trunk_ours(job: Job):
    edl_hvd.init()
    model = ActorCritic()
    actor_optimizer = torch.optim.SGD([*model.trunk.parameters(), *model.actor.parameters()], lr=0.2, momentum=0.9)
    critic_optimizer = torch.optim.Adam([*model.trunk.parameters(), *model.critic.parameters()], lr=0.01, eps=1e-3)
    actor_optimizer = edl_hvd.DistributedOptimizer(actor_optimizer, exact=job.exact)
    critic_optimizer = edl_hvd.DistributedOptimizer(critic_optimizer, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(experience(job), batch_sampler=batches)
    state = edl_hvd.State(
        model=model, critic_optimizer=critic_optimizer, actor_optimizer=actor_optimizer, batches=batches
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                actor_optimizer.zero_grad()
                for states, actions, returns in step:
                    policy, value = model(states)
                    (-(policy.log_prob(actions) * (returns - value).detach()).mean()).backward()
                actor_optimizer.step()

                critic_optimizer.zero_grad()
                for states, _, returns in step:
                    F.mse_loss(model(states)[1], returns).backward()
                critic_optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizers": [actor_optimizer, critic_optimizer]}


def slow_and_fast_plain(job: Job):
    model = make_model()
    fast = torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9)
    slow = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            F.cross_entropy(model(inputs), target).backward()
            fast.step()
            fast.zero_grad()
            number += 1
            if number % 3 == 0:
                slow.step()
                slow.zero_grad()
    return {"model": model, "optimizers": [fast, slow]}


def slow_and_fast_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    fast = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9), exact=job.exact)
    slow = edl_hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, slow=slow, fast=fast, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                fast.step()
                fast.zero_grad()
                if (step.number + 1) % 3 == 0:
                    slow.step()
                    slow.zero_grad()
            # end

    train(state)
    return {"model": model, "optimizers": [fast, slow]}


# --- optimizers that need more than one gradient ---


class SAM(torch.optim.Optimizer):
    """The implementation that most people copy."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        defaults = dict(rho=rho, **kwargs)
        super().__init__(params, defaults)
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sam_plain(job: Job):
    model = make_model()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(inputs), target).backward()
            optimizer.second_step(zero_grad=True)
            losses.append(loss.item())
    return {"model": model, "base": optimizer.base_optimizer, "losses": losses}


def sam_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    optimizer = edl_hvd.DistributedOptimizer(
        SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), exact=job.exact
    )
    state = edl_hvd.State(
        model=model, optimizer=optimizer, base_optimizer=optimizer.base_optimizer, batches=batches, losses=[]
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.first_step(zero_grad=True)
                state.losses.append(step.mean("loss"))
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.second_step(zero_grad=True)

    # end
    train(state)
    return {"model": model, "base": optimizer.base_optimizer, "losses": state.losses}


def sam_closure_plain(job: Job):
    model = make_model()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):

            def closure(inputs=inputs, target=target):
                F.cross_entropy(model(inputs), target).backward()

            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "base": optimizer.base_optimizer, "lr": optimizer.param_groups[0]["lr"]}


def sam_closure_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    optimizer = edl_hvd.DistributedOptimizer(
        SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), exact=job.exact
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = edl_hvd.State(
        model=model,
        optimizer=optimizer,
        base_optimizer=optimizer.base_optimizer,
        scheduler=scheduler,
        batches=batches,
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):

                def closure(step=step):
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()

                closure()
                optimizer.step(closure)
                optimizer.zero_grad()
            # end
            scheduler.step()

    train(state)
    return {"model": model, "base": optimizer.base_optimizer, "lr": optimizer.param_groups[0]["lr"]}


def make_double() -> nn.Module:
    return make_model().double()


def lbfgs_plain(job: Job):
    model = make_double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)
    losses = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):

            def closure(inputs=inputs, target=target):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.double()), target)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    return {"model": model, "losses": losses}


def lbfgs_ours(job: Job):
    model, optimizer, loader, state = prepare(
        job,
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5),
        make_double,
        losses=[],
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):

                def closure(step=step):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        loss = F.cross_entropy(model(inputs.double()), target)
                        loss.backward()
                        step.record(loss=loss)
                    return step.mean("loss")

                state.losses.append(optimizer.step(closure))
            # end

    train(state)
    return {"model": model, "losses": state.losses}


def lbfgs_line_search_plain(job: Job):
    model = make_double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    losses = []
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):

            def closure(inputs=inputs, target=target):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs.double()), target)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    return {"model": model, "losses": losses}


def lbfgs_line_search_ours(job: Job):
    model, optimizer, loader, state = prepare(
        job,
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
        make_double,
        losses=[],
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):

                def closure(step=step):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        loss = F.cross_entropy(model(inputs.double()), target)
                        loss.backward()
                        step.record(loss=loss)
                    return step.mean("loss")

                state.losses.append(optimizer.step(closure))

    train(state)
    return {"model": model, "losses": state.losses}


# --- which parameters are trained ---


def unfrozen_later_plain(job: Job):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        if epoch == 1:
            model[0].requires_grad_(True)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def unfrozen_later_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                model[0].requires_grad_(True)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def unfrozen_within_epoch_plain(job: Job):
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = momentum_sgd(model)
    number = 0
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            if number == 2:
                model[0].requires_grad_(True)
            if number == 5:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            number += 1
    return {"model": model, "optimizer": optimizer}


def unfrozen_within_epoch_ours(job: Job):
    def make() -> nn.Module:
        model = make_model()
        model[0].requires_grad_(False)
        return model

    model, optimizer, loader, state = prepare(job, momentum_sgd, make)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                if step.number == 2:
                    model[0].requires_grad_(True)
                if step.number == 5:
                    model[2].requires_grad_(False)
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


def group_added_later_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9)
    for epoch in range(job.epochs):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        for inputs, target in job.plain_loader(epoch=epoch):
            model.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def group_added_later_ours(job: Job):
    edl_hvd.init()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9), exact=job.exact
    )
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
            for step in state.steps(loader):
                model.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model, "optimizer": optimizer}


def zero_grad_inside_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def zero_grad_inside_ours(job: Job):
    model, optimizer, loader, state = prepare(job, momentum_sgd)

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
    return {"model": model, "optimizer": optimizer}


# --- gradients that the script reads, makes or throws away ---


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


def batch_statistics_plain(job: Job):
    model = make_model()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        for states, actions, returns in job.plain_loader(experience(job), epoch):
            advantage = (returns - returns.mean()) / returns.std(correction=0)
            optimizer.zero_grad()
            log_prob = torch.distributions.Categorical(logits=model(states)).log_prob(actions)
            (-(log_prob * advantage).mean()).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def batch_statistics_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(experience(job), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for _, _, returns in step:
                    step.record(mean=returns.mean(), square=returns.square().mean())
                mean = step.mean("mean")
                std = (step.mean("square") - mean**2) ** 0.5

                optimizer.zero_grad()
                for states, actions, returns in step:
                    advantage = (returns - mean) / std
                    log_prob = torch.distributions.Categorical(logits=model(states)).log_prob(actions)
                    (-(log_prob * advantage).mean()).backward()
                optimizer.step()
            # end

    train(state)
    return {"model": model, "optimizer": optimizer}


# --- randomness, and loops of other shapes ---


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


def later_optimizer_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(4):
        if epoch == 2:
            optimizer = momentum_sgd(model)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model}


def later_optimizer_ours(job: Job):
    edl_hvd.init()
    model = make_model()
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    # recipe
    adam = edl_hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), exact=job.exact)
    sgd = edl_hvd.DistributedOptimizer(momentum_sgd(model), exact=job.exact)
    state = edl_hvd.State(model=model, adam=adam, sgd=sgd, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(4):
            optimizer = adam if epoch < 2 else sgd
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    # end
    train(state)
    return {"model": model}


def cleared_state_plain(job: Job):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(4):
        if epoch == 2:
            optimizer.state.clear()
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def cleared_state_ours(job: Job):
    model, optimizer, loader, state = prepare(job, lambda model: torch.optim.Adam(model.parameters(), lr=0.05))

    @edl_hvd.elastic
    def train(state):
        # recipe
        for epoch in state.epochs(4):
            if epoch == 2:
                optimizer.state.clear()
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
        # end

    train(state)
    return {"model": model, "optimizer": optimizer}


IDIOMS = [
    Idiom(
        "Two losses, two `backward()` calls",
        "In the loop over a step `backward()` may be called any number of times; the gradients add up, as ever.",
        two_losses_plain,
        two_losses_ours,
    ),
    Idiom(
        "Two `backward()` calls in the flat loop",
        "With one micro-batch per worker and step this works in the flat loop, too.",
        two_losses_flat_plain,
        two_losses_flat_ours,
        exact=False,  # which takes a micro_batch, and so several per step
        micro_batches=(None, 12),
    ),
    Idiom(
        "Actor and critic, each with its optimizer",
        "Several networks, losses and optimizers share one loop over the step.",
        actor_critic_plain,
        actor_critic_ours,
    ),
    Idiom(
        "Parameters in several optimizers",
        "A shared trunk may be moved by the actor's optimizer and by the critic's: one loop over the step for each.",
        shared_trunk_plain,
        shared_trunk_ours,
    ),
    Idiom(
        "A fast and a slow optimizer",
        "One of them steps every third time, with the gradients that have added up in `.grad` since.",
        slow_and_fast_plain,
        slow_and_fast_ours,
    ),
    Idiom(
        "SAM",
        "Loop over the step once for each of its two passes. An optimizer that holds another one needs both in "
        "`State`.",
        sam_plain,
        sam_ours,
    ),
    Idiom(
        "SAM with a closure",
        "A closure that `optimizer.step` calls loops over the step as well. A scheduler is built on the outer "
        "optimizer.",
        sam_closure_plain,
        sam_closure_ours,
    ),
    Idiom(
        "LBFGS",
        "The closure loops over the step, as often as the optimizer calls it, and returns the mean loss of the global "
        "batch. In float64, as ever, if the line of steps is to be the same.",
        lbfgs_plain,
        lbfgs_ours,
    ),
    Idiom(
        "LBFGS with a line search",
        "The same with `line_search_fn`: every worker sees the same losses, and so calls the closure equally often.",
        lbfgs_line_search_plain,
        lbfgs_line_search_ours,
    ),
    Idiom(
        "A backbone that is unfrozen later",
        "`requires_grad` is part of what is kept: a worker that joins later has it, too. Give the optimizer all "
        "parameters from the beginning.",
        unfrozen_later_plain,
        unfrozen_later_ours,
    ),
    Idiom(
        "Parameters that are frozen and unfrozen within an epoch",
        "Do it at step level.",
        unfrozen_within_epoch_plain,
        unfrozen_within_epoch_ours,
    ),
    Idiom(
        "`add_param_group` later",
        "Where the elastic function runs again, a group that is there already is not added once more.",
        group_added_later_plain,
        group_added_later_ours,
    ),
    Idiom(
        "`zero_grad()` in the loop over micro-batches",
        "It may stand there, but belongs before or behind it.",
        zero_grad_inside_plain,
        zero_grad_inside_ours,
    ),
    Idiom(
        "Another optimizer from an epoch on",
        "Such as SGD after Adam (SWATS). Give `State` both from the beginning, and choose by the epoch.",
        later_optimizer_plain,
        later_optimizer_ours,
    ),
    Idiom(
        "An optimizer whose state is cleared",
        "As in ReLoRA, or where a cycle begins anew.",
        cleared_state_plain,
        cleared_state_ours,
    ),
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
    Idiom(
        "Statistics of the whole batch",
        "A first loop over the step without `backward()` may collect what the second needs, such as mean and "
        "variance of the advantages in PPO.",
        batch_statistics_plain,
        batch_statistics_ours,
    ),
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
