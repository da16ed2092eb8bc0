"""TLS for sockets that do not block, with the standard library: who has a certificate, and who verifies it.

What ``curl --cacert`` takes is taken here: a file of certificates in PEM. Both sides prove a token besides, so a
student needs no certificate of its own.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edl_hvd.errors import ProtocolError, UsageError

SYSTEM = "system"
# In place of a file: the certificates of this machine.
_HANDSHAKE = 22
# First byte of all that a TLS client sends.
_MOST_BYTES = 1 << 14
# Of one record. What could not be sent has to be sent again in the same piece.


class PlainPeerError(ProtocolError):
    """The other side does not speak TLS."""


class TlsSocket(ssl.SSLSocket):
    """A socket with TLS that behaves as a plain one that does not block. Made by the contexts of this module."""

    needs_read = False
    # Whether the last attempt to send waits for something to read, as in a handshake.
    needs_write = False
    # Whether the last attempt to read waits for room to write.
    _is_greeted = False

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As a socket without TLS does; also goes on with the handshake."""
        try:
            self._look_at_peer()
            chunk = super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise self._blocked(error, is_sending=False) from None
        self.needs_write = False
        return chunk

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """As a socket without TLS does."""
        try:
            count = super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise self._blocked(error, is_sending=False) from None
        self.needs_write = False
        return count

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """As a socket without TLS does; sends a piece of the first buffer."""
        try:
            self._look_at_peer()
            count = super().send(memoryview(next(iter(buffers)))[:_MOST_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise self._blocked(error, is_sending=True) from None
        self.needs_read = False
        return count

    def send_plain(self, data: bytes) -> None:
        """Send bytes as they are, to a side that does not speak TLS; what does not fit is lost."""
        socket.socket.send(self, data)

    def _blocked(self, error: ssl.SSLError, is_sending: bool) -> BlockingIOError:
        if is_sending:
            self.needs_read = isinstance(error, ssl.SSLWantReadError)
        else:
            self.needs_write = isinstance(error, ssl.SSLWantWriteError)
        return BlockingIOError("TLS has nothing yet")

    def _look_at_peer(self) -> None:
        """On the server's side: see whether the first byte is that of a handshake."""
        if self._is_greeted or not self.server_side:
            return
        try:
            first = socket.socket.recv(self, 1, socket.MSG_PEEK)
        except BlockingIOError:
            self.needs_read = True
            raise
        if first and first[0] != _HANDSHAKE:
            raise PlainPeerError("it does not speak TLS")
        self._is_greeted = True


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """What a server proves itself with.

    Args:
        certificate: File with its certificate, and those between it and the CA's.
        key: File with the key, which has no password.

    Raises:
        UsageError: They cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = TlsSocket
    for what, path in (("certificate", certificate), ("key", key)):
        _check_file(what, path)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{certificate!r} and {key!r} are no certificate and its key: {getattr(error, 'reason', None) or error}; "
            "expected two files in PEM that belong together"
        ) from error
    return context


def client_context(authority: str) -> ssl.SSLContext:
    """How a client verifies servers.

    Args:
        authority: File with the certificates of the CAs that it trusts, or "system".

    Raises:
        UsageError: The file cannot be read, or holds none.
    """
    if authority != SYSTEM:
        _check_file("CA", authority)
    try:
        context = ssl.create_default_context(cafile=None if authority == SYSTEM else authority)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{authority!r} holds no certificate of a CA: {getattr(error, 'reason', None) or error}; expected a file "
            "in PEM, or 'system'"
        ) from error
    context.sslsocket_class = TlsSocket
    return context


def wrap(connection: socket.socket, context: ssl.SSLContext, server: str | None = None) -> socket.socket:
    """A connected socket with TLS; the handshake is made when something is read or sent.

    Args:
        connection: Socket, which belongs to the result from now on.
        context: Context of this module.
        server: Name that the server's certificate has to have; ``None`` at the server's end.
    """
    return context.wrap_socket(
        connection, server_side=server is None, do_handshake_on_connect=False, server_hostname=server
    )


def explain(error: ssl.SSLError) -> str:
    """Why there is no TLS with the other side, for the side that called."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if error.reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return "it does not speak TLS; start it with a certificate, or call it without a CA"
    return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"


def _check_file(what: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the {what} file {path!r}: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key has a password")
