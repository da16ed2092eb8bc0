"""Objects in an S3 bucket, or in anything that speaks S3's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage.base import StoredObject, check_key, check_size

_PART_BYTES = 64 * 1024 * 1024
# What a dropped connection costs at most; S3 allows 10,000 parts, so an object may have 640 GB.

_CONFLICT_ATTEMPTS = 4
# S3 answers 409 while another conditional write of the key is under way, and asks for a new attempt.

_CONFIG = Config(
    connect_timeout=5,
    # A bucket's endpoint answers a connection in milliseconds or is not there.
    read_timeout=30,
    # Time without a single byte, not time per object.
    user_agent_extra="edl-hvd",
)


class S3Storage:
    """Storage under ``s3://bucket/prefix``.

    Endpoint, region, credentials, retries and the like come from boto3's own sources (``AWS_ENDPOINT_URL``,
    ``AWS_DEFAULT_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_MAX_ATTEMPTS``, profiles, instance roles). The
    endpoint must support conditional writes (``If-None-Match: *``).

    Raises:
        StorageError: boto3 cannot make a client, for instance because no region is set.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._folder = f"{prefix}/" if prefix else ""
        with self._translated("open", ""):
            self._client = boto3.session.Session().client("s3", config=_CONFIG)

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with self._translated("read", key):
            answer = self._client.get_object(**self._address(key))
            with closing(answer["Body"]) as body:
                check_size(answer["ContentLength"], limit_bytes, key, self.url)
                contents: bytes = body.read()
                return contents

    def write(self, key: str, data: bytes | memoryview) -> None:
        with self._translated("write", key):
            self._put(key, memoryview(data).cast("B"), {})

    def write_new(self, key: str, data: bytes | memoryview) -> None:
        with self._translated("create", key):
            for attempt in range(_CONFLICT_ATTEMPTS):
                try:
                    return self._put(key, memoryview(data).cast("B"), {"IfNoneMatch": "*"})
                except ClientError as error:
                    if _code(error) != "ConditionalRequestConflict" or attempt == _CONFLICT_ATTEMPTS - 1:
                        raise

    def list(self, prefix: str = "") -> list[StoredObject]:
        with self._translated("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._folder + prefix
            )
            return sorted(
                StoredObject(entry["Key"].removeprefix(self._folder), entry["Size"])
                for page in pages
                for entry in page.get("Contents", [])
            )

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            self._client.delete_object(**self._address(key))

    def exists(self, key: str) -> bool:
        # HEAD answers a missing bucket and a missing object alike; a listing tells them apart.
        with self._translated("look for", key):
            name = self._address(key)["Key"]
            page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=1)
            return any(entry["Key"] == name for entry in page.get("Contents", []))

    def close(self) -> None:
        self._client.close()

    def _address(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._folder + check_key(key)}

    def _put(self, key: str, data: memoryview, condition: dict[str, str]) -> None:
        if data.nbytes <= _PART_BYTES:
            self._client.put_object(**self._address(key), Body=bytes(data), **condition)
        else:
            self._put_in_parts(key, data, condition)

    def _put_in_parts(self, key: str, data: memoryview, condition: dict[str, str]) -> None:
        """One part after the other: the ranks of a world upload side by side already."""
        address = self._address(key)
        upload = {**address, "UploadId": self._client.create_multipart_upload(**address)["UploadId"]}
        try:
            parts = []
            for number, start in enumerate(range(0, data.nbytes, _PART_BYTES), start=1):
                body = bytes(data[start : start + _PART_BYTES])
                answer = self._client.upload_part(**upload, PartNumber=number, Body=body)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except BaseException:
            # Parts of an unfinished upload are invisible but paid for; the first error is the one to report.
            with suppress(ClientError, BotoCoreError):
                self._client.abort_multipart_upload(**upload)
            raise

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        attempt = f"cannot {verb} {key!r} in {self.url}" if key else f"cannot {verb} {self.url}"
        try:
            yield
        except (UsageError, ObjectTooLargeError):
            raise
        except ClientError as error:
            raise _translation(attempt, self._bucket, error) from error
        except NoCredentialsError as error:
            raise StorageError(
                f"{attempt}: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "a profile, or run where an instance role is attached"
            ) from error
        except NoRegionError as error:
            raise StorageError(f"{attempt}: no AWS region is set; set AWS_DEFAULT_REGION") from error
        except (BotoCoreError, ValueError) as error:
            # ValueError is how botocore rejects a malformed AWS_ENDPOINT_URL.
            raise StorageError(f"{attempt}: {error}") from error


def _code(error: ClientError) -> str:
    details: dict[str, Any] = error.response.get("Error", {})
    return str(details.get("Code", ""))


def _translation(attempt: str, bucket: str, error: ClientError) -> StorageError:
    code = _code(error)
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
    return StorageError(f"{attempt}: {code}: {message}")
