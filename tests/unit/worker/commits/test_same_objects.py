from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch

from edl_hvd.worker.codec import encode
from edl_hvd.worker.commits.same_objects import SameObjects


def captured(objects: SameObjects, name: str, value):
    """A commit of an attribute: its plain value, copies of its tensors, and the names of what is the same."""
    plain, tensors = encode(value, name)
    same = objects.names(name, value, tensors)
    return plain, {path: tensor.clone() for path, tensor in tensors.items()}, same


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ([1, 2], lambda value: value.append(3)),
        ({"a": 1}, lambda value: value.update(a=2, b=3)),
        (deque([1, 2], maxlen=3), lambda value: value.extend([3, 4])),
        (Counter("ab"), lambda value: value.update("bc")),
        (defaultdict(list, a=[1]), lambda value: value["b"].append(2)),
        (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
        (torch.zeros(3), lambda value: value.add_(1)),
        (torch.zeros(3, requires_grad=True), lambda value: value.data.add_(1)),
        ({"a": torch.zeros(3)}, lambda value: value["a"].add_(1)),
        ([torch.zeros(3), torch.ones(2)], lambda value: value[1].mul_(5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_was_given_gets_its_former_value_back(given, change) -> None:
    objects = SameObjects({"it": given}, [])
    plain, tensors, same = captured(objects, "it", given)
    expected = encode(given, "it").plain, {path: tensor.clone() for path, tensor in tensors.items()}
    parts = encode(given, "it").tensors
    change(given)
    loaded = objects.load("it", plain, tensors, same)
    assert loaded is given
    now = encode(given, "it")
    assert now.plain == expected[0]
    for path, tensor in now.tensors.items():
        assert torch.equal(tensor, expected[1][path])
        assert tensor.data_ptr() == parts[path].data_ptr()


@pytest.mark.parametrize(
    "other", [[7], torch.full((3,), 7.0), {"a": torch.full((3,), 7.0)}], ids=["list", "tensor", "dict"]
)
def test_an_object_that_the_script_has_put_elsewhere_is_left_alone(other) -> None:
    """The commit is of another object than the given one, so that one must not be written into."""
    given = (
        type(other)([1])
        if isinstance(other, list)
        else {"a": torch.zeros(3)}
        if isinstance(other, dict)
        else torch.zeros(3)
    )
    objects = SameObjects({"it": given}, [])
    before = repr(given)
    plain, tensors, same = captured(objects, "it", other)
    assert not same
    loaded = objects.load("it", plain, tensors, same)
    assert loaded is not given
    assert loaded is not other
    assert repr(loaded) == repr(other)
    assert repr(given) == before


def test_a_tensor_in_a_dictionary_that_is_another_by_now_is_left_alone() -> None:
    tasks = [torch.zeros(3), torch.ones(3)]
    given: dict = {"current": tasks[0], "count": 0}
    objects = SameObjects({"it": given}, [])
    given.update(current=tasks[1], count=1)
    plain, tensors, same = captured(objects, "it", given)
    given.update(current=tasks[0], count=2)
    loaded = objects.load("it", plain, tensors, same)
    assert loaded is given
    assert loaded["count"] == 1
    assert torch.equal(loaded["current"], torch.ones(3))
    assert torch.equal(tasks[0], torch.zeros(3))
    assert torch.equal(tasks[1], torch.ones(3))


def test_an_object_that_was_put_elsewhere_since_the_commit_comes_back() -> None:
    given = torch.zeros(3)
    objects = SameObjects({"it": given}, [])
    plain, tensors, same = captured(objects, "it", given)
    given.add_(5)
    assert objects.load("it", plain, tensors, same) is given
    assert torch.equal(given, torch.zeros(3))


def test_tensors_that_share_memory_are_copies_after_a_change() -> None:
    """Two attributes may have two values in a commit that are one tensor now; a parameter is loaded by its model."""
    shared, parameter = torch.zeros(3), torch.zeros(2)
    objects = SameObjects({"best": shared, "now": shared, "weight": parameter}, [parameter])
    for name, value in (("best", shared), ("now", shared), ("weight", parameter)):
        plain, tensors, _ = captured(objects, name, value)
        assert objects.load(name, plain, tensors, [name]).data_ptr() != value.data_ptr()


def test_objects_that_a_commit_does_not_name_are_not_held() -> None:
    given = torch.zeros(3)
    objects = SameObjects({"it": given, "list": []}, [])
    objects.keep(["list"])
    plain, tensors, same = captured(objects, "it", given)
    assert not same
    assert objects.load("it", plain, tensors, ["it"]) is not given


@pytest.mark.parametrize(
    "now", [torch.ones(4), torch.ones(3, dtype=torch.float64), [1]], ids=["shape", "dtype", "kind"]
)
def test_what_does_not_fit_is_another_object(now) -> None:
    given = torch.zeros(3)
    objects = SameObjects({"it": given}, [])
    plain, tensors = encode(now, "it")
    loaded = objects.load("it", plain, tensors, ["it"])
    assert repr(loaded) == repr(now)
    assert loaded is not given


@pytest.mark.parametrize("given", [torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(0)])
def test_a_tensor_without_memory_is_a_copy_after_a_change(given: torch.Tensor) -> None:
    objects = SameObjects({"it": given, "more": [given]}, [given])
    plain, tensors, same = captured(objects, "it", given)
    loaded = objects.load("it", plain, tensors, same)
    assert loaded.shape == given.shape
    assert loaded.layout == given.layout


def test_what_was_loaded_shares_nothing_with_the_commit() -> None:
    given = [[1], torch.zeros(2)]
    objects = SameObjects({"it": given}, [])
    plain, tensors, same = captured(objects, "it", given)
    loaded = objects.load("it", plain, tensors, same)
    loaded[0].append(2)
    loaded[1].add_(1)
    assert plain[0] == [1]
    assert torch.equal(tensors["it/1"], torch.zeros(2))
