"""A number that an optimizer keeps beside its state_dict, such as a count of its steps, is named after the first epoch.

No resume has it, as in plain PyTorch, and neither has a worker that joins; in the flat loop, a worker that gets no
micro-batch in a step may not count.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from simulation import Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


class EveryThird(torch.optim.SGD):
    """Steps at twice the rate in each third step, which it counts by itself, as published optimizers do."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr)
        self.iter_num = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.iter_num += 1
        if self.iter_num % 3 == 0:
            super().step()
        return super().step()


class CountedInGroups(torch.optim.SGD):
    """The same, with the count where state_dict() has it."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["iter_num"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["iter_num"] += 1
        if self.param_groups[0]["iter_num"] % 3 == 0:
            super().step()
        return super().step()


class ToldNorm(torch.optim.SGD):
    """Keeps what it has last measured, for whoever wants to print it."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr)
        self.last_norm = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        self.last_norm = float(sum(p.grad.norm() for group in self.param_groups for p in group["params"]))
        return super().step()


class WithOwnState(EveryThird):
    """Whose state_dict() has the count."""

    def state_dict(self):
        return {**super().state_dict(), "iter_num": self.iter_num}

    def load_state_dict(self, state_dict):
        self.iter_num = state_dict.pop("iter_num")
        super().load_state_dict(state_dict)


def said(kind: type[torch.optim.SGD], size: int, is_flat: bool) -> set[str]:
    def script() -> None:
        job = Job()
        edl_hvd.init()
        torch.manual_seed(0)
        model = Tempered()
        optimizer = edl_hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        batches = job.batches()
        loader = DataLoader(job.dataset(), batch_sampler=batches)
        state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                if is_flat:
                    for inputs, target in state.batches(loader):
                        optimizer.zero_grad()
                        F.cross_entropy(model(inputs), target).backward()
                        optimizer.step()
                else:
                    for step in state.steps(loader):
                        optimizer.zero_grad()
                        for inputs, target in step:
                            F.cross_entropy(model(inputs), target).backward()
                        optimizer.step()
                scheduler.step()

        train(state)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(script)
    return {text for warning in caught if "beside its state_dict" in (text := str(warning.message))}


@pytest.mark.parametrize("is_flat", [False, True], ids=["steps", "flat"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_count_of_an_optimizer_is_named(size: int, is_flat: bool) -> None:
    [message] = said(EveryThird, size, is_flat)
    assert message == (
        "EveryThird.iter_num is a number that the optimizer counts with beside its state_dict(): a worker that joins "
        "and a job that is resumed begin with the first value, and a worker without a micro-batch may not count; keep "
        "it in param_groups or in the optimizer's state"
    )


@pytest.mark.parametrize("is_flat", [False, True], ids=["steps", "flat"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, CountedInGroups, ToldNorm])
def test_what_is_kept_or_only_told_is_not(kind: type[torch.optim.SGD], is_flat: bool) -> None:
    assert said(kind, 2, is_flat) == set()


def test_one_that_the_optimizers_own_state_dict_has_is_not() -> None:
    assert said(WithOwnState, 1, is_flat=False) == set()
