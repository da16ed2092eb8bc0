"""Requests to S3, each made until it is answered or given up: small ones, a part sent, a part fetched."""

from __future__ import annotations

import base64
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import boto3
import botocore.session
from botocore.awsrequest import AWSPreparedRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError, SSLError
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.parsers import ResponseParserError

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.storage.parts import CHUNK_BYTES, ChangedError
from edl_hvd.storage.pieces import Pieces
from edl_hvd.storage.retries import Attempts, GaveUpError, Patience

_CRC32: Callable[[memoryview, int], int] = zlib.crc32
with suppress(ImportError):
    from isal import isal_zlib  # the same, three to five times as fast

    _CRC32 = isal_zlib.crc32

_CONNECT_TIMEOUT_S = 5.0
# A bucket's endpoint answers a connection in milliseconds or is not there.

_LAST_WORD_S = 3.0
# For giving an upload up, once it has failed: if the storage does not even take that, others clear up.

_SEND_BYTES = 1024 * 1024
# At a time: each is a turn of Python. It has to leave within the time that a connection may stall.

_PROOF = {
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "create_multipart_upload": "UploadId",
    "complete_multipart_upload": "ETag",
    "put_object": "ETag",
    "upload_part": "ETag",
    "head_object": "ETag",
    "get_object": "ETag",
}
# What S3 answers to each with, always. The page of a proxy that is being repaired has status 200 and none of it.

