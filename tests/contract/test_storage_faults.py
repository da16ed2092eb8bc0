"""S3 behind a bad network: each fault met once is got over, one that stays ends in one clear error, soon."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from faulty_proxy import Cut as CutOff
from faulty_proxy import Delay, Fault, FaultyProxy, Page, Refuse, Stall, Together
from servers import AwsServer
from storage_processes import MemoryUse, create_in_parts, memory_of_transfers, process_context

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, StorageError
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.pieces import Pieces
from edl_hvd.storage.retries import Patience
from edl_hvd.storage.s3 import S3Storage

PART_BYTES = 100_000
LARGE = random.Random(1).randbytes(350_000)  # four parts
SMALL = b"small"
PATIENT = Patience(stall_s=20.0, retry_for_s=20.0)
# Where nothing comes by order nobody needs to wait for long; elsewhere a server on a busy machine takes its time.
IMPATIENT = Patience(stall_s=1.0, retry_for_s=20.0)
# Two attempts, however long the first one takes.
SOON_GIVING_UP = Patience(stall_s=20.0, retry_for_s=20.0, attempts=2)
SOON_GIVING_UP_STALLS = Patience(stall_s=0.5, retry_for_s=20.0, attempts=2)
# In the same place, for what no fault is to meet: on a busy machine the server itself stalls for longer.
BESIDE_STALLS = Patience(stall_s=20.0, retry_for_s=19.0)
# No attempt follows one that fails late.
ONCE_ONLY = Patience(stall_s=20.0, retry_for_s=0.7)
HANGS_S = 30.0  # only ends a test that would hang

ONCE: tuple[Fault, ...] = (
    Refuse(503, "SlowDown"),
    Refuse(500, "InternalError"),
    Page(),
    Page(head='ETag: "5f3b-1a"\r\n'),
    Page(body='{"status": "maintenance"}', type="application/json"),
    CutOff("request", after_bytes=2),
    CutOff("answer", after_bytes=None),
    CutOff("answer", after_bytes=2),
    Stall("request", after_bytes=2),
    Stall("answer", after_bytes=2),
    Delay(0.05),
)
LASTING: tuple[tuple[Fault, str], ...] = (
    (Refuse(503, "SlowDown"), "SlowDown: as told"),
    (Page(), "is not one of S3; a proxy or load balancer may have given it"),
    (CutOff("request", after_bytes=50_000), "(C|c)onnection"),
    (CutOff("answer", after_bytes=None), "(C|c)onnection"),
    (Stall("request", after_bytes=50_000), "(T|t)imeout|timed out"),
    (Stall("answer", after_bytes=None), "(T|t)imeout|timed out"),
)


@pytest.fixture(scope="module")
def one_proxy(aws: AwsServer) -> Iterator[FaultyProxy]:
    with pytest.MonkeyPatch.context() as monkeypatch, FaultyProxy(aws.url) as proxy:
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        for variable, value in {**aws.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(variable, value)
        yield proxy


@pytest.fixture
def proxy(one_proxy: FaultyProxy) -> FaultyProxy:
    one_proxy.forgive()
    return one_proxy


@pytest.fixture(scope="module")
def storages(aws: AwsServer, one_proxy: FaultyProxy) -> Iterator[dict[Patience, S3Storage]]:
    """One for each patience: to make a client takes longer than most of these tests."""
    bucket, patiences = aws.new_bucket(), (PATIENT, IMPATIENT, SOON_GIVING_UP, SOON_GIVING_UP_STALLS, ONCE_ONLY)
    folders = {patience: f"run-{number}" for number, patience in enumerate(patiences)}
    folders[BESIDE_STALLS] = folders[SOON_GIVING_UP_STALLS]
    storages = {
        patience: S3Storage(bucket, folder, Cut(PART_BYTES, connections=4), patience)
        for patience, folder in folders.items()
    }
    yield storages
    for storage in storages.values():
        storage.close()


@pytest.fixture
def storage_with(proxy: FaultyProxy, storages: dict[Patience, S3Storage]) -> Iterator[Callable[[Patience], S3Storage]]:
    """The empty storage of this patience."""
    taken = set()

    def take(patience: Patience) -> S3Storage:
        taken.add(patience)
        return storages[patience]

    yield take
    proxy.forgive()
    for patience in taken - {SOON_GIVING_UP_STALLS}:
        for entry in storages[patience].list():
            storages[patience].delete(entry.key)


@pytest.fixture
def storage(storage_with: Callable[[Patience], S3Storage]) -> S3Storage:
    return storage_with(PATIENT)


def read_into(storage: S3Storage, key: str) -> bytes:
    buffer = bytearray(len(LARGE))
    assert storage.read_into(key, 0, buffer) == len(LARGE)
    return bytes(buffer)


@pytest.mark.parametrize("fault", ONCE, ids=str)
def test_a_fault_met_once_by_any_request_is_got_over(
    proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage], fault: Fault
) -> None:
    storage = storage_with(IMPATIENT if isinstance(fault, Stall) else PATIENT)
    cases: list[tuple[str, str, Callable[[], object]]] = [
        ("PUT", "partNumber=2", lambda: storage.write_new("large", LARGE)),
        ("GET", "/large", lambda: read_into(storage, "large")),
        ("POST", "?uploads", lambda: storage.write("large", LARGE)),
        ("POST", "?uploadId", lambda: storage.write("large", LARGE)),
        ("PUT", "/small", lambda: storage.write_new("small", SMALL)),
        ("GET", "/large", lambda: storage.read("large")),
        ("GET", "list-type", storage.list),
        ("GET", "list-type", lambda: storage.exists("large")),
        ("DELETE", "", lambda: storage.delete("small")),
    ]
    for method, holding, act in cases[:2] if isinstance(fault, Stall) else cases:
        proxy.meet(fault, method, holding)
        act()
        assert proxy.struck.pop()[1].method == method
    assert storage.read("large") == read_into(storage, "large") == LARGE
    assert [entry.key for entry in storage.list()] == ["large"]


@pytest.mark.parametrize(("fault", "cause"), LASTING, ids=lambda value: str(value) if isinstance(value, Fault) else "")
def test_a_fault_that_stays_is_one_clear_error(
    proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage], fault: Fault, cause: str
) -> None:
    stalls = isinstance(fault, Stall)
    storage = storage_with(SOON_GIVING_UP_STALLS if stalls else SOON_GIVING_UP)
    undisturbed = storage_with(BESIDE_STALLS) if stalls else storage
    undisturbed.write("large", LARGE)
    for method, act, words in (
        ("PUT", lambda: storage.write_new("new", LARGE), "cannot create 'new'"),
        ("GET", lambda: read_into(storage, "large"), "cannot read 'large'"),
    ):
        if isinstance(fault, CutOff | Stall) and fault.what == "request" and method == "GET":
            continue  # it has no body
        proxy.meet(fault, method, times=None)
        began_s = time.monotonic()
        with pytest.raises(StorageError, match=rf"{words} in {storage.url} \(2 attempts within \d+ s\): .*{cause}"):
            act()
        assert time.monotonic() - began_s < HANGS_S
        proxy.forgive()
    assert [entry.key for entry in undisturbed.list()] == ["large"]


@pytest.mark.parametrize("page", [Page(), Page(body="<html/>"), Page(body="ok", type="text/plain")], ids=str)
def test_a_page_of_status_200_is_no_empty_listing_no_write_and_no_deletion(
    proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage], page: Page
) -> None:
    storage = storage_with(SOON_GIVING_UP)
    storage.write("key", SMALL)
    proxy.meet(page, times=None)
    acts: tuple[Callable[[], object], ...] = (
        storage.list,
        storage.place_exists,
        lambda: storage.exists("key"),
        lambda: storage.write("new", SMALL),
        lambda: storage.write_new("new", LARGE),
        lambda: storage.delete("key"),
        lambda: storage.read("key"),
    )
    for act in acts:
        with pytest.raises(StorageError) as caught:
            act()
        assert not isinstance(caught.value, ObjectMissingError)
    proxy.forgive()
    assert [entry.key for entry in storage.list()] == ["key"]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(403, "AccessDenied", "access denied"), (400, "InvalidRequest", "InvalidRequest: as told")],
)
def test_a_refusal_after_a_passing_fault_is_reported_as_what_it_is(
    proxy: FaultyProxy, storage: S3Storage, status: int, code: str, words: str
) -> None:
    proxy.meet(Refuse(503, "SlowDown"), "PUT")
    proxy.meet(Refuse(status, code), "PUT")
    with pytest.raises(StorageError, match=f"cannot create 'key' in {storage.url}: {words}"):
        storage.write_new("key", SMALL)


def test_a_conflict_after_a_passing_fault_is_tried_again(proxy: FaultyProxy, storage: S3Storage) -> None:
    proxy.meet(Refuse(503, "SlowDown"), "PUT")
    proxy.meet(Refuse(409, "ConditionalRequestConflict"), "PUT")
    storage.write_new("key", SMALL)
    assert len(proxy.struck) == 2
    assert storage.read("key") == SMALL


def test_a_failed_upload_leaves_nothing_to_be_paid_for(
    aws: AwsServer, proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage]
) -> None:
    storage = storage_with(SOON_GIVING_UP)
    proxy.meet(Refuse(), "PUT", "partNumber=3", times=None)
    with pytest.raises(StorageError, match="SlowDown"):
        storage.write_new("paid", LARGE)
    assert proxy.requests[-1].method == "DELETE"
    client = aws.client("s3")
    _, _, bucket, folder = storage.url.split("/")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket, Prefix=f"{folder}/paid")
    client.close()


def uploads(aws: AwsServer, storage: S3Storage) -> list[str]:
    """Keys of the unfinished uploads in a storage."""
    _, _, bucket, folder = storage.url.split("/")
    client = aws.client("s3")
    found = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{folder}/").get("Uploads", [])
    client.close()
    return [upload["Key"].removeprefix(f"{folder}/") for upload in found]


def test_a_failed_upload_that_could_not_be_given_up_is_given_up_before_the_next(
    aws: AwsServer, proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage]
) -> None:
    storage = storage_with(SOON_GIVING_UP)
    proxy.meet(Refuse(), "PUT", "partNumber=3", times=None)
    proxy.meet(Refuse(), "DELETE")
    with pytest.raises(StorageError, match="SlowDown"):
        storage.write_new("paid", LARGE)
    assert uploads(aws, storage) == ["paid"]
    proxy.forgive()
    storage.write_new("next", LARGE)
    assert uploads(aws, storage) == []


def test_uploads_of_writers_that_died_more_than_a_day_ago_are_given_up(aws: AwsServer, one_proxy: FaultyProxy) -> None:
    bucket, client = aws.new_bucket(), aws.client("s3")
    begun = {
        key: client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        for key in ("run/dead", "run/living", "other/dead")
    }
    for key in ("run/dead", "other/dead"):
        aws.began[begun[key]] -= timedelta(hours=25)
    aws.began[begun["run/living"]] -= timedelta(hours=23)
    storage = S3Storage(bucket, "run", Cut(PART_BYTES, connections=4), PATIENT)
    storage.write("first", LARGE)
    assert uploads(aws, storage) == ["living"], "it may be under way still"
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == ["other/dead", "run/living"]
    client.close()
    storage.close()


def test_an_upload_that_somebody_gave_up_meanwhile_is_an_error_at_once_and_writes_nothing(
    aws: AwsServer, proxy: FaultyProxy, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a lifecycle rule, or by hand: S3 answers 404 to its parts and to its end."""
    client = aws.client("s3")
    _, _, bucket, folder = storage.url.split("/")
    send_parts = S3Storage._send_parts

    def give_up(when: str) -> Callable[[S3Storage, dict[str, str], Pieces], Sequence[dict[str, Any]]]:
        def send(self: S3Storage, upload: dict[str, str], pieces: Pieces) -> Sequence[dict[str, Any]]:
            tags = send_parts(self, upload, pieces) if when == "before its end" else []
            client.abort_multipart_upload(**upload)
            return tags or send_parts(self, upload, pieces)

        return send

    for when in ("before its parts", "before its end"):
        monkeypatch.setattr(S3Storage, "_send_parts", give_up(when))
        proxy.requests.clear()
        with pytest.raises(
            StorageError, match=f"cannot create 'gone' in s3://{bucket}/{folder}: NoSuchUpload: "
        ) as told:
            storage.write_new("gone", LARGE)
        assert not isinstance(told.value, ObjectMissingError), "nobody looked for an object"
        ends = [request for request in proxy.requests if request.method == "POST" and "?uploadId" in request.path]
        assert len(ends) == (when == "before its end"), "it is not asked for twice"
        assert storage.list() == []
    monkeypatch.setattr(S3Storage, "_send_parts", send_parts)
    proxy.requests.clear()
    storage.write_new("gone", LARGE)
    assert not any(request.method == "DELETE" for request in proxy.requests), "what is gone is not given up again"
    assert storage.read("gone") == LARGE
    client.close()


