"""The top of an epoch that is continued runs again; what it changes counts once, or it is said."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue import tops
from catalogue.kept import Tempered
from catalogue.structure import momentum_sgd, prepare
from idioms import Idiom, Job, differences
from simulation import Fault, Simulation
from waiting import LONG_S

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
            deadline_s = time.monotonic() + LONG_S
            while not any(steps(storage)):  # the first one is written beside the training
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
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


def test_weights_of_which_there_is_no_copy_are_said() -> None:
    """Commits copy weights no more some steps after the script has last changed them by itself."""

    def script() -> None:
        model, optimizer, loader, state = prepare(Job(samples=600), momentum_sgd, Tempered)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                with torch.no_grad():
                    model.head.weight.mul_(0.5)
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()

        train(state)

    [message] = said(script, Fault(70, worker=1, leaves=(1,)))
    assert message.startswith("the top of epoch 0, which is continued, has changed weights once more")


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
