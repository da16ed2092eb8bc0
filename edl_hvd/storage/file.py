"""Objects as files in a folder, local or shared between hosts."""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, StorageError
from edl_hvd.storage.base import RESERVED_FOLDER, StoredObject, check_key, check_size
from edl_hvd.storage.pieces import Data, Pieces

_ABANDONED_AFTER_S = 3600.0
# A file being written changes all the time; one untouched for an hour belongs to a dead writer.

_PLACING_ATTEMPTS = 20
# Each attempt is lost only to another process removing the same empty folder in that very moment.

_WRITE_BYTES = 64 * 1024 * 1024
# At a time; a system call takes 2 GiB at most.

_WRITING = ("write", "create", "delete")
_FULL = (
    "free some of it or choose a larger one: a checkpoint is written before an older one goes, so keep_newest=N needs "
    "room for N + 1"
)
_CLOSED = "choose a folder that this user may write, or change its permissions, on every host"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.ENOENT: "no folder can be made there; choose another one",
    errno.ENOTDIR: "a file is in the way of a folder; remove it or choose another one",
}

_NAMES_OF_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}


class FileStorage:
    """Storage in a folder.

    A file appears under its key complete and flushed to disk, or not at all: it is written and synced
    under another name in ``.partial``, then renamed (replacing) or hard-linked (creating). What is no plain
    file (a link, a pipe, a device) is listed but cannot be read: it counts as missing.

    Args:
        root: The folder; created by the first write.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))
        self._swept = False
        self.url = self._root.as_uri()

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with self._opened(key) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            check_size(size_bytes, limit_bytes, key, self.url)
            return file.read(size_bytes)

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        with self._opened(key) as file:
            file.seek(start)
            return file.readinto(memoryview(buffer).cast("B"))

    @contextmanager
    def _opened(self, key: str) -> Iterator[io.BufferedReader]:
        try:
            with open(self._path(key), "rb", opener=_open_plain) as file:
                yield file
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"cannot read {key!r} in {self.url}: no such file") from error
        except _NotPlainError as error:
            raise ObjectMissingError(f"cannot read {key!r} in {self.url}: there is no file, but {error}") from error
        except OSError as error:
            raise self._failure("read", key, error) from error

    def write(self, key: str, data: Data) -> None:
        self._put("write", key, data, os.replace)

    def write_new(self, key: str, data: Data) -> None:
        # A link fails if its name is taken, whoever took it: the check and the act are one system call.
        self._put("create", key, data, os.link)

    def list(self, prefix: str = "") -> list[StoredObject]:
        try:
            return sorted(entry for entry in self._walk(prefix.rpartition("/")[0]) if entry.key.startswith(prefix))
        except OSError as error:
            raise self._failure("list", prefix, error) from error

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise self._failure("delete", key, error) from error
        self._remove_empty_folders(path.parent)

    def exists(self, key: str) -> bool:
        try:
            return stat.S_ISREG(self._path(key).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._failure("look for", key, error) from error

    def place_exists(self) -> bool:
        try:
            return self._root.is_dir()
        except OSError as error:
            raise self._failure("look for", "", error) from error

    def close(self) -> None:
        """Holds nothing open."""

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _failure(self, verb: str, key: str, error: OSError) -> StorageError:
        words = f"cannot {verb} {key!r} in {self.url}: {error.strerror or error}"
        if verb in _WRITING and (remedy := _REMEDIES.get(error.errno or 0)):
            words += f"; {remedy}"
        return StorageError(words)

    def _put(self, verb: str, key: str, data: Data, place: Callable[[Path, Path], None]) -> None:
        path = self._path(key)
        partial = self._root / RESERVED_FOLDER / uuid.uuid4().hex
        try:
            _make_folders(partial.parent)
            try:
                _write_synced(partial, data)
                self._sweep(now_s=partial.stat().st_mtime)
                _place_synced(partial, path, place)
            finally:
                partial.unlink(missing_ok=True)
        except FileExistsError as error:
            raise ObjectExistsError(f"cannot {verb} {key!r} in {self.url}: it exists already") from error
        except OSError as error:
            raise self._failure(verb, key, error) from error

    def _sweep(self, now_s: float) -> None:
        """Remove what killed writers left, once per storage. ``now_s`` is the disk's own clock."""
        if self._swept:
            return
        self._swept = True
        for partial in (self._root / RESERVED_FOLDER).iterdir():
            # Another process may have swept it first. What cannot be removed stays: a folder, a file of another user,
            # one that a process has open (NFS).
            with suppress(OSError):
                if partial.stat().st_mtime < now_s - _ABANDONED_AFTER_S:
                    partial.unlink()

    def _walk(self, folder: str) -> Iterator[StoredObject]:
        for entry in _entries(self._root / folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if key == RESERVED_FOLDER:
                continue
            try:
                # A link at the top may lead to a larger disk. Further down it is an object like a file, or what lies
                # outside would look as if it were ours to delete.
                if entry.is_dir(follow_symlinks=not folder):
                    yield from self._walk(key)
                else:
                    found = entry.stat(follow_symlinks=False)
                    yield StoredObject(key, found.st_size, found.st_mtime)
            except FileNotFoundError:
                continue  # Deleted between the listing of its folder and this look at it.

    def _remove_empty_folders(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return  # Not empty, or already gone: either way nothing is left to do here.
            folder = folder.parent


class _NotPlainError(Exception):
    """Something that is no file has a file's name; says what."""


def _open_plain(path: str, flags: int) -> int:
    """Open a file and nothing else: a link may lead anywhere, a pipe has no end and makes its reader wait."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(path):
            raise _NotPlainError("a symbolic link") from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _NotPlainError(_NAMES_OF_KINDS.get(stat.S_IFMT(mode), "a device or socket"))
    return descriptor


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_synced(path: Path, data: Data) -> None:
    with open(path, "xb") as file:
        pieces = Pieces.of(data)
        for view in pieces.views(0, pieces.size_bytes, _WRITE_BYTES):
            file.write(view)
        file.flush()
        os.fsync(file.fileno())


def _place_synced(partial: Path, path: Path, place: Callable[[Path, Path], None]) -> None:
    """Give the finished file its name; on return the name too survives a power cut."""
    for attempt in range(_PLACING_ATTEMPTS):
        try:
            _make_folders(path.parent)
            place(partial, path)
            _sync_folder(path.parent)
            return
        except FileNotFoundError:
            # ``delete`` of a neighbour removed the empty folder before the file arrived in it.
            if attempt == _PLACING_ATTEMPTS - 1:
                raise


def _make_folders(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # Never the object's own name: one of its folders is a file, or was there and is gone again.
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(folder)) from error
    for path in missing:
        if path.parent.exists():
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
