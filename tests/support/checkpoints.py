"""What the tests of checkpoints share: a storage that can be watched and held, states, whole checkpoints."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import torch
from clocks import FakeClock
from waiting import LONG_S

from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.events import Event
from edl_hvd.storage import Storage, StoredObject, open_storage
from edl_hvd.storage.pieces import Data


class WatchedStorage:
    """A storage that tells ``watch(method, key)`` before each call; the watcher may raise or block."""

    def __init__(self, watch: Callable[[str, str], None] = lambda method, key: None) -> None:
        self._inner = open_storage(f"memory://{uuid.uuid4().hex}")
        self.watch = watch
        self.url = self._inner.url

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        self.watch("read", key)
        return self._inner.read(key, limit_bytes)

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        self.watch("read_into", key)
        return self._inner.read_into(key, start, buffer)

    def write(self, key: str, data: Data) -> None:
        self.watch("write", key)
        self._inner.write(key, data)

    def write_new(self, key: str, data: Data) -> None:
        self.watch("write_new", key)
        self._inner.write_new(key, data)

    def list(self, prefix: str = "") -> list[StoredObject]:
        self.watch("list", prefix)
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self.watch("delete", key)
        self._inner.delete(key)

    def exists(self, key: str) -> bool:
        self.watch("exists", key)
        return self._inner.exists(key)

    def place_exists(self) -> bool:
        self.watch("place_exists", "")
        return self._inner.place_exists()

    def close(self) -> None:
        self._inner.close()


class Gate:
    """A watcher that holds every call whose method and key it was told, until opened."""

    def __init__(self, method: str, in_key: str) -> None:
        self._method, self._in_key = method, in_key
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, method: str, key: str) -> None:
        if method == self._method and self._in_key in key:
            self.reached.set()
            self._opened.wait(LONG_S)

    def open(self) -> None:
        self._opened.set()


def snapshot_of(step: int, variant: int = 0) -> Snapshot:
    """Contents that differ for every step and variant."""
    numbers = torch.Generator().manual_seed(1000 * step + variant)
    tensors = {
        f"layer.{number}": torch.randn(3 + number, 5, generator=numbers).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16))
    }
    tensors["count"] = torch.tensor(step)
    tensors["none"] = torch.empty(0, 3)
    return Snapshot(tensors, {"variant": variant, "losses": [0.5, float("inf")]}, step, step // 10, step * 32)


def assert_equal(found: Snapshot | None, expected: Snapshot) -> None:
    assert found is not None
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name
    fields = ("plain", "step", "epoch", "samples")
    assert [getattr(found, field) for field in fields] == [getattr(expected, field) for field in fields]


def write(
    storage: Storage, snapshot: Snapshot, size: int = 1, keep: int = 3, attempt: str | None = None
) -> list[list[Event]]:
    """One checkpoint by a world of ``size``, rank 0 last, so that it finds the others' shares; events by rank."""
    attempt = attempt or uuid.uuid4().hex
    events = []
    for rank in reversed(range(size)):
        writer = CheckpointWriter(storage, keep, FakeClock())
        writer.begin(snapshot, rank, size, attempt)
        assert writer.wait(60)
        events.append(writer.poll())
    return events[::-1]


def write_rank(storage: Storage, snapshot: Snapshot, rank: int, size: int, attempt: str) -> list[Event]:
    writer = CheckpointWriter(storage, clock=FakeClock())
    writer.begin(snapshot, rank, size, attempt)
    assert writer.wait(60)
    return writer.poll()


def nothing_reported(event: Event) -> None:
    raise AssertionError(event)
