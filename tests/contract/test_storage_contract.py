"""What every storage promises, whichever it is: one suite, all of them."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cloud_servers import AzureStorageServer, GoogleStorageServer
from servers import AwsServer
from storage_processes import create, process_context
from waiting import soon

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage import Storage, StoredObject, open_storage
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.pieces import Buffer
from edl_hvd.storage.s3 import S3Storage
from edl_hvd.storage.through_fsspec import FsspecStorage

KINDS = ("file", "memory", "s3", "gs", "az", "fsspec")
OF_SERVERS = ("s3", "gs", "az")
ODD_NAMES = (
    "a b",
    "ü",
    "😀",
    "100%",
    "a%2Fb",
    "x?y#z",
    "a+b",
    "a:b&c=d",
    "'\"",
    "back\\slash",
    "~",
    "-",
    ".hidden",
    "*",
)
NO_KEYS = ("", "/", "/etc/passwd", "a/../b", "..", ".", "a//b", "a/", "./a", "a\0b", "a\nb", "\ud800")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opener(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Storage]:
    """Opens the same fresh, empty storage each time it is called, as two workers of a job do."""
    if kind == "file":
        return lambda: open_storage(str(tmp_path / "run"))
    if kind == "fsspec":
        return lambda: FsspecStorage(f"local://{tmp_path}/run")
    if kind == "memory":
        name = uuid.uuid4().hex
        return lambda: open_storage(f"memory://{name}")
    environment, place = _server_of(kind, request)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    url = f"{kind}://{place}/some/run"
    return lambda: open_storage(url)


def _server_of(kind: str, request: pytest.FixtureRequest) -> tuple[dict[str, str], str]:
    """What points a storage to the local server of its kind, and a fresh bucket there."""
    if kind == "gs":
        google: GoogleStorageServer = request.getfixturevalue("google_storage")
        return google.environment, google.new_bucket()
    if kind == "az":
        azure: AzureStorageServer = request.getfixturevalue("azure_storage")
        return azure.environment, azure.new_container()
    aws: AwsServer = request.getfixturevalue("aws")
    return aws.environment, aws.new_bucket()


@pytest.fixture
def storage(opener: Callable[[], Storage]) -> Iterator[Storage]:
    storage = opener()
    yield storage
    storage.close()


def test_what_was_written_is_read_back(storage: Storage) -> None:
    for key, data in {"top": b"1", "a/b/c.json": b"{}", "a/empty": b"", "a/b/large": os.urandom(3_000_000)}.items():
        storage.write(key, data)
        assert storage.read(key) == data
        assert storage.exists(key)


def test_a_memoryview_is_written_like_bytes(storage: Storage) -> None:
    data = memoryview(bytearray(range(200)))[50:150]
    storage.write("view", data)
    storage.write_new("view-new", data)
    assert storage.read("view") == storage.read("view-new") == bytes(range(50, 150))


def test_several_buffers_make_one_object(storage: Storage) -> None:
    pieces: list[Buffer] = [b"head", memoryview(b""), memoryview(array("f", [1.0, 2.0])), bytearray(b"tail")]
    storage.write("pieces", pieces)
    storage.write_new("pieces-new", pieces)
    storage.write("nothing", [])
    assert storage.read("pieces") == storage.read("pieces-new") == b"".join(map(bytes, pieces))
    assert storage.read("nothing") == b""


def test_any_part_of_an_object_is_read_into_memory(storage: Storage) -> None:
    data = random.Random(2).randbytes(100_000)
    storage.write("folder/key", data)
    storage.write("empty", b"")
    for start, length in (
        (0, 100_000),
        (0, 1),
        (99_999, 1),
        (12_345, 54_321),
        (99_990, 20),
        (100_000, 5),
        (200_000, 5),
    ):
        around = bytearray(b"\xaa" * (length + 2))
        expected = data[start : start + length]
        assert storage.read_into("folder/key", start, memoryview(around)[1:-1]) == len(expected)
        assert around == b"\xaa" + expected + b"\xaa" * (length + 1 - len(expected)), "nothing beside it is written"
    numbers = array("H", [0]) * 10
    assert storage.read_into("folder/key", 6, memoryview(numbers)) == 20
    assert numbers.tobytes() == data[6:26]
    assert storage.read_into("folder/key", 5, bytearray()) == 0
    assert storage.read_into("empty", 0, bytearray(3)) == 0
    for length in (0, 10):
        with pytest.raises(ObjectMissingError, match="missing"):
            storage.read_into("missing", 0, bytearray(length))


def test_write_replaces(storage: Storage) -> None:
    storage.write("key", b"old and longer")
    storage.write("key", b"new")
    assert storage.read("key") == b"new"
    assert storage.list() == [StoredObject("key", 3)]


def test_write_new_creates_once_and_leaves_what_is_there(storage: Storage) -> None:
    storage.write_new("folder/key", b"first")
    with pytest.raises(ObjectExistsError, match=r"folder/key.*exists already"):
        storage.write_new("folder/key", b"second")
    assert storage.read("folder/key") == b"first"
    storage.delete("folder/key")
    storage.write_new("folder/key", b"third")
    assert storage.read("folder/key") == b"third"


def test_reading_nothing_says_which_object_is_missing_and_where(storage: Storage) -> None:
    storage.write("a", b"")
    for key in ("missing", "folder/missing"):
        with pytest.raises(ObjectMissingError) as caught:
            storage.read(key)
        assert key in str(caught.value)
        assert storage.url in str(caught.value)
        assert not storage.exists(key)


def test_an_object_larger_than_its_reader_takes_is_refused(storage: Storage) -> None:
    data = os.urandom(200_000)
    storage.write("folder/key", data)
    storage.write("empty", b"")
    for limit_bytes in (len(data), len(data) + 1, 2**62):
        assert storage.read("folder/key", limit_bytes) == data
    assert storage.read("empty", 0) == b""
    for limit_bytes in (0, 1, len(data) - 1):
        with pytest.raises(ObjectTooLargeError) as caught:
            storage.read("folder/key", limit_bytes)
        for word in ("'folder/key'", storage.url, "it has 200000 bytes", f"more than the {limit_bytes} expected"):
            assert word in str(caught.value)
    with pytest.raises(ObjectMissingError):
        storage.read("missing", 10)
    storage.write("folder/key", b"small")
    assert storage.read("folder/key", 5) == b"small", "the size that counts is that of now"


def test_refusing_large_objects_uses_no_connection_up(storage: Storage) -> None:
    storage.write("key", bytes(3_000_000))
    for _ in range(30):
        with pytest.raises(ObjectTooLargeError):
            storage.read("key", 1)
    assert len(storage.read("key")) == 3_000_000


def test_a_storage_nobody_wrote_to_is_empty(storage: Storage) -> None:
    assert storage.list() == []
    assert storage.list("checkpoints/") == []
    assert not storage.exists("anything")
    storage.delete("anything")
    with pytest.raises(ObjectMissingError):
        storage.read("anything")


def test_the_place_of_what_was_written_exists(storage: Storage) -> None:
    storage.write("a/key", b"")
    assert storage.place_exists()


def test_a_folder_exists_once_something_was_written_and_a_bucket_before(kind: str, storage: Storage) -> None:
    assert storage.place_exists() == (kind in ("memory", *OF_SERVERS))


def test_listing_is_sorted_complete_and_by_string_prefix(storage: Storage) -> None:
    keys = ["b", "a/2", "a/10", "a/1/x", "ab", "a/1/y", "B", "a-b"]
    for key in keys:
        storage.write(key, key.encode())
    assert [entry.key for entry in storage.list()] == sorted(keys)
    assert storage.list("a/1") == [StoredObject("a/1/x", 5), StoredObject("a/1/y", 5), StoredObject("a/10", 4)]
    assert [entry.key for entry in storage.list("a")] == ["a-b", "a/1/x", "a/1/y", "a/10", "a/2", "ab"]
    assert [entry.key for entry in storage.list("a/")] == ["a/1/x", "a/1/y", "a/10", "a/2"]
    assert storage.list("nothing/here") == []


def test_every_writer_sees_what_another_wrote(opener: Callable[[], Storage]) -> None:
    first, second = opener(), opener()
    assert second.list("x/") == []
    first.write("x/one", b"1")
    assert second.read("x/one") == b"1"
    assert [entry.key for entry in second.list("x/")] == ["x/one"]
    second.delete("x/one")
    assert not first.exists("x/one")
    assert first.list() == []
    assert first.url == second.url


def test_a_listing_says_when_an_object_was_written_if_the_storage_does(storage: Storage) -> None:
    storage.write("old/new", b"1")
    [entry] = storage.list("old/")
    if storage.url.startswith(("file:", "s3:", "gs:", "az:")):
        assert entry.written_s is not None
    assert entry.written_s is None or abs(time.time() - entry.written_s) < 600  # of one machine


def test_deleting_removes_one_object_and_missing_is_fine(storage: Storage) -> None:
    storage.write("folder/one", b"1")
    storage.write("folder/two", b"2")
    storage.delete("folder/one")
    storage.delete("folder/one")
    storage.delete("no/such/folder/one")
    assert storage.list() == [StoredObject("folder/two", 1)]


def test_odd_names_are_kept_as_they_are(kind: str, storage: Storage) -> None:
    for name in ODD_NAMES:
        key = f"odd/{name}/{name}"
        if kind == "az" and "\\" in name:  # Azure makes slashes of them
            with pytest.raises(UsageError, match=r"not a storage key.*another character"):
                storage.write_new(key, b"")
            continue
        storage.write_new(key, name.encode())
        assert storage.read(key) == name.encode()
        assert storage.exists(key)
        assert [entry.key for entry in storage.list("odd/")] == [key]
        storage.delete(key)
        assert storage.list() == []


def test_what_is_not_a_key_is_refused_by_every_method(storage: Storage) -> None:
    for key in NO_KEYS:
        for call in (
            storage.read,
            lambda key: storage.read_into(key, 0, bytearray(1)),
            storage.delete,
            storage.exists,
            lambda key: storage.write(key, b""),
            lambda key: storage.write_new(key, b""),
        ):
            with pytest.raises(UsageError, match="is not a storage key") as caught:
                call(key)
            assert repr(key) in str(caught.value)


def test_a_reader_sees_the_old_contents_or_the_new_never_a_mixture(opener: Callable[[], Storage]) -> None:
    size_bytes = 300_000
    contents = [bytes([letter]) * size_bytes for letter in b"abc"]
    writer, reader = opener(), opener()
    writer.write("key", contents[0])
    done = threading.Event()
    seen = set()

    def read() -> None:
        while not done.is_set():
            data = reader.read("key")
            assert len(data) == size_bytes
            assert len(set(data)) == 1
            seen.add(data[0])

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for turn in range(30):
                writer.write("key", contents[turn % 3])
        finally:
            done.set()
        for result in readers:
            soon(result)
    assert seen


def test_of_many_threads_exactly_one_creates_the_object(opener: Callable[[], Storage]) -> None:
    rounds, writers = 5, 8
    barrier = threading.Barrier(writers)

    def create(number: int) -> list[int]:
        storage = opener()
        won = []
        for turn in range(rounds):
            soon(barrier)
            try:
                storage.write_new(f"turn/{turn}", f"{number}".encode() * 1000)
                won.append(turn)
            except ObjectExistsError:
                continue
        storage.close()
        return won

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(create, range(writers)))
    assert sorted(turn for turns in won for turn in turns) == list(range(rounds))
    storage = opener()
    for number, turns in enumerate(won):
        for turn in turns:
            assert storage.read(f"turn/{turn}") == f"{number}".encode() * 1000


@pytest.mark.parametrize("kind", ["file", *OF_SERVERS, "fsspec"])  # memory:// belongs to one process
def test_of_many_processes_exactly_one_creates_the_object(
    kind: str, opener: Callable[[], Storage], request: pytest.FixtureRequest
) -> None:
    environment = _server_of(kind, request)[0] if kind in OF_SERVERS else {}
    storage = opener()
    with process_context().Pool(4) as pool:
        calls = [(storage.url, environment, number, 100_000) for number in range(12)]
        won = pool.starmap(create, calls, chunksize=1)
    assert won.count(True) == 1
    assert storage.read("contested") == bytes([won.index(True)]) * 100_000
    storage.close()


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(opener: Callable[[], Storage]) -> None:
    """Removing the last file of a folder must not pull the folder away under a file that is arriving."""

    def churn(number: int) -> None:
        storage = opener()
        numbers = random.Random(number)
        for turn in range(20):
            key = f"shared/folder/{number}-{turn}"
            storage.write_new(key, b"x" * numbers.randrange(1000))
            storage.delete(key)
        storage.write("kept/" + str(number), b"kept")
        storage.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert [entry.key for entry in opener().list()] == [f"kept/{number}" for number in range(4)]


def test_a_closed_endpoint_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with AwsServer() as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        storage = open_storage(f"s3://{server.new_bucket()}")
        storage.write("key", b"1")
    for call in (lambda: storage.read("key"), lambda: storage.write("key", b"2"), storage.list):
        with pytest.raises(StorageError, match=r"cannot (read|write|list)"):
            call()
    storage.close()


def test_a_missing_bucket_is_named(aws: AwsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    storage = open_storage("s3://no-such-bucket-here/run")
    for call in (storage.list, lambda: storage.read("key"), lambda: storage.exists("key"), lambda: _put(storage)):
        with pytest.raises(StorageError, match="bucket 'no-such-bucket-here' does not exist"):
            call()
    assert not storage.place_exists()
    storage.close()


def _put(storage: Storage) -> None:
    storage.write_new("key", b"")


def test_large_objects_go_to_s3_in_parts_and_are_created_once_all_the_same(
    aws: AwsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    bucket = aws.new_bucket()
    storage = S3Storage(bucket, "run", Cut(part_bytes=5 * 1024 * 1024))  # the smallest S3 allows
    data = os.urandom(11 * 1024 * 1024)
    storage.write_new("large", [data[:1000], memoryview(data)[1000:]])
    assert storage.read("large") == data
    with pytest.raises(ObjectExistsError):
        storage.write_new("large", data[::-1])
    assert storage.read("large") == data
    storage.write("large", data[1:])
    assert storage.read("large") == data[1:]
    back = bytearray(len(data))
    assert storage.read_into("large", 0, back) == len(data) - 1
    assert back[:-1] == data[1:]
    with pytest.raises(ObjectTooLargeError):
        storage.read("large", len(data) - 2)
    client = aws.client("s3")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket), "an unfinished upload is still paid for"
    client.close()
    storage.close()


def test_unknown_credentials_are_named(aws: AwsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**aws.environment, "AWS_ACCESS_KEY_ID": "nobody"}.items():
        monkeypatch.setenv(variable, value)
    storage = open_storage(f"s3://{aws.new_bucket()}/run")
    with aws.asking_for_credentials():
        for call in (storage.list, lambda: storage.read("key"), lambda: _put(storage)):
            with pytest.raises(StorageError, match=rf"{storage.url}: the credentials in use are wrong.*InvalidAcc"):
                call()
    storage.close()