def test_a_writer_leaves_the_uploads_of_others_alone(aws: AwsServer, one_proxy: FaultyProxy) -> None:
    """Every writer clears up once before its first upload in parts, while others are under way."""
    bucket = aws.new_bucket()
    first = S3Storage(bucket, "run", Cut(PART_BYTES, connections=4), PATIENT)
    second = S3Storage(bucket, "run", Cut(PART_BYTES, connections=4), PATIENT)
    send_parts = first._send_parts

    def send_while_another_writes(upload: dict[str, str], pieces: Pieces) -> Sequence[dict[str, Any]]:
        second.write("other", LARGE)
        return send_parts(upload, pieces)

    first._send_parts = send_while_another_writes
    first.write("mine", LARGE)
    assert first.read("mine") == first.read("other") == LARGE
    for storage in (first, second):
        storage.close()


def test_what_was_created_although_the_answer_was_lost_counts_as_created(
    proxy: FaultyProxy, storage: S3Storage
) -> None:
    for key, data, method, holding in (("small", SMALL, "PUT", ""), ("large", LARGE, "POST", "?uploadId")):
        proxy.meet(CutOff("answer", after_bytes=None), method, holding)
        storage.write_new(key, data)
        assert len(proxy.struck) == 1
        proxy.struck.clear()
        assert storage.read(key) == data
        proxy.meet(CutOff("answer", after_bytes=None), method, holding)
        with pytest.raises(ObjectExistsError):
            storage.write_new(key, data)  # equal contents, and yet not the same creation
        proxy.struck.clear()


