"""Objects in an S3 bucket, or in anything that speaks S3's protocol."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from botocore.parsers import ResponseParserError

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage.base import StoredObject, check_key, check_size
from edl_hvd.storage.parts import ByteRange, ChangedError, Cut, Delivery, side_by_side
from edl_hvd.storage.pieces import Data, Pieces
from edl_hvd.storage.retries import GaveUpError, Patience
from edl_hvd.storage.s3_requests import Fetched, S3Requests, StrangeAnswerError, code_of

_CONFLICT_ATTEMPTS = 4
# S3 answers 409 while another conditional write of the key is under way, and asks for a new attempt.

_READ_ATTEMPTS = 4
# One is lost when somebody replaces the object just then.

_ABANDONED_AFTER = timedelta(days=1)
# No upload of a share takes as long: its writer is dead.

_WRITER = "edl-hvd-writer"
# Metadata that tells an object of ours from that of another writer, when the answer to our own request was lost.


class S3Storage:
    """Storage under ``s3://bucket/prefix``.

    Endpoint, region, credentials and the like come from boto3's own sources (``AWS_ENDPOINT_URL``,
    ``AWS_DEFAULT_REGION``, ``AWS_ACCESS_KEY_ID``, profiles, instance roles). The endpoint must support conditional
    writes (``If-None-Match: *``).

    Args:
        bucket, prefix: Where the objects are.
        cut: How large objects are taken apart.
        patience: How long a request is tried.

    Raises:
        StorageError: boto3 cannot make a client, for instance because no region is set.
    """

    def __init__(self, bucket: str, prefix: str = "", cut: Cut | None = None, patience: Patience | None = None) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._folder = f"{prefix}/" if prefix else ""
        self._cut = cut or Cut()
        self._unfinished: list[dict[str, str]] = []
        self._swept = False
        with self._translated("open", ""):
            self._requests = S3Requests(self._cut.connections, patience or Patience())

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with self._translated("read", key):
            address = self._address(key)
            for attempt in range(_READ_ATTEMPTS):
                try:
                    return self._read(key, address, limit_bytes)
                except ChangedError:
                    if attempt == _READ_ATTEMPTS - 1:
                        raise
            raise AssertionError("the last attempt returns or raises")

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        with self._translated("read", key):
            address = self._address(key)
            view = memoryview(buffer).cast("B")
            if not view.nbytes:
                self._requests.call("head_object", address)
            for attempt in range(_READ_ATTEMPTS):
                try:
                    return self._fetch_all(address, Delivery(view, start), start, start + view.nbytes)
                except ChangedError:
                    if attempt == _READ_ATTEMPTS - 1:
                        raise
            raise AssertionError("the last attempt returns or raises")

    def write(self, key: str, data: Data) -> None:
        with self._translated("write", key):
            self._put(self._address(key), Pieces.of(data), {})

    def write_new(self, key: str, data: Data) -> None:
        with self._translated("create", key):
            for attempt in range(_CONFLICT_ATTEMPTS):
                try:
                    return self._put(self._address(key), Pieces.of(data), {"IfNoneMatch": "*"})
                except ClientError as error:
                    if code_of(error) != "ConditionalRequestConflict" or attempt == _CONFLICT_ATTEMPTS - 1:
                        raise

    def list(self, prefix: str = "") -> list[StoredObject]:
        with self._translated("list", prefix):
            words = {"Bucket": self._bucket, "Prefix": self._folder + prefix}
            found = []
            while True:
                page = self._requests.call("list_objects_v2", words)
                found += [
                    StoredObject(entry["Key"].removeprefix(self._folder), entry["Size"], _written_s(entry))
                    for entry in page.get("Contents", [])
                ]
                if not page.get("IsTruncated"):
                    return sorted(found)
                words["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            self._requests.call("delete_object", self._address(key))

    def exists(self, key: str) -> bool:
        # HEAD answers a missing bucket and a missing object alike; a listing tells them apart.
        with self._translated("look for", key):
            name = self._address(key)["Key"]
            page = self._requests.call("list_objects_v2", {"Bucket": self._bucket, "Prefix": name, "MaxKeys": 1})
            return any(entry["Key"] == name for entry in page.get("Contents", []))

    def place_exists(self) -> bool:
        with self._translated("look for", ""):
            try:
                self._requests.call("list_objects_v2", {"Bucket": self._bucket, "Prefix": self._folder, "MaxKeys": 1})
            except ClientError as error:
                if code_of(error) != "NoSuchBucket":
                    raise
                return False
            return True

    def close(self) -> None:
        self._requests.close()

    def _address(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._folder + check_key(key)}

    def _read(self, key: str, address: dict[str, str], limit_bytes: int | None) -> bytes:
        """The first part tells how long the object is; the others are then fetched side by side."""
        delivery = Delivery(None, 0)
        memory = io.BytesIO()

        def begin(size_bytes: int) -> None:
            nonlocal memory
            check_size(size_bytes, limit_bytes, key, self.url)
            if delivery.size_bytes != size_bytes:
                memory = io.BytesIO(bytes(size_bytes))
                delivery.view = memory.getbuffer()

        with delivery:
            first = self._requests.fetch(address, 0, self._cut.part_bytes, begin, delivery)
            if delivery.size_bytes > self._cut.part_bytes:
                self._fetch_all(address, delivery, self._cut.part_bytes, delivery.size_bytes, first.version)
        # What a BytesIO holds it also hands out, as long as nobody has a view of it, without a copy.
        delivery.view.release()
        return memory.getvalue()

    def _fetch_all(self, address: dict[str, str], delivery: Delivery, start: int, stop: int, version: str = "") -> int:
        """Fetch a range, part by part; returns how much of it the object has."""
        fetched: list[Fetched] = []

        def fetch(part: ByteRange, stopped: threading.Event) -> None:
            fetched.append(self._requests.fetch(address, part.start, part.stop, lambda size: None, delivery, stopped))

        with delivery:
            parts = self._cut.parts(start, stop)
            if len(parts) == 1:
                fetch(parts[0], threading.Event())
            else:
                side_by_side(fetch, parts, self._cut.connections)
        if len({part.version for part in fetched if part.version} | ({version} if version else set())) > 1:
            raise ChangedError
        return sum(part.count_bytes for part in fetched)

    def _put(self, address: dict[str, str], pieces: Pieces, condition: dict[str, str]) -> None:
        writer = uuid.uuid4().hex

        def happened() -> bool:
            return bool(self._requests.call("head_object", address)["Metadata"].get(_WRITER) == writer)

        named: dict[str, Any] = {**address, "Metadata": {_WRITER: writer}}
        if pieces.size_bytes <= self._cut.part_bytes:
            words = {**named, **condition}
            self._requests.send("put_object", words, pieces, 0, pieces.size_bytes, happened=happened)
            return
        self._clear_up()
        begun = self._requests.call("create_multipart_upload", {**named, **self._requests.upload_words})
        upload = {**address, "UploadId": begun["UploadId"]}
        try:
            words = {**upload, "MultipartUpload": {"Parts": self._send_parts(upload, pieces)}, **condition}
            self._requests.call("complete_multipart_upload", words, happened=happened)
        except BaseException:
            # Parts of an unfinished upload are invisible but paid for; the first error is the one to report.
            if self._requests.last_word("abort_multipart_upload", upload) is None:
                self._unfinished.append(upload)
            raise

    def _clear_up(self) -> None:
        """Give up unfinished uploads before the next one: those of this storage, and once those of dead writers."""
        while self._unfinished:
            upload = self._unfinished.pop()
            if self._requests.last_word("abort_multipart_upload", upload) is None:
                self._unfinished.append(upload)
                return  # it does not answer yet
        if self._swept or not self._folder:
            return  # of a whole bucket, others may have a part
        self._swept = True
        words = {"Bucket": self._bucket, "Prefix": self._folder}
        page = self._requests.last_word("list_multipart_uploads", words) or {}
        # The bucket's clock on both sides. One that may not be listed, or aborted, is left to the lifecycle rule.
        date = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        for begun in page.get("Uploads", []) if date else []:
            if parsedate_to_datetime(date) - begun["Initiated"] > _ABANDONED_AFTER:
                words = {"Bucket": self._bucket, "Key": begun["Key"], "UploadId": begun["UploadId"]}
                self._requests.last_word("abort_multipart_upload", words)

    def _send_parts(self, upload: dict[str, str], pieces: Pieces) -> Sequence[dict[str, Any]]:
        """Send all parts, several at once; returns what completes the upload."""
        tags: dict[int, dict[str, str]] = {}

        def send(part: ByteRange, stopped: threading.Event) -> None:
            words = {**upload, "PartNumber": part.number}
            tags[part.number] = self._requests.send("upload_part", words, pieces, part.start, part.stop, stopped)

        side_by_side(send, self._cut.parts(0, pieces.size_bytes), self._cut.connections)
        return [{"PartNumber": number, **tag} for number, tag in sorted(tags.items())]

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        attempt = f"cannot {verb} {key!r} in {self.url}" if key else f"cannot {verb} {self.url}"
        try:
            yield
        except (UsageError, ObjectTooLargeError):
            raise
        except GaveUpError as error:
            raise _translation(f"{attempt} ({error})", self._bucket, error.error) from error.error
        except (ClientError, BotoCoreError, ResponseParserError, StrangeAnswerError, ValueError) as error:
            # ValueError is how botocore rejects a malformed AWS_ENDPOINT_URL.
            raise _translation(attempt, self._bucket, error) from error
        except ChangedError as error:
            raise StorageError(f"{attempt}: it was replaced {_READ_ATTEMPTS} times while it was read") from error


def _written_s(entry: dict[str, Any]) -> float | None:
    return entry["LastModified"].timestamp() if "LastModified" in entry else None


def _translation(attempt: str, bucket: str, error: Exception) -> StorageError:
    if isinstance(error, NoCredentialsError):
        return StorageError(
            f"{attempt}: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "a profile, or run where an instance role is attached"
        )
    if isinstance(error, NoRegionError):
        return StorageError(f"{attempt}: no AWS region is set; set AWS_DEFAULT_REGION")
    if not isinstance(error, ClientError):
        return StorageError(f"{attempt}: {error}")
    code = code_of(error)
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    if code in ("NoSuchKey", "404"):
        return ObjectMissingError(f"{attempt}: no such object")
    if code in ("PreconditionFailed", "412"):
        return ObjectExistsError(f"{attempt}: it exists already")
    if code == "NoSuchBucket":
        return StorageError(f"{attempt}: bucket {bucket!r} does not exist; create it or correct the URL")
    if code in ("AccessDenied", "403"):
        needed = "s3:GetObject, s3:PutObject, s3:DeleteObject on its objects and s3:ListBucket on the bucket"
        return StorageError(f"{attempt}: access denied; the credentials in use need {needed} ({message})")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"):
        return StorageError(
            f"{attempt}: the credentials in use are wrong or have expired; correct AWS_ACCESS_KEY_ID, "
            f"AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile ({code}: {message})"
        )
    return StorageError(f"{attempt}: {code}: {message}")
