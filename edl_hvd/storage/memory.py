"""Objects in this process's memory, for trying things out and for tests."""

from __future__ import annotations

import threading
from collections import defaultdict

from edl_hvd.errors import ObjectExistsError, ObjectMissingError
from edl_hvd.storage.base import StoredObject, check_key, check_size
from edl_hvd.storage.pieces import Data, Pieces

# Two storages of the same name share their objects, as two clients of one bucket do.
_OBJECTS: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
_LOCK = threading.Lock()


class MemoryStorage:
    """Storage under ``memory://name``; gone when the process ends."""

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        with _LOCK:
            self._objects = _OBJECTS[name]

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with _LOCK:
            try:
                data = self._objects[check_key(key)]
            except KeyError as error:
                raise ObjectMissingError(f"cannot read {key!r} in {self.url}: no such object") from error
        check_size(len(data), limit_bytes, key, self.url)
        return data

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        found = memoryview(self.read(key))[start : start + memoryview(buffer).nbytes]
        memoryview(buffer).cast("B")[: found.nbytes] = found
        return found.nbytes

    def write(self, key: str, data: Data) -> None:
        with _LOCK:
            self._objects[check_key(key)] = Pieces.of(data).joined()

    def write_new(self, key: str, data: Data) -> None:
        with _LOCK:
            if check_key(key) in self._objects:
                raise ObjectExistsError(f"cannot create {key!r} in {self.url}: it exists already")
            self._objects[key] = Pieces.of(data).joined()

    def list(self, prefix: str = "") -> list[StoredObject]:
        with _LOCK:
            return sorted(StoredObject(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with _LOCK:
            self._objects.pop(check_key(key), None)

    def exists(self, key: str) -> bool:
        with _LOCK:
            return check_key(key) in self._objects

    def place_exists(self) -> bool:
        return True

    def close(self) -> None:
        """Keeps the objects: another ``memory://`` storage of this name still sees them."""
