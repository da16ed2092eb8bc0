"""Objects in Google Cloud Storage and Azure Blob Storage, through obstore."""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from edl_hvd.errors import ObjectExistsError, ObjectMissingError, ObjectTooLargeError, StorageError, UsageError
from edl_hvd.storage.base import RESERVED_FOLDER, StoredObject, check_key, check_size
from edl_hvd.storage.parts import CHUNK_BYTES, MEMORY_MB, ByteRange, ChangedError, Cut, Delivery, side_by_side
from edl_hvd.storage.pieces import Data, Pieces
from edl_hvd.storage.retries import Patience

_CONNECT_TIMEOUT_S = 5.0
# A service's endpoint answers a connection in milliseconds or is not there.

_STALL_S = 45.0
# obstore counts the sending of a part, too: 8 MiB take as long at 1.5 Mbit/s.

_WHOLE_S = 300.0
# For one request, whose answer has 32 MiB at most; obstore's 30 s would end a slow one.

_READ_ATTEMPTS = 4
# One is lost when somebody replaces the object just then.

_ABANDONED_AFTER = timedelta(days=1)
# No upload of a share takes as long: its writer is dead.

_COPY_WITHIN_S, _COPY_PAUSE_S = 60.0, 0.2
# A copy within one account changes a table; Azure may answer before it has done so.

_WRITER = "edlhvdwriter"
# Metadata that tells an object of ours from that of another writer, when the answer to our own request was lost.
# Azure takes no hyphen in it, and some servers no underscore.

_PAGE_ENTRIES = 1000
# A listing that ends with a full page of Google's or Azure's, or is empty, may have ended too soon.

_NO_RANGE = re.compile(r"416|range", re.IGNORECASE)
# What obstore says of a part that begins where the object ends.

Result = TypeVar("Result")


@dataclass(frozen=True)
class CloudService:
    """What distinguishes one cloud's storage from another's.

    Attributes:
        place: Word for what holds the objects.
        refused: Characters that no key may have, because the service changes them.
        no_credentials: What to do where no credentials are found.
        permissions: What the credentials have to permit.
    """

    place: str
    refused: str
    no_credentials: str
    permissions: str


GOOGLE = CloudService(
    place="bucket",
    refused="",
    no_credentials="set GOOGLE_APPLICATION_CREDENTIALS, run 'gcloud auth application-default login', or run where a "
    "service account is attached",
    permissions="storage.objects.create, get, list and delete",
)
AZURE = CloudService(
    place="container",
    refused="\\",
    no_credentials="set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN), or run "
    "where a managed identity is attached",
    permissions="the role Storage Blob Data Contributor",
)


