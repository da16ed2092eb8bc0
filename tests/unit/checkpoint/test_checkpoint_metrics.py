"""What a script reports is in the checkpoints after it, and the best of them stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import alone
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.checkpoint import restore, steps
from edl_hvd.checkpoint.reading.files import read_listed
from edl_hvd.errors import SettingsError
from edl_hvd.events import read_events
from edl_hvd.storage import Storage, open_storage

STEPS_PER_EPOCH = 3


def make() -> tuple[edl_hvd.State, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    batches = edl_hvd.ElasticBatchSampler(20, global_batch=8)
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_sampler=batches)
    return edl_hvd.State(model=model, optimizer=optimizer, batches=batches), loader


def train(
    folder: Path,
    accuracies: Sequence[float],
    body: Callable[[edl_hvd.State], None] = lambda state: None,
    **settings: Any,
) -> edl_hvd.State:
    """As many epochs as there are accuracies; each is reported after its epoch."""
    state, loader = make()

    @edl_hvd.elastic(checkpoint=folder, **settings)
    def run(state: edl_hvd.State) -> None:
        for epoch in state.epochs(len(accuracies)):
            for [inputs] in state.batches(loader):
                while state._runtime.coordinator._checkpoints.busy:
                    pass
                state.optimizer.zero_grad()
                state.model(inputs).square().mean().backward()
                state.optimizer.step()
                body(state)
            while state._runtime.coordinator._checkpoints.busy:
                pass
            state.report(accuracy=accuracies[epoch])

    with alone():
        run(state)
    return state


def metrics(storage: Storage) -> dict[int, dict[str, float]]:
    return {step: read_listed(storage, step).manifest.metrics for step in steps(storage)}


@pytest.mark.parametrize("every", ["1 epoch", "1 step", "4 samples", "1ms"])
def test_what_is_measured_after_an_epoch_is_in_the_checkpoint_of_that_epoch(tmp_path: Path, every: str) -> None:
    accuracies = [0.25, 0.5, 0.75]
    train(tmp_path, accuracies, checkpoint_every=every, keep_newest=99)
    found = metrics(open_storage(str(tmp_path)))
    assert found.keys() >= {3, 6, 9}
    assert (found.keys() == {3, 6, 9}) == (every == "1 epoch")
    for step, values in found.items():
        epochs = step // STEPS_PER_EPOCH
        assert values == ({"accuracy": accuracies[epochs - 1]} if epochs else {})


def test_of_each_metric_the_last_value_before_a_checkpoint_is_in_it(tmp_path: Path) -> None:
    def body(state: edl_hvd.State) -> None:
        state.report(loss=state.step * 10)
        if state.step == 4:
            state.report(accuracy=math.inf)

    events = tmp_path / "events"
    train(tmp_path / "c", [1, 2], body, checkpoint_every="1 step", keep_newest=99, events=events)
    found = metrics(open_storage(str(tmp_path / "c")))
    assert len(found) >= 2
    for step, values in found.items():
        assert values.pop("loss") == (step - 1) * 10
        expected = {3: 1.0, 4: 1.0, 5: math.inf, 6: 2.0}
        assert values == ({"accuracy": expected[step]} if step in expected else {})
    told = [event["values"] for event in read_events(events) if event["event"] == "metrics"]
    assert told[:3] == [{"loss": 0.0}, {"loss": 10.0}, {"loss": 20.0}]


def test_the_best_epoch_stays_with_the_weights_that_were_measured(tmp_path: Path) -> None:
    accuracies = [0.5, 0.9, 0.7, math.nan, 0.6]
    weights: dict[int, torch.Tensor] = {}
    train(
        tmp_path / "c",
        accuracies,
        lambda state: weights.update({state.step + 1: state.model.weight.detach().clone()}),
        checkpoint_every="1 epoch",
        keep_newest=1,
        keep_best="accuracy:max",
        events=tmp_path / "events",
    )
    storage = open_storage(str(tmp_path / "c"))
    assert metrics(storage) == {15: {"accuracy": 0.6}, 6: {"accuracy": 0.9}}
    assert torch.equal(restore(storage, 6).tensors["model/weight"], weights[6])


def test_the_best_so_far_is_known_after_a_restart_and_metrics_go_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "checkpoint_every": "1 epoch",
        "keep": 1,
        "keep_best": "accuracy:max",
        "keep_every": "9 steps",
    }
    train(tmp_path, [0.5, 0.9], **settings)
    train(tmp_path, [0.5, 0.9, 0.7], **settings)
    storage = open_storage(str(tmp_path))
    assert metrics(storage) == {9: {"accuracy": 0.7}, 6: {"accuracy": 0.9}}
    # Nothing is reported in the epoch after, and what was is still there when its checkpoint is written.
    state, loader = make()
    seen = []

    @edl_hvd.elastic(checkpoint=tmp_path, **settings)
    def run(state: edl_hvd.State) -> None:
        for _ in state.epochs(4):
            for [inputs] in state.batches(loader):
                state.model(inputs).square().mean().backward()
                state.optimizer.step()
                seen.append(state.step)

    with alone():
        run(state)
    assert seen == [9, 10, 11]
    assert metrics(storage) == {12: {"accuracy": 0.7}, 9: {"accuracy": 0.7}, 6: {"accuracy": 0.9}}


def test_a_report_after_the_last_commit_is_undone_with_the_rest() -> None:
    state, _ = make()
    state.report(accuracy=0.5)
    state._runtime.store.save(0)
    state.report(accuracy=0.9, loss=1)
    state._runtime.store.restore()
    state._runtime.store.save(1)
    other, _ = make()
    other._runtime.store.load(*state._runtime.store.export())
    other.report(loss=2)
    plain, _ = other._runtime.store.live(2)
    assert plain["attributes"]["_metrics"] == {"accuracy": 0.5, "loss": 2.0}


def test_a_setting_that_cannot_be_is_refused_when_the_function_is_decorated() -> None:
    with pytest.raises(SettingsError, match=r"keep_every: .*steps, samples or whole epochs(.|\n)*keep_best: '-loss'"):
        edl_hvd.elastic(keep_every="10min", keep_best="-loss")
