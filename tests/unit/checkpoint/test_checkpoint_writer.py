"""Writing checkpoints: what becomes visible, when, and what is kept."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Gate, WatchedStorage, assert_equal, nothing_reported, snapshot_of, write
from waiting import soon

import edl_hvd.checkpoint
from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.errors import InternalError, ObjectExistsError, StateError
from edl_hvd.events import CheckpointWritten
from edl_hvd.storage.pieces import Data

# What is written


@pytest.mark.parametrize("size", range(1, 9))
def test_a_world_of_any_size_writes_what_one_reader_restores(size: int) -> None:
    storage = WatchedStorage()
    for step in (10, 20):
        events = write(storage, snapshot_of(step), size)
    assert steps(storage) == [20, 10]
    assert_equal(restore_newest(storage, nothing_reported), snapshot_of(20))
    assert_equal(restore(storage, 10), snapshot_of(10))
    [written] = events[0]
    assert isinstance(written, CheckpointWritten)
    shards = [entry for entry in storage.list(object_keys.folder(20)) if entry.key.endswith(".safetensors")]
    assert (written.url, written.step) == (storage.url, 20)
    assert written.size_bytes == sum(entry.size_bytes for entry in shards)
    assert events[1:] == [[]] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_a_tensor_that_holds_most_of_the_bytes_is_written_by_all_ranks(size: int) -> None:
    storage = WatchedStorage()
    large = {
        "embedding": torch.randn(5000, 60),
        "transposed": torch.randn(700, 900).t(),
        "row": torch.randn(1, 400_000),
    }
    snapshot = Snapshot({**snapshot_of(1).tensors, **large}, step=1)
    write(storage, snapshot, size)
    assert_equal(restore(storage, 1), snapshot)
    sizes_bytes = [entry.size_bytes for entry in storage.list() if entry.key.endswith(".safetensors")]
    mean_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values()) / size
    assert len(sizes_bytes) == size
    headers_bytes = 4000
    assert max(sizes_bytes) <= max(mean_bytes, large["row"].nbytes) + large["transposed"].nbytes / 900 + headers_bytes


def test_the_objects_of_a_checkpoint_are_one_shard_per_rank_and_a_manifest() -> None:
    storage = WatchedStorage()
    write(storage, snapshot_of(12345), size=4)
    assert [entry.key for entry in storage.list()] == [
        "checkpoints/000000012345/manifest.json",
        "checkpoints/000000012345/tensors-00000-of-00004.safetensors",
        "checkpoints/000000012345/tensors-00001-of-00004.safetensors",
        "checkpoints/000000012345/tensors-00002-of-00004.safetensors",
        "checkpoints/000000012345/tensors-00003-of-00004.safetensors",
    ]


def test_a_snapshot_without_tensors_and_one_with_fewer_than_ranks_are_kept_too() -> None:
    storage = WatchedStorage()
    bare = Snapshot({}, {"only": "this"}, step=1)
    write(storage, bare, size=2)
    assert_equal(restore(storage, 1), bare)
    single = Snapshot({"w": torch.ones(2)}, step=2)
    write(storage, single, size=5)
    assert_equal(restore(storage, 2), single)


def test_the_manifest_is_written_after_every_shard() -> None:
    calls: list[str] = []
    storage = WatchedStorage(lambda method, key: calls.append(key) if method == "write_new" else None)
    write(storage, snapshot_of(1), size=3)
    assert calls[-1] == object_keys.manifest_key(1)
    assert len(calls) == 4


def test_no_code_in_the_package_can_unpickle_or_evaluate() -> None:
    sources = [*Path(edl_hvd.checkpoint.__file__).parent.rglob("*.py")]
    assert len(sources) > 25
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & set(names), source
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save", "eval", "exec", "np.load"), source


# In the background


def test_begin_returns_while_the_storage_still_blocks_and_busy_says_so() -> None:
    gate = Gate("write_new", "tensors")
    storage = WatchedStorage(gate)
    writer = CheckpointWriter(storage)
    assert not writer.busy
    assert writer.wait(0)
    writer.begin(snapshot_of(1), 0, 1, "a")
    soon(gate.reached)
    assert writer.busy
    assert not writer.wait(0)
    assert writer.poll() == []
    with pytest.raises(InternalError, match="while another is being written"):
        writer.begin(snapshot_of(2), 0, 1, "b")
    gate.open()
    assert writer.wait(60)
    assert not writer.busy
    assert [type(event) for event in writer.poll()] == [CheckpointWritten]
    assert writer.poll() == []


def test_tensors_that_have_been_looked_at_are_looked_at_again_when_one_is_another() -> None:
    writer = CheckpointWriter(WatchedStorage())
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    for step in (1, 2):
        writer.begin(Snapshot(tensors, step=step), 0, 1, f"attempt-{step}")
        assert writer.wait(60)
    tensors["b"] = torch.eye(2).to_sparse()
    with pytest.raises(StateError, match="tensor 'b' has layout"):
        writer.begin(Snapshot(tensors, step=3), 0, 1, "attempt-3")


def test_tensors_that_cannot_be_written_are_refused_by_begin_not_in_the_background() -> None:
    writer = CheckpointWriter(WatchedStorage())
    with pytest.raises(StateError):
        writer.begin(Snapshot({"a": torch.eye(2).to_sparse()}), 0, 1, "a")
    for rank, size, attempt in ((1, 1, "a"), (-1, 1, "a"), (0, 1, "../a"), (0, 1, "")):
        with pytest.raises(InternalError):
            writer.begin(snapshot_of(1), rank, size, attempt)
    assert not writer.busy


# A checkpoint of that step exists already


def test_a_step_that_is_checkpointed_already_counts_as_done() -> None:
    storage = WatchedStorage()
    write(storage, snapshot_of(5, variant=1), size=2)
    events = write(storage, snapshot_of(5, variant=2), size=2)
    assert [type(event) for event in events[0]] == [CheckpointWritten]
    assert_equal(restore(storage, 5), snapshot_of(5, variant=1))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: data[:-5] + b"?" + data[-4:]], ids=["cut", "changed"]
)
@pytest.mark.parametrize("victim", ["manifest.json", "tensors-00001-of-00002.safetensors"])
def test_a_damaged_checkpoint_of_the_same_step_is_replaced(victim: str, damage: Callable[[bytes], bytes]) -> None:
    storage = WatchedStorage()
    write(storage, snapshot_of(5, variant=1), size=2)
    key = object_keys.folder(5) + victim
    storage.write(key, damage(storage.read(key)))
    write(storage, snapshot_of(5, variant=2), size=2)
    assert_equal(restore_newest(storage, nothing_reported), snapshot_of(5, variant=2))


def test_a_manifest_whose_acknowledgement_was_lost_counts_as_written() -> None:
    """A client repeats a conditional write whose answer was lost, and is told that the object exists."""

    class LosesAnAnswer(WatchedStorage):
        def write_new(self, key: str, data: Data) -> None:
            super().write_new(key, data)
            if "manifest" in key:
                raise ObjectExistsError(key)

    calls: list[str] = []
    storage = LosesAnAnswer(lambda method, key: calls.append(key) if method == "read" else None)
    events = write(storage, snapshot_of(5), size=2)
    assert not [key for key in calls if key.endswith(".safetensors")], "what it just wrote it need not read again"
    assert [type(event) for event in events[0]] == [CheckpointWritten]
    assert_equal(restore(storage, 5), snapshot_of(5))
