"""Several networks that are trained against each other, each by an optimizer of its own."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from idioms import FEATURES, Idiom, Job
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import edl_hvd

NOISE = 4


def make_networks() -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator; the names of their parameters are the same."""
    torch.manual_seed(0)
    netG = nn.Sequential(nn.Linear(NOISE, 8), nn.Tanh(), nn.Linear(8, FEATURES))
    netD = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return netG, netD


def real_and_noise(job: Job):
    """Each sample has noise of its own, so that it does not depend on who draws it."""
    noise = torch.randn(job.samples, NOISE, generator=torch.Generator().manual_seed(5))
    return job.dataset(job.inputs, noise)


def real_noise_and_place(job: Job):
    """The same, and for each sample a place between real and fake."""
    place = torch.rand(job.samples, 1, generator=torch.Generator().manual_seed(6))
    return job.dataset(*real_and_noise(job).tensors, place)


criterion = nn.BCEWithLogitsLoss()


def make_optimizers(netG: nn.Module, netD: nn.Module):
    optimizerD = torch.optim.Adam(netD.parameters(), lr=0.02, betas=(0.5, 0.999), eps=1e-3)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=0.02, betas=(0.5, 0.999), eps=1e-3)
    return optimizerG, optimizerD


def dcgan_plain(job: Job):
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    losses = []
    for epoch in range(job.epochs):
        for real, noise in job.plain_loader(real_and_noise(job), epoch):
            netD.zero_grad()
            errD_real = criterion(netD(real), torch.ones(len(real), 1))
            errD_real.backward()
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(len(real), 1))
            errG.backward()
            optimizerG.step()
            losses.append((errD_real.item() + errD_fake.item(), errG.item()))
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "losses": losses}


def dcgan_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    dataset = real_and_noise(job)
    # recipe
    optimizerD = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(netD.parameters(), lr=0.02, betas=(0.5, 0.999), eps=1e-3), exact=job.exact
    )
    optimizerG = edl_hvd.DistributedOptimizer(
        torch.optim.Adam(netG.parameters(), lr=0.02, betas=(0.5, 0.999), eps=1e-3), exact=job.exact
    )
    batches = job.batches()
    loader = DataLoader(dataset, batch_sampler=batches)
    state = edl_hvd.State(
        netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches, losses=[]
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                netD.zero_grad()
                for real, noise in step:
                    errD_real = criterion(netD(real), torch.ones(len(real), 1))
                    errD_real.backward()
                    fake = netG(noise)
                    errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
                    errD_fake.backward()
                    step.record(errD=errD_real + errD_fake)
                optimizerD.step()

                netG.zero_grad()
                for real, noise in step:
                    errG = criterion(netD(netG(noise)), torch.ones(len(real), 1))
                    errG.backward()
                    step.record(errG=errG)
                optimizerG.step()
                state.losses.append((step.mean("errD"), step.mean("errG")))

    # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "losses": state.losses}


def dcgan_fakes_kept_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    # Wrapped and given to State in another order than they step in.
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, netG.named_parameters(), exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, netD.named_parameters(), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(
        optimizerG=optimizerG, optimizerD=optimizerD, netG=netG, netD=netD, batches=batches, losses=[]
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                netD.zero_grad()
                fakes = []
                for real, noise in step:
                    errD_real = criterion(netD(real), torch.ones(len(real), 1))
                    errD_real.backward()
                    fake = netG(noise)
                    errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
                    errD_fake.backward()
                    fakes.append(fake)
                    step.record(errD=errD_real + errD_fake)
                optimizerD.step()

                netG.zero_grad()
                for (real, _), fake in zip(step, fakes, strict=True):
                    errG = criterion(netD(fake), torch.ones(len(real), 1))
                    errG.backward()
                    step.record(errG=errG)
                optimizerG.step()
                state.losses.append((step.mean("errD"), step.mean("errG")))
            # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "losses": state.losses}


def dcgan_flat_plain(job: Job):
    return {name: value for name, value in dcgan_plain(job).items() if name != "losses"}


def dcgan_flat_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = map(edl_hvd.DistributedOptimizer, make_optimizers(netG, netD))
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for real, noise in state.batches(loader):
                netD.zero_grad()
                criterion(netD(real), torch.ones(len(real), 1)).backward()
                fake = netG(noise)
                criterion(netD(fake.detach()), torch.zeros(len(real), 1)).backward()
                optimizerD.step()

                netG.zero_grad()
                criterion(netD(fake), torch.ones(len(real), 1)).backward()
                optimizerG.step()
            # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD}


def dcgan_flat_micro_batches_ours(job: Job):
    return dcgan_flat_ours(job)


def noise_at_step_level_plain(job: Job):
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for epoch in range(job.epochs):
        for (real,) in job.plain_loader(job.dataset(job.inputs), epoch):
            noise = torch.randn(10, NOISE, generator=generator)
            netD.zero_grad()
            criterion(netD(real), torch.ones(len(real), 1)).backward()
            fake = netG(noise)
            criterion(netD(fake.detach()), torch.zeros(10, 1)).backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(10, 1))
            errG.backward()
            optimizerG.step()
            losses.append(errG.item())
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "losses": losses}


