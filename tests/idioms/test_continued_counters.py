"""What a loop counts beside the steps of an epoch begins anew where the epoch goes on: it is said."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import GLOBAL_BATCH, Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch.utils.data import DataLoader, Dataset

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

FAULTS = [
    None, Fault(12, worker=1, leaves=(1,)), Fault(17, worker=0, leaves=(2,), joins=1),
    Fault(8, worker=1, joins=1, politely=True),
]  # fmt: skip


def trained(step, model, optimizer, weight: float = 1.0) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        (F.cross_entropy(model(inputs), target) * weight).backward()
    optimizer.step()


def over_steps(loop):
    """A script whose loop over the steps of an epoch is given."""

    def script(job: Job) -> None:
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

        @edl_hvd.elastic
        def train(state):
            for epoch in state.epochs(job.epochs):
                loop(state, loader, epoch, lambda step, weight=1.0: trained(step, model, optimizer, weight))

        train(state)

    return script


def by_enumerate(state, loader, epoch, train) -> None:
    """As in DINO and MAE: the number of the step is that of the epoch, times its length, and what enumerate counts."""
    for it, step in enumerate(state.steps(loader)):
        it = len(loader) * epoch + it
        train(step, 1.0 / (1 + it))


def by_enumerate_plainly(state, loader, epoch, train) -> None:
    for i, step in enumerate(state.steps(loader)):
        train(step, 1.0 / (1 + i))


def by_a_schedule(state, loader, epoch, train) -> None:
    for step, place in zip(state.steps(loader), itertools.count(), strict=False):
        train(step, 1.0 / (1 + place))


def by_its_number(state, loader, epoch, train) -> None:
    for step in state.steps(loader):
        train(step, 1.0 / (1 + step.number))


def from_its_number(state, loader, epoch, train) -> None:
    for number, step in enumerate(state.steps(loader), start=state.step):
        train(step, 1.0 / (1 + number))


def from_its_place(state, loader, epoch, train) -> None:
    for number, step in enumerate(state.steps(loader), start=state.step % len(loader) + 1):
        train(step, 1.0 / number)


def not_read(state, loader, epoch, train) -> None:
    for _, step in enumerate(state.steps(loader)):
        train(step)


def said(script, job: Job, size: int, fault: Fault | None) -> set[str]:
    simulation = Simulation(size, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(lambda: script(job))
    assert len(simulation.worlds) == 1 + (fault is not None), "the fault did not come"
    return {str(warning.message) for warning in caught if "in the middle of epoch" in str(warning.message)}


@pytest.mark.parametrize("fault", FAULTS, ids=["no fault", "dies", "dies late", "joins"])
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (by_enumerate_plainly, "i"),
        (by_a_schedule, "place"),
        (by_its_number, ""),
        (from_its_number, ""),
        (from_its_place, ""),
        (not_read, ""),
    ],
)
def test_a_counter_that_begins_anew_is_named_where_the_epoch_goes_on(loop, name: str, fault: Fault | None) -> None:
    found = said(over_steps(loop), Job(), 3, fault)
    if not name or fault is None:
        assert found == set()
        return
    [message] = found
    assert message.startswith(f"{name} is 0 again in the middle of epoch 0")
    assert "count with step.number" in message


def test_a_counter_that_the_body_changes_is_named_too() -> None:
    [message] = said(over_steps(by_enumerate), Job(), 3, FAULTS[1])
    assert message.startswith("it is 0 again in the middle of epoch 0")


class Pair(Dataset):
    """Samples that hold a number each, which is no counter."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.target = job.inputs, job.target

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int):
        return self.inputs[place], self.target[place]


def flat(count):
    """A script with the flat loop, whose step is one micro-batch."""

    def script(job: Job) -> None:
        edl_hvd.init()
        model = Tempered()
        optimizer = edl_hvd.DistributedOptimizer(momentum_sgd(model))
        batches = edl_hvd.ElasticBatchSampler(job.samples, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, seed=3)
        loader = DataLoader(
            Pair(job), batch_sampler=batches, collate_fn=lambda all_: (len(all_), *zip(*all_, strict=True))
        )
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for place, (size, inputs, target) in count(state.batches(loader)):
                    optimizer.zero_grad()
                    loss = sum(F.cross_entropy(model(x[None]), y[None]) for x, y in zip(inputs, target, strict=True))
                    (loss / size / (1 + (place or 0))).backward()
                    optimizer.step()

        train(state)

    return script


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_counter_of_the_flat_loop_is_named_where_it_counts_steps(is_counted: bool) -> None:
    count = enumerate if is_counted else lambda batches: ((None, batch) for batch in batches)
    found = said(flat(count), Job(), 2, Fault(20, worker=1, leaves=(1,)))
    assert len(found) == is_counted
    assert all(message.startswith("place is 0 again in the middle of epoch") for message in found)
    assert all("count with state.step" in message for message in found)
