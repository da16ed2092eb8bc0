"""Momentum when the policy's factor changes abruptly: which optimizers need a correction, and that it happens once."""

from __future__ import annotations

import pytest
import torch
from fake_world import alone
from torch import nn

import edl_hvd
from edl_hvd.worker.codec import encode
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.standby.donor import StateDonor
from edl_hvd.worker.standby.replica import StandbyReplica

RATE, MOMENTUM = 0.1, 0.9
FACTORS = (1.0, 1.0, 4.0, 4.0, 4.0, 0.5, 2.0)


class RateInside(torch.optim.Optimizer):
    """SGD with v = m v + η g, w = w - v: equation 10 of Goyal et al. 2017."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:  # as many optimizers do it
                    kept["velocity"] = torch.zeros_like(parameter)
                kept["velocity"].mul_(group["momentum"]).add_(parameter.grad, alpha=group["lr"])
                parameter.sub_(kept["velocity"])


@pytest.fixture(autouse=True)
def in_a_world():
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        yield


def make(kind="inside", velocity="velocity"):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    made = {
        "inside": lambda: RateInside(model.parameters(), RATE, MOMENTUM),
        "torch": lambda: torch.optim.SGD(model.parameters(), RATE, MOMENTUM),
        "adam": lambda: torch.optim.Adam(model.parameters(), RATE),
    }[kind]()
    optimizer = edl_hvd.DistributedOptimizer(made, model.named_parameters(), velocity=velocity)
    return edl_hvd.State(model=model, optimizer=optimizer)


def step(state, factor: float, seed: int) -> None:
    """A step on gradients that depend on the seed alone."""
    state.optimizer.reduction.learning_rate_factor = factor
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    state.optimizer.step()


def by_the_formula() -> torch.Tensor:
    """v = m (η' / η) v + η' g, w = w - v, on its own."""
    state = make()
    weights = [parameter.detach().clone() for parameter in state.model.parameters()]
    velocities = [torch.zeros_like(weight) for weight in weights]
    before = FACTORS[0]
    for seed, factor in enumerate(FACTORS):
        generator = torch.Generator().manual_seed(seed)
        for weight, velocity in zip(weights, velocities, strict=True):
            gradient = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            velocity.mul_(MOMENTUM * factor / before).add_(gradient, alpha=RATE * factor)
            weight.sub_(velocity)
        before = factor
    return torch.cat([weight.flatten() for weight in weights])


def weights_of(state) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])


def trained(kind: str, velocity: str | None) -> torch.Tensor:
    state = make(kind, velocity)
    for seed, factor in enumerate(FACTORS):
        step(state, factor, seed)
    return weights_of(state)


def test_momentum_with_the_rate_in_it_is_corrected_as_the_paper_has_it():
    torch.testing.assert_close(trained("inside", "velocity"), by_the_formula(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(trained("inside", None), by_the_formula(), rtol=1e-3)


def test_torchs_sgd_is_right_without_and_would_be_wrong_with_it():
    torch.testing.assert_close(trained("torch", None), by_the_formula(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(trained("torch", "momentum_buffer"), by_the_formula(), rtol=1e-3)


def test_adam_has_no_such_state():
    assert torch.equal(trained("adam", "velocity"), trained("adam", None))


def test_a_step_that_is_not_made_again_is_not_corrected_for_again():
    """The world breaks after a step at factor 4; the one that goes through the batch again has factor 3."""
    state = make()
    for seed in range(4):
        step(state, 1.0, seed)
        state._runtime.store.step += 1
        state._runtime.commit_step(None)
    step(state, 4.0, 4)  # then the world breaks, before the commit
    moved = weights_of(state)
    state._runtime.store.restore()
    state._runtime.begin_attempt()
    state._runtime.store.resave()
    assert state.optimizer.stepping.skip == 1
    step(state, 3.0, 4)
    assert torch.equal(weights_of(state), moved)
    step(state, 3.0, 5)

    straight = make()
    for seed, factor in enumerate((1.0, 1.0, 1.0, 1.0, 4.0, 3.0)):
        step(straight, factor, seed)
    torch.testing.assert_close(weights_of(state), weights_of(straight), rtol=1e-12, atol=1e-12)


def test_a_step_that_is_undone_is_corrected_for_when_it_is_made_again():
    state = make()
    step(state, 1.0, 0)
    state._runtime.store.save(0)
    for _ in range(2):
        step(state, 4.0, 1)
        made = weights_of(state)
        state._runtime.store.restore()
    straight = make()
    step(straight, 1.0, 0)
    step(straight, 4.0, 1)
    assert torch.equal(made, weights_of(straight))


def test_another_process_goes_on_with_it():
    state = make()
    for seed, factor in enumerate(FACTORS[:3]):
        step(state, factor, seed)
    state._runtime.store.save(3)
    plain, tensors = state._runtime.store.export()
    other = make()
    other._runtime.store.load(plain, {name: tensor.clone() for name, tensor in tensors.items()})
    for seed in range(3, len(FACTORS)):
        step(other, FACTORS[seed], seed)
    torch.testing.assert_close(weights_of(other), by_the_formula(), rtol=1e-12, atol=1e-12)


def test_a_newcomer_repeats_the_correction():
    """From the gradients and the options of the groups alone, as a donor sends them."""
    state, newcomer = make(), make()
    donor, frames = StateDonor(state._runtime.store), []

    class Watcher:
        def note(self, optimizer, closure):
            frames.append(donor._step_message(0, optimizer))

    watcher = Watcher()
    state.optimizer.stepping.before.add(watcher.note)
    replica = StandbyReplica.__new__(StandbyReplica)
    replica._optimizers, replica._store = [newcomer.optimizer], newcomer._runtime.store
    for seed, factor in enumerate(FACTORS):
        step(state, factor, seed)
        replica._repeat(frames[-1])
    assert torch.equal(weights_of(newcomer), weights_of(state))
    assert (
        encode(newcomer.optimizer.state_dict(), "")[0]["state"] == encode(state.optimizer.state_dict(), "")[0]["state"]
    )