def noise_at_step_level_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs), batch_sampler=batches)
    # recipe
    generator = torch.Generator().manual_seed(7)
    state = edl_hvd.State(
        netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches, generator=generator,
        losses=[],
    )  # fmt: skip

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                noise = torch.randn(10, NOISE, generator=generator)
                netD.zero_grad()
                for (real,) in step:
                    criterion(netD(real), torch.ones(len(real), 1)).backward()
                fake = netG(noise)
                criterion(netD(fake.detach()), torch.zeros(10, 1)).backward()
                optimizerD.step()

                netG.zero_grad()
                errG = criterion(netD(fake), torch.ones(10, 1))
                errG.backward()
                optimizerG.step()
                state.losses.append(errG.item())

    # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "losses": state.losses}


def frozen_discriminator_plain(job: Job):
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    for epoch in range(job.epochs):
        for real, noise in job.plain_loader(real_and_noise(job), epoch):
            netD.requires_grad_(False)
            fake = netG(noise)
            optimizerG.zero_grad()
            (criterion(netD(fake), torch.ones(len(real), 1)) + F.l1_loss(fake, real)).backward()
            optimizerG.step()

            netD.requires_grad_(True)
            optimizerD.zero_grad()
            errD_real = criterion(netD(real), torch.ones(len(real), 1))
            errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
            (0.5 * (errD_real + errD_fake)).backward()
            optimizerD.step()
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD}


def frozen_discriminator_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                netD.requires_grad_(False)
                optimizerG.zero_grad()
                fakes = []
                for real, noise in step:
                    fake = netG(noise)
                    (criterion(netD(fake), torch.ones(len(real), 1)) + F.l1_loss(fake, real)).backward()
                    fakes.append(fake.detach())
                optimizerG.step()

                netD.requires_grad_(True)
                optimizerD.zero_grad()
                for (real, _), fake in zip(step, fakes, strict=True):
                    errD_real = criterion(netD(real), torch.ones(len(real), 1))
                    errD_fake = criterion(netD(fake), torch.zeros(len(real), 1))
                    (0.5 * (errD_real + errD_fake)).backward()
                optimizerD.step()
            # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD}


