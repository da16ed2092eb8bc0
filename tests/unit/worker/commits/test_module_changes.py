"""Numbers, words and other attributes of modules: what a commit keeps of them, and what is said of the others."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from edl_hvd.errors import EdlHvdWarning
from edl_hvd.worker.commits.module_changes import ModuleChanges


class Holder(nn.Module):
    tau: Any
    later: Any
    kept: Any
    seen: Any
    shape: Any

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.drop = nn.Dropout(0)
        for name, value in attributes.items():
            setattr(self, name, value)


def kept(model: nn.Module, changes: ModuleChanges) -> dict:
    """What a commit holds, through JSON."""
    return json.loads(json.dumps(changes.capture()))


@pytest.mark.parametrize(
    ("first", "now"),
    [
        (1.0, numpy.float64(0.9)), (1, numpy.int64(2)), (False, numpy.bool_(True)), (numpy.float64(1.0), 0.5),
        (None, 3.0), (3.0, None), (0, False), (0, 0.0), ("a", "b"),
    ],
)  # fmt: skip
def test_a_number_or_word_is_kept_and_restored(first: object, now: object) -> None:
    model, newcomer = Holder(tau=first), Holder(tau=first)
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": newcomer})
    at_first = kept(model, changes)
    model.tau = now
    state = kept(model, changes)
    others.restore(state, {})
    assert newcomer.tau == now
    assert isinstance(newcomer.tau, (bool, int, float, str, type(None)))
    changes.restore(at_first, {})
    assert model.tau is first
    changes.restore(state, {})
    assert model.tau == now


def test_a_number_of_torchs_own_module_is_kept() -> None:
    model, newcomer = Holder(), Holder()
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": newcomer})
    model.drop.p += 0.2
    others.restore(kept(model, changes), {})
    assert newcomer.drop.p == 0.2


def test_an_attribute_that_appears_is_kept_and_is_gone_where_it_was_not_there() -> None:
    model, newcomer = Holder(), Holder()
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": newcomer})
    at_first = kept(model, changes)
    setattr(model.drop, "backup", 0.1)  # noqa: B010
    state = kept(model, changes)
    others.restore(state, {})
    assert newcomer.drop.backup == 0.1
    assert kept(newcomer, others) == state
    changes.restore(at_first, {})
    assert not hasattr(model.drop, "backup")
    assert kept(model, changes) == at_first


def test_a_value_of_another_kind_is_left_as_it_is() -> None:
    model = Holder(tau=1.0, later=None)
    changes = ModuleChanges({"model": model})
    model.tau, model.later = tau, later = torch.tensor(0.5), [1]
    with pytest.warns(EdlHvdWarning, match=r"^state\.model\.tau, an attribute of a module"):
        state = kept(model, changes)
    changes.restore(state, {})
    assert model.tau is tau
    assert model.later is later


def test_a_size_that_a_lazy_layer_finds_out_is_no_matter_of_a_commit() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    changes = ModuleChanges({"model": model})
    at_first = kept(model, changes)
    model(torch.zeros(2, 4))
    assert kept(model, changes) == at_first
    changes.restore(at_first, {})
    assert model[0].in_features == 4


def said(model: nn.Module, change) -> list[str]:
    """About a change that is made in each of two steps."""
    changes = ModuleChanges({"model": model})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        changes.capture()
        for _ in range(2):
            change(model)
            changes.capture()
    return [str(warning.message).partition(",")[0] for warning in caught]


def moved(model: Holder) -> None:
    model.kept = model.kept * 0.5


def moved_in_place(model: Holder) -> None:
    model.kept *= 0.5


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (torch.ones(2), moved), (torch.ones(2), moved_in_place), (numpy.ones(2), moved),
        (numpy.ones(2), moved_in_place), (1.0, lambda model: setattr(model, "kept", torch.ones(2))),
        ({}, lambda model: model.kept.update({0: torch.ones(2)})), ([], lambda model: model.kept.append(1)),
        ([1.0], lambda model: model.kept.__setitem__(0, 2.0)),
        ([torch.ones(2)], lambda model: model.kept[0].mul_(0.5)),
    ],
)  # fmt: skip
def test_what_is_not_kept_and_changes_is_said_once(first: object, change) -> None:
    assert said(Holder(kept=first), change) == ["state.model.kept"]


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_what_a_forward_pass_makes_anew_is_not_said(norm) -> None:
    model = Holder(seen=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.layer = norm(nn.Linear(2, 2))

    def forward(model: Holder) -> None:
        model.seen = model.layer(torch.ones(1, 2))
        model.shape = tuple(model.seen.shape)

    assert not said(model, forward)


class Banked(nn.Module):
    bank: Any

    def __init__(self, length: int | None = 1) -> None:
        super().__init__()
        self.register_buffer("bank", None if length is None else torch.zeros(length, 2))


def grown(bank: Banked) -> None:
    bank.bank = torch.cat([bank.bank, torch.ones(1, 2)])


def in_double(bank: Banked) -> None:
    bank.bank = bank.bank.double()


def removed(bank: Banked) -> None:
    bank.bank = None


def registered(bank: Banked) -> None:
    bank.register_buffer("later", torch.ones(3))


@pytest.mark.parametrize("change", [grown, in_double, removed, registered])
def test_a_buffer_gets_the_shape_of_a_commit(change) -> None:
    model, newcomer = nn.Sequential(Banked()), nn.Sequential(Banked())
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": newcomer})
    at_first = kept(model, changes)
    change(model[0])
    state = kept(model, changes)
    others.restore_layouts(state)
    newcomer.load_state_dict(model.state_dict())
    for name, value in model.state_dict().items():
        assert newcomer.state_dict()[name].dtype == value.dtype
        assert torch.equal(newcomer.state_dict()[name], value)
    assert len(others.restore_layouts(at_first)) == 1
    assert kept(newcomer, others) == at_first
    assert not hasattr(newcomer[0], "later")
    assert newcomer[0].bank.shape == (1, 2)


def test_a_buffer_that_is_none_at_first_is_made() -> None:
    model, newcomer = Banked(None), Banked(None)
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": newcomer})
    model.bank = torch.ones(2, 2)
    others.restore_layouts(kept(model, changes))
    newcomer.load_state_dict(model.state_dict())
    assert torch.equal(newcomer.bank, torch.ones(2, 2))


def test_a_buffer_of_another_model_keeps_its_shape() -> None:
    """Such as one of which the checkpoint has another configuration: torch says that it does not fit."""
    model, other = Banked(3), Banked(2)
    changes, others = ModuleChanges({"model": model}), ModuleChanges({"model": other})
    assert not others.restore_layouts(kept(model, changes))
    grown(model)
    assert not others.restore_layouts(kept(model, changes))
    assert not others.restore_layouts({"modes": {}, "values": {}})  # of a checkpoint of an older version
    assert other.bank.shape == (2, 2)
