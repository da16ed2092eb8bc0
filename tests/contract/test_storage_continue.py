"""A connection that breaks within the answer "100 Continue", for which botocore would look for the rest for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from edl_hvd.storage.s3 import S3Storage

CONTINUE = b"HTTP/1.1 100 Continue\r\n"
BODY = b"x" * 3000


class Server:
    """Breaks the first connection off after a line, and serves the second."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bodies: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answers_whole in (False, True):
            connection, _ = self._listener.accept()
            self.connections += 1
            with connection, connection.makefile("rb") as stream:
                while stream.readline() != b"\r\n":
                    pass
                connection.sendall(CONTINUE)
                if answers_whole:
                    connection.sendall(b"\r\n")
                    self.bodies.append(stream.read(len(BODY)))
                    connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    environment = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**environment, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_a_connection_that_breaks_within_100_continue_is_one_that_failed_and_the_request_is_made_again(server):
    S3Storage("bucket").write("key", BODY)
    assert server.bodies == [BODY]
    assert server.connections == 2
