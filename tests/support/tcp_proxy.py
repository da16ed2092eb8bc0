"""What the proxies of the tests share: each listens on a free port, and serves every connection in its own thread."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

Proxy = TypeVar("Proxy", bound="TcpProxy")


class TcpProxy(ABC):
    """Listens from its construction on, and serves as long as it is entered.

    Attributes:
        url: Where it listens, for HTTP.
        lock: Held while anything changes that several connections share.
        closing: Set when it is left.
        connections: Those that are open, at both ends of the proxy.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @abstractmethod
    def serve(self, client: socket.socket) -> None:
        """Serve a connection, which is closed afterwards; an ``OSError`` ends it, too."""

    @contextmanager
    def kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        """A connection that ``cut`` knows, and that is closed at the end."""
        with self.lock:
            self.connections.add(connection)
        try:
            with connection:
                yield connection
        finally:
            with self.lock:
                self.connections.discard(connection)

    def cut(self, only: Iterable[socket.socket] | None = None) -> int:
        """Shut connections down, all by default; their number."""
        with self.lock:
            found = list(self.connections if only is None else self.connections.intersection(only))
        for connection in found:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return len(found)

    def __enter__(self: Proxy) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), self.kept(client):
            self.serve(client)
