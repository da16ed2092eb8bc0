"""One bounded exchange over HTTP, with the standard library: a poll of a discovery script needs no packages.

No proxy is used, and no redirect is followed: a token in a header goes to nobody but the server that was asked.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
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
        socket_s: Each single wait, for the server and for the addresses of its name.
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


class LookUpTimeoutError(TimeoutError):
    """The name of the server was not looked up within the bounds, so nobody was asked; its message says that."""


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
        LookUpTimeoutError: The addresses of its name were not found within the bounds.
        TimeoutError: The server did not answer within the bounds.
        OSError, http.client.HTTPException: It did not answer, or the answer was cut off.
        BodyTooLongError: Its message names the bound.
    """
    deadline_s = clock.monotonic_s() + bounds.whole_s
    connection = _connect(address, bounds.socket_s, deadline_s, clock, context)
    connection.response_class = _response_until(deadline_s, bounds.socket_s, clock)
    try:
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        connection.request(method, path, headers={"Connection": "close", **headers})
        with connection.getresponse() as response:  # with "Connection: close" the connection does not close it
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

    >>> without_secrets("no such token: s3cr3t/t0ken", {"Authorization": "Bearer s3cr3t/t0ken"})
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


def _connect(
    address: SplitResult, socket_s: float, deadline_s: float, clock: Clock, context: ssl.SSLContext | None
) -> http.client.HTTPConnection:
    """A connection whose socket is there: the library would look the name up itself, for as long as that takes."""
    host = address.hostname or ""
    if address.scheme == "https":
        context = context or ssl.create_default_context()
        secure = http.client.HTTPSConnection(host, address.port, context=context)
        stream = _open_socket(host, secure.port, socket_s, deadline_s, clock)
        try:
            secure.sock = context.wrap_socket(stream, server_hostname=host)
        except BaseException:
            stream.close()
            raise
        return secure
    connection = http.client.HTTPConnection(host, address.port)
    connection.sock = _open_socket(host, connection.port, socket_s, deadline_s, clock)
    return connection


def _open_socket(host: str, port: int, socket_s: float, deadline_s: float, clock: Clock) -> socket.socket:
    """A socket to the first address of the host that takes one."""

    def left_s() -> float:
        return max(min(socket_s, deadline_s - clock.monotonic_s()), 1e-3)

    failure = OSError(f"{host} has no address")
    for found in _look_up(host, port, left_s()):
        stream = socket.socket(found.family, socket.SOCK_STREAM)
        try:
            stream.settimeout(left_s())
            stream.connect(found.sockaddr)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream
        except OSError as error:
            stream.close()
            failure = error
    try:
        raise failure
    finally:
        del failure  # it holds this frame


@dataclass(frozen=True)
class _Address:
    """One address of a host: what a socket of this family connects to."""

    family: socket.AddressFamily
    sockaddr: Any


_looking: dict[tuple[str, int], Future[list[_Address]]] = {}
# Look-ups that go on, by host and port: no second thread waits for a name that a resolver does not answer for.
_looking_lock = threading.Lock()


def _look_up(host: str, port: int, longest_s: float) -> list[_Address]:
    """The addresses of a host. A resolver knows no deadline of ours, so a thread waits for it, which may outlive this.

    Raises:
        LookUpTimeoutError: It takes longer.
        OSError: The name is not known.
    """
    with _looking_lock:
        future = _looking.get((host, port))
        if future is None:
            future = _looking[host, port] = Future()
            threading.Thread(target=_resolve, args=(host, port, future), name=f"look up {host}", daemon=True).start()
    if not wait([future], longest_s).done:
        raise LookUpTimeoutError(
            f"the name {host} was not looked up within {longest_s:.3g} s; ask the resolver of this machine for it "
            f"(getent hosts {host})"
        )
    return future.result()


def _resolve(host: str, port: int, future: Future[list[_Address]]) -> None:
    """In a thread of its own: look a name up once. Whoever asks after the answer is there has it looked up anew."""

    def forget() -> None:
        with _looking_lock:
            del _looking[host, port]

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except Exception as error:
        forget()
        future.set_exception(error)
        return
    forget()
    future.set_result([_Address(family, sockaddr) for family, *_, sockaddr in found])


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
