"""A checkpoint restored by several ranks: each byte is read once, and all of them end in the same way."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import WatchedStorage, assert_equal, snapshot_of, write
from fake_world import together
from hypothesis import given, settings
from hypothesis import strategies as some

from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.reading.spans import Span, divide
from edl_hvd.errors import StorageError
from edl_hvd.events import CheckpointDamaged, Event
from edl_hvd.storage import Storage, open_storage
from edl_hvd.worker.saving.shared_restore import SharedRestore


def large(step: int) -> Snapshot:
    """One table that holds nearly everything, and small tensors of several types."""
    tensors = {"table": torch.randn(3000, 1024), "odd": torch.randn(7).to(torch.bfloat16), "flag": torch.tensor(True)}
    return Snapshot(tensors | {"nothing": torch.empty(0, 4)}, {"a": [1, 2]}, step, 1, 2)


def restored(storages: list[Any], events: list[Event]) -> list[Any]:
    return together(
        len(storages),
        lambda collectives, world: SharedRestore(storages[world.rank], collectives, world).newest(events.append),
    )


class CountedStorage(WatchedStorage):
    """Counts how often each byte of the elements is read, by all that share ``counts``."""

    def __init__(self, inner: Storage, counts: Counter[tuple[str, int]]) -> None:
        super().__init__()
        self._inner, self._counts, self._lock = inner, counts, threading.Lock()
        self.bytes_read = 0

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        size_bytes = super().read_into(key, start, buffer)
        if start:  # else it is the header, which each reader of the file needs
            with self._lock:
                self.bytes_read += size_bytes
                self._counts.update((key, place) for place in range(start, start + size_bytes, 64))
        return size_bytes


@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_all_hold_it_and_each_byte_is_read_once_by_ranks_that_share_it_out(writers: int, readers: int) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    snapshot = large(10)
    write(storage, snapshot, size=writers)
    counts: Counter[tuple[str, int]] = Counter()
    storages = [CountedStorage(storage, counts) for _ in range(readers)]
    events: list[Event] = []
    for found in restored(storages, events):
        assert_equal(found, snapshot)
    assert set(counts.values()) == {1}
    total_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    assert sum(one.bytes_read for one in storages) == total_bytes
    # The table is read in spans of 16 MB at most, which here is all of a file.
    assert max(one.bytes_read for one in storages) <= total_bytes / min(writers, readers) * 1.5 + 64
    assert events == []


def test_a_rank_that_does_not_see_the_folder_gets_everything_from_the_others() -> None:
    storage, elsewhere = open_storage(f"memory://{uuid.uuid4().hex}"), open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, snapshot_of(10))
    write(elsewhere, snapshot_of(10, variant=1))  # another job's
    for found in restored([storage, elsewhere, open_storage(f"memory://{uuid.uuid4().hex}")], []):
        assert_equal(found, snapshot_of(10))


def test_without_a_checkpoint_nobody_gets_one() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    assert restored([storage] * 3, []) == [None] * 3


@pytest.mark.parametrize("writer", [0, 1, 2])
def test_damage_that_any_rank_finds_makes_all_of_them_go_back(writer: int) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    for step in (10, 20):
        write(storage, snapshot_of(step), size=3)
    key = object_keys.folder(20) + object_keys.shard_name(writer, 3)
    data = bytearray(storage.read(key))
    data[-1] ^= 1
    storage.write(key, bytes(data))
    events: list[Event] = []
    for found in restored([storage] * 3, events):
        assert_equal(found, snapshot_of(10))
    [event] = events
    assert isinstance(event, CheckpointDamaged)
    assert event.step == 20
    assert object_keys.shard_name(writer, 3) in event.reason


def test_an_outage_that_one_rank_meets_is_an_error_on_all_and_no_damage() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, snapshot_of(10), size=2)

    class Broken(WatchedStorage):
        def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
            raise StorageError("connection refused by rank 1's network")

    broken = Broken()
    broken._inner = storage
    events: list[Event] = []
    for found in restored([storage, broken], events):
        assert isinstance(found, StorageError)
        assert "restored: StorageError: connection refused by rank 1's network" in str(found)
    assert events == []


def test_a_checkpoint_that_is_removed_while_one_rank_reads_is_passed_over() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, snapshot_of(20), size=2)

    class Late(WatchedStorage):
        def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
            if "000000000020" in key and storage.exists(object_keys.manifest_key(20)):
                write(storage, snapshot_of(30), keep=1)
            return super().read_into(key, start, buffer)

    late = Late()
    late._inner = storage
    events: list[Event] = []
    for found in restored([late, late], events):
        assert_equal(found, snapshot_of(30))
    assert events == []


@settings(max_examples=200)
@given(some.lists(some.integers(0, 100), max_size=30), some.integers(1, 9))
def test_every_span_has_one_reader_and_none_reads_more_than_its_part_and_a_span(sizes: list[int], readers: int) -> None:
    spans = [Span("f", str(number), 0, size) for number, size in enumerate(sizes)]
    shares = divide(spans, readers)
    assert len(shares) == readers
    assert [span for share in shares for span in share] == spans
    for share in shares:
        assert sum(span.size_bytes for span in share) <= sum(sizes) / readers + max([0, *sizes])


def test_what_a_writer_of_many_ranks_wrote_is_restored_by_any_other_number() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    snapshot = large(5)
    for rank in reversed(range(4)):
        writer = CheckpointWriter(storage)
        writer.begin(snapshot, rank, 4, "attempt")
        assert writer.wait(60)
    for size in (1, 2, 3, 5):
        assert all(
            torch.equal(one.tensors["table"], snapshot.tensors["table"]) for one in restored([storage] * size, [])
        )
