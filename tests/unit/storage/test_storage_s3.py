"""What S3's answers become, one by one; the contract suite runs against a real server."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.response import StreamingBody
from botocore.stub import ANY, Stubber

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, StorageError, UsageError
from edl_hvd.storage import StoredObject
from edl_hvd.storage.s3 import S3Storage


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Storage]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage = S3Storage("bucket", "run")
    yield storage
    storage.close()


@pytest.fixture
def answers(storage: S3Storage) -> Iterator[Stubber]:
    with Stubber(storage._requests.client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ("NoSuchKey", 404, ObjectMissingError, "no such object"),
        ("NoSuchBucket", 404, StorageError, "bucket 'bucket' does not exist; create it"),
        ("AccessDenied", 403, StorageError, "access denied.*s3:PutObject"),
        ("SlowDown", 503, StorageError, "SlowDown"),
        ("InvalidAccessKeyId", 403, StorageError, "InvalidAccessKeyId"),
    ],
)
def test_an_error_of_s3_becomes_one_of_ours_with_url_key_and_cause(
    storage: S3Storage, answers: Stubber, code: str, status: int, kind: type[Exception], words: str
) -> None:
    answers.add_client_error("get_object", code, "said the service", status)
    with pytest.raises(kind, match=rf"cannot read 'key' in s3://bucket/run: .*{words}") as caught:
        storage.read("key")
    assert isinstance(caught.value.__cause__, ClientError)


def test_a_conflicting_conditional_write_is_tried_again(storage: S3Storage, answers: Stubber) -> None:
    answers.add_client_error("put_object", "ConditionalRequestConflict", "", 409)
    expected = {"Bucket": "bucket", "Key": "run/key", "Body": ANY, "IfNoneMatch": "*", "Metadata": ANY}
    answers.add_response("put_object", {"ETag": "1"}, {**expected, "ChecksumCRC32": "g9zvtw=="})
    storage.write_new("key", b"1")
    answers.add_client_error("put_object", "ConditionalRequestConflict", "", 409)
    answers.add_client_error("put_object", "PreconditionFailed", "", 412)
    with pytest.raises(ObjectExistsError):
        storage.write_new("key", b"1")


def test_a_conflict_that_does_not_end_is_reported(storage: S3Storage, answers: Stubber) -> None:
    for _ in range(4):
        answers.add_client_error("put_object", "ConditionalRequestConflict", "", 409)
    with pytest.raises(StorageError, match="ConditionalRequestConflict"):
        storage.write_new("key", b"1")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoCredentialsError(), "no AWS credentials were found; set AWS_ACCESS_KEY_ID"),
        (EndpointConnectionError(endpoint_url="http://nowhere"), "http://nowhere"),
    ],
)
def test_what_fails_before_s3_answers_is_a_storage_error_too(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(**arguments: object) -> None:
        raise error

    monkeypatch.setattr(storage._requests.client, "get_object", fail)
    with pytest.raises(StorageError, match=words):
        storage.read("key")


def test_a_malformed_endpoint_is_reported_when_the_storage_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no-scheme")
    with pytest.raises(StorageError, match=r"cannot open s3://bucket: .*no-scheme"):
        S3Storage("bucket")


def test_a_bad_key_stays_the_callers_error(storage: S3Storage) -> None:
    with pytest.raises(UsageError, match="is not a storage key"):
        storage.read("../key")


def test_a_listing_of_several_pages_is_one(storage: S3Storage, answers: Stubber) -> None:
    page = {"Contents": [{"Key": "run/b", "Size": 2}], "IsTruncated": True, "NextContinuationToken": "more"}
    asked = {"Bucket": "bucket", "Prefix": "run/"}
    answers.add_response("list_objects_v2", page, asked)
    last = {"Contents": [{"Key": "run/a", "Size": 1}], "IsTruncated": False}
    answers.add_response("list_objects_v2", last, {**asked, "ContinuationToken": "more"})
    assert storage.list() == [StoredObject("a", 1), StoredObject("b", 2)]
    answers.add_response("list_objects_v2", {"IsTruncated": False}, asked)
    assert storage.list() == []


def test_a_server_that_sends_another_range_than_was_asked_for_is_not_believed(
    storage: S3Storage, answers: Stubber
) -> None:
    body = StreamingBody(io.BytesIO(b"12345"), 5)
    answers.add_response("get_object", {"Body": body, "ContentLength": 5, "ETag": "1", "ContentRange": "bytes 0-4/9"})
    with pytest.raises(StorageError, match="was asked for a part from byte 3 on and sent 'bytes 0-4/9'"):
        storage.read_into("key", 3, bytearray(5))


def test_a_server_that_knows_no_ranges_is_read_all_the_same(storage: S3Storage, answers: Stubber) -> None:
    body = StreamingBody(io.BytesIO(b"12345"), 5)
    answers.add_response("get_object", {"Body": body, "ContentLength": 5, "ETag": "1"})
    buffer = bytearray(3)
    assert (storage.read_into("key", 0, buffer), bytes(buffer)) == (3, b"123")