class CloudStorage:
    """Storage in a bucket of Google's or a container of Azure's.

    Objects of more than one part are sent to ``.partial``, several parts at once, and then copied to their name by the
    service, on the condition that there is no such object: neither service takes a condition for the parts themselves.

    Args:
        store: Store of obstore's, whose prefix is the URL's folder.
        url: Address for messages.
        service: Which cloud it is.
        memory_mb: Memory in megabytes that one transfer may take beside the data itself.
        cut: How large objects are taken apart; by ``memory_mb`` if left out.
    """

    def __init__(
        self, store: Any, url: str, service: CloudService, memory_mb: float = MEMORY_MB, cut: Cut | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._store = store
        self._service = service
        self._cut = cut or Cut.within(memory_mb)
        self._memory_bytes = int(memory_mb * 1e6)
        self._place_seen = self._swept = False

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        with self._translated("read", key):
            return _unless_changed(lambda: self._read(self._checked(key), limit_bytes))

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer).cast("B")
        with self._translated("read", key):
            return _unless_changed(lambda: self._read_into(self._checked(key), start, view))

    def write(self, key: str, data: Data) -> None:
        with self._translated("write", key):
            self._put(self._checked(key), Pieces.of(data), {})

    def write_new(self, key: str, data: Data) -> None:
        with self._translated("create", key):
            checked, pieces, writer = self._checked(key), Pieces.of(data), uuid.uuid4().hex
            try:
                if pieces.size_bytes <= self._cut.part_bytes:
                    self._put(checked, pieces, {_WRITER: writer}, mode="create")
                else:
                    self._create_from_copy(checked, pieces, writer)
            except AlreadyExistsError:
                if not self._is_written_by(checked, writer):  # the answer to our first attempt may have been lost
                    raise

    def list(self, prefix: str = "") -> list[StoredObject]:
        with self._translated("list", prefix):
            found = [
                StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp())
                for entry in self._entries(prefix.rpartition("/")[0])
            ]
            if len(found) % _PAGE_ENTRIES == 0:
                self._check_service()
            self._place_seen = True
            reserved = f"{RESERVED_FOLDER}/"
            return sorted(
                entry for entry in found if entry.key.startswith(prefix) and not entry.key.startswith(reserved)
            )

    def delete(self, key: str) -> None:
        with self._translated("delete", key), suppress(FileNotFoundError):
            obstore.delete(self._store, self._checked(key))

    def exists(self, key: str) -> bool:
        with self._translated("look for", key):
            checked = self._checked(key)
            try:
                obstore.head(self._store, checked)
            except FileNotFoundError:
                self._check_place()
                return False
            return True

    def place_exists(self) -> bool:
        with self._translated("look for", ""):
            return self._has_place()

    def close(self) -> None:
        """obstore closes connections that are idle by itself."""

    def _checked(self, key: str) -> str:
        check_key(key)
        if any(character in key for character in self._service.refused):
            raise UsageError(
                f"{key!r} is not a storage key in {self.url}: the service would write another character for "
                f"{self._service.refused!r}; expected a name without it"
            )
        return key

    def _read(self, key: str, limit_bytes: int | None) -> bytes:
        """The first part tells how long the object is; the others are then fetched side by side."""
        try:
            first = obstore.get(self._store, key, options={"range": (0, self._cut.part_bytes)})
        except BaseError as error:
            if not _NO_RANGE.search(short_words(error)) or obstore.head(self._store, key)["size"]:
                raise
            return b""  # of an empty object there is no range
        size_bytes = first.meta["size"]
        check_size(size_bytes, limit_bytes, key, self.url)
        memory = io.BytesIO(bytes(size_bytes))
        view = memory.getbuffer()
        delivery = Delivery(view, 0)
        with delivery:
            _deliver(first, delivery, threading.Event())
            rest = min(size_bytes, self._cut.part_bytes)
            self._fetch_all(key, delivery, self._cut.parts(rest, size_bytes), first.meta["e_tag"])
        del delivery
        view.release()
        # What a BytesIO holds it also hands out, as long as nobody has a view of it, without a copy.
        return memory.getvalue()

    def _read_into(self, key: str, start: int, view: memoryview) -> int:
        delivery = Delivery(view, start)
        if 0 < view.nbytes <= self._cut.part_bytes:
            return self._read_part(key, start, view.nbytes, delivery)
        met = obstore.head(self._store, key)
        stop = min(start + view.nbytes, met["size"])
        with delivery:
            self._fetch_all(key, delivery, self._cut.parts(start, stop) if stop > start else [], met["e_tag"])
        return max(0, stop - start)

    def _read_part(self, key: str, start: int, count: int, delivery: Delivery) -> int:
        try:
            answer = obstore.get(self._store, key, options={"range": (start, start + count)})
        except BaseError as error:
            if not _NO_RANGE.search(short_words(error)) or obstore.head(self._store, key)["size"] > start:
                raise
            return 0
        with delivery:
            _deliver(answer, delivery, threading.Event())
        return int(answer.range[1]) - start

    def _fetch_all(self, key: str, delivery: Delivery, parts: Sequence[ByteRange], version: str | None) -> None:
        def fetch(part: ByteRange, stopped: threading.Event) -> None:
            answer = obstore.get(
                self._store, key, options={"range": (part.start, part.stop), "if_match": version or None}
            )
            if version and answer.meta["e_tag"] != version:
                raise ChangedError
            _deliver(answer, delivery, stopped)

        try:
            if len(parts) == 1:
                fetch(parts[0], threading.Event())
            else:
                side_by_side(fetch, parts, self._cut.connections)
        except PreconditionError as error:
            raise ChangedError from error

    def _put(
        self, key: str, pieces: Pieces, attributes: dict[str, str], mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if pieces.size_bytes <= self._cut.part_bytes:
            _check_tag(
                obstore.put(self._store, key, pieces.joined(), mode=mode, attributes=attributes, use_multipart=False)
            )
            return
        part = self._cut.parts(0, pieces.size_bytes)[0]
        length = min(part.stop - part.start, max(self._cut.part_bytes, self._memory_bytes // 4))
        length = max(length, -(-pieces.size_bytes // 9_000))
        result = obstore.put(
            self._store, key, pieces.views(0, pieces.size_bytes, CHUNK_BYTES), attributes=attributes,
            use_multipart=True, chunk_size=length,
            max_concurrency=max(1, min(self._cut.connections, self._memory_bytes // length - 1)),
        )  # fmt: skip
        _check_tag(result)

    def _create_from_copy(self, key: str, pieces: Pieces, writer: str) -> None:
        self._clear_up()
        partial = f"{RESERVED_FOLDER}/{uuid.uuid4().hex}"
        try:
            self._put(partial, pieces, {_WRITER: writer})
            obstore.copy(self._store, partial, key, overwrite=False)
            self._await_copy(key, pieces.size_bytes, writer)
        finally:
            # What cannot be removed now is removed by a later job.
            with suppress(BaseError, OSError):
                obstore.delete(self._store, partial)

    def _await_copy(self, key: str, size_bytes: int, writer: str) -> None:
        """Wait until the copy is whole; one that does not become so is taken away."""
        give_up_s = time.monotonic() + _COPY_WITHIN_S
        while obstore.head(self._store, key)["size"] != size_bytes:
            if time.monotonic() > give_up_s:
                if self._is_written_by(key, writer):
                    obstore.delete(self._store, key)
                raise StorageError(f"cannot create {key!r} in {self.url}: its copy was not done in {_COPY_WITHIN_S} s")
            time.sleep(_COPY_PAUSE_S)

    def _is_written_by(self, key: str, writer: str) -> bool:
        """Whether an object is ours, as far as can be told; where it cannot, the refusal stands."""
        with suppress(BaseError, OSError):
            return bool(obstore.get(self._store, key, options={"head": True}).attributes.get(_WRITER) == writer)
        return False

    def _clear_up(self) -> None:
        """Remove, once, what dead writers have left in ``.partial``."""
        if self._swept:
            return
        self._swept = True
        with suppress(BaseError, OSError):
            before = datetime.now(timezone.utc) - _ABANDONED_AFTER
            for entry in self._entries(RESERVED_FOLDER):
                if entry["last_modified"] < before:
                    obstore.delete(self._store, entry["path"])

    def _entries(self, folder: str) -> Iterator[Any]:
        return itertools.chain.from_iterable(obstore.list(self._store, folder or None))

    def _has_place(self) -> bool:
        try:
            next(iter(obstore.list(self._store, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            if re.search(r"NoSuchBucket|ContainerNotFound", str(error)):
                return False
            raise
        self._place_seen = True
        return True

    def _check_service(self) -> None:
        """Raise unless the service answers: the page of a proxy in its place is taken for a listing without entries.

        Raises:
            StorageError: Something says of an object that cannot be there that it is.
        """
        try:
            obstore.head(self._store, f"{RESERVED_FOLDER}/{uuid.uuid4().hex}")
        except FileNotFoundError:
            return
        raise StorageError(_STRANGE)

    def _check_place(self) -> None:
        """Both services answer a missing bucket and a missing object alike; a listing tells them apart."""
        if not self._place_seen and not self._has_place():
            raise StorageError(f"the {self._service.place} does not exist; create it or correct the URL")

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        attempt = f"cannot {verb} {key!r} in {self.url}" if key else f"cannot {verb} {self.url}"
        _check_process(attempt)
        try:
            yield
        except (UsageError, ObjectTooLargeError):
            raise
        except StorageError as error:
            if str(error).startswith("cannot "):
                raise
            raise StorageError(f"{attempt}: {error}") from error
        except FileNotFoundError as error:
            with self._translated(verb, key):
                self._check_place()
            raise ObjectMissingError(f"{attempt}: no such object") from error
        except AlreadyExistsError as error:
            raise ObjectExistsError(f"{attempt}: it exists already") from error
        except ChangedError as error:
            raise StorageError(f"{attempt}: it was replaced {_READ_ATTEMPTS} times while it was read") from error
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(f"{attempt}: {self._words(error)}") from error

    def _words(self, error: Exception) -> str:
        words = short_words(error)
        service = self._service
        if re.search(r"NoSuchBucket|ContainerNotFound", str(error)):
            return f"the {service.place} does not exist; create it or correct the URL"
        if re.search(r"token request|metadata/identity|Missing(?:Account|Credential)", str(error)):
            return f"no credentials were found; {service.no_credentials} ({words})"
        if isinstance(error, UnauthenticatedError) or " 401 Unauthorized" in words:
            return f"the credentials in use are wrong or have expired; {service.no_credentials} ({words})"
        if isinstance(error, PermissionDeniedError) or " 403 Forbidden" in words:
            return f"access denied; the credentials in use need {service.permissions} ({words})"
        return words


def client_options(patience: Patience, allow_http: bool) -> dict[str, Any]:
    """How a client of obstore's waits."""
    return {
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, patience.stall_s)),
        "read_timeout": timedelta(seconds=max(_STALL_S, patience.stall_s)),
        "timeout": timedelta(seconds=_WHOLE_S),
        "allow_http": allow_http,
        "user_agent": f"edl-hvd obstore/{obstore.__version__}",
    }


def retry_config(patience: Patience) -> dict[str, Any]:
    """When obstore makes a request again."""
    attempts = 1000 if patience.attempts is None else patience.attempts
    return {
        "max_retries": attempts - 1,
        "retry_timeout": timedelta(seconds=patience.retry_for_s),
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
    }


def short_words(error: Exception) -> str:
    """The first line of an error of obstore's, without what its addresses ask for: that may be a signature."""
    first = str(error).split("\n\nDebug source", 1)[0].splitlines()
    return re.sub(r"\?\S*", "", " ".join(line.strip() for line in first if line.strip()))[:500]


def _unless_changed(read: Callable[[], Result]) -> Result:
    for attempt in range(_READ_ATTEMPTS):
        try:
            return read()
        except ChangedError:
            if attempt == _READ_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _deliver(answer: Any, delivery: Delivery, stopped: threading.Event) -> None:
    _check_tag(answer.meta)
    position, stop = answer.range
    for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
        if stopped.is_set():
            return
        delivery(position, chunk)
        position += len(chunk)
    if position != stop:
        raise StorageError(f"the answer ended {stop - position} bytes before its end")


_STRANGE = (
    "the answer is not one of the storage; a proxy or load balancer may have given it: see what the endpoint leads to"
)


def _check_tag(told: Any) -> None:
    """Refuse an answer of status 200 without an entity tag, which the services always give."""
    if not told["e_tag"]:
        raise StorageError(_STRANGE)


_used_by: int | None = None


def _check_process(attempt: str) -> None:
    """obstore's threads do not survive a fork, and it ends a forked process that uses it."""
    global _used_by
    _used_by = _used_by or os.getpid()
    if _used_by != os.getpid():
        raise UsageError(
            f"{attempt}: this process was forked from one that had used such a URL already, which obstore does not "
            "allow; start it otherwise, as with DataLoader(…, multiprocessing_context='forkserver')"
        )