def gradient_penalty(netD: nn.Module, real: torch.Tensor, fake: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    between = (place * real + (1 - place) * fake).requires_grad_(True)
    score = netD(between)
    (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


def make_critic() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def wgan_gp_plain(job: Job):
    netG, critic = make_networks()[0], make_critic()
    optimizerG, optimizerD = make_optimizers(netG, critic)
    penalties = []
    number = 0
    for epoch in range(job.epochs):
        for real, noise, place in job.plain_loader(real_noise_and_place(job), epoch):
            optimizerD.zero_grad()
            fake = netG(noise).detach()
            penalty = gradient_penalty(critic, real, fake, place)
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
            optimizerD.step()
            penalties.append(penalty.item())
            if number % 2 == 1:
                optimizerG.zero_grad()
                (-critic(netG(noise)).mean()).backward()
                optimizerG.step()
            number += 1
    return {"netG": netG, "critic": critic, "G": optimizerG, "D": optimizerD, "penalties": penalties}


def wgan_gp_ours(job: Job):
    edl_hvd.init()
    netG, critic = make_networks()[0], make_critic()
    optimizerG, optimizerD = make_optimizers(netG, critic)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_noise_and_place(job), batch_sampler=batches)
    state = edl_hvd.State(
        netG=netG, critic=critic, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches, penalties=[]
    )

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                optimizerD.zero_grad()
                for real, noise, place in step:
                    fake = netG(noise).detach()
                    penalty = gradient_penalty(critic, real, fake, place)
                    (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
                    step.record(penalty=penalty)
                optimizerD.step()
                state.penalties.append(step.mean("penalty"))
                if step.number % 2 == 1:
                    optimizerG.zero_grad()
                    for _, noise, _ in step:
                        (-critic(netG(noise)).mean()).backward()
                    optimizerG.step()
            # end

    train(state)
    return {"netG": netG, "critic": critic, "G": optimizerG, "D": optimizerD, "penalties": state.penalties}


def wgan_clipping_plain(job: Job):
    netG, critic = make_networks()[0], make_critic()
    optimizerD = torch.optim.RMSprop(critic.parameters(), lr=0.01, eps=1e-3)
    optimizerG = torch.optim.RMSprop(netG.parameters(), lr=0.01, eps=1e-3)
    for epoch in range(job.epochs):
        for real, noise in job.plain_loader(real_and_noise(job), epoch):
            for _ in range(3):
                optimizerD.zero_grad()
                (critic(netG(noise).detach()).mean() - critic(real).mean()).backward()
                optimizerD.step()
                for p in critic.parameters():
                    p.data.clamp_(-0.2, 0.2)
            optimizerG.zero_grad()
            (-critic(netG(noise)).mean()).backward()
            optimizerG.step()
    return {"netG": netG, "critic": critic, "G": optimizerG, "D": optimizerD}


def wgan_clipping_ours(job: Job):
    edl_hvd.init()
    netG, critic = make_networks()[0], make_critic()
    optimizerD = torch.optim.RMSprop(critic.parameters(), lr=0.01, eps=1e-3)
    optimizerG = torch.optim.RMSprop(netG.parameters(), lr=0.01, eps=1e-3)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(netG=netG, critic=critic, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for _ in range(3):
                    optimizerD.zero_grad()
                    for real, noise in step:
                        (critic(netG(noise).detach()).mean() - critic(real).mean()).backward()
                    optimizerD.step()
                    for p in critic.parameters():
                        p.data.clamp_(-0.2, 0.2)
                optimizerG.zero_grad()
                for _, noise in step:
                    (-critic(netG(noise)).mean()).backward()
                optimizerG.step()
            # end

    train(state)
    return {"netG": netG, "critic": critic, "G": optimizerG, "D": optimizerD}


def alternating_plain(job: Job):
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    ema = AveragedModel(netG, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    number = 0
    for epoch in range(job.epochs):
        for real, noise in job.plain_loader(real_and_noise(job), epoch):
            if number % 2 == 0:
                optimizerD.zero_grad()
                errD = criterion(netD(real), torch.ones(len(real), 1))
                errD = errD + criterion(netD(netG(noise).detach()), torch.zeros(len(real), 1))
                errD.backward()
                optimizerD.step()
            else:
                optimizerG.zero_grad()
                criterion(netD(netG(noise)), torch.ones(len(real), 1)).backward()
                optimizerG.step()
                ema.update_parameters(netG)
            number += 1
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "ema": ema}


def alternating_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    ema = AveragedModel(netG, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state = edl_hvd.State(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches, ema=ema)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                if step.number % 2 == 0:
                    optimizerD.zero_grad()
                    for real, noise in step:
                        errD = criterion(netD(real), torch.ones(len(real), 1))
                        errD = errD + criterion(netD(netG(noise).detach()), torch.zeros(len(real), 1))
                        errD.backward()
                    optimizerD.step()
                else:
                    optimizerG.zero_grad()
                    for real, noise in step:
                        criterion(netD(netG(noise)), torch.ones(len(real), 1)).backward()
                    optimizerG.step()
                    ema.update_parameters(netG)
            # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD, "ema": ema}


def make_cycle():
    torch.manual_seed(2)
    to_b, to_a = (nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES)) for _ in "ab")
    critic_a, critic_b = (nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in "ab")
    return to_b, to_a, critic_a, critic_b


def pairs(job: Job):
    return job.dataset(job.inputs, job.inputs.flip(0) ** 2)


def mse(score: torch.Tensor, target: float) -> torch.Tensor:
    return F.mse_loss(score, torch.full_like(score, target))


def cyclegan_plain(job: Job):
    to_b, to_a, critic_a, critic_b = make_cycle()
    optimizerG = torch.optim.SGD(itertools.chain(to_b.parameters(), to_a.parameters()), lr=0.1, momentum=0.5)
    optimizerA = torch.optim.SGD(critic_a.parameters(), lr=0.1, momentum=0.5)
    optimizerB = torch.optim.SGD(critic_b.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(job.epochs):
        for a, b in job.plain_loader(pairs(job), epoch):
            optimizerG.zero_grad()
            fake_b, fake_a = to_b(a), to_a(b)
            loss = mse(critic_b(fake_b), 1.0) + mse(critic_a(fake_a), 1.0)
            (loss + F.l1_loss(to_a(fake_b), a) + F.l1_loss(to_b(fake_a), b)).backward()
            optimizerG.step()
            optimizerA.zero_grad()
            (mse(critic_a(a), 1.0) + mse(critic_a(fake_a.detach()), 0.0)).backward()
            optimizerA.step()
            optimizerB.zero_grad()
            (mse(critic_b(b), 1.0) + mse(critic_b(fake_b.detach()), 0.0)).backward()
            optimizerB.step()
    return {"networks": [to_b, to_a, critic_a, critic_b], "optimizers": [optimizerG, optimizerA, optimizerB]}


def cyclegan_ours(job: Job):
    edl_hvd.init()
    to_b, to_a, critic_a, critic_b = make_cycle()
    batches = job.batches()
    loader = DataLoader(pairs(job), batch_sampler=batches)
    # recipe
    optimizerG = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(itertools.chain(to_b.parameters(), to_a.parameters()), lr=0.1, momentum=0.5), exact=job.exact
    )
    optimizerA, optimizerB = (
        edl_hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), exact=job.exact)
        for net in (critic_a, critic_b)
    )
    state = edl_hvd.State(
        to_b=to_b, to_a=to_a, critic_a=critic_a, critic_b=critic_b, batches=batches,
        optimizerA=optimizerA, optimizerB=optimizerB, optimizerG=optimizerG,
    )  # fmt: skip

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizerG.zero_grad()
                fakes = []
                for a, b in step:
                    fake_b, fake_a = to_b(a), to_a(b)
                    loss = mse(critic_b(fake_b), 1.0) + mse(critic_a(fake_a), 1.0)
                    (loss + F.l1_loss(to_a(fake_b), a) + F.l1_loss(to_b(fake_a), b)).backward()
                    fakes.append((fake_a.detach(), fake_b.detach()))
                optimizerG.step()

                optimizerA.zero_grad()
                optimizerB.zero_grad()
                for (a, b), (fake_a, fake_b) in zip(step, fakes, strict=True):
                    (mse(critic_a(a), 1.0) + mse(critic_a(fake_a), 0.0)).backward()
                    (mse(critic_b(b), 1.0) + mse(critic_b(fake_b), 0.0)).backward()
                optimizerA.step()
                optimizerB.step()

    # end

    train(state)
    return {"networks": [to_b, to_a, critic_a, critic_b], "optimizers": [optimizerG, optimizerA, optimizerB]}


