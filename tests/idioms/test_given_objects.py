"""Objects given to State, which the script holds by other names as well, in worlds that change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job, differences
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation

import edl_hvd

FAULTS = [
    Fault(14, worker=1, leaves=(1,)),
    Fault(14, worker=1, leaves=(1,), joins=1),
    Fault(9, worker=1, joins=1, politely=True),
    Fault(21, worker=0, leaves=(0,), joins=1),
]
IDS = ["dies", "dies and another joins", "joins", "rank 0 dies and another joins"]


def by_other_names(job: Job) -> dict:
    """The loop changes a list and tensors by its own names for them, and never by those of State."""
    history, seen, sums = [], {"steps": 0}, torch.zeros(2)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, history=history, seen=seen, sums=sums)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                seen["steps"] += 1
                history.append(seen["steps"])
                sums[0] += seen["steps"]
        assert history is state.history
        assert seen is state.seen
        assert sums is state.sums

    train(state)
    return {"model": model, "history": history, "seen": seen, "sums": sums}


def one_of_several(job: Job) -> dict:
    """The attribute is one of the script's tensors, and each epoch another; none of them may be written into."""
    tasks = [torch.full((4,), float(number)) for number in range(3)]
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, task=tasks[0], made=[])

    @edl_hvd.elastic
    def train(state):
        for epoch in state.epochs(job.epochs):
            state.task = tasks[epoch + 1]
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                state.made.append(state.task.sum().item())
                if len(state.made) == 6:
                    state.task = tasks[0]

    train(state)
    return {"model": model, "made": state.made, "tasks": tasks}


@pytest.mark.parametrize("script", [by_other_names, one_of_several])
@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_objects_given_to_state_may_be_held_by_other_names(script, fault: Fault) -> None:
    job = Job(micro_batch=3)
    [expected] = Simulation(1).run(lambda: script(job))
    simulation = Simulation(3, fault)
    outcomes = simulation.run(lambda: script(job))
    assert len(simulation.worlds) == 2, "the fault did not come"
    for outcome in outcomes:
        assert not differences(outcome, expected, 1e-5)


def test_a_worker_that_is_not_the_first_has_the_objects_it_was_given() -> None:
    [expected] = Simulation(1).run(lambda: by_other_names(Job()))
    for outcome in Simulation(3).run(lambda: by_other_names(Job())):
        assert not differences(outcome, expected, 1e-5)
