"""Parts of a file behind an ``https://`` address, with the standard library."""

from __future__ import annotations

import http.client
import re
import ssl
from urllib.parse import SplitResult, urljoin, urlsplit

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import ObjectMissingError, StorageError, UsageError
from edl_hvd.storage.parts import CHUNK_BYTES, ChangedError
from edl_hvd.storage.retries import Attempts, GaveUpError, Patience

_REDIRECTS = 5
# As many as browsers' manuals advise against exceeding: a mirror, its region, and the store behind it.
_REDIRECTING = (301, 302, 303, 307, 308)
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)


class _BusyError(Exception):
    """An answer that may be another one at the next attempt."""


class _CutShortError(Exception):
    """The answer ended before its end."""


class WebObject:
    """A file behind an address of http or https, read in parts over one connection.

    The server has to answer requests for parts (``Range``). Redirects are followed; no credentials are sent but those
    that the address itself has, such as the signature of a presigned URL, which no message shows. One thread.

    Args:
        url: The address.
        patience: How long a request is tried.
        clock: Measures and waits between attempts.

    Raises:
        UsageError: The address is malformed, or holds a password.
    """

    def __init__(self, url: str, patience: Patience | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        try:
            address = urlsplit(url)
            usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:
            usable = False
        if not usable or not url.isascii() or " " in url:
            raise UsageError(
                f"{_shown(url)!r} is no address; expected 'https://host/file', with other characters as %XX"
            )
        if address.password is not None:
            raise UsageError(f"{_shown(url)!r} holds a password, which logs would show; use a presigned URL")
        self._asked, self._address = address, address
        self._patience = patience or Patience()
        self._clock = clock
        self._connection: http.client.HTTPConnection | None = None
        self._version = ""
        self._brought = 0  # bytes of the present answer

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill memory with the part of the file that begins at ``start``.

        After a broken connection the next attempt goes on where the last one ended.

        Returns:
            How many bytes were read: fewer than ``buffer`` has only if the file ends before.

        Raises:
            ObjectMissingError: No such file.
            StorageError: The server does not answer, refuses, or gives no parts; or the file was replaced.
        """
        attempt = f"cannot read {_shown(self._asked.geturl())!r}"
        attempts = Attempts(self._patience, _passes, self._clock)
        count = 0

        def go_on() -> None:
            nonlocal count
            try:
                while count < buffer.nbytes:
                    more = self._read_part(start + count, buffer[count:], attempts)
                    count += more
                    if not more:
                        return
            except BaseException:
                count += self._brought
                self.close()
                raise

        try:
            attempts.make(go_on)
        except GaveUpError as error:
            raise StorageError(f"{attempt} ({error}): {_words(error.error)}") from error.error
        except ChangedError as error:
            raise StorageError(f"{attempt}: it was replaced while it was read; a shard has to stay as it is") from error
        except (OSError, http.client.HTTPException, _BusyError, _CutShortError) as error:
            if isinstance(error, StorageError):
                raise type(error)(f"{attempt}: {error}") from error
            raise StorageError(f"{attempt}: {_words(error)}") from error
        return count

    def close(self) -> None:
        """Give up the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read_part(self, start: int, buffer: memoryview, attempts: Attempts) -> int:
        """One answer; the bytes that it brings, 0 at the end of the file."""
        self._brought = 0
        answer = self._ask(start, start + buffer.nbytes)
        if answer.status == 416:
            answer.read()
            return 0
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(?:\d+|\*)", answer.headers.get("Content-Range", ""))
        if answer.status == 200 and start == 0:
            end = buffer.nbytes  # of a server that sends the whole; its connection is of no more use
        elif answer.status != 206 or found is None or int(found[1]) != start:
            raise StorageError(
                f"the server was asked for a part from byte {start} on and answered {answer.status} "
                f"{answer.headers.get('Content-Range', 'without Content-Range')!r}; shards need one that gives parts"
            )
        else:
            end = min(buffer.nbytes, int(found[2]) + 1 - start)
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if self._version and version != self._version:
            raise ChangedError
        self._version = version
        while self._brought < end:
            got = answer.readinto(buffer[self._brought : min(end, self._brought + CHUNK_BYTES)])
            if not got:
                if answer.status == 200 and not answer.length:
                    break  # the file is shorter than what was asked for
                raise _CutShortError(f"the answer ended {end - self._brought} bytes before its end")
            self._brought += got
            attempts.progress()
        if answer.status == 200:
            self.close()
        return self._brought

    def _ask(self, start: int, stop: int) -> http.client.HTTPResponse:
        for _ in range(_REDIRECTS + 1):
            address = self._address
            if self._connection is None:
                self._connection = _connect(address, self._patience.stall_s)
            path = (address.path or "/") + (f"?{address.query}" if address.query else "")
            self._connection.request(
                "GET", path, headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            )
            answer = self._connection.getresponse()
            if answer.status in (200, 206, 416):
                return answer
            target = answer.headers.get("Location", "")
            self.close()
            if answer.status in _REDIRECTING and target:
                self._address = urlsplit(urljoin(address.geturl(), target))
                allowed = ("https",) if address.scheme == "https" else ("http", "https")  # never back into the open
                if self._address.scheme not in allowed or not self._address.hostname:
                    raise StorageError(f"the server sends elsewhere, to {_shown(target)!r}; give the right address")
                continue
            if address != self._asked:
                self._address = self._asked  # what it led to may have been good for some time only
            if answer.status in (404, 410):
                raise ObjectMissingError(f"there is no such file ({answer.status} {answer.reason})")
            if answer.status in _PASSING_STATUS or (answer.status in (401, 403) and address != self._asked):
                raise _BusyError(f"the server answered {answer.status} {answer.reason}")
            raise StorageError(
                f"the server answered {answer.status} {answer.reason}; "
                "expected a file that anybody may read, or a presigned URL"
            )
        raise StorageError(f"the server redirects more than {_REDIRECTS} times; give the last address")


def _connect(address: SplitResult, stall_s: float) -> http.client.HTTPConnection:
    host = address.hostname or ""
    if address.scheme == "https":
        return http.client.HTTPSConnection(host, address.port, timeout=stall_s, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, address.port, timeout=stall_s)


def _passes(error: Exception) -> bool:
    if isinstance(error, (StorageError, ssl.SSLCertVerificationError)):
        return False
    return isinstance(error, (OSError, http.client.HTTPException, _BusyError, _CutShortError))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, (_BusyError, _CutShortError)) else str(error)


def _shown(url: str) -> str:
    """An address without what it asks for, which may be a signature, and without a user."""
    return re.sub(r"//[^/@]*@", "//***@", re.sub(r"[?#].*", "?…", url))
