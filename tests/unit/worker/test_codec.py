import collections
from pathlib import Path

import pytest
import torch

from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.errors import StateError
from edl_hvd.storage import open_storage
from edl_hvd.worker.codec import decode, encode


def round_trip(value):
    import json

    plain, tensors = encode(value, "x")
    return decode(json.loads(json.dumps(plain)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2.5, float("inf"), "text", [1, [2, (3, "a")]], {"a": {1: "one", None: 2}},
        {"__tuple__": 1}, collections.Counter({30: 1, 60: 2}), {"betas": (0.9, 0.999)}, {}, [], (),
        {"__deque__": 1}, collections.deque([1, (2, "a"), {3: 4}]), collections.deque([1, 2], maxlen=2),
    ],
)  # fmt: skip
def test_values_come_back_with_their_types(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)


def test_a_deque_keeps_its_tensors_and_its_length():
    result = round_trip(collections.deque([torch.ones(2), (torch.zeros(1), 0.5)], maxlen=2))
    result.append(3)
    assert result.maxlen == 2
    assert torch.equal(result[0][0], torch.zeros(1))


def test_a_refusal_says_what_keeping_it_elsewhere_means():
    with pytest.raises(StateError, match=r"convert it: what is outside State begins anew on a worker that joins$"):
        encode({1, 2}, "x")


def test_the_document_says_what_comes_back_and_what_is_refused():
    document = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    part = document.partition("## What can be kept\n")[2].partition("\n## ")[0]
    assert "Tuples, and dictionaries whose keys are numbers, booleans or None, come back as they were.\n" in part
    for kept in ((1, (2.5, None)), {1: "a", 2.5: "b", None: "c"}, {True: "d", False: "e"}):
        assert repr(round_trip(kept)) == repr(kept)
    refused = part.partition("is refused with its name:\n")[2].partition(".")[0]
    assert refused == "`complex128` and sparse tensors, sets, objects of other classes"
    for tensor in (torch.ones(1, dtype=torch.complex128), torch.eye(2).to_sparse()):
        with pytest.raises(StateError, match=r"complex128|[Ss]parse"):
            CheckpointWriter(open_storage("memory://what-can-be-kept")).begin(
                Snapshot({"tensor": tensor}, {}, 1, 0, 1), 0, 1, "attempt"
            )
    for other in ({1, 2}, object()):
        with pytest.raises(StateError):
            encode(other, "x")


def test_tensors_are_named_by_where_they_stand():
    tree = {"state": {0: {"momentum": torch.ones(2)}}, "list": [torch.zeros(1)]}
    _, tensors = encode(tree, "optimizer")
    assert sorted(tensors) == ["optimizer/list/0", "optimizer/state/0/momentum"]
    result = round_trip(tree)
    assert torch.equal(result["state"][0]["momentum"], torch.ones(2))


def test_two_tensors_never_share_a_name():
    tree = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    result = round_trip(tree)
    assert result["a/b"].item() == 0
    assert result["a"]["b"].item() == 1


def test_optimizers_and_schedulers_of_torch_can_be_kept():
    parameter = torch.nn.Parameter(torch.ones(3))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        optimizer = kind([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        state = round_trip(optimizer.state_dict())
        optimizer.load_state_dict(state)
        for scheduler in (
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ):
            scheduler.load_state_dict(round_trip(scheduler.state_dict()))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", {"deep": [{"er": 1j}]}, {(1, 2): 3}])
def test_what_cannot_be_kept_is_named_with_its_place(value):
    with pytest.raises(StateError, match=r"state\.thing"):
        encode(value, "state.thing")
