"""Replicas that have drifted apart are named when a checkpoint is written."""

import pytest
import torch
from checkpoints import nothing_reported
from clocks import FakeClock

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore_newest
from edl_hvd.checkpoint.format.shards import checksums_of, elements_of
from edl_hvd.checkpoint.writing.audit import digests_of, drifted
from edl_hvd.checkpoint.writing.shares import Rows
from edl_hvd.events import CheckpointWritten, ReplicasDrifted
from edl_hvd.storage import open_storage


def state(**changed):
    numbers = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(50, 40, generator=numbers) for i in range(8)}
    tensors["dropout"] = torch.arange(16)
    return Snapshot({**tensors, **changed}, {}, 7, 1, 70)


def write(snapshots):
    """One checkpoint whose ranks hold these; the events of rank 0, and where it is."""
    storage = open_storage("memory://audit")
    for key in storage.list():
        storage.delete(key.key)
    for rank in reversed(range(len(snapshots))):
        writer = CheckpointWriter(storage, 3, FakeClock())
        writer.begin(snapshots[rank], rank, len(snapshots), "attempt")
        assert writer.wait(60)
    return writer.poll(), storage


def test_equal_replicas_are_not_mentioned():
    events, _ = write([state()] * 4)
    assert [type(event) for event in events] == [CheckpointWritten]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_has_drifted_is_named_with_its_tensors_and_the_checkpoint_is_written(rank):
    wrong = state().tensors["layer.3"].clone()
    wrong[49, 39] += 1e-7  # one element, and in nobody's share but one
    snapshots = [state()] * 4
    snapshots[rank] = state(**{"layer.3": wrong, "layer.6": torch.zeros(50, 40)})
    events, storage = write(snapshots)
    assert [type(event) for event in events] == [ReplicasDrifted, CheckpointWritten]
    assert (events[0].rank, events[0].tensors, events[0].names) == (rank, 2, ["layer.3", "layer.6"])
    restored = restore_newest(storage, nothing_reported)
    assert restored is not None
    assert restored.step == 7


def test_random_generators_of_a_ranks_own_are_no_drift():
    events, _ = write([state(), state(dropout=torch.arange(16) + 1)])
    assert [type(event) for event in events] == [CheckpointWritten]


def digested(tensors):
    whole = [[Rows(name, 0, len(tensor)) for name, tensor in tensors.items()]]
    return digests_of(tensors, whole, lambda rows: checksums_of(elements_of(tensors[rows.name])))


def test_the_way_a_tensor_lies_in_memory_does_not_matter_and_its_bits_do():
    plain = torch.randn(6, 8)
    views = {"a": plain.t().contiguous().t(), "b": plain.repeat(2, 1)[:6], "c": torch.randn(6, 16)[:, ::2].copy_(plain)}
    digests = digested({"plain": plain, **views, "other": plain + 1})
    assert len({digests[name] for name in ("plain", *views)}) == 1
    assert digests["other"] != digests["plain"]
    nan = digested({"one": torch.full((3,), torch.nan), "other": torch.full((3,), torch.nan)})
    assert nan["one"] == nan["other"]
    zero = digested({"one": torch.zeros(3), "other": -torch.zeros(3)})
    assert zero["one"] != zero["other"], "they go different ways from here"


def test_most_ranks_are_right_and_of_as_many_the_first():
    assert drifted({0: {"a": "x"}, 1: {"a": "y"}, 2: {"a": "y"}}) == {0: ["a"]}
    assert drifted({0: {"a": "x"}, 1: {"a": "y"}}) == {1: ["a"]}
    assert drifted({0: {"a": "x"}, 1: {"a": "y"}, 2: {"a": "y"}, 3: {"a": "x"}}) == {1: ["a"], 2: ["a"]}
    assert drifted({0: {"a": "x"}}) == {}
