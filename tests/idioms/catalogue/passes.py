"""Several losses, backward passes and optimizers in one step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms import CLASSES, FEATURES, Idiom, Job
from script_parts import make_model, momentum_sgd, prepare
from torch import nn
from torch.utils.data import DataLoader

import edl_hvd


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
        "`zero_grad()` in the loop over micro-batches",
        "It may stand there, but belongs before or behind it.",
        zero_grad_inside_plain,
        zero_grad_inside_ours,
    ),
    Idiom(
        "Statistics of the whole batch",
        "A first loop over the step without `backward()` may collect what the second needs, such as mean and "
        "variance of the advantages in PPO.",
        batch_statistics_plain,
        batch_statistics_ours,
    ),
]
