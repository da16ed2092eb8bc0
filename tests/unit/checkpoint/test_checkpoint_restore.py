"""Restoring: what does not verify is passed over and named, and nothing else is."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.checksum import checksum
from edl_hvd.checkpoint.format.manifest import Manifest
from edl_hvd.checkpoint.format.shards import pack
from edl_hvd.errors import CheckpointDamagedError, ObjectMissingError, StorageError
from edl_hvd.events import CheckpointDamaged, CheckpointWritten, Event
from edl_hvd.storage import Storage, open_storage

SHARD = object_keys.shard_name(0, 2)


def snapshot_of(step: int) -> Snapshot:
    numbers = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(4, 5, generator=numbers) for name in ("a", "b", "c", "d")}
    return Snapshot(tensors, {"step": step}, step, 0, step)


def write(storage: Storage, step: int) -> None:
    attempt = uuid.uuid4().hex
    for rank in (1, 0):
        writer = CheckpointWriter(storage, keep=9)
        writer.begin(snapshot_of(step), rank, 2, attempt)
        assert writer.wait(60)
        assert [type(event) for event in writer.poll()] == [CheckpointWritten][rank:]


@pytest.fixture
def storage() -> Storage:
    """Two checkpoints: steps 10 and 20."""
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    write(storage, 10)
    write(storage, 20)
    assert steps(storage) == [20, 10]
    return storage


def is_step(snapshot: Snapshot | None, step: int) -> bool:
    expected = snapshot_of(step)
    return (
        snapshot is not None
        and (snapshot.step, snapshot.plain, snapshot.samples) == (step, {"step": step}, step)
        and snapshot.tensors.keys() == expected.tensors.keys()
        and all(torch.equal(tensor, expected.tensors[name]) for name, tensor in snapshot.tensors.items())
    )


def change(storage: Storage, step: int, name: str, edit: Callable[[bytes], bytes]) -> None:
    key = object_keys.folder(step) + name
    storage.write(key, edit(storage.read(key)))


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 4]) + data[position:][1:]


def other_tensors(storage: Storage) -> None:
    change(storage, 20, SHARD, lambda data: b"".join(pack({"x": torch.zeros(50)}).data))
    agree(storage)


def agree(storage: Storage) -> None:
    """Make the manifest's file entry fit whatever the shard holds now: damage that only tensors can show."""
    key = object_keys.manifest_key(20)
    manifest = Manifest.decode(storage.read(key))
    data = storage.read(object_keys.folder(20) + SHARD)
    before = manifest.files[SHARD]
    header_bytes = len(data) - (before.size_bytes - before.header_bytes)
    file = replace(
        before, size_bytes=len(data), header_bytes=header_bytes, header_checksum=checksum(data[:header_bytes])
    )
    storage.write(key, replace(manifest, files={**manifest.files, SHARD: file}).encode())