def test_a_download_goes_on_where_its_connection_broke(proxy: FaultyProxy, aws: AwsServer) -> None:
    storage = S3Storage(aws.new_bucket(), "run", Cut(8_000_000, connections=2), PATIENT)
    data = LARGE * 10  # less than a part, more than the piece that is read at a time
    storage.write("large", data)
    proxy.meet(CutOff("answer", after_bytes=2_500_000), "GET")
    proxy.requests.clear()
    assert storage.read("large") == data
    first, second = (request.range or "" for request in proxy.requests)
    assert first.startswith("bytes=0-")
    assert int(second.removeprefix("bytes=").partition("-")[0]) >= 2 * 1024 * 1024
    storage.close()


def test_of_an_upload_only_the_part_that_was_cut_off_is_sent_again(proxy: FaultyProxy, storage: S3Storage) -> None:
    proxy.meet(CutOff("request", after_bytes=30_000), "PUT", "partNumber=2")
    storage.write_new("large", LARGE)
    sent = sorted(request.path.partition("partNumber=")[2][0] for request in proxy.requests if request.method == "PUT")
    assert sent == ["1", "2", "2", "3", "4"]
    assert storage.read("large") == LARGE


def test_a_part_that_leaves_slowly_is_tried_again_when_it_fails_late(
    proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage]
) -> None:
    storage = storage_with(ONCE_ONLY)
    proxy.meet(Refuse(503, "SlowDown"), "PUT", "partNumber=2")
    slow = Pieces(LARGE, between=lambda: time.sleep(1.5 * ONCE_ONLY.retry_for_s))
    storage.write_new("large", slow)
    assert len(proxy.struck) == 1
    assert storage.read("large") == LARGE


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_parts_travel_side_by_side(proxy: FaultyProxy, storage: S3Storage, method: str) -> None:
    storage.write("large", LARGE)
    proxy.forgive()
    proxy.meet(Together(4), method, times=4)
    if method == "PUT":
        storage.write("again", LARGE)
    else:
        assert read_into(storage, "large") == LARGE
    assert [request.method for request in proxy.requests].count(method) == 4, "none of them had to be tried again"


