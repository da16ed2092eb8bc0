"""One bounded exchange over HTTP, with the standard library: a poll of a discovery script needs no packages.

No proxy is used, and no redirect is followed: a token in a header goes to nobody but the server that was asked.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, quote

from edl_hvd.clock import Clock

_CHUNK_BYTES = 1 << 16
_SECRET_HEADERS = ("authorization", "x-aws-ec2-metadata-token")
_HIDDEN = "***"
_SHORTEST_SECRET = 4  # characters; less is no secret, and occurs anywhere


@dataclass(frozen=True)
class Bounds:
    """What one exchange may take.

    Attributes:
        socket_s: Each single wait for the server.
        whole_s: All of it, the headers included, so that a server that trickles is given up, too.
        body_bytes: The body of the answer.
    """

    socket_s: float
    whole_s: float
    body_bytes: int


@dataclass(frozen=True)
class HttpAnswer:
    """What a server said.

    Attributes:
        headers: By lower-case name.
        is_whole: The server said how long the body is, so that nothing can be missing at its end.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_whole: bool = True

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def words(self) -> str:
        """The beginning of the body on one line, for messages."""
        return " ".join(self.body[:200].decode(errors="replace").split())

    def now_s(self, clock: Clock) -> float:
        """Seconds since the epoch by the server's clock, which set its deadlines; this host's may be wrong."""
        try:
            return parsedate_to_datetime(self.headers["date"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return clock.wall_s()


class BodyTooLongError(Exception):
    """The body has more bytes than the bounds allow."""


def exchange(
    address: SplitResult,
    headers: Mapping[str, str],
    bounds: Bounds,
    clock: Clock,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
) -> HttpAnswer:
    """Ask for ``address``, without a body, on a connection of its own.

    A server that repeats a secret of the request's headers, as in the words of its 401, does not get it into logs: in
    any answer but one of success it is ``***``.

    Args:
        context: How an https server is verified; ``None``: by the certificates of this machine.

    Raises:
        TimeoutError: The server did not answer within the bounds.
        OSError, http.client.HTTPException: It did not answer, or the answer was cut off.
        BodyTooLongError: Its message names the bound.
    """
    deadline_s = clock.monotonic_s() + bounds.whole_s
    connection = _connect(address, min(bounds.socket_s, max(bounds.whole_s, 1e-3)), context)
    connection.response_class = _response_until(deadline_s, bounds.socket_s, clock)
    try:
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        connection.request(method, path, headers={"Connection": "close", **headers})
        response = connection.getresponse()
        body = _read_body(response, bounds.body_bytes)
        named = {name.lower(): value for name, value in response.getheaders()}
        if response.status not in range(200, 300):
            named = {name: without_secrets(value, headers) for name, value in named.items()}
            body = without_secrets(body.decode("latin-1"), headers).encode("latin-1")
        is_whole = "content-length" in named or "chunked" in named.get("transfer-encoding", "").lower()
        return HttpAnswer(response.status, named, body, is_whole)
    finally:
        connection.close()


def without_secrets(text: str, headers: Mapping[str, str]) -> str:
    """The text with ``***`` for what the headers of a request keep secret, also as JSON or a URL would write it.

    >>> without_secrets("no such token: a/b", {"Authorization": "Bearer a/b"})
    'no such token: ***'
    """
    for name, value in headers.items():
        if name.lower() in _SECRET_HEADERS:
            secret = value.rpartition(" ")[2]
            for form in (secret, secret.replace("/", "\\/"), quote(secret, safe="")):
                text = text.replace(form, _HIDDEN) if len(form) >= _SHORTEST_SECRET else text
    return text


def seconds_since_epoch(text: str) -> float:
    """The seconds since the epoch of a time as clouds and Kubernetes write it (RFC 3339).

    >>> seconds_since_epoch("2017-09-18T08:22:00Z")
    1505722920.0

    Raises:
        ValueError: It is no such time.
    """
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python before 3.11 knows no "Z"
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    return moment.timestamp()


def _connect(address: SplitResult, socket_s: float, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    host = address.hostname or ""
    if address.scheme == "https":
        context = context or ssl.create_default_context()
        return http.client.HTTPSConnection(host, address.port, timeout=socket_s, context=context)
    return http.client.HTTPConnection(host, address.port, timeout=socket_s)


def _response_until(deadline_s: float, socket_s: float, clock: Clock) -> type[http.client.HTTPResponse]:
    """A response of which each read waits at most ``socket_s``, and all reads until ``deadline_s``."""

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
            super().__init__(sock, *arguments, **named)
            untimed, self.fp = self.fp, io.BufferedReader(_TimedReader(sock, deadline_s, socket_s, clock))
            untimed.close()

    return Response


class _TimedReader(io.RawIOBase):
    """The bytes of a socket until a moment; afterwards each read raises ``TimeoutError``."""

    def __init__(self, stream: socket.socket, deadline_s: float, socket_s: float, clock: Clock) -> None:
        self._stream = stream
        self._raw = stream.makefile("rb", buffering=0)  # it keeps the socket open until it is closed itself
        self._deadline_s = deadline_s
        self._socket_s = socket_s
        self._clock = clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        self._stream.settimeout(min(self._socket_s, left_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _read_body(response: http.client.HTTPResponse, most_bytes: int) -> bytes:
    body = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        body += chunk
        if len(body) > most_bytes:
            raise BodyTooLongError(f"more than {most_bytes >> 20} MiB")
    if response.length:  # read1 does not notice that a connection ended before the body did
        raise http.client.IncompleteRead(bytes(body), response.length)
    return bytes(body)
