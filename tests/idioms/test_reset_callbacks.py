"""Reset callbacks that set the learning rate by the number of workers, as scripts of Horovod do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from idioms import Job, differences
from script_parts import make_model
from simulation import Fault, Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

RATE = 0.05
FAULTS = [
    Fault(18, worker=1, joins=1, politely=True),
    Fault(18, worker=1, leaves=(1,), joins=2),
    Fault(18, worker=0, leaves=(0,)),
]


def by_size(optimizer, state) -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE * edl_hvd.size()


def by_size_before(optimizer, state) -> None:
    """What a worker that joins has to know is in State."""
    for group in optimizer.param_groups:
        group["lr"] *= edl_hvd.size() / state.workers
    state.workers = edl_hvd.size()


def with_steps(job: Job, callback: Callable[..., None]):
    edl_hvd.init()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE * edl_hvd.size(), momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner)
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, workers=edl_hvd.size(), used=[])
    state.register_reset_callbacks([lambda: callback(optimizer, state)])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                state.used.append(optimizer.param_groups[0]["lr"])
                optimizer.step()

    train(state)
    return {"model": model, "used": state.used, "size": edl_hvd.size()}


def in_a_loop_of_its_own(job: Job, callback: Callable[..., None]):
    """As Horovod's own elastic example; each worker trains on the whole batch, so all gradients are alike."""
    edl_hvd.init()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=RATE * edl_hvd.size(), momentum=0.9)
    optimizer = edl_hvd.DistributedOptimizer(inner)
    order = [batch for epoch in range(job.epochs) for batch in job.plain_loader(epoch=epoch)]
    state = edl_hvd.State(model=model, optimizer=optimizer, batch=0, workers=edl_hvd.size(), used=[])
    state.register_reset_callbacks([lambda: callback(optimizer, state)])

    @edl_hvd.elastic
    def train(state):
        while state.batch < len(order):
            inputs, target = order[state.batch]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            state.used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            state.batch += 1
            state.commit()

    train(state)
    return {"model": model, "used": state.used, "size": edl_hvd.size()}


def plain(job: Job, rates: list[float]):
    """The same in one process, with the rates that the job has used."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0], momentum=0.9)
    batches = [batch for epoch in range(job.epochs) for batch in job.plain_loader(epoch=epoch)]
    for rate, (inputs, target) in zip(rates, batches, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return {"model": model}


@pytest.mark.parametrize("fault", FAULTS, ids=["joins", "dies and two join", "dies"])
@pytest.mark.parametrize("callback", [by_size, by_size_before])
@pytest.mark.parametrize("script", [with_steps, in_a_loop_of_its_own])
def test_every_worker_goes_on_with_the_rate_that_a_callback_has_set(script, callback, fault):
    torch.manual_seed(0)
    job = Job(3)
    simulation = Simulation(2, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        outcomes = simulation.run(lambda: script(job, callback))
    assert simulation.has_struck
    first = outcomes[0]
    assert first["used"][-1] == pytest.approx(RATE * first["size"])
    assert first["size"] == len(simulation.worlds[-1]) != 2
    for outcome in outcomes:
        assert not differences(outcome, first, 0.0)
        assert not differences({"model": outcome["model"]}, plain(job, first["used"]), 1e-5)


def test_a_callback_of_one_worker_is_no_collective():
    """As one that prints for all."""
    registered = []

    def script():
        edl_hvd.init()
        model = make_model()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
        state = edl_hvd.State(model=model, optimizer=optimizer)
        told = []
        if not registered:
            registered.append("by one worker")
            state.on_resize(lambda: told.append(edl_hvd.size()))

        @edl_hvd.elastic
        def train(state):
            while state.step < 8:
                optimizer.zero_grad()
                F.cross_entropy(model(torch.ones(2, 6)), torch.zeros(2, dtype=torch.long)).backward()
                optimizer.step()
                state.commit()

        train(state)
        return told

    outcomes = Simulation(2, Fault(9, worker=1, joins=1, politely=True)).run(script)
    assert outcomes == [[3], [], []]
