"""A flipped bit: on the way it costs a second read, in storage no checkpoint that is whole goes for a damaged one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from checkpoints import WatchedStorage, assert_equal, nothing_reported, snapshot_of, write
from clocks import FakeClock

from edl_hvd.checkpoint import CheckpointWriter, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.entries import stored_by_file
from edl_hvd.checkpoint.lease import Rule, rule
from edl_hvd.checkpoint.reading.catalog import read_catalog
from edl_hvd.checkpoint.reading.files import check_shard, read_listed, verify
from edl_hvd.checkpoint.retention.collector import plan_by_hand
from edl_hvd.checkpoint.retention.policy import RetentionPolicy, carry_out
from edl_hvd.checkpoint.tools.inspection import verify_each
from edl_hvd.errors import CheckpointDamagedError
from edl_hvd.events import CheckpointDamaged, CheckpointWritten, Event
from edl_hvd.storage import Storage, open_storage


class FlippingStorage(WatchedStorage):
    """The next ``times`` reads of an object whose key holds ``holding`` bring one flipped bit; so does what is written.

    Attributes:
        flipped: Keys of the reads that brought one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flipped: list[str] = []
        self.holding, self.times = "", 0
        self.spoils = ""

    def flip(self, holding: str, times: int = 1) -> None:
        self.holding, self.times = holding, times

    def _flips(self, key: str) -> bool:
        if not self.times or self.holding not in key:
            return False
        self.times -= 1
        self.flipped.append(key)
        return True

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        data = bytearray(super().read(key, limit_bytes))
        if data and self._flips(key):
            data[len(data) // 2] ^= 1
        return bytes(data)

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        found = super().read_into(key, start, buffer)
        if found and self._flips(key):
            memoryview(buffer).cast("B")[found // 2] ^= 1
        return found

    def spoil(self, key: str) -> None:
        """Flip a bit in storage."""
        data = bytearray(super().read(key))
        data[-1] ^= 1
        super().write(key, bytes(data))


def shard_of(step: int) -> str:
    return object_keys.folder(step) + object_keys.shard_name(0, 1)


@pytest.fixture
def storage() -> FlippingStorage:
    return FlippingStorage()


# On the way


@pytest.mark.parametrize("what", ["tensors-", "manifest"])
def test_what_comes_damaged_is_read_once_more_and_no_older_checkpoint_is_used(
    storage: FlippingStorage, what: str
) -> None:
    write(storage, snapshot_of(10))
    write(storage, snapshot_of(20))
    damaged: list[Event] = []
    storage.flip(what)
    assert_equal(restore_newest(storage, damaged.append), snapshot_of(20))
    assert len(storage.flipped) == 1
    assert damaged == []


def test_with_one_checkpoint_a_flip_on_the_way_does_not_end_the_job(storage: FlippingStorage) -> None:
    write(storage, snapshot_of(10), keep=1)
    for what in ("manifest", "tensors-"):
        storage.flip(what)
        assert_equal(restore_newest(storage, nothing_reported), snapshot_of(10))
    assert len(storage.flipped) == 2


def test_what_comes_damaged_twice_is_damaged(storage: FlippingStorage) -> None:
    write(storage, snapshot_of(10))
    storage.flip("tensors-", times=1000)
    reported: list[Event] = []
    with pytest.raises(CheckpointDamagedError, match="damaged"):
        restore_newest(storage, reported.append)
    assert len(reported) == 1


def test_verifying_tells_damage_in_storage_from_damage_on_the_way(storage: FlippingStorage) -> None:
    write(storage, snapshot_of(10))
    for what in ("tensors-", "manifest"):
        storage.flip(what)
        [found] = verify_each(storage, [10], lambda done, whole: None)
        assert found.damaged == {}
    storage.spoil(shard_of(10))
    [found] = verify_each(storage, [10], lambda done, whole: None)
    assert list(found.damaged) == [shard_of(10)]


def test_a_list_of_accepted_manifests_that_comes_damaged_is_read_once_more(storage: FlippingStorage) -> None:
    from edl_hvd.checkpoint.format import document

    storage.write(object_keys.accepted_key(1), document.encode({"manifests": ["a"]}))
    storage.write(object_keys.accepted_key(2), document.encode({"manifests": ["b"]}))
    storage.flip("00002-accepted")
    assert rule(storage) == Rule(2, frozenset({"b"}))
    assert len(storage.flipped) == 1


# In storage


def test_pruning_by_hand_keeps_the_newest_checkpoint_that_is_whole(storage: FlippingStorage) -> None:
    for step in (10, 20, 30):
        write(storage, snapshot_of(step))
    storage.spoil(shard_of(30))
    pruning = plan_by_hand(storage, RetentionPolicy(1), FakeClock())
    assert (pruning.kept, pruning.removed, pruning.spared) == ([20], [10], [30])
    carry_out(storage, pruning, lambda done, whole: None)
    reported: list[Event] = []
    assert_equal(restore_newest(storage, reported.append), snapshot_of(20))
    assert len(reported) == 1


def test_pruning_by_hand_counts_whole_checkpoints_only(storage: FlippingStorage) -> None:
    for step in (10, 20, 30, 40):
        write(storage, snapshot_of(step), keep=9)
    storage.spoil(shard_of(30))
    pruning = plan_by_hand(storage, RetentionPolicy(2), FakeClock())
    assert (pruning.kept, pruning.removed) == ([40, 20], [10])


def spoiled_on_writing(storage: FlippingStorage, step: int) -> None:
    """From now on the shard of this step is damaged as soon as it is written."""

    def watch(method: str, key: str) -> None:
        if method == "write_new" and key == object_keys.manifest_key(step):
            storage.watch = lambda method, key: None
            storage.spoil(shard_of(step))

    storage.watch = watch


def test_a_job_that_keeps_one_does_not_give_a_whole_checkpoint_for_a_damaged_one(storage: FlippingStorage) -> None:
    write(storage, snapshot_of(10), keep=1)
    spoiled_on_writing(storage, 20)
    [events] = write(storage, snapshot_of(20), keep=1)
    assert [type(event) for event in events] == [CheckpointWritten, CheckpointDamaged]
    assert steps(storage) == [20, 10]
    assert_equal(restore_newest(storage, events.append), snapshot_of(10))
    write(storage, snapshot_of(30), keep=1)
    assert steps(storage) == [30], "which is whole, so the damaged one and the older one go"


def test_one_of_those_that_a_job_keeps_has_been_read_back_before_another_goes(storage: FlippingStorage) -> None:
    """With three of them that is each third one: what was read stays whole as long as it is kept."""
    writer = CheckpointWriter(storage, 3, FakeClock())
    read: list[str] = []

    def watch(method: str, key: str) -> None:
        if method == "read_into" and "tensors-" in key:
            read.append(key.split("/")[1].lstrip("0"))

    storage.watch = watch
    for step in range(10, 110, 10):
        writer.begin(snapshot_of(step), 0, 1, uuid.uuid4().hex)
        assert writer.wait(60)
        assert steps(storage) == [step, step - 10, step - 20][: step // 10]
    assert list(dict.fromkeys(read)) == ["40", "70", "100"]


def test_after_each_checkpoint_one_manifest_is_read_however_many_are_kept(storage: FlippingStorage) -> None:
    writer = CheckpointWriter(storage, 20, FakeClock())
    read: list[str] = []
    for step in range(10, 210, 10):
        writer.begin(snapshot_of(step), 0, 1, uuid.uuid4().hex)
        assert writer.wait(60)
    storage.watch = lambda method, key: read.append(key) if method == "read" and "manifest" in key else None
    for step in (210, 220):
        read.clear()
        writer.begin(snapshot_of(step), 0, 1, uuid.uuid4().hex)
        assert writer.wait(60)
        assert set(read) <= {object_keys.manifest_key(step)}


# Reading without keeping


def test_a_file_is_verified_in_pieces_as_it_is_as_a_whole(tmp_path: Path) -> None:
    storage: Storage = open_storage(str(tmp_path))
    write(storage, snapshot_of(10), size=2)
    manifest = read_listed(storage, 10).manifest
    verify(storage, manifest)
    stored = stored_by_file(manifest.tensors)
    for name in manifest.files:
        key = object_keys.folder(10) + name
        whole = storage.read(key)
        for place in range(0, len(whole), 7):
            storage.write(key, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointDamagedError, match=f"{name} in {storage.url} is damaged"):
                check_shard(storage, manifest, name, stored.get(name, {}))
        for other in (whole[:-1], whole + b"x", whole[:3]):
            storage.write(key, other)
            with pytest.raises(CheckpointDamagedError, match=f"{name} in {storage.url}"):
                check_shard(storage, manifest, name, stored.get(name, {}))
        storage.write(key, whole)
    assert read_catalog(storage).steps == [10]
