"""Lets the one standby in that a donor waits for; strangers, however many and silent, do not keep it out."""

from __future__ import annotations

import hmac
import selectors
import socket
import time

_LONGEST_SECRET_BYTES = 4096
_MOST_STRANGERS = 64
# Connections that have not given the secret yet; they must not use up the descriptors of the worker.


def admit(listener: socket.socket, secret: str, timeout_s: float) -> socket.socket:
    """The first connection that begins with the secret, and all others closed. Any thread; blocks.

    Args:
        listener: Listening socket. To shut it down from another thread ends the wait.
        secret: Line that is to come.
        timeout_s: Longest time until it has come, whoever else connects meanwhile.

    Returns:
        A connected socket that does not block; nothing is left to read of the line.

    Raises:
        TimeoutError: No connection has given the secret in time.
        OSError: The listener was shut down, or no descriptor is left.
    """
    expected, deadline_s = secret.encode() + b"\n", time.monotonic() + timeout_s
    strangers: dict[socket.socket, bytearray] = {}  # what each has said; the one that came first is the first
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:

        def drop(stranger: socket.socket) -> None:
            selector.unregister(stranger)
            del strangers[stranger]
            stranger.close()

        selector.register(listener, selectors.EVENT_READ)
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                ready = {key.fileobj for key, _ in selector.select(left_s)}
                # Before room is made for another one, those that are here are heard.
                for stranger in [one for one in strangers if one in ready]:
                    said = strangers[stranger]
                    is_over = _hear(stranger, said)
                    if hmac.compare_digest(said, expected):
                        del strangers[stranger]
                        return stranger
                    if is_over:
                        drop(stranger)
                if listener in ready and (newcomer := _accept(listener)) is not None:
                    if len(strangers) >= _MOST_STRANGERS:
                        drop(next(iter(strangers)))
                    strangers[newcomer] = bytearray()
                    selector.register(newcomer, selectors.EVENT_READ)
        finally:
            for stranger in strangers:
                stranger.close()
    raise TimeoutError(f"no standby has connected within {timeout_s:g} s")


def _accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; ``None`` where it has ended already."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    connection.setblocking(False)
    return connection


def _hear(stranger: socket.socket, said: bytearray) -> bool:
    """Add what has come to what was said; whether that is a whole line, or nothing more will come."""
    try:
        chunk = stranger.recv(_LONGEST_SECRET_BYTES)
    except BlockingIOError:
        return False
    except OSError:
        return True
    said += chunk
    return not chunk or b"\n" in chunk or len(said) >= _LONGEST_SECRET_BYTES
