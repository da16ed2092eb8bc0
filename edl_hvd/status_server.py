"""A small HTTP server that shows how something stands: a page for people, a text for Prometheus. It changes nothing.

It answers GET and HEAD, from a thread of its own, with what the functions that it was given return. On an address of
this machine alone it answers only those who call it by such a name: a page of another site cannot read it through a
name that leads here.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from edl_hvd.errors import UsageError

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_MOST_CALLERS = 16
_FAILED = b"this cannot be shown now; the log of the program that serves it says why\n"


@dataclass(frozen=True)
class Document:
    """What a path shows."""

    text: str
    kind: str = "text/html; charset=utf-8"


def read_address(text: str) -> tuple[str, int]:
    """Address and port of ``8400`` or ``0.0.0.0:8400``; without an address it is 127.0.0.1.

    >>> read_address("8400"), read_address("0.0.0.0:0")
    (('127.0.0.1', 8400), ('0.0.0.0', 0))

    Raises:
        UsageError: It is neither.
    """
    address, _, port = text.rpartition(":")
    address = address.strip("[]") or "127.0.0.1"
    try:
        ipaddress.ip_address(address)
        number = int(port) if port.isascii() and port.isdecimal() else -1
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 16:
        raise UsageError(f"{text!r} is no place to serve at; expected PORT or ADDRESS:PORT, e.g. 8400 or 0.0.0.0:8400")
    return address, number


def _is_local(host: str) -> bool:
    """Whether a caller's name for this server can only mean this machine.

    >>> _is_local("localhost"), _is_local("127.2.0.3"), _is_local("::1"), _is_local("127.0.0.1.evil.example")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class StatusServer:
    """Serves from the moment it is made; a context manager that ends it.

    Args:
        where: ``PORT`` or ``ADDRESS:PORT``; port 0 is any that is free.
        documents: What each path shows. The functions are called in other threads, several at once. An error of one is
            answered with status 500, and logged the first time.

    Attributes:
        url: Where it is served.

    Raises:
        UsageError: ``where`` does not read, or nothing can be served there.
    """

    def __init__(self, where: str, documents: Mapping[str, Callable[[], Document]]) -> None:
        address, port = read_address(where)
        only_local = ipaddress.ip_address(address).is_loopback
        handler = type("Handler", (_Handler,), {"documents": documents, "only_local": only_local})
        try:
            self._server = _Server((address, port), handler)
        except OSError as error:
            raise UsageError(
                f"nothing can be served at {where}: {error.strerror or error}; expected a free port of an address of "
                "this machine"
            ) from error
        shown = f"[{address}]" if ":" in address else address
        self.url = f"http://{shown}:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, name="edl-hvd-status", daemon=True).start()

    def __enter__(self) -> StatusServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in place[0]:
            self.address_family = 10  # socket.AF_INET6
        self._places = threading.Semaphore(_MOST_CALLERS)
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        super().__init__(place, handler)

    def process_request(self, request: object, client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that hangs up, or does not read, is nobody's problem; another error is a fault of the server."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            logger.exception("a request from %s could not be answered", client_address)

    def log_failure(self, path: str) -> None:
        """Log, the first time, that a document cannot be made. In the handler of the exception."""
        with self._lock:
            is_first = path not in self._failed
            self._failed.add(path)
        if is_first:
            logger.exception("%s cannot be shown, which is said once; its callers get status 500", path)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    documents: Mapping[str, Callable[[], Document]]
    only_local: bool
    timeout = _PATIENCE_S
    server_version = "edl-hvd"
    sys_version = ""

    def do_GET(self) -> None:
        """Show a document."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "the path or the name of the host does not read")
            return
        if self.only_local and not _is_local(host or ""):
            self.send_error(HTTPStatus.FORBIDDEN, "this address answers to localhost alone")
            return
        document = self.documents.get(path)
        if document is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"expected one of {', '.join(self.documents)}")
            return
        try:
            shown = document()
            body = shown.text.encode()
        except Exception:  # whatever it is: the caller is told, and the next one may be served
            self.server.log_failure(path)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", _FAILED)
        else:
            self._send(HTTPStatus.OK, shown.kind, body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # the name that the library looks for

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads a line per scrape."""
