"""Objects in any file system that fsspec has a driver for: Google Cloud Storage, Azure, SFTP and others."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage.base import RESERVED_FOLDER, StoredObject, check_key, check_size, redacted
from edl_hvd.storage.parts import MEMORY_MB
from edl_hvd.storage.pieces import Data, Pieces

_SMALLEST_BLOCK_BYTES = 5 * 1024 * 1024
# Of what most services take in a part of an upload.


class FsspecStorage:
    """Storage at a URL of fsspec's.

    How much of the contract holds is the driver's doing. Object stores (gs, abfs, ...) keep all of it.
    On servers with plain files (sftp, smb, ...) ``write_new`` is exclusive, but a writer killed in the
    middle of it leaves a short object; readers of checkpoints recognise such a one by its checksum.

    Args:
        url: Any URL ``fsspec`` accepts; options come from fsspec's own configuration.
        memory_mb: Memory that one transfer may take; two blocks of data have to fit.

    Raises:
        UsageError: fsspec, or the package for this scheme, is missing, or the scheme is unknown.
    """

    def __init__(self, url: str, memory_mb: float = MEMORY_MB) -> None:
        self._block_bytes = max(_SMALLEST_BLOCK_BYTES, int(memory_mb * 1e6) // 2)
        self.url = redacted(url).rstrip("/")
        scheme = url.partition(":")[0]
        try:
            import fsspec
        except ImportError as error:
            raise UsageError(f"{self.url!r} needs fsspec, which is not installed; run: pip install fsspec") from error
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self.url!r} cannot be opened: no installed package handles {scheme!r} ({error}); expected a "
                "folder, 'file://', 's3://', 'memory://', or a scheme of fsspec whose package is installed"
            ) from error
        except Exception as error:
            # Some drivers connect at once; what their libraries raise has no common base.
            raise StorageError(f"cannot open {self.url}: {error}") from error
        self._system: Any = system
        self._root = root.rstrip("/")

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with self._translated("read", key):
            if limit_bytes is not None:
                self._system.invalidate_cache()
                check_size(self._system.info(self._path(key))["size"], limit_bytes, key, self.url)
            contents: bytes = self._system.cat_file(self._path(key))
            return contents

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer).cast("B")
        with self._translated("read", key):
            self._system.invalidate_cache()
            # Some drivers refuse a range that reaches beyond the end.
            end = min(start + view.nbytes, int(self._system.info(self._path(key))["size"]))
            for begin in range(start, end, self._block_bytes):
                stop = min(begin + self._block_bytes, end)
                view[begin - start : stop - start] = self._system.cat_file(self._path(key), start=begin, end=stop)
        return max(0, end - start)

    def write(self, key: str, data: Data) -> None:
        with self._translated("write", key):
            partial = self._path(f"{RESERVED_FOLDER}/{uuid.uuid4().hex}", reserved=True)
            self._make_folder(partial)
            self._put(partial, "wb", data)
            self._make_folder(self._path(key))
            self._system.mv(partial, self._path(key))

    def write_new(self, key: str, data: Data) -> None:
        with self._translated("create", key):
            self._make_folder(self._path(key))
            self._put(self._path(key), "xb", data)

    def list(self, prefix: str = "") -> list[StoredObject]:
        with self._translated("list", prefix):
            folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
            self._system.invalidate_cache()
            found = self._system.find(folder, detail=True)
            objects = [StoredObject(self._key(path), entry["size"]) for path, entry in found.items()]
            return sorted(
                entry
                for entry in objects
                if entry.key.startswith(prefix) and not entry.key.startswith(f"{RESERVED_FOLDER}/")
            )

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            try:
                self._system.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def exists(self, key: str) -> bool:
        with self._translated("look for", key):
            self._system.invalidate_cache()
            return bool(self._system.isfile(self._path(key)))

    def place_exists(self) -> bool:
        # Paths of object stores begin with the bucket, those of file systems with a slash.
        bucket = self._root.partition("/")[0]
        with self._translated("look for", ""):
            self._system.invalidate_cache()
            return bool(self._system.exists(self._root or "/")) or bool(bucket and self._system.exists(bucket))

    def close(self) -> None:
        """fsspec shares its connections between all users of one server and closes them itself."""

    def _path(self, key: str, reserved: bool = False) -> str:
        return f"{self._root}/{key if reserved else check_key(key)}"

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _make_folder(self, path: str) -> None:
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _put(self, path: str, mode: str, data: Data) -> None:
        pieces = Pieces.of(data)
        # A driver's file gathers a block, sends it, and gathers the next.
        file = self._system.open(path, mode, block_size=self._block_bytes)
        try:
            with file:
                for view in pieces.views(0, pieces.size_bytes, self._block_bytes):
                    file.write(view)
        except BaseException:
            # It is ours, and not whole. The first error is the one to report.
            with suppress(Exception):
                self._system.rm_file(path)
            raise

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        attempt = f"cannot {verb} {key!r} in {self.url}"
        try:
            yield
        except (UsageError, ObjectTooLargeError):
            raise
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{attempt}: no such object") from error
        except FileExistsError as error:
            raise ObjectExistsError(f"{attempt}: it exists already") from error
        except Exception as error:
            # Each driver raises its own library's errors; they have no common base.
            raise StorageError(f"{attempt}: {type(error).__name__}: {error}") from error
