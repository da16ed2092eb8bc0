"""The top of an epoch that is continued runs again; what it changes counts once, or it is said."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue import tops
from catalogue.kept import Tempered
from idioms import Idiom, Job, differences
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from waiting import until

import edl_hvd
from edl_hvd.checkpoint import steps
from edl_hvd.errors import EdlHvdWarning
from edl_hvd.storage import open_storage


class EndOfProcess(BaseException):
    """A process is killed."""


@pytest.mark.parametrize("step", [2, 3, 4, 6, 7])
@pytest.mark.parametrize("idiom", tops.IDIOMS, ids=lambda idiom: idiom.name)
def test_a_process_that_goes_on_from_a_checkpoint_in_mid_epoch_learns_the_same(
    idiom: Idiom, step: int, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    assert idiom.plain is not None
    torch.manual_seed(0)
    expected = idiom.plain(Job())
    monkeypatch.setenv("EDL_HVD_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("EDL_HVD_CHECKPOINT_EVERY", "1 steps")
    storage, forward, calls = open_storage(str(tmp_path)), Tempered.forward, []

    def dies(model: Tempered, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == step + 1:
            until(lambda: any(steps(storage)))  # the first one is written beside the training
            raise EndOfProcess
        return forward(model, inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        monkeypatch.setattr(Tempered, "forward", dies)
        with pytest.raises(EndOfProcess):
            Simulation(1).run(lambda: idiom.ours(Job()))
        monkeypatch.setattr(Tempered, "forward", forward)
        monkeypatch.setenv("EDL_HVD_TAKE_OVER", "1")  # the one before has not ended for this process
        [outcome] = Simulation(1).run(lambda: idiom.ours(Job()))
    assert not differences(outcome, expected, idiom.tolerance)


def said(script, fault: Fault) -> list[str]:
    simulation = Simulation(3, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(script)
    assert len(simulation.worlds) == 2, "the fault did not come"
    return sorted({str(warning.message) for warning in caught if "the top of epoch" in str(warning.message)})


def test_options_that_are_put_back_are_said() -> None:
    [message] = said(lambda: tops.cut_at_top_ours(Job()), Fault(14, worker=1, leaves=(1,), joins=1))
    assert message.startswith("the top of epoch 0, which is continued, has changed options of an optimizer once more")
    assert "belongs into state.on_resize(…) or a batch policy" in message


def set_in_function(rate_after_cut: float) -> None:
    model, optimizer, loader, state = prepare(Job(), momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        optimizer.param_groups[0]["lr"] = 0.2
        for epoch in state.epochs(2):
            if epoch == 1:
                optimizer.param_groups[0]["lr"] = rate_after_cut
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)


def test_a_rate_that_the_function_sets_before_its_epochs_is_said() -> None:
    late = Fault(45, worker=1, leaves=(1,), joins=1)
    for rate in (0.02, 0.2):
        simulation = Simulation(3, late)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EdlHvdWarning)
            simulation.run(lambda rate=rate: set_in_function(rate))
        assert len(simulation.worlds) == 2, "the fault did not come"
        said = {str(warning.message).split(" after step")[0] for warning in caught if "elastic" in str(warning.message)}
        message = (
            "the elastic function, which runs again in each world, has set lr of an optimizer before its loop over "
            "epochs, from 0.02 to 0.2"
        )
        assert said == ({message} if rate == 0.02 else set()), "what is set to what it is changes nothing"


LATE, IN_EPOCH_1 = 70, 400
# Collectives. Commits copy weights no more some 40 of them after the script has last changed them by itself.


def written(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def written_behind_autograd(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.data *= 0.5


def replaced(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.data = model.head.weight.data * 0.5


def momentum_forgotten(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def momentum_halved(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    for kept in optimizer.state.values():
        kept["momentum_buffer"].mul_(0.5)


def momentum_halved_and_partly_removed(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    momentum_halved(model, optimizer)
    optimizer.state.pop(model.head.bias, None)


def long_epochs_plain(job: Job, top) -> dict:
    model = Tempered()
    optimizer = momentum_sgd(model)
    for epoch in range(job.epochs):
        top(model, optimizer)
        for inputs, target in job.plain_loader(epoch=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


def long_epochs(job: Job, top) -> dict:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            top(model, optimizer)
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    F.cross_entropy(model(inputs), target).backward()
                optimizer.step()

    train(state)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(LATE, worker=1, leaves=(1,)),
        Fault(LATE, worker=1, leaves=(1,), joins=1),
        Fault(2 * LATE, worker=1, joins=1),
        Fault(IN_EPOCH_1, worker=0, leaves=(0,), joins=1),
    ],
    ids=["dies", "dies and another joins", "joins", "rank 0 dies in epoch 1"],
)
@pytest.mark.parametrize("top", [written, written_behind_autograd, replaced, momentum_forgotten])
def test_what_the_top_of_a_long_epoch_writes_it_writes_once(top, fault: Fault) -> None:
    """Commits hold neither weights nor momentum then."""
    check_learned(top, fault)


@pytest.mark.parametrize("top", [momentum_halved, momentum_halved_and_partly_removed])
def test_momentum_that_the_top_of_a_long_epoch_writes_it_writes_once(top) -> None:
    """In epoch 0 there is none yet when the top runs first."""
    check_learned(top, Fault(IN_EPOCH_1, worker=1, leaves=(1,), joins=1))


def check_learned(top, fault: Fault) -> None:
    job = Job(samples=600)
    torch.manual_seed(0)
    expected = long_epochs_plain(job, top)
    simulation = Simulation(3, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EdlHvdWarning)
        outcomes = simulation.run(lambda: long_epochs(job, top))
    assert len(simulation.worlds) == 2, "the fault did not come"
    assert not differences(outcomes[0], expected, 1e-5)


def test_gradients_that_the_top_has_cleared_are_there_where_the_epoch_is_continued() -> None:
    """The script accumulates gradients over two steps, and the world changes between them."""

    def script(job: Job) -> dict:
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                optimizer.zero_grad()
                for number, step in enumerate(state.steps(loader), start=state.step):
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()

        train(state)
        return {"model": model}

    job = Job()
    [expected] = Simulation(1).run(lambda: script(job))
    for at in range(2, 14):
        simulation = Simulation(3, Fault(at, worker=1, leaves=(1,)))
        assert not differences(simulation.run(lambda: script(job))[0], expected, 1e-5), at


def written_once_there_is_momentum(model: Tempered, optimizer: torch.optim.Optimizer) -> None:
    if len(optimizer.state):
        written(model, optimizer)


@pytest.mark.parametrize(
    ("top", "tensor"),
    [(written_once_there_is_momentum, "model.head.weight"), (momentum_halved, "optimizer.state.0.momentum_buffer")],
)
def test_what_only_the_repeated_top_writes_is_said(top, tensor: str) -> None:
    [message] = said(lambda: long_epochs(Job(samples=600), top), Fault(LATE, worker=1, leaves=(1,)))
    assert message.startswith(f"the top of epoch 0, which is continued, has changed {tensor}, which it had not when")


def test_between_two_loops_of_one_epoch_nothing_is_put_back() -> None:
    """The second loop begins in mid-epoch, too, and what stands between them has not run before."""

    def script() -> dict:
        model, optimizer, loader, state = prepare(Job(), momentum_sgd, Tempered, rates=[])

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for _ in range(2):
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
                    for number, step in enumerate(state.steps(loader)):
                        optimizer.zero_grad()
                        for inputs, target in step:
                            F.cross_entropy(model(inputs), target).backward()
                        optimizer.step()
                        state.rates.append(optimizer.param_groups[0]["lr"])
                        if number == 1:
                            break

        train(state)
        return {"rates": state.rates}

    [outcome] = Simulation(1).run(script)
    assert outcome["rates"] == [0.1, 0.1, 0.05, 0.05]


def test_an_epoch_that_is_begun_once_more_without_need_keeps_what_its_top_does() -> None:
    """The script leaves its loop over epochs in mid-epoch and enters it again, in one run of the function."""

    def script() -> dict:
        model, optimizer, loader, state = prepare(Job(), momentum_sgd, Tempered, rates=[])

        @edl_hvd.elastic
        def train(state):
            for _ in range(2):
                for _ in state.epochs(1):
                    optimizer.param_groups[0]["lr"] *= 0.5
                    for number, step in enumerate(state.steps(loader)):
                        optimizer.zero_grad()
                        for inputs, target in step:
                            F.cross_entropy(model(inputs), target).backward()
                        optimizer.step()
                        state.rates.append(optimizer.param_groups[0]["lr"])
                        if number == 1:
                            break
                    break

        train(state)
        return {"rates": state.rates}

    [outcome] = Simulation(1).run(script)
    assert outcome["rates"] == [0.1, 0.1, 0.05, 0.05]
