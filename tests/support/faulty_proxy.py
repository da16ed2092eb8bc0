"""A proxy in front of an HTTP server that does to its requests what bad networks and busy services do.

    with FaultyProxy(server.url) as proxy:
        proxy.meet(Cut("answer", after_bytes=1000), method="GET")       # the next GET; later ones pass
        proxy.meet(Refuse(503, "SlowDown"), times=None)                 # every request from now on
        proxy.meet_at_random(0.1, [Refuse(), Stall()], seed=7)          # a tenth of all requests
        ... requests to proxy.url ...
        assert proxy.struck

Each request meets at most one fault: the oldest that was asked for and fits.
"""

from __future__ import annotations

import http.client
import io
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Literal
from urllib.parse import urlsplit

from tcp_proxy import TcpProxy

_PIECE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Refuse:
    """Answer in the server's place, as S3 does: a status and a code. The request's body is not waited for."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Page:
    """Answer in the server's place with status 200 and a page for people, as a proxy does that is being repaired.

    Attributes:
        head: Further lines of the answer's head; some servers give pages an ETag.
        body: The page.
        type: Its type.
    """

    head: str = ""
    body: str = "<html><head><title>Back soon</title></head><body><p>Maintenance</p></body></html>"
    type: str = "text/html"

    def answer(self, method: str) -> bytes:
        """The bytes of the answer."""
        body = self.body.encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {self.type}\r\n{self.head}Connection: close\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if method == "HEAD" else body)


@dataclass(frozen=True)
class Cut:
    """Close the connection after N bytes of the body of the request or of the answer.

    The answer cut after ``None`` bytes does not even begin: the server has done what was asked, and nobody hears of it.
    """

    what: Literal["request", "answer"]
    after_bytes: int | None = 0


@dataclass(frozen=True)
class Stall:
    """After N bytes of the body of the request or of the answer, neither take nor send another one.

    With ``None`` the answer does not begin, as above.
    """

    what: Literal["request", "answer"] = "request"
    after_bytes: int | None = 0


@dataclass(frozen=True)
class Delay:
    """Forward the request later."""

    duration_s: float


@dataclass(frozen=True)
class Before:
    """Call something with the request's path, then forward the request."""

    act: Callable[[str], object]


@dataclass(frozen=True)
class Swallow:
    """Ask the server in the client's place whether it wants the body, and take no "100 Continue" for an answer.

    A proxy does so that asks with a client such as Python's ``http.client``, which reads over such answers: it waits
    for the server, which waits for the body. A request without that question passes.
    """


@dataclass(frozen=True)
class Together:
    """Hold the request until N are held; they fail when that does not come about."""

    count: int
    timeout_s: float = 30.0


Fault = Refuse | Page | Cut | Stall | Delay | Before | Swallow | Together


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    size_bytes: int
    range: str | None


@dataclass
class _Planned:
    fault: Fault
    fits: Callable[[Request], bool]
    times: float


class _Done(Exception):
    """The connection is of no use any more."""