def test_slow_answers_are_waited_for(proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage]) -> None:
    storage = storage_with(IMPATIENT)
    storage.write("large", LARGE)
    proxy.forgive()
    proxy.bytes_per_s = PART_BYTES / (1.2 * IMPATIENT.stall_s)
    assert storage.read("large") == LARGE
    assert len(proxy.requests) == 4, "nothing had to be fetched twice"


def test_an_object_replaced_while_it_is_read_is_read_anew(proxy: FaultyProxy, storage: S3Storage) -> None:
    storage.write("large", LARGE)
    proxy.meet(CutOff("answer", after_bytes=50_000), "GET", "/large")
    proxy.on_strike = lambda: storage.write("large", LARGE[::-1])
    assert storage.read("large") == LARGE[::-1]


def test_one_request_in_ten_may_fail_in_any_way(
    proxy: FaultyProxy, storage_with: Callable[[Patience], S3Storage]
) -> None:
    storage, seed = storage_with(IMPATIENT), 4
    proxy.meet_at_random(0.1, [Refuse(), CutOff("request", 2), CutOff("answer", None), Stall("answer", 2)], seed)
    numbers = random.Random(seed)
    written = {}
    for number in range(12):
        key, data = f"object-{number}", numbers.randbytes(numbers.choice([10, 350_000]))
        storage.write_new(key, data)
        written[key] = data
    assert {entry.key: storage.read(entry.key) for entry in storage.list()} == written
    assert len(proxy.struck) >= 5