def backward_inputs_plain(job: Job):
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    for epoch in range(job.epochs):
        for real, noise in job.plain_loader(real_and_noise(job), epoch):
            fake = netG(noise)
            errD = criterion(netD(real), torch.ones(len(real), 1)) + criterion(netD(fake), torch.zeros(len(real), 1))
            errD.backward(inputs=list(netD.parameters()), retain_graph=True)
            errG = criterion(netD(fake), torch.ones(len(real), 1))
            errG.backward(inputs=list(netG.parameters()))
            optimizerD.step()
            optimizerG.step()
            optimizerD.zero_grad()
            optimizerG.zero_grad()
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD}


def backward_inputs_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = make_optimizers(netG, netD)
    optimizerG = edl_hvd.DistributedOptimizer(optimizerG, exact=job.exact)
    optimizerD = edl_hvd.DistributedOptimizer(optimizerD, exact=job.exact)
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            # recipe
            for step in state.steps(loader):
                for real, noise in step:
                    fake = netG(noise)
                    errD = criterion(netD(real), torch.ones(len(real), 1))
                    errD = errD + criterion(netD(fake), torch.zeros(len(real), 1))
                    errD.backward(inputs=list(netD.parameters()), retain_graph=True)
                    errG = criterion(netD(fake), torch.ones(len(real), 1))
                    errG.backward(inputs=list(netG.parameters()))
                optimizerD.step()
                optimizerG.step()
                optimizerD.zero_grad()
                optimizerG.zero_grad()
            # end

    train(state)
    return {"netG": netG, "netD": netD, "G": optimizerG, "D": optimizerD}


