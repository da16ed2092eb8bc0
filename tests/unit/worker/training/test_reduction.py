"""A reduction sums over the workers that it is bound to, whatever the process says of its world."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import RecordingCollectives, alone
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import EdlHvdWarning, UsageError
from edl_hvd.worker import process
from edl_hvd.worker.training.process_group import PresentGroup, WorldGroup
from edl_hvd.worker.training.reduction import Reduction

TRAINING = Path(edl_hvd.__file__).parent / "worker" / "training"


def test_a_reduction_sums_over_the_workers_it_is_bound_to_without_a_process():
    process.shutdown()
    collectives = RecordingCollectives()
    weights = torch.nn.Parameter(torch.ones(2))
    reduction = Reduction([("weights", weights)], PresentGroup())
    reduction.bind(WorldGroup(1, 4, collectives))
    (weights * torch.tensor([2.0, 3.0])).sum().backward()
    assert collectives.parts["edl_hvd.gradient.weights"].tolist() == [0.5, 0.75]
    assert "edl_hvd.flags" in collectives.parts


def test_a_backward_outside_the_elastic_function_is_refused_by_what_the_script_has_called(monkeypatch):
    weights = torch.nn.Parameter(torch.ones(2))
    edl_hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=0.1))
    with alone():
        monkeypatch.setattr(process, "size", lambda: 2)
        with pytest.raises(UsageError, match=r"^backward\(\) was called outside the elastic function, for a model"):
            weights.sum().backward()


def test_modules_of_training_are_handed_the_world_and_do_not_ask_the_process_for_it():
    asking = set()
    for path in TRAINING.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [f"{node.module}.{name.name}" for name in node.names] if isinstance(node, ast.ImportFrom) else []
            if "edl_hvd.worker.process" in names or getattr(node, "module", "") == "edl_hvd.worker.process":
                asking.add(path.name)
    assert asking == {"process_group.py"}


def make(weight: int):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer: Any = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = edl_hvd.ElasticBatchSampler(8, global_batch=8, micro_batch=4)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    groups = []

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(1):
            for step in state.steps(loader):
                for (inputs,) in step:
                    step.weigh(weight)
                    model(inputs).square().mean().backward()
                groups.append(optimizer.reduction.sum.group)
                optimizer.step()

    return state, train, groups


def test_the_loop_binds_the_reduction_to_the_world_that_it_has_entered():
    state, train, groups = make(weight=1)
    with alone():
        train(state)
    (group,) = groups
    assert isinstance(group, WorldGroup)
    assert (group.rank, group.size) == (0, 1)
    assert isinstance(state.optimizer.reduction.sum.group, PresentGroup)


def test_micro_batches_that_are_all_left_out_have_a_gradient_of_zeros():
    state, train, _ = make(weight=0)
    before = state.model.weight.detach().clone()
    with alone(), pytest.warns(EdlHvdWarning, match="counts for nothing"):
        train(state)
    assert torch.equal(state.model.weight.grad, torch.zeros(1, 4))
    assert torch.equal(state.model.weight, before)