@dataclass
class FaultyProxy(TcpProxy):
    """Listens on a free port and forwards to ``target`` (``http://host:port``).

    Attributes:
        bytes_per_s: Most that a connection carries in each direction; ``None`` for no limit.
        requests: Those that came, in order.
        struck: Faults that were met, each with its request.
        swallowed: What the server has said to those who asked whether it wants the body.
        on_strike: Called before a cut, once.
    """

    target: str
    bytes_per_s: float | None = None
    requests: list[Request] = field(default_factory=list)
    struck: list[tuple[Fault, Request]] = field(default_factory=list)
    swallowed: list[bytes] = field(default_factory=list)
    on_strike: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._planned: list[_Planned] = []
        self._held = 0
        self._changed = threading.Condition(self.lock)

    def meet(self, fault: Fault, method: str = "", holding: str = "", times: int | None = 1) -> None:
        """The next ``times`` requests (``None``: all) of this method whose path holds these words meet the fault."""

        def fits(request: Request) -> bool:
            return request.method.startswith(method) and holding in request.path

        with self.lock:
            self._planned.append(_Planned(fault, fits, float("inf") if times is None else times))

    def meet_at_random(self, share: float, faults: Sequence[Fault], seed: int) -> None:
        """Each request meets one of the faults with this probability."""
        numbers = random.Random(seed)
        with self.lock:
            part = share / len(faults)
            for fault in faults:
                self._planned.append(_Planned(fault, lambda request: numbers.random() < part, float("inf")))

    def forgive(self) -> None:
        """No faults from now on, but for those that have begun; what was counted is forgotten."""
        with self.lock:
            self._planned.clear()
            self.requests.clear()
            self.struck.clear()
            self._held = 0
            self.bytes_per_s = self.on_strike = None

    def serve(self, client: socket.socket) -> None:
        """Serve one request after the other."""
        with client.makefile("rb") as stream, suppress(_Done, http.client.HTTPException):
            while head := _head(stream):
                method, path, _ = head.readline().decode("latin-1").split(" ", 2)
                headers = http.client.parse_headers(head)
                request = Request(method, path, int(headers.get("Content-Length", 0)), headers.get("Range"))
                self._handle(client, stream, request, headers, self._fault(request))

    def _fault(self, request: Request) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for planned in self._planned:
                if planned.times and planned.fits(request):
                    planned.times -= 1
                    self.struck.append((planned.fault, request))
                    return planned.fault
        return None

    def _handle(
        self,
        connection: socket.socket,
        stream: BinaryIO,
        request: Request,
        headers: http.client.HTTPMessage,
        fault: Fault | None,
    ) -> None:
        waits = headers.get("Expect", "").lower() == "100-continue"
        if isinstance(fault, Refuse):
            if not waits:
                stream.read(request.size_bytes)
            connection.sendall(_refusal(fault, request.method))
            raise _Done
        if isinstance(fault, Page):
            stream.read(request.size_bytes)
            connection.sendall(fault.answer(request.method))
            raise _Done
        if isinstance(fault, Delay):
            self.closing.wait(fault.duration_s)
        if isinstance(fault, Before):
            fault.act(request.path)
        if isinstance(fault, Together):
            with self._changed:
                self._held += 1
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._held >= fault.count, fault.timeout_s):
                    raise _Done
        if isinstance(fault, Swallow) and waits:
            self._ask_and_wait(request, headers)
        if waits:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts = urlsplit(self.target)
        upstream = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
        try:
            upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders()
            self._carry(stream, upstream.send, request.size_bytes, "request", fault)
            with upstream.getresponse() as answer:
                self._give_back(connection, request, answer, fault)
        finally:
            upstream.close()

    def _ask_and_wait(self, request: Request, headers: http.client.HTTPMessage) -> None:
        """Send the server the head alone, with its question, and wait for what is not coming."""
        parts = urlsplit(self.target)
        head = [f"{request.method} {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        with socket.create_connection((parts.hostname or "", parts.port or 80)) as upstream:
            upstream.sendall("\r\n".join([*head, "", ""]).encode("latin-1"))
            self.swallowed.append(upstream.recv(_PIECE_BYTES))
            self.closing.wait(600)
        raise _Done

    def _give_back(
        self, connection: socket.socket, request: Request, answer: http.client.HTTPResponse, fault: Fault | None
    ) -> None:
        if isinstance(fault, Cut | Stall) and fault.what == "answer" and fault.after_bytes is None:
            if isinstance(fault, Stall):
                self.closing.wait(600)
            raise _Done
        length = int(answer.getheader("Content-Length") or 0)
        head = [f"HTTP/1.1 {answer.status} {answer.reason}", f"Content-Length: {length}"]
        head += [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in _OWN_HEADERS]
        connection.sendall("\r\n".join([*head, "", ""]).encode("latin-1"))
        if request.method != "HEAD":
            self._carry(answer, connection.sendall, length, "answer", fault)

    def _carry(
        self, source: BinaryIO, send: Callable[[bytes], None], size_bytes: int, what: str, fault: Fault | None
    ) -> None:
        """Carry a body over, at the speed that a connection has, as far as the fault lets it come."""
        end = size_bytes
        if isinstance(fault, Cut | Stall) and fault.what == what and fault.after_bytes is not None:
            end = min(fault.after_bytes, size_bytes)
        began_s, carried = time.monotonic(), 0
        while carried < end:
            piece = source.read(min(_PIECE_BYTES, end - carried))
            if not piece:
                raise _Done
            send(piece)
            carried += len(piece)
            if self.bytes_per_s is not None:
                self.closing.wait(max(0.0, carried / self.bytes_per_s - (time.monotonic() - began_s)))
        if isinstance(fault, Cut | Stall) and fault.what == what:
            if isinstance(fault, Stall):
                self.closing.wait(600)
            act, self.on_strike = self.on_strike, None
            if act:
                act()
            raise _Done


def _head(stream: BinaryIO) -> BinaryIO | None:
    """The lines before the body; ``None`` when the connection ends in the middle of them, as the server does it."""
    head = io.BytesIO()
    while line := stream.readline():
        head.write(line)
        if line == b"\r\n":
            head.seek(0)
            return head
    return None


_OWN_HEADERS = ("content-length", "connection", "transfer-encoding", "keep-alive")


def _refusal(fault: Refuse, method: str) -> bytes:
    body = f"<Error><Code>{fault.code}</Code><Message>as told</Message></Error>".encode()
    head = f"HTTP/1.1 {fault.status} As told\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if method == "HEAD" else body)
