"""What every storage promises, and the rules for keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from edl_hvd.errors import ObjectTooLargeError, UsageError
from edl_hvd.storage.pieces import Data

# Where ``FileStorage`` keeps what is being written; reserved everywhere, so that a job can change storages.
RESERVED_FOLDER = ".partial"

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, order=True)
class StoredObject:
    """One object as a listing shows it.

    Attributes:
        key: Path relative to the storage's URL.
        size_bytes: Length of its contents.
        written_s: When it was written, in seconds since 1970 by the storage's clock; ``None`` where it does not say.
            What compares objects does not look at it.
    """

    key: str
    size_bytes: int
    written_s: float | None = field(default=None, compare=False)


class Storage(Protocol):
    """Objects under one URL, each written whole and read whole or in part. Safe to use from several threads.

    Keys are relative POSIX paths such as ``checkpoints/000000000010/manifest.json``; see ``check_key``.
    Every failure of the storage is a ``StorageError`` (or one of its kinds) that names URL, key and cause.
    All methods block until the storage has answered; what was written is durable when they return.
    """

    @property
    def url(self) -> str:
        """Where this storage is, for people: absolute, and without a password."""

    def read(self, key: str, limit_bytes: int | None = None) -> bytes:
        """The contents of an object.

        Args:
            key: Which one.
            limit_bytes: The most it may have. Of a larger one nothing is kept in memory.

        Raises:
            ObjectMissingError: No such object.
            ObjectTooLargeError: It has more than ``limit_bytes``.
        """

    def read_into(self, key: str, start: int, buffer: bytearray | memoryview) -> int:
        """Fill memory with the part of an object that begins at byte ``start``.

        Args:
            key: Which object.
            start: The first byte, from 0 on.
            buffer: Writable and contiguous; as long as the part. What it holds after an error is undefined, but it
                is not written to any more.

        Returns:
            How many bytes were read: fewer than ``buffer`` has only if the object ends before.

        Raises:
            ObjectMissingError: No such object.
        """

    def write(self, key: str, data: Data) -> None:
        """Create or replace an object; a reader sees the old contents or the new, never a mixture.

        Args:
            key: Which object.
            data: Its contents: one buffer, or several in their order, so that nothing has to be joined. They must not
                change meanwhile.
        """

    def write_new(self, key: str, data: Data) -> None:
        """Create an object only if there is none; of several writers at once exactly one succeeds.

        Args:
            key: Which object.
            data: As for ``write``.

        Raises:
            ObjectExistsError: There is one already; it is left as it is.
        """

    def list(self, prefix: str = "") -> list[StoredObject]:
        """All objects whose key starts with ``prefix`` (any string, not only a folder), sorted by key."""

    def delete(self, key: str) -> None:
        """Remove an object; not an error if there is none."""

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    def place_exists(self) -> bool:
        """Whether the folder or bucket of the URL exists.

        An object store has no folders: any place in a bucket that exists does. Where this is false a write may create
        the place (a folder) or fail (a bucket).
        """

    def close(self) -> None:
        """Give up connections. The storage is not used afterwards."""


def check_key(key: str) -> str:
    """Return ``key`` if it is one.

    >>> check_key("checkpoints/000000000010/manifest.json")
    'checkpoints/000000000010/manifest.json'

    Raises:
        UsageError: Empty, absolute, with an empty, ``.`` or ``..`` component, with a control
            character, or in the reserved folder ``.partial``.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or _CONTROL.search(key) or parts[0] == RESERVED_FOLDER:
        raise UsageError(
            f"{key!r} is not a storage key; expected a relative path such as 'checkpoints/manifest.json' without "
            f"'.', '..', empty parts or control characters, and not inside {RESERVED_FOLDER!r}"
        )
    return key


def check_size(size_bytes: int, limit_bytes: int | None, key: str, url: str) -> None:
    """Raises ``ObjectTooLargeError`` if an object has more bytes than its reader takes."""
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise ObjectTooLargeError(
            f"cannot read {key!r} in {url}: it has {size_bytes} bytes, more than the {limit_bytes} expected"
        )


def redacted(url: str) -> str:
    """``url`` with the password of ``user:password@host`` replaced by ``***``, fit for messages.

    >>> redacted("sftp://ada:secret@host/run")
    'sftp://ada:***@host/run'
    """
    return re.sub(r"^([^/]*://[^/@:]*):[^/@]*@", r"\1:***@", url)
