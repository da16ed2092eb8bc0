"""Whether an upload waits for the server to say that it wants the body ("100 Continue"): it does not."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator

import boto3
import pytest
import urllib3.util
from botocore.awsrequest import AWSConnection
from botocore.config import Config
from botocore.exceptions import ReadTimeoutError
from faulty_proxy import FaultyProxy, Swallow
from servers import AwsServer

from edl_hvd.storage.retries import Patience
from edl_hvd.storage.s3 import S3Storage

CONTINUE = b"HTTP/1.1 100 Continue\r\n"
OK = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n'
BODY = b"x" * 3000


class Server:
    """Says one thing on each connection when it has the headers; after a whole word it reads the body and answers.

    Args:
        words: What to say on one connection after the other. After half of "100 Continue" the connection breaks.
    """

    def __init__(self, *words: bytes) -> None:
        self._words = words
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.headers: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for words in self._words:
            connection, _ = self._listener.accept()
            self.connections += 1
            with connection, connection.makefile("rb") as stream:
                while (line := stream.readline()) != b"\r\n":
                    self.headers.append(line.lower())
                connection.sendall(words)
                if words != CONTINUE:
                    self.bodies.append(stream.read(len(BODY)))
                    connection.sendall(OK)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(*request.param)
    environment = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**environment, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long botocore was ready to wait for an answer before it sends a body, each time."""
    found: list[float] = []

    def wait_for_read(_: socket.socket, timeout_s: float) -> bool:
        found.append(timeout_s)
        return False

    monkeypatch.setattr(urllib3.util, "wait_for_read", wait_for_read)
    return found


@pytest.mark.parametrize("server", [(CONTINUE, CONTINUE + b"\r\n")], indirect=True)
def test_a_connection_that_breaks_within_100_continue_is_one_that_failed_and_the_request_is_made_again(server):
    S3Storage("bucket").write("key", BODY)
    assert server.bodies == [BODY]
    assert server.connections == 2


@pytest.mark.parametrize("server", [(b"",)], indirect=True)
def test_a_server_that_never_says_100_continue_is_not_waited_for(server, waits):
    S3Storage("bucket").write("key", BODY)
    assert server.bodies == [BODY]
    assert waits == []
    assert [line for line in server.headers if line.startswith(b"expect")] == []


@pytest.mark.parametrize("server", [(b"",)], indirect=True)
def test_other_clients_of_the_process_ask_and_wait_as_ever(server, waits):
    storage = S3Storage("bucket")
    client = boto3.client("s3", endpoint_url=server.url)
    client.put_object(Bucket="bucket", Key="key", Body=io.BytesIO(BODY))
    assert server.bodies == [BODY]
    assert waits == [1]
    assert b"expect: 100-continue\r\n" in server.headers
    assert AWSConnection._consume_headers.__module__ == "botocore.awsrequest"
    storage.close()


@pytest.fixture
def swallowing(aws: AwsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before a server of S3 that waits for the server's word on the body, and does not see it."""
    with FaultyProxy(aws.url) as proxy:
        proxy.meet(Swallow(), "PUT", times=None)
        for name, value in {**aws.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def test_a_proxy_that_swallows_100_continue_does_not_stall_an_upload(aws, swallowing):
    storage = S3Storage(aws.new_bucket(), patience=Patience(stall_s=20.0, attempts=1))
    storage.write("key", BODY)
    assert storage.read("key") == BODY
    assert swallowing.swallowed == []


def test_a_client_that_asks_through_such_a_proxy_gets_no_answer(aws, swallowing):
    """Else the test above shows nothing."""
    client = boto3.client("s3", config=Config(read_timeout=3, retries={"total_max_attempts": 1}))
    with pytest.raises(ReadTimeoutError):
        client.put_object(Bucket=aws.new_bucket(), Key="key", Body=io.BytesIO(BODY))
    [word] = swallowing.swallowed
    assert word.startswith(CONTINUE)
