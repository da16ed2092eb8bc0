"""A copy of the weights that an elastic function takes again in mid-training is said."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch.nn.utils import parameters_to_vector

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

FAULTS = [
    Fault(40, worker=1, leaves=(1,)),
    Fault(31, worker=1, joins=1, politely=True),
    Fault(400, worker=0, leaves=(0,), joins=1),
]
IDS = ["dies", "joins", "rank 0 dies in epoch 1"]


def pull(model, references) -> torch.Tensor:
    """What keeps weights near others, as in FedProx, L2-SP and elastic weight consolidation."""
    if isinstance(references, Anchor):
        references = references.weights
    if isinstance(references, torch.nn.Module):
        references = list(references.parameters())
    if isinstance(references, dict):
        references = [references[name] for name, _ in model.named_parameters()]
    if isinstance(references, list):
        references = parameters_to_vector(references).detach()
    if references.dim() > 1:
        return (model.head.weight - references).square().sum()
    return (parameters_to_vector(model.parameters()) - references).square().sum()


def as_list(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def as_model(model) -> torch.nn.Module:
    return copy.deepcopy(model)


def as_dictionary(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def as_vector(model) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def of_one_layer(model) -> torch.Tensor:
    return model.head.weight.detach().clone()


class Anchor:
    """An object of the script that holds the copy."""

    def __init__(self, model) -> None:
        self.model = model
        self.weights = as_dictionary(model)


def the_parameters(model) -> list[torch.Tensor]:
    """No copy."""
    return list(model.parameters())


def zeros(model) -> list[torch.Tensor]:
    return [torch.zeros_like(p) for p in model.parameters()]


def trained(model, optimizer, step, references) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        (F.cross_entropy(model(inputs), target) + 0.1 * pull(model, references)).backward()
    optimizer.step()


def before_epochs(job: Job, taken_by) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        references = taken_by(model)
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(model, optimizer, step, references)

    train(state)


def at_the_top(job: Job, taken_by) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            references = taken_by(model)
            for step in state.steps(loader):
                trained(model, optimizer, step, references)

    train(state)


def before_the_function(job: Job, taken_by) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    references = taken_by(model)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(model, optimizer, step, references)

    train(state)


def kept_in_state(job: Job, taken_by) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, references=None)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            state.references = [p.detach().clone() for p in model.parameters()]
            for step in state.steps(loader):
                trained(model, optimizer, step, state.references)

    train(state)


def behind_new_weights(job: Job, taken_by) -> None:
    """The copy is the same in each run, because the function makes the weights anew before."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        torch.manual_seed(3)
        model.head.reset_parameters()
        references = of_one_layer(model)
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(model, optimizer, step, references)

    train(state)


def said(script, taken_by, fault: Fault, job: Job | None = None) -> list[str]:
    simulation = Simulation(3, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(lambda: script(job or Job(samples=600), taken_by))
    assert len(simulation.worlds) == 2, "the fault did not come"
    return sorted({str(warning.message) for warning in caught if "a copy of weights" in str(warning.message)})


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
@pytest.mark.parametrize("taken_by", [as_list, as_model, as_dictionary, as_vector, of_one_layer, Anchor])
def test_a_copy_before_the_epochs_or_at_the_top_of_one_is_named(taken_by, fault: Fault) -> None:
    name = "references.weights" if taken_by is Anchor else "references"
    [message] = said(before_epochs, taken_by, fault)
    assert message.startswith(f"{name} is a copy of weights that the elastic function takes again in each world")
    assert "before its loop over epochs" in message
    [message] = said(at_the_top, taken_by, fault)
    assert message.startswith(f"{name} is a copy of weights that the elastic function takes again in each world")
    assert "at the top of epoch " in message


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_what_is_no_copy_of_the_present_weights_is_not_named(fault: Fault) -> None:
    for script in (before_epochs, at_the_top):
        assert not said(script, the_parameters, fault)
        assert not said(script, zeros, fault)
    assert not said(before_the_function, as_list, fault)
    assert not said(before_the_function, as_model, fault)
    assert not said(before_the_function, Anchor, fault)
    assert not said(kept_in_state, None, fault)
    assert not said(behind_new_weights, None, fault)