def test_of_many_processes_exactly_one_creates_an_object_in_parts(
    aws: AwsServer, proxy: FaultyProxy, storage: S3Storage
) -> None:
    with process_context().Pool(2) as pool:
        calls = [(storage.url, aws.environment, number, PART_BYTES) for number in range(6)]
        won = pool.starmap(create_in_parts, calls, chunksize=1)
    assert won.count(True) == 1
    assert storage.read("contested") == bytes([won.index(True)]) * (3 * PART_BYTES)


def test_a_transfer_takes_no_more_memory_than_it_was_given(aws: AwsServer) -> None:
    with process_context().Pool(1) as pool:
        url = f"s3://{aws.new_bucket()}/run"
        used: MemoryUse = pool.apply(memory_of_transfers, (url, aws.environment, 48_000_000, 12))
    assert used.connections == 3
    assert used.upload_mb < 12
    assert used.download_mb < 12


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_wrong_credentials_are_named_at_once(proxy: FaultyProxy, storage: S3Storage, code: str) -> None:
    acts: tuple[Callable[[], object], ...] = (
        lambda: storage.read("key"),
        lambda: storage.write("key", SMALL),
        lambda: storage.write_new("key", LARGE),
        storage.list,
    )
    proxy.meet(Refuse(403, code), times=None)
    for act in acts:
        proxy.requests.clear()
        with pytest.raises(StorageError, match=f"credentials in use are wrong or have expired.*{code}"):
            act()
        assert len(proxy.requests) == 1


def test_a_missing_object_is_not_looked_for_twice(proxy: FaultyProxy, storage: S3Storage) -> None:
    for act in (lambda: storage.read("missing"), lambda: read_into(storage, "missing")):
        proxy.requests.clear()
        with pytest.raises(ObjectMissingError):
            act()
        assert len({request.range for request in proxy.requests}) == len(proxy.requests)


def test_a_server_that_comes_back_is_used_again(aws: AwsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with AwsServer() as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        storage = S3Storage(server.new_bucket(), "run", patience=Patience(stall_s=2, retry_for_s=HANGS_S))
        storage.write("key", os.urandom(10))
        server.stop()
        with FaultyProxy(server.url):  # nothing but a moment in which nobody answers
            pass
        server.start()
        assert len(storage.read("key")) == 10
        storage.close()
