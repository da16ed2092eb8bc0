"""A checkpoint to be damaged, what is done with it then, and how kinds of damage are written down."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import write

from edl_hvd.checkpoint import Snapshot, restore, restore_newest
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.format.shards import pack
from edl_hvd.checkpoint.writing.shares import share_out
from edl_hvd.errors import StorageError
from edl_hvd.events import Event
from edl_hvd.storage import Storage, open_storage

MANIFEST = "manifest.json"
SHARD = object_keys.shard_name(1, 2)
OTHER_SHARD = object_keys.shard_name(0, 2)
WEIGHT, COUNTS, EMPTY = "weight", "counts", "empty"  # whole tensors in SHARD
SPLIT = "split"  # a tensor of which each shard has a piece
PIECE, OTHER_PIECE = f"{SPLIT}[rows 5:20]", f"{SPLIT}[rows 0:5]"  # what they are called in SHARD and OTHER_SHARD
CHUNK_BYTES = 100  # PIECE has two

JsonObject = dict[str, Any]


def snapshot_of(step: int) -> Snapshot:
    numbers = torch.Generator().manual_seed(step)
    tensors = {
        "large": torch.randn(1, 40, generator=numbers),
        WEIGHT: torch.randn(3, 4, generator=numbers).bfloat16(),
        COUNTS: torch.arange(3),
        EMPTY: torch.empty(0, 3),
        SPLIT: torch.randint(0, 256, (20, 12), dtype=torch.uint8, generator=numbers),
    }
    return Snapshot(tensors, {"batch": step, "rate": 0.5}, step, 0, 32 * step)


def checksum(data: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def json_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Victim:
    """Two checkpoints, of steps 10 and 20; the second is what is done to."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def bytes_of(self, name: str) -> bytes:
        return self.storage.read(object_keys.folder(20) + name)

    def put(self, name: str, data: bytes) -> None:
        self.storage.write(object_keys.folder(20) + name, data)

    def content(self) -> JsonObject:
        content: JsonObject = json.loads(self.bytes_of(MANIFEST))["content"]
        return content

    def sign(self, content: object, **others: object) -> None:
        """A manifest of this content whose checksum is right."""
        self.put(
            MANIFEST, json_bytes({"format": 3, "checksum": checksum(json_bytes(content)), "content": content, **others})
        )

    def put_shard(self, data: bytes) -> None:
        """A shard that the manifest agrees with as far as length and the checksum of the header go."""
        self.put(SHARD, data)
        content = self.content()
        file = content["files"][SHARD]
        elements_bytes = file["size_bytes"] - file["header_bytes"]
        header = data[: max(0, len(data) - elements_bytes)]
        file.update(size_bytes=len(data), header_bytes=len(header), header_checksum=checksum(header))
        self.sign(content)

    def header(self) -> tuple[JsonObject, bytes]:
        data = self.bytes_of(SHARD)
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]

    def put_header(self, header: JsonObject | bytes, data: bytes) -> None:
        text = header if isinstance(header, bytes) else json_bytes(header)
        self.put_shard(len(text).to_bytes(8, "little") + text + data)


@dataclass(frozen=True)
class Case:
    """One kind of damage, the object that is to be blamed and what is to be said about it."""

    damage: Callable[[Victim], object]
    blamed: str
    words: str


class Cases(dict[str, Case]):
    """Kinds of damage by name."""

    def add(self, name: str, blamed: str, words: str, damage: Callable[[Victim], object]) -> None:
        assert name not in self
        self[name] = Case(damage, blamed, words)


def new_victim() -> Victim:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    for key, data in ORIGINAL.items():
        storage.write(key, data)
    return Victim(storage)


def _original() -> dict[str, bytes]:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        # Tensors of a few bytes are split and have several chunks, as large ones have.
        patch.setattr("edl_hvd.checkpoint.writing.assembly.share_out", partial(share_out, whole_below_bytes=200))
        patch.setattr("edl_hvd.checkpoint.writing.attempt.pack", partial(pack, chunk_bytes=CHUNK_BYTES))
        for step in (10, 20):
            write(storage, snapshot_of(step), size=2)
    return {entry.key: storage.read(entry.key) for entry in storage.list()}


ORIGINAL = _original()


def refusal(storage: Storage) -> StorageError:
    with pytest.raises(StorageError) as caught:
        restore(storage, 20)
    return caught.value


def newest(storage: Storage) -> tuple[Snapshot | None, list[Event]]:
    events: list[Event] = []
    return restore_newest(storage, events.append), events


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, at: str) -> None:
        self._at = at

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._at,)


# Where the one in the table goes off.
EXPLODED = f"/tmp/edl-hvd-exploded-{uuid.uuid4().hex}"