def fakes_before_step_ours(job: Job):
    edl_hvd.init()
    netG, netD = make_networks()
    optimizerG, optimizerD = map(edl_hvd.DistributedOptimizer, make_optimizers(netG, netD))
    batches = job.batches()
    loader = DataLoader(real_and_noise(job), batch_sampler=batches)
    state = edl_hvd.State(netG=netG, netD=netD, optimizerG=optimizerG, optimizerD=optimizerD, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            for step in state.steps(loader):
                # recipe
                fakes = []
                for real, noise in step:
                    fakes.append(netG(noise))
                    criterion(netD(fakes[-1].detach()), torch.zeros(len(real), 1)).backward()
                optimizerD.step()
                for fake, _ in zip(fakes, step, strict=False):
                    criterion(netD(fake), torch.ones(len(fake), 1)).backward()
                optimizerG.step()
                # end

    train(state)
    return {}


IDIOMS = [
    Idiom(
        "A GAN (DCGAN)",
        "Each network has its optimizer; both, and both networks, are given to `State`. Loop over the step once per "
        "optimizer: a second loop goes over the same micro-batches. The noise is in the data set, so that each sample "
        "has the same in any world; noise drawn in the loop is also repeatable, but depends on `micro_batch`.",
        dcgan_plain,
        dcgan_ours,
    ),
    Idiom(
        "A GAN whose fakes are computed once",
        "What the first loop over the step computes can be kept for the second: write `zip(step, fakes)`, with the "
        "step first. The order of optimizers in `State` does not matter, nor do equal parameter names.",
        dcgan_plain,
        dcgan_fakes_kept_ours,
    ),
    Idiom(
        "`zip` with the step second",
        "`zip(fakes, step)` stops at the end of `fakes`, before the step's loop has ended, so its gradient is "
        "never summed; it is refused. Write `zip(step, fakes)`.",
        None,
        fakes_before_step_ours,
        refused="left before its end",
    ),
    Idiom(
        "A GAN in the flat loop",
        "Where a global batch is one micro-batch per worker, the loop may stay as in the tutorial: every "
        "`backward()` is summed when it returns.",
        dcgan_flat_plain,
        dcgan_flat_ours,
        exact=False,  # which takes a micro_batch, and so several per step
        micro_batches=(None, 12),
    ),
    Idiom(
        "A GAN in the flat loop with several micro-batches",
        "With `micro_batch` smaller than the global batch the generator's pass would come before the "
        "discriminator's step; it is refused. Use `state.steps`.",
        None,
        dcgan_flat_micro_batches_ours,
        refused=r"a second time in one body of state\.batches\(\)",
        micro_batches=(3, 6),
    ),
    Idiom(
        "A GAN whose noise is drawn once per step",
        "At step level all workers compute the same: noise drawn there, and a loss computed from it, needs no loop "
        "over the step. Its gradient is added to that of the loop. Give a `torch.Generator` to `State`, or use the "
        "default one, which is seeded for each step.",
        noise_at_step_level_plain,
        noise_at_step_level_ours,
    ),
    Idiom(
        "A GAN that freezes the discriminator for the generator's step",
        "`requires_grad_` may be switched at step level as often as you like.",
        frozen_discriminator_plain,
        frozen_discriminator_ours,
    ),
    Idiom(
        "WGAN with gradient penalty",
        "`torch.autograd.grad(…, create_graph=True)` works as ever. `step.number` counts optimizer steps of the "
        "whole run and says when it is the generator's turn; a counter of your own would start anew after a "
        "failure.",
        wgan_gp_plain,
        wgan_gp_ours,
    ),
    Idiom(
        "WGAN with weight clipping, several critic steps per batch",
        "A step may be looped over any number of times, and weights may be changed by hand at step level.",
        wgan_clipping_plain,
        wgan_clipping_ours,
    ),
    Idiom(
        "Optimizers that take turns",
        "An optimizer need not step in every step.",
        alternating_plain,
        alternating_ours,
    ),
    Idiom(
        "CycleGAN: four networks, three optimizers",
        "One loop over the step may serve several optimizers, and one optimizer several networks.",
        cyclegan_plain,
        cyclegan_ours,
    ),
    Idiom(
        "`backward(inputs=…)`",
        "One loop over the step serves both networks if each `backward()` names the parameters that it is for.",
        backward_inputs_plain,
        backward_inputs_ours,
    ),
]
