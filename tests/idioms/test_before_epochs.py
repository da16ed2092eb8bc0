"""What an elastic function does before its loops over epochs counts once, though it runs again in each world."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job, differences
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation

from edl_hvd import elastic
from edl_hvd.errors import EdlHvdWarning

LATE = 70  # collectives; commits copy weights no more some 40 of them after the script has last changed them by itself
FAULTS = [
    Fault(LATE, worker=1, leaves=(1,)),
    Fault(LATE, worker=1, leaves=(1,), joins=1),
    Fault(LATE, worker=1, joins=1, politely=True),
    Fault(400, worker=0, leaves=(0,), joins=1),
]
IDS = ["dies", "dies and another joins", "joins", "rank 0 dies in epoch 1"]


def weights_begun(state) -> None:
    torch.manual_seed(4)
    state.model.head.reset_parameters()


def weights_replaced(state) -> None:
    state.model.head.weight.data = torch.full_like(state.model.head.weight, 0.1)


def momentum_forgotten(state) -> None:
    state.optimizer.state.clear()


def buffer_set(state) -> None:
    state.model.beta.fill_(0.5)


def attributes_set(state) -> None:
    state.seen, state.total = 0, torch.zeros(2)


def frozen(state) -> None:
    state.model.body.requires_grad_(False)


def same_again(state) -> None:
    state.model.load_state_dict({name: tensor.clone() for name, tensor in state.model.state_dict().items()})
    state.optimizer.zero_grad()
    state.model.train()


def trained(state, optimizer, step) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        F.cross_entropy(state.model(inputs), target).backward()
    optimizer.step()


def script(job: Job, before) -> dict:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, seen=0, total=torch.zeros(2))

    @elastic
    def train(state):
        before(state)
        for epoch in state.epochs(job.epochs):
            if epoch == 1:
                model.body.requires_grad_(True)
            for step in state.steps(loader):
                trained(state, optimizer, step)
                state.seen += 1
                state.total += 1
                with torch.no_grad():
                    model.beta.mul_(0.999)

    train(state)
    return {"model": model, "optimizer": optimizer, "beta": model.beta, "seen": state.seen, "total": state.total}


def run(body, fault: Fault | None, size: int = 3) -> tuple[list, list[str]]:
    simulation = Simulation(size, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        outcomes = simulation.run(body)
    assert len(simulation.worlds) == (2 if fault else 1), "the fault did not come"
    return outcomes, sorted(
        {str(warning.message) for warning in caught if "elastic function, " in str(warning.message)}
    )


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
@pytest.mark.parametrize(
    ("before", "name"),
    [
        (weights_begun, "model.head.bias"),
        (weights_replaced, "model.head.weight"),
        (momentum_forgotten, "optimizer.state.0.momentum_buffer"),
        (buffer_set, "model.beta"),
        (attributes_set, "seen"),
        (same_again, ""),
    ],
)
def test_what_stands_before_the_epochs_counts_once(before, name: str, fault: Fault) -> None:
    job = Job(samples=600)
    [expected], silent = run(lambda: script(job, before), None, size=1)
    assert not silent
    outcomes, said = run(lambda: script(job, before), fault)
    for outcome in outcomes:
        assert not differences(outcome, expected, 1e-5)
    if not name:
        assert not said
        return
    [message] = said
    assert f"has changed state.{name} before its loop over epochs, after step " in message
    assert "; it is put back, because the training goes on from there; do it before that function is called" in message


def test_what_the_loop_has_unfrozen_stays_so() -> None:
    job = Job(samples=600)
    [expected], _ = run(lambda: script(job, frozen), None, size=1)
    outcomes, [message] = run(lambda: script(job, frozen), FAULTS[-1])
    assert not differences(outcomes[0], expected, 1e-5)
    assert "state.model.body.0.bias.requires_grad" in message


def two_phases(job: Job, ends: tuple[int, ...] = (1, 3)) -> dict:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, phase=0)

    @elastic
    def train(state):
        for end in ends:
            for _ in state.epochs(end):
                for step in state.steps(loader):
                    trained(state, optimizer, step)
            with torch.no_grad():
                model.head.weight.mul_(0.5)
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] *= 0.5
            state.phase += 1

    train(state)
    return {"model": model, "optimizer": optimizer, "phase": state.phase}


@pytest.mark.parametrize("ends", [(1, 3), (1, 2, 3)], ids=["two phases", "one loop for each epoch"])
@pytest.mark.parametrize("politely", [False, True], ids=["dies", "joins"])
def test_what_stands_between_two_loops_over_epochs_counts_once(politely: bool, ends: tuple[int, ...]) -> None:
    job = Job(samples=120)
    [expected], _ = run(lambda: two_phases(job, ends), None, size=1)
    for collective in range(2, 90, 4):
        fault = Fault(collective, worker=1, leaves=() if politely else (1,), joins=1, politely=politely)
        outcomes, said = run(lambda: two_phases(job, ends), fault)
        for outcome in outcomes:
            assert not differences(outcome, expected, 1e-5), collective
        assert not said


def test_loops_of_a_single_epoch_each_keep_what_stands_before_them() -> None:
    """They stand in a loop of the script's own, which goes on with the next one."""

    def script(job: Job) -> dict:
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, rounds=0)

        @elastic
        def train(state):
            while state.epoch < 3:
                if state.rounds == state.epoch:
                    state.rounds += 1
                for _ in state.epochs(state.epoch + 1):
                    for step in state.steps(loader):
                        trained(state, optimizer, step)

        train(state)
        return {"model": model, "rounds": state.rounds}

    job = Job()
    [expected], _ = run(lambda: script(job), None, size=1)
    for collective in range(2, 24, 3):
        fault = Fault(collective, worker=1, joins=1, politely=True)
        assert not differences(run(lambda: script(job), fault)[0][0], expected, 1e-5), collective


def test_a_loop_of_the_scripts_own_is_left_alone() -> None:
    """Whether it has begun is not known."""

    def script(job: Job) -> dict:
        _, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, runs=0)

        @elastic
        def train(state):
            state.runs += 1
            while state.epoch < job.epochs:
                for step in state.steps(loader):
                    trained(state, optimizer, step)
                state.epoch += 1
                loader.batch_sampler.set_epoch(state.epoch)
                state.commit()

        train(state)
        return {"runs": state.runs}

    outcomes, said = run(lambda: script(Job()), Fault(14, worker=1, leaves=(1,)))
    assert outcomes[0]["runs"] == 2
    assert not said
