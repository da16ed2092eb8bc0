"""One object of a storage as a file that is read from front to back, such as a shard in a bucket or behind a URL."""

from __future__ import annotations

import io
import os
import re
from typing import Any, Protocol
from urllib.parse import urlsplit

from edl_hvd.errors import UsageError
from edl_hvd.storage.base import Storage, redacted
from edl_hvd.storage.opening import open_storage
from edl_hvd.storage.web import WebObject

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_FIRST_BYTES, _MOST_BYTES = 256 * 1024, 2 * 1024 * 1024
# What is fetched at a time: little where a file is opened or jumped in, and twice as much each time it is read on. Of
# 2 MiB a request takes a third at most; more would be held for each shard that a process has open.


class _Readable(Protocol):
    """Something of which any part can be read."""

    def read_into(self, start: int, buffer: memoryview) -> int: ...

    def close(self) -> None: ...


class _StoredObject:
    """One object of a storage that other files of this process may share."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key

    def read_into(self, start: int, buffer: memoryview) -> int:
        return self._storage.read_into(self._key, start, buffer)

    def close(self) -> None:
        """The storage keeps its connections for the next shard."""


class RemoteFile(io.RawIOBase):
    """An object that is read as a file; 2 MiB of it at most are in memory.

    What is asked for again after a broken connection, and for how long, is the storage's doing. The object must not be
    replaced meanwhile.

    Args:
        remote: Where it is read from.
    """

    def __init__(self, remote: _Readable) -> None:
        self._remote = remote
        self._position = 0
        self._block = memoryview(b"")
        self._block_start = 0
        self._next_bytes = _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the length of a remote file is not known")
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin = self._position - self._block_start
        if not 0 <= begin < self._block.nbytes:
            self._fetch()
            begin = 0
        count = min(view.nbytes, self._block.nbytes - begin)
        view[:count] = self._block[begin : begin + count]
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._block = memoryview(b"")
            self._remote.close()
        super().close()

    def _fetch(self) -> None:
        is_next = self._position == self._block_start + self._block.nbytes
        self._next_bytes = min(_MOST_BYTES, 2 * self._next_bytes) if is_next and self._block.nbytes else _FIRST_BYTES
        block = memoryview(bytearray(self._next_bytes))
        count = self._remote.read_into(self._position, block)
        self._block, self._block_start = block[:count], self._position


def is_url(path: str) -> bool:
    """Whether a path is an address of something that is not a file here.

    >>> is_url("s3://bucket/train-0000.tar"), is_url("/data/train-0000.tar")
    (True, False)
    """
    return bool(_URL.match(path))


def open_remote(url: str) -> RemoteFile:
    """Open an object for reading; nothing is contacted yet.

    Any process may call it. Storages are kept for the next file of the same process, so that a shard costs no new
    connection.

    Args:
        url: ``https://`` or ``http://``, or an object in any storage that ``open_storage`` knows.

    Raises:
        UsageError: The URL is malformed, or the package that it needs is not installed.
    """
    if urlsplit(url).scheme.lower() in ("http", "https"):
        return RemoteFile(WebObject(url))
    folder, _, key = url.rpartition("/")
    if not key or folder.endswith(("/", ":")):
        raise UsageError(
            f"{redacted(url)!r} names no object; expected one in a folder, such as 's3://bucket/train-0000.tar'"
        )
    return RemoteFile(_StoredObject(_storage_of(folder), key))


_storages: dict[tuple[int, str], Storage] = {}


def _storage_of(folder: str) -> Storage:
    """The storage of a folder, one for this process: what was opened before a fork is the parent's."""
    for process, other in list(_storages):
        if process != os.getpid():
            del _storages[process, other]
    if (os.getpid(), folder) not in _storages:
        _storages[os.getpid(), folder] = open_storage(folder)
    return _storages[os.getpid(), folder]
