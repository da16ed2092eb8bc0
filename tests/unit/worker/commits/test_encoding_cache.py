"""What checkpoints take of models and optimizers as they stand: as if named anew each time, whatever a script does."""

import gc
import weakref

import pytest
import torch
from fake_world import alone
from torch import nn

import edl_hvd
from edl_hvd.worker.codec import EncodingCache, decode, encode
from edl_hvd.worker.commits.dirty import FrozenParameters
from edl_hvd.worker.commits.handlers import ModuleHandler, OptimizerHandler
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


@pytest.fixture(autouse=True)
def in_a_world():
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        yield


def values(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


class Kept:
    """A model and its optimizer, and what is kept of both."""

    def __init__(self, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.optimizer = edl_hvd.DistributedOptimizer(optimizer(self.model.parameters()), self.model.named_parameters())
        stepped = frozenset(self.model.parameters())
        self._handlers = {
            "model": ModuleHandler(self.model, stepped, FrozenParameters()),
            "optimizer": OptimizerHandler(self.optimizer),
        }
        self._encodings = {name: EncodingCache(name, handler) for name, handler in self._handlers.items()}
        self.captured: list[str] = []
        for name, handler in self._handlers.items():
            handler.capture = self._counted(name, handler.capture)

    def _counted(self, name, capture):
        def counted():
            self.captured.append(name)
            return capture()

        return counted

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()

    def look(self):
        """What had to be named anew; and all of it is as if it had been."""
        anew = {}
        for name, handler in self._handlers.items():
            self.captured.clear()
            live, tensors = self._encodings[name].encoded()
            anew[name] = bool(self.captured)
            rest, more = encode(handler.capture_delta(), name)
            expected, fresh = encode(handler.capture(), name)
            merge_delta = decode(handler.merge_delta(live, rest), values({**tensors, **more}))
            assert merge_delta == decode(expected, values(fresh))
            assert list(tensors) == list(fresh)
            assert all(tensors[key].is_set_to(tensor) for key, tensor in fresh.items())
        return anew


def test_nothing_is_named_anew_as_long_as_only_steps_move_it():
    kept = Kept()
    kept.step()
    assert kept.look() == {"model": True, "optimizer": True}
    for _ in range(3):
        kept.step()
        kept.optimizer.param_groups[0]["lr"] *= 0.5
        assert kept.look() == {"model": False, "optimizer": False}


def first_steps(kept):
    """Momentum appears with the first of them."""
    kept.step()


def another_parameter(kept):
    kept.model[0].weight = nn.Parameter(torch.randn(4, 4))


def other_memory(kept):
    kept.model[0].weight.data = torch.randn(4, 4)


def the_same_memory_cut_otherwise(kept):
    kept.model[0].weight.data = kept.model[0].weight.data.t()


def another_buffer(kept):
    kept.model[1].register_buffer("more", torch.ones(3))


def one_layer_less(kept):
    del kept.model[2]


def another_group(kept):
    kept.optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3))], "lr": 1.0})


def one_option_more(kept):
    kept.optimizer.param_groups[0]["note"] = "warm"


def one_option_less(kept):
    kept.optimizer.param_groups[0].pop("note", None)


def loaded_state(kept):
    kept.optimizer.load_state_dict(kept.optimizer.state_dict())


def other_momentum(kept):
    for state in kept.optimizer.state.values():
        state["momentum_buffer"] = torch.randn_like(state["momentum_buffer"])


def a_number_in_the_state(kept):
    next(iter(kept.optimizer.state.values()))["steps"] = len(kept.captured)


def no_state(kept):
    kept.optimizer.state.clear()


def a_tensor_as_learning_rate(kept):
    kept.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def tensors_in_an_option(kept):
    kept.optimizer.param_groups[0]["lr"] = 0.3
    kept.optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))


@pytest.mark.parametrize(
    "changes",
    [
        [first_steps],
        [first_steps, another_parameter, first_steps],
        [first_steps, other_memory, the_same_memory_cut_otherwise, first_steps],
        [first_steps, another_buffer, one_layer_less],
        [another_group, first_steps, another_group],
        [first_steps, one_option_more, first_steps, one_option_less],
        [first_steps, loaded_state, other_momentum, first_steps],
        [first_steps, a_number_in_the_state, a_number_in_the_state],
        [first_steps, no_state, first_steps],
        [first_steps, a_tensor_as_learning_rate, first_steps],
        [first_steps, tensors_in_an_option, first_steps],
    ],
    ids=lambda changes: changes[-2 if len(changes) > 1 else -1].__name__,
)
def test_whatever_a_script_does_it_is_as_if_named_anew(changes):
    kept = Kept()
    kept.look()
    for change in changes:
        change(kept)
        kept.look()
        kept.look()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop])
def test_optimizers_of_torch_are_named_once(optimizer):
    kept = Kept(lambda parameters: optimizer(parameters, lr=0.01))
    kept.step()
    kept.look()
    kept.step()
    assert kept.look() == {"model": False, "optimizer": False}


class Counting(torch.optim.SGD):
    """It keeps more than tensors of its parameters."""

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}


def test_an_optimizer_that_keeps_more_is_asked_each_time():
    kept = Kept(lambda parameters: Counting(parameters, lr=0.1, momentum=0.9))
    for calls in range(3):
        kept.optimizer.calls = calls
        kept.step()
        assert kept.look()["optimizer"]


def test_a_model_that_hands_out_copies_is_asked_each_time():
    kept = Kept()
    kept.model.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({name: value.double() for name, value in state.items()})
    )
    capture = kept._handlers["model"].capture
    for _ in range(2):
        kept.captured.clear()
        _, tensors = kept._encodings["model"].encoded()
        assert kept.captured == ["model"]
        assert tensors.keys() == {f"model/{name}" for name in capture()}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}


def test_memory_that_the_script_gives_up_is_not_kept():
    kept = Kept()
    kept.step()
    kept.look()
    momentum = weakref.WeakSet(state["momentum_buffer"] for state in kept.optimizer.state.values())
    assert momentum
    other_momentum(kept)
    gc.collect()
    assert not momentum
