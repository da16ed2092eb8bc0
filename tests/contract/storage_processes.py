"""What the processes of the storage tests run. Light to import: each of them imports it anew."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

import forked

from edl_hvd.errors import ObjectExistsError, StorageError
from edl_hvd.storage import Storage, open_storage
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.s3 import S3Storage
from edl_hvd.storage.through_fsspec import FsspecStorage


def process_context() -> ForkServerContext:
    """Processes that have the imports of these tests."""
    return forked.process_context("edl_hvd.storage.s3", "fsspec", "pytest")


def create(url: str, environment: dict[str, str], number: int, size_bytes: int) -> bool:
    """Try to create the object ``contested``; whether this process did."""
    os.environ.update(environment)
    storage = FsspecStorage(url) if url.startswith("local:") else open_storage(url)
    try:
        storage.write_new("contested", bytes([number]) * size_bytes)
    except ObjectExistsError:
        return False
    finally:
        storage.close()
    return True


def create_in_parts(url: str, environment: dict[str, str], number: int, part_bytes: int) -> bool:
    """The same with an object of three parts."""
    os.environ.update(environment)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    storage = S3Storage(bucket, prefix, Cut(part_bytes, connections=3))
    try:
        storage.write_new("contested", bytes([number]) * (3 * part_bytes))
    except ObjectExistsError:
        return False
    finally:
        storage.close()
    return True


def read_after_fork(url: str, environment: dict[str, str]) -> tuple[str, bytes]:
    """Use a storage, fork, and use it in the child: what it is told there, and what the parent reads afterwards."""
    os.environ.update(environment)
    storage = open_storage(url)
    storage.write("key", b"1")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            open_storage(url).read("key")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read().decode()
    os.waitpid(child, 0)
    return told, storage.read("key")


class MemoryUse(NamedTuple):
    """What transfers took beside the data, at most."""

    connections: int
    upload_mb: float
    download_mb: float


def memory_of_transfers(url: str, environment: dict[str, str], size_bytes: int, memory_mb: float) -> MemoryUse:
    """Write and read an object with so much memory; the connections are warm before it is measured."""
    os.environ.update(environment)
    storage = open_storage(url, memory_mb)
    data, back = bytearray(size_bytes), bytearray(size_bytes)
    for start in range(0, size_bytes, 1_000_000):
        data[start : start + 1_000_000] = back[start : start + 1_000_000] = os.urandom(1_000_000)
    storage.write("warm", memoryview(data)[:9_000_000])
    storage.read_into("warm", 0, memoryview(back)[:9_000_000])
    before_mb = _most_memory_mb()
    storage.write("large", data)
    between_mb = _most_memory_mb()
    storage.read_into("large", 0, back)
    after_mb = _most_memory_mb()
    storage.close()
    if back != data:
        raise AssertionError("what came back is not what was written")
    return MemoryUse(Cut.within(memory_mb).connections, between_mb - before_mb, after_mb - between_mb)


def _most_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def fill_up(kind: str, folder: str) -> None:
    """Write more than a disk of 2 MB takes: refused with a reason, and what fits is still taken."""
    storage = _open(kind, folder)
    storage.write("before", b"kept")
    for number, write in enumerate((storage.write, storage.write_new)):
        key = f"large-{number}"
        _expect(f"'{key}' in {storage.url}: .*No space left", partial(write, key, bytes(3_000_000)))
    storage.write_new("after", bytes(1_000_000))
    found = [entry.key for entry in storage.list()]
    if found != ["after", "before"]:
        raise AssertionError(f"half an object is listed: {found}")
    print("as expected")


def write_nowhere(kind: str, folder: str) -> None:
    """Write into a folder that can only be read."""
    storage = _open(kind, folder)
    _expect(f"cannot write 'key' in {storage.url}: .*Read-only", lambda: storage.write("key", b"1"))
    _expect(f"cannot create 'key' in {storage.url}: .*Read-only", lambda: storage.write_new("key", b"1"))
    if storage.list() or storage.exists("key"):
        raise AssertionError("something was written")
    print("as expected")


def _open(kind: str, folder: str) -> Storage:
    return open_storage(folder) if kind == "file" else FsspecStorage(f"local://{folder}")


def _expect(message: str, act: Callable[[], None]) -> None:
    try:
        act()
    except StorageError as error:
        if not re.search(message, str(error)):
            raise
    else:
        raise AssertionError(f"nothing was raised, expected: {message}")