def other_values(storage: Storage) -> None:
    change(storage, 20, SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    agree(storage)


def no_safetensors(storage: Storage) -> None:
    change(storage, 20, SHARD, lambda data: b"\xff" * len(data))
    agree(storage)


DAMAGE: dict[str, Callable[[Storage], None]] = {
    "shard missing": lambda storage: storage.delete(object_keys.folder(20) + SHARD),
    "shard empty": lambda storage: change(storage, 20, SHARD, lambda data: b""),
    "shard cut short": lambda storage: change(storage, 20, SHARD, lambda data: data[:-1]),
    "shard too long": lambda storage: change(storage, 20, SHARD, lambda data: data + b"\0"),
    "bit flipped in header": lambda storage: change(storage, 20, SHARD, flip(20)),
    "bit flipped in data": lambda storage: change(storage, 20, SHARD, flip(-9)),
    "shard of another step": lambda storage: storage.write(
        object_keys.folder(20) + SHARD, storage.read(object_keys.folder(10) + SHARD)
    ),
    "shard with other tensors": other_tensors,
    "shard with other values": other_values,
    "shard no safetensors file": no_safetensors,
    "manifest empty": lambda storage: storage.write(object_keys.manifest_key(20), b""),
    "manifest cut short": lambda storage: change(storage, 20, "manifest.json", lambda data: data[: len(data) // 2]),
    "manifest not UTF-8": lambda storage: storage.write(object_keys.manifest_key(20), b"\xff\xfe\xfa"),
    "manifest edited": lambda storage: change(
        storage, 20, "manifest.json", lambda data: data.replace(b'"samples":20', b'"samples":21')
    ),
    "manifest of another step": lambda storage: storage.write(
        object_keys.manifest_key(20), storage.read(object_keys.manifest_key(10))
    ),
}


def test_nothing_written_is_nothing_restored() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    assert steps(storage) == []
    events: list[Event] = []
    assert restore_newest(storage, events.append) is None
    assert events == []
    with pytest.raises(ObjectMissingError, match="checkpoints/000000000010"):
        restore(storage, 10)


def test_the_newest_is_restored_and_any_on_request(storage: Storage) -> None:
    events: list[Event] = []
    assert is_step(restore_newest(storage, events.append), 20)
    assert events == []
    assert is_step(restore(storage, 10), 10)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(
    storage: Storage, damage: Callable[[Storage], None]
) -> None:
    damage(storage)
    events: list[Event] = []
    assert is_step(restore_newest(storage, events.append), 10)
    [event] = events
    assert isinstance(event, CheckpointDamaged)
    assert (event.url, event.step) == (storage.url, 20)
    assert "20" in event.reason
    with pytest.raises(CheckpointDamagedError):
        restore(storage, 20)


def test_random_damage_never_restores_anything_but_a_checkpoint(storage: Storage) -> None:
    numbers = random.Random(7)
    keys = [entry.key for entry in storage.list(object_keys.folder(20))]
    fell_back = 0
    for _ in range(300):
        key = numbers.choice(keys)
        original = storage.read(key)
        damaged = bytearray(original)
        for _ in range(numbers.randrange(1, 4)):
            damaged[numbers.randrange(len(damaged))] ^= 1 << numbers.randrange(8)
        storage.write(key, bytes(damaged[: numbers.choice([len(damaged), numbers.randrange(len(damaged))])]))
        found = restore_newest(storage, lambda event: None)
        assert is_step(found, 10) or is_step(found, 20)
        fell_back += is_step(found, 10)
        storage.write(key, original)
    assert fell_back > 250
    assert is_step(restore_newest(storage, lambda event: None), 20)


def test_if_none_verifies_all_are_listed_in_one_error(storage: Storage) -> None:
    DAMAGE["shard missing"](storage)
    change(storage, 10, "manifest.json", lambda data: data[1:])
    events: list[Event] = []
    with pytest.raises(CheckpointDamagedError, match="none of the 2 checkpoints") as caught:
        restore_newest(storage, events.append)
    assert "000000000020" in str(caught.value)
    assert "000000000010" in str(caught.value)
    assert len(events) == 2


class Interrupted:
    """A storage that first does something else when it is read."""

    def __init__(self, storage: Storage, meanwhile: Callable[[str], None]) -> None:
        self._storage, self._meanwhile = storage, meanwhile
        self.list, self.exists, self.url = storage.list, storage.exists, storage.url

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        self._meanwhile(key)
        return self._storage.read(key, limit_bytes)

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        self._meanwhile(key)
        return self._storage.read_into(key, start, buffer)


def test_an_outage_is_not_taken_for_damage(storage: Storage) -> None:
    def outage(key: str) -> None:
        if "tensors" in key:
            raise StorageError("connection refused")

    events: list[Event] = []
    with pytest.raises(StorageError, match="connection refused"):
        restore_newest(Interrupted(storage, outage), events.append)  # type: ignore[arg-type]
    assert events == []


def test_a_checkpoint_that_retention_removes_while_it_is_read_is_not_called_damaged(storage: Storage) -> None:
    def newer_one_written_and_old_ones_removed(key: str) -> None:
        if "000000000020/tensors" in key and storage.exists(object_keys.manifest_key(20)):
            write(storage, 30)
            for step in (10, 20):
                for name in ("manifest.json", SHARD):
                    storage.delete(object_keys.folder(step) + name)

    events: list[Event] = []
    busy = Interrupted(storage, newer_one_written_and_old_ones_removed)
    assert is_step(restore_newest(busy, events.append), 30)  # type: ignore[arg-type]
    assert events == []


def test_a_checkpoint_of_a_later_version_is_an_error_not_a_reason_to_go_back(storage: Storage) -> None:
    change(storage, 20, "manifest.json", lambda data: data.replace(b'"format":3', b'"format":4'))
    events: list[Event] = []
    with pytest.raises(StorageError, match="use the version that wrote it") as caught:
        restore_newest(storage, events.append)
    assert not isinstance(caught.value, CheckpointDamagedError)
    assert events == []


def test_a_huge_header_length_allocates_nothing(storage: Storage) -> None:
    change(storage, 20, SHARD, lambda data: (2**60).to_bytes(8, "little") + data[8:])
    agree(storage)
    assert is_step(restore_newest(storage, lambda event: None), 10)


def test_shards_are_ordinary_safetensors_and_the_manifest_ordinary_json(storage: Storage) -> None:
    """A checkpoint can be read without this package."""
    from safetensors.torch import load

    manifest = json.loads(storage.read(object_keys.manifest_key(20)))["content"]
    tensors: dict[str, torch.Tensor] = {}
    for name in manifest["files"]:
        tensors.update(load(storage.read(object_keys.folder(20) + name)))
    assert tensors.keys() == manifest["tensors"].keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in snapshot_of(20).tensors.items())
    assert manifest["versions"]["torch"] == torch.__version__


def test_a_tensor_in_pieces_is_put_together_from_the_manifest_and_ordinary_safetensors() -> None:
    from safetensors.torch import load

    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    tensors = {"w": torch.randn(1000, 300), "w[rows 0:334]": torch.randn(7)}
    for rank in (2, 1, 0):
        writer = CheckpointWriter(storage)
        writer.begin(Snapshot(tensors, step=20), rank, 3, "attempt")
        assert writer.wait(60)
    entry = json.loads(storage.read(object_keys.manifest_key(20)))["content"]["tensors"]["w"]
    assert len(entry["pieces"]) == 3
    pieces = []
    for piece in entry["pieces"]:
        name = f"w[rows {piece['first_row']}:{piece['first_row'] + piece['rows']}]"
        pieces.append(load(storage.read(object_keys.folder(20) + piece["file"]))[name])
    assert torch.equal(torch.cat(pieces), tensors["w"])
    found = restore(storage, 20).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
