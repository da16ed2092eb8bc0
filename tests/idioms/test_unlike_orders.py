"""An order that is not the same on all workers is refused: samples would be trained on twice or never."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from idioms import Job, differences
from script_parts import make_model, momentum_sgd
from simulation import Fault, Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import UsageError


class Boosted(edl_hvd.Order):
    """Draws samples by weights that follow the losses of the last epoch."""

    repeats = True

    def __init__(self, samples: int) -> None:
        self.length = self.positions = samples
        self.name = f"boosted {samples}"
        self.weights = torch.ones(samples)

    def samples(self, seed: int, epoch: int, first: int, last: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed + epoch)
        found: list[int] = torch.multinomial(self.weights, self.positions, True, generator=generator).tolist()
        return found[first:last]


class KeptWeights:
    def __init__(self, order: Boosted) -> None:
        self.order = order

    def state_dict(self) -> dict:
        return {"weights": self.order.weights}

    def load_state_dict(self, state: dict) -> None:
        self.order.weights = state["weights"]


def script(job: Job, is_kept: bool) -> dict:
    edl_hvd.init()
    order, model = Boosted(job.samples), make_model()
    optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model))
    batches = edl_hvd.ElasticBatchSampler(job.samples, global_batch=12, micro_batch=3, order=order)
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    kept = {"weights": KeptWeights(order)} if is_kept else {}
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, **kept)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(3):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
            with torch.no_grad():
                order.weights = 0.05 + F.cross_entropy(model(job.inputs), job.target, reduction="none")

    train(state)
    return {"model": model, "optimizer": optimizer}


JOINS = Fault(26, worker=1, joins=1, politely=True)


def test_an_order_that_a_worker_which_joins_has_not_is_refused() -> None:
    with pytest.raises(UsageError, match="the order of batches is not the same on all workers after step "):
        Simulation(2, JOINS).run(lambda: script(Job(samples=36), is_kept=False))


def test_an_order_that_state_keeps_is_the_same() -> None:
    [expected] = Simulation(1).run(lambda: script(Job(samples=36), is_kept=True))
    simulation = Simulation(2, JOINS)
    for outcome in simulation.run(lambda: script(Job(samples=36), is_kept=True)):
        assert not differences(outcome, expected, 1e-5)
    assert len(simulation.worlds) == 2