_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {"RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "XAmzContentChecksumMismatch"}


class _CutShortError(Exception):
    """The answer ended before its end."""


class StrangeAnswerError(Exception):
    """An answer of status 200 that does not come from S3."""


@dataclass(frozen=True)
class Fetched:
    """What came of fetching a range.

    Attributes:
        version: The entity tag of the object that it belongs to; two contents have two.
        count_bytes: How much of the range the object has.
    """

    version: str
    count_bytes: int


class S3Requests:
    """A boto3 client whose requests are tried again by the rules of ``patience``.

    boto3 repeats requests, but not those whose answer breaks off or stalls in its body, and without a bound in time;
    so it is told to make one attempt, and the repeating is done here.

    Args:
        connections: Most connections that are kept for the next request.
        patience: How long a request is tried; attempts are those of ``AWS_MAX_ATTEMPTS`` if it is set.
        clock: Measures and waits between attempts.
    """

    def __init__(self, connections: int, patience: Patience, clock: Clock = SYSTEM_CLOCK) -> None:
        settings = botocore.session.get_session()
        attempts = settings.get_config_variable("max_attempts")
        self._patience = patience if attempts is None else replace(patience, attempts=attempts)
        self._clock = clock
        self._config = Config(
            connect_timeout=min(_CONNECT_TIMEOUT_S, patience.stall_s),
            read_timeout=patience.stall_s,
            max_pool_connections=connections,
            retries={"mode": "standard", "total_max_attempts": 1},
            # Of a part of an object S3 knows no checksum. Whoever reads large objects compares checksums of his own.
            response_checksum_validation="when_required",
            # A checksum goes with every body; to compute a second, cryptographic one would take most of the time.
            s3={"payload_signing_enabled": False},
            # boto3's own is put together anew for each request, which takes a tenth of its time.
            user_agent=f"edl-hvd Boto3/{boto3.__version__}",
        )
        self._making = threading.Lock()  # a session makes clients for one thread at a time
        self._session = boto3.session.Session(botocore_session=settings)
        self.client = self._session.client("s3", config=self._config)
        self.client.meta.events.register("before-send.s3", _send_body_at_once)
        self._with_checksums = self.client.meta.config.request_checksum_calculation != "when_required"

    def call(
        self,
        operation: str,
        words: Mapping[str, Any],
        attempts: Attempts | None = None,
        happened: Callable[[], bool] | None = None,
    ) -> Any:
        """The answer to a request, by the name of the client's method.

        Args:
            operation: For instance ``delete_object``.
            words: The request's arguments.
            attempts: How it is tried; ``None``: by the patience.
            happened: Asked when an attempt was refused that was not the first: maybe because an earlier one was
                carried out and its answer lost.
        """
        act = getattr(self.client, operation)
        attempts = attempts or self._attempts(None)
        body = words.get("Body")

        def attempt() -> Any:
            if body:
                body.seek(0)
            answer = act(**words)
            check_answer(operation, answer)
            return answer

        try:
            return attempts.make(attempt)
        except ClientError:
            if attempts.made > 1 and happened and self._has(happened):
                return {}
            raise

    def _has(self, happened: Callable[[], bool]) -> bool:
        """Whether an earlier attempt was carried out, as far as can be told; where it cannot, the refusal stands."""
        try:
            return happened()
        except (ClientError, BotoCoreError, ResponseParserError, StrangeAnswerError, GaveUpError):
            return False

    def send(
        self,
        operation: str,
        words: Mapping[str, Any],
        pieces: Pieces,
        start: int,
        stop: int,
        stopped: threading.Event | None = None,
        happened: Callable[[], bool] | None = None,
    ) -> dict[str, str]:
        """Send a request with these bytes as its body; returns the tags by which S3 knows them.

        As long as more of them leave than in any attempt before, time does not count against it.
        """
        attempts = self._attempts(stopped)
        checksum = {}
        if self._with_checksums:
            checksum["ChecksumCRC32"] = _checksum(pieces, start, stop)
        body = _Body(pieces, start, stop, stopped, attempts.progress) if stop > start else b""
        answer = self.call(operation, {**words, **checksum, "Body": body}, attempts, happened)
        return {"ETag": answer.get("ETag", ""), **checksum}

    @property
    def upload_words(self) -> dict[str, str]:
        """What the beginning of an upload in parts says about the parts."""
        return {"ChecksumAlgorithm": "CRC32"} if self._with_checksums else {}

    def fetch(
        self,
        address: dict[str, str],
        start: int,
        stop: int,
        begin: Callable[[int], None],
        deliver: Callable[[int, bytes], None],
        stopped: threading.Event | None = None,
    ) -> Fetched:
        """Fetch bytes ``start`` up to ``stop``, or as many of them as the object has.

        After a broken connection the next attempt goes on where the last one ended.

        Args:
            address: Bucket and key.
            begin: Called with the length of the whole object before anything is delivered, maybe several times.
            deliver: Called with a position in the object and bytes from there on.
            stopped: When set, nothing more is tried.

        Raises:
            ChangedError: The object was replaced meanwhile.
        """
        attempts = self._attempts(stopped)
        position, version = start, ""

        def attempt() -> None:
            nonlocal position, version
            words = {**address, "Range": f"bytes={position}-{stop - 1}"} | ({"IfMatch": version} if version else {})
            try:
                answer = self.client.get_object(**words)
                check_answer("get_object", answer)
            except ClientError as error:
                if code_of(error) == "InvalidRange" and not version:
                    return begin(start)
                if code_of(error) in ("PreconditionFailed", "412"):
                    raise ChangedError from error
                raise
            with closing(answer["Body"]) as body:
                if not version:
                    begin(_whole_size(answer, position))
                version = answer.get("ETag", "")
                end = min(stop, position + answer["ContentLength"])
                while position < end:
                    if stopped and stopped.is_set():
                        return
                    chunk = body.read(min(CHUNK_BYTES, end - position))
                    if not chunk:
                        raise _CutShortError(f"the answer ended {end - position} bytes before its end")
                    deliver(position, chunk)
                    position += len(chunk)
                    attempts.progress()

        attempts.make(attempt)
        return Fetched(version, position - start)

    def last_word(self, operation: str, words: Mapping[str, Any]) -> Any:
        """One short attempt at a request whose outcome changes nothing any more; ``None`` if it fails.

        An upload that is to be given up and is gone already counts as given up.
        """
        config = self._config.merge(Config(connect_timeout=_LAST_WORD_S, read_timeout=_LAST_WORD_S))
        try:
            with self._making:
                client = self._session.client("s3", config=config)
            with closing(client):
                answer = getattr(client, operation)(**words)
                check_answer(operation, answer)
                return answer
        except ClientError as error:
            return {} if code_of(error) == "NoSuchUpload" else None
        except (BotoCoreError, ResponseParserError, StrangeAnswerError):
            return None

    def close(self) -> None:
        self.client.close()

    def _attempts(self, stopped: threading.Event | None) -> Attempts:
        return Attempts(self._patience, passes, self._clock, stopped)


def _send_body_at_once(request: AWSPreparedRequest, **_: object) -> None:
    """Take away the question whether the server wants the body, which botocore asks about one that is read.

    It waits a second for the answer where none comes, and for ever where the connection breaks within one
    (``AWSConnection._consume_headers``, botocore 1.44.5). Some proxies swallow the answer. The header is not signed.
    """
    request.headers.pop("Expect", None)


def passes(error: Exception) -> bool:
    """Whether a request that failed so may succeed at another attempt."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _PASSING_STATUS or code_of(error) in _PASSING_CODES
    if isinstance(error, SSLError):
        return "certificate" not in str(error).lower()
    # What a parser cannot read is the page of a proxy or half an answer.
    return isinstance(
        error,
        (
            HTTPClientError, NoConnectionError, IncompleteReadError, ResponseParserError, _CutShortError,
            StrangeAnswerError,
        ),
    )  # fmt: skip


def check_answer(operation: str, answer: Mapping[str, Any]) -> None:
    """Refuse an answer of status 200 that S3 has not given, such as the page of a proxy that is being repaired.

    To a listing such a page would mean that there are no objects, to a write that the object is there.

    Raises:
        StrangeAnswerError: It lacks what S3 always says, or is a page.
    """
    told = answer.get("ResponseMetadata", {})
    headers = told.get("HTTPHeaders", {})
    kind, length = headers.get("content-type", ""), headers.get("content-length", "")
    has_body = told.get("HTTPStatusCode") != 204 and length != "0"
    is_page = has_body and kind.lower().startswith("text/html")
    proof = _PROOF.get(operation)
    # Without a proof: deletions, which S3 answers without a body.
    is_missing = has_body and bool(told) if proof is None else proof not in answer
    if operation == "list_objects_v2" and answer.get("IsTruncated") and not answer.get("NextContinuationToken"):
        is_missing, proof = True, "NextContinuationToken"
    if is_page or is_missing:
        lacks = f" without {proof!r}" if is_missing and proof else ""
        if "Body" in answer:
            answer["Body"].close()
        raise StrangeAnswerError(
            f"the answer, of status {told.get('HTTPStatusCode')} and type {kind or 'unknown'!r}{lacks}, is not one of "
            "S3; a proxy or load balancer may have given it: see what AWS_ENDPOINT_URL leads to"
        )


def code_of(error: ClientError) -> str:
    """S3's name for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _whole_size(answer: dict[str, Any], position: int) -> int:
    """How long the object is of which an answer brings a part."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange", ""))
    if found and int(found[1]) == position:
        return int(found[2])
    if found is None and position == 0:
        return int(answer["ContentLength"])  # a server that sends the whole although it was asked for a part
    raise ValueError(f"the server was asked for a part from byte {position} on and sent {answer.get('ContentRange')!r}")


def _checksum(pieces: Pieces, start: int, stop: int) -> str:
    value = 0
    for view in pieces.views(start, stop, CHUNK_BYTES):
        value = _CRC32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class _Body:
    """A part of an object as boto3 takes it: something to be read, here without a copy.

    ``read`` hands out views of ``_SEND_BYTES``, also where less was asked for: the HTTP library would ask for 16 KiB at
    a time, and sends whatever it gets.
    """

    def __init__(
        self, pieces: Pieces, start: int, stop: int, stopped: threading.Event | None, progress: Callable[[], None]
    ) -> None:
        self._pieces, self._start, self._stop, self._stopped = pieces, start, stop, stopped
        self._position = self._furthest = start
        self._progress = progress

    def __len__(self) -> int:
        return self._stop - self._start

    def read(self, size: int = -1) -> memoryview | bytes:
        if self._stopped and self._stopped.is_set():
            raise InterruptedError("the upload was given up")
        view = next(self._pieces.views(self._position, self._stop, _SEND_BYTES), b"")
        if self._position > self._furthest:  # what came before has left
            self._furthest = self._position
            self._progress()
        self._position += len(view)
        return view

    def tell(self) -> int:
        return self._position - self._start

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (self._start, self._position, self._stop)[whence]
        self._position = base + offset
        return self.tell()
