"""A training that begins with the weights of another run."""

import pytest
import torch
from torch import nn

import edl_hvd
from edl_hvd.checkpoint import CheckpointWriter
from edl_hvd.errors import ObjectMissingError, StateError
from edl_hvd.storage import open_storage


def state_of(seed, classes=10, width=32, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, classes))
    return edl_hvd.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **more)


@pytest.fixture
def url(tmp_path):
    """Checkpoints of two steps; the first of seed 1, the second of seed 2."""
    for step in (1, 2):
        state = state_of(step, best=0.5)
        state.step = step
        state._runtime.store.save(step)
        for rank in (1, 0):
            writer = CheckpointWriter(open_storage(str(tmp_path)))
            writer.begin(state._runtime.store.snapshot(), rank, 2, f"attempt-{step}")
            assert writer.wait(60)
    return tmp_path


def weights(state):
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


def assert_same(one, other, names=None):
    for name in one if names is None else names:
        assert torch.equal(one[name], other[name]), name


def test_all_weights_and_nothing_else(url):
    state = state_of(7)
    report = state.load_weights(url)
    assert report.complete
    assert str(report) == "everything fits"
    assert_same(weights(state), weights(state_of(2)))
    assert state.step == 0
    assert state.optimizer.state == {}
    state.load_weights(url, step=1)
    assert_same(weights(state), weights(state_of(1)))


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(url):
    state = state_of(7, classes=3)
    state.model.append(nn.Linear(3, 3))
    before = weights(state)
    with pytest.raises(StateError) as caught:
        state.load_weights(url)
    assert "missing: model.3.weight, model.3.bias" in str(caught.value)
    assert "of another shape: model.2.weight [10, 32] instead of [3, 32], model.2.bias [10] instead of [3]" in str(
        caught.value
    )
    assert "partial=True" in str(caught.value)
    assert_same(weights(state), before)


def test_what_fits_is_loaded_if_that_is_asked_for(url):
    state = state_of(7, classes=3)
    before = weights(state)
    report = state.load_weights(url, partial=True)
    assert report.mismatched == {"model.2.weight": ((10, 32), (3, 32)), "model.2.bias": ((10,), (3,))}
    body = [name for name in before if not name.startswith("2.")]
    assert set(report.loaded) == {f"model.{name}" for name in body}
    assert_same(weights(state), weights(state_of(2)), body)
    assert_same(weights(state), before, ["2.weight", "2.bias"])


def test_a_model_that_the_checkpoint_lacks_is_missing_and_weights_that_the_model_lacks_are_unexpected(url):
    state = state_of(7, teacher=nn.Linear(2, 2))
    del state.model[2]
    report = state.load_weights(url, partial=True)
    assert report.missing == ("teacher.weight", "teacher.bias")
    assert report.unexpected == ("model.2.weight", "model.2.bias")
    assert_same(weights(state), weights(state_of(2)))


def test_only_the_models_are_read(url):
    """Momentum and the rest may be damaged, or much larger than the weights."""
    state = state_of(7)
    read = []
    storage_class = type(open_storage(str(url)))
    original = storage_class.read_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_class, "read_into", lambda self, key, start, buffer: (
            read.append(len(memoryview(buffer))), original(self, key, start, buffer))[1])  # fmt: skip
        state.load_weights(url)
    weights_bytes = sum(tensor.nbytes for tensor in state.model.state_dict().values())
    assert weights_bytes < sum(read) < weights_bytes + 3000, "headers besides"


def test_where_there_is_no_checkpoint_the_error_says_so(url, tmp_path):
    with pytest.raises(ObjectMissingError, match="those there are: 2, 1"):
        state_of(7).load_weights(url, step=3)
    with pytest.raises(ObjectMissingError, match="no checkpoint is listed"):
        state_of(7).load_weights(tmp_path / "elsewhere")
