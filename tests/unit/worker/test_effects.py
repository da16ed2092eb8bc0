"""Warnings for what has no effect: a loop that counts nothing, a job that is complete; and what own loops count."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from fake_world import alone
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.checkpoint import steps
from edl_hvd.errors import EdlHvdWarning
from edl_hvd.storage import open_storage


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = edl_hvd.ElasticBatchSampler(20, global_batch=8)
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_sampler=batches)
    return edl_hvd.State(model=model, optimizer=optimizer, batches=batches), loader


def step(state, inputs):
    state.optimizer.zero_grad()
    state.model(inputs).square().mean().backward()
    state.optimizer.step()


def test_a_loop_over_the_loader_itself_is_said_to_count_nothing_once():
    state, loader = make()

    @edl_hvd.elastic
    def train(state):
        for _ in range(2):
            for (inputs,) in loader:
                step(state, inputs)

    with alone(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EdlHvdWarning)
        train(state)
    assert [type(one.message) for one in said] == [EdlHvdWarning]
    assert "without state.commit(): no sample is counted" in str(said[0].message)
    assert state.step == 0


def test_a_loop_of_ones_own_counts_its_steps_and_writes_its_checkpoints(tmp_path):
    state, loader = make()

    @edl_hvd.elastic(checkpoint=tmp_path, checkpoint_every="2 steps", keep_newest=99)
    def train(state):
        for (inputs,) in loader:
            step(state, inputs)
            state.commit()
            while state._runtime.coordinator._checkpoints.busy:
                pass

    with alone(), warnings.catch_warnings():
        warnings.simplefilter("error", EdlHvdWarning)
        train(state)
    assert state.step == 3
    assert {2, 3} <= set(steps(open_storage(str(tmp_path))))


def test_a_job_that_is_complete_says_so(tmp_path, caplog):
    for run in range(2):
        state, loader = make()

        @edl_hvd.elastic(checkpoint=tmp_path)
        def train(state, loader=loader):
            for _ in state.epochs(2):
                for one in state.steps(loader):
                    for (inputs,) in one:
                        state.model(inputs).square().mean().backward()
                    state.optimizer.step()
                    state.optimizer.zero_grad()

        with alone(), caplog.at_level(logging.WARNING, "edl_hvd"):
            train(state)
        told = [record.getMessage() for record in caplog.records if "nothing left" in record.getMessage()]
        assert told == ([f"step 6 of 6 in {tmp_path}; nothing left to train"] if run else [])


def test_an_epoch_that_is_not_counted_is_refused_when_it_comes_again():
    state, loader = make()

    @edl_hvd.elastic
    def train(state):
        for _ in range(2):
            for (inputs,) in state.batches(loader):
                step(state, inputs)

    said = r"called again in epoch 0.*for epoch in state\.epochs"
    with alone(), pytest.raises(edl_hvd.errors.UsageError, match=said):
        train(state)
