"""A proxy between an operator and the API server: it delays, holds and cuts watches, or has them begin too early."""

from __future__ import annotations

import re
import select
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass, field

from tcp_proxy import TcpProxy

_REQUEST = re.compile(rb"(GET|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n")
_ANSWER = re.compile(rb"HTTP/1\.1 (\d+)")
_DELETED = re.compile(rb'"preconditions": *\{"uid": *"([^"]+)"')
_LOOK_S = 0.2


@dataclass
class WatchProxy(TcpProxy):
    """Listens on a free port for HTTP, and passes it on by TLS.

    Attributes:
        port: The API server's port.
        watch_delay_s: How much later everything arrives that the server says in a watch.
        is_shut: Whether new connections are closed at once.
        is_held: Whether requests for watches wait.
        expired: Number of watches to come that begin at a version which is not kept any more.
        requests: Method and path of those that came, in order.
        answers: Method, path and code of those that were answered, in order.
        deleted: UIDs of objects that were to be deleted, in order.
        deletion_s: How long a request to delete an object waits here.
        deleting: Number of those that wait at the moment.
        most_deleting: The most of them that waited at once.
    """

    port: int
    watch_delay_s: float = 0.0
    is_shut: bool = False
    is_held: bool = False
    expired: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    answers: list[tuple[str, str, int]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    deletion_s: float = 0.0
    deleting: int = 0
    most_deleting: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._watches: set[socket.socket] = set()

    def cut_watches(self) -> int:
        """Cut the connections whose last request was for a watch; their number."""
        return self.cut(self._watches)

    @property
    def watches(self) -> int:
        """Number of connections whose last request was for a watch."""
        return len(self._watches)

    def count(self, method: str, words: str) -> int:
        """Number of requests of a method whose path holds these words."""
        return sum(asked == method and words in path for asked, path in list(self.requests))

    def refused(self, method: str, words: str) -> list[tuple[str, str, int]]:
        """Requests of a method whose path holds these words, and that the server did not do."""
        return [one for one in list(self.answers) if one[0] == method and words in one[1] and one[2] >= 300]

    def serve(self, client: socket.socket) -> None:
        """Carry requests to the server, and to the client what is due of its answers."""
        if self.is_shut:
            return
        server, late = self._connect(), deque[tuple[float, bytes]]()
        asked: deque[tuple[str, str]] = deque(maxlen=1)
        try:
            while True:
                left_s = late[0][0] - time.monotonic() if late else _LOOK_S
                ready = [server] if server.pending() else select.select([client, server], [], [], max(0.0, left_s))[0]
                if client in ready:
                    if not (data := client.recv(1 << 16)):
                        return
                    self.deleted += [uid.decode() for uid in _DELETED.findall(data)]
                    if self._note(client, data, asked):
                        server.close()
                        server = self._connect()  # the one before may be of a server that has ended meanwhile
                        if self.expired:
                            self.expired -= 1
                            data = re.sub(rb"resourceVersion=\d+", b"resourceVersion=1", data)
                    server.sendall(data)
                elif server in ready:
                    data = server.recv(1 << 16)
                    if asked and (found := _ANSWER.match(data)):
                        self.answers.append((*asked.pop(), int(found[1])))
                    late.append((time.monotonic() + (self.watch_delay_s if client in self._watches else 0.0), data))
                while late and late[0][0] <= time.monotonic():
                    if not (data := late.popleft()[1]):
                        return
                    client.sendall(data)
        finally:
            self._watches.discard(client)
            server.close()

    def _note(self, client: socket.socket, data: bytes, asked: deque[tuple[str, str]]) -> bool:
        """Note a request, and hold it. Whether it is for a watch."""
        if not (found := _REQUEST.match(data)):
            return False
        path = found[2].decode()
        is_watch = "watch=1" in path
        (self._watches.add if is_watch else self._watches.discard)(client)
        asked.append((found[1].decode(), path))
        self.requests.append(asked[0])
        if found[1] == b"DELETE":
            with self.lock:
                self.deleting += 1
                self.most_deleting = max(self.most_deleting, self.deleting)
            time.sleep(self.deletion_s)
            with self.lock:
                self.deleting -= 1
        while is_watch and self.is_held:
            time.sleep(0.01)
        return is_watch

    def _connect(self) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        made = socket.create_connection(("127.0.0.1", self.port), 60)
        return context.wrap_socket(made)
