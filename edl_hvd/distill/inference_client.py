"""One connection of the student to a server of the Open Inference Protocol, over HTTP. Decides nothing."""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

from edl_hvd.errors import ProtocolError
from edl_hvd.open_inference import HEADER_LENGTH, InferenceRequest, ModelUrl
from edl_hvd.silence import ask_for_answers, unanswered_s

_CONNECT_S = 10.0


@dataclass(frozen=True)
class HttpReply:
    """What a server replied.

    Attributes:
        status: Status of HTTP.
        header_length: Header that says where raw bytes begin; ``None`` without.
        body: Body, of bounded size.
    """

    status: int
    header_length: str | None
    body: bytearray


class ServerLine:
    """One connection to a server, made when it is needed. One thread; ``cut`` may be called from any.

    Args:
        model: Model.
        context: How a server is verified, for https.
    """

    def __init__(self, model: ModelUrl, context: ssl.SSLContext | None) -> None:
        self._model, self._context = model, context
        self._connection: http.client.HTTPConnection | None = None
        self._is_cut = False

    def ask(self, method: str, path: str, most_bytes: int, request: InferenceRequest | None = None) -> HttpReply:
        """Ask, and wait for the reply for as long as the server's host is there.

        A connection on which a request has been answered may have been closed since then, so it is tried anew once.

        Raises:
            OSError: There is no server, or it has gone.
            ProtocolError: It does not speak HTTP, or replies more than ``most_bytes``.
        """
        if self._is_cut:
            self.close()
            self._is_cut = False
        was_used = self._connection is not None
        try:
            return self._ask(method, path, most_bytes, request)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if self._is_cut:
                raise OSError("its host has not answered") from error
            if not (was_used and isinstance(error, ConnectionError)):
                raise _as_os_error(error) from error
        try:
            return self._ask(method, path, most_bytes, request)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _as_os_error(error) from error

    def _ask(self, method: str, path: str, most_bytes: int, request: InferenceRequest | None) -> HttpReply:
        connection = self._connection or self._connect()
        headers = dict(request.headers) if request else {}
        connection.request(method, path, request.parts if request else None, headers)
        response = connection.getresponse()
        length = response.length
        if length is None:
            body = bytearray(response.read(most_bytes + 1))
        else:
            body = bytearray(min(length, most_bytes + 1))
            filled = 0
            while filled < len(body) and (count := response.readinto(memoryview(body)[filled:])):
                filled += count
            if filled < len(body):
                raise http.client.IncompleteRead(b"", len(body) - filled)
        if len(body) > most_bytes:
            self.close()
            raise ProtocolError(f"it replied more than {most_bytes} bytes, the most that an answer here has")
        if response.will_close:
            self.close()
        return HttpReply(response.status, response.getheader(HEADER_LENGTH), body)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._model.host, self._model.port
        if self._model.scheme == "https":
            context = self._context or ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_CONNECT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        connection.connect()
        # The one who watches ends a wait for a host that is gone.
        connection.sock.settimeout(None)
        ask_for_answers(connection.sock)
        self._connection = connection
        return connection

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the server's host; any thread."""
        connection = self._connection
        try:
            return unanswered_s(connection.sock) if connection is not None and connection.sock is not None else 0.0
        except OSError:
            return 0.0

    def cut(self) -> None:
        """End a wait of the thread that uses it, which gets an ``OSError``; any thread."""
        self._is_cut = True
        connection = self._connection
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close it; it is made again when it is needed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _as_os_error(error: Exception) -> OSError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return OSError(f"its certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return OSError(f"it does not speak TLS as expected: {error.reason or error}")
    if isinstance(error, OSError):
        return error
    return OSError(f"the connection ended in the middle of an answer ({type(error).__name__})")
