"""The server that shows how something stands."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.status_server import Document, StatusServer, read_address


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with StatusServer(
        "0", {"/": lambda: Document("<p>ä</p>"), "/metrics": lambda: Document("a 1\n", "text/plain")}
    ) as it:
        yield it


def ask(server: StatusServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, bytes]:
    place = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers["Content-Type"], answer.read()
    connection.close()
    return found


def test_each_path_shows_its_document(server):
    assert ask(server, "/") == (200, "text/html; charset=utf-8", "<p>ä</p>".encode())
    assert ask(server, "/metrics?x=1") == (200, "text/plain", b"a 1\n")
    assert ask(server, "/", "HEAD")[2] == b""
    assert ask(server, "/etc/passwd")[0] == 404
    assert ask(server, "/", "POST")[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_page_of_another_site_that_leads_here_reads_nothing(server, host):
    """As by DNS rebinding: the browser names the other site."""
    assert ask(server, "/", Host=host)[0] == 403
    assert ask(server, "/", Host="localhost:1")[0] == 200
    assert ask(server, "/", Host="127.2.0.3:1")[0] == 200


def test_callers_that_say_nothing_keep_no_other_away_for_long(server):
    port = int(server.url.rstrip("/").rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(15)]
    try:
        assert ask(server, "/")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_garbage_ends_the_connection_alone(server):
    port = int(server.url.rstrip("/").rpartition(":")[2])
    for line in (b"\0" * 70_000, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: [::\r\n\r\n", b"\x16\x03\x01" * 50 + b"\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    assert ask(server, "/")[0] == 200


@pytest.mark.parametrize("document", [lambda: Document(str(1 / 0)), lambda: Document("\ud800")])
def test_a_document_that_cannot_be_made_is_answered_and_logged_once(
    document: Callable[[], Document], caplog: pytest.LogCaptureFixture
) -> None:
    with StatusServer("0", {"/bad": document, "/good": lambda: Document("x"), "/worse": document}) as server:
        for _ in range(3):
            status, kind, text = ask(server, "/bad")
            assert (status, kind) == (500, "text/plain; charset=utf-8")
            assert text == b"this cannot be shown now; the log of the program that serves it says why\n"
        assert ask(server, "/bad", "HEAD")[::2] == (500, b"")
        assert ask(server, "/good")[0] == 200
        assert ask(server, "/worse")[0] == 500
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["/bad", "/worse"]
    assert all(record.exc_info for record in caplog.records)


def test_a_host_that_does_not_read_is_a_bad_request(server, caplog):
    assert ask(server, "/", Host="[::")[0] == 400
    assert not caplog.records


def _caught(error: Exception) -> None:
    """The server, while it handles this error of a request."""
    with StatusServer("0", {}) as server:
        try:
            raise error
        except Exception:
            server._server.handle_error(None, ("127.0.0.1", 7))


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), TimeoutError()])
def test_a_caller_that_hangs_up_is_not_logged(error, caplog):
    _caught(error)
    assert not caplog.records


def test_another_error_of_a_request_is_logged(caplog):
    _caught(ValueError("x"))
    [record] = caplog.records
    assert record.getMessage() == "a request from ('127.0.0.1', 7) could not be answered"


def test_a_port_that_is_taken_is_one_sentence(server):
    taken = server.url.removeprefix("http://").rstrip("/")
    with pytest.raises(UsageError, match=f"nothing can be served at {taken}: .*expected a free port"):
        StatusServer(taken, {})


@pytest.mark.parametrize("text", ["", "x", "70000", "-1", "host:80", "1.2.3.4:", "٣"])
def test_a_place_that_does_not_read_is_refused(text):
    with pytest.raises(UsageError, match="expected PORT or ADDRESS:PORT"):
        read_address(text)


def test_addresses_of_both_kinds():
    assert read_address("[::1]:80") == ("::1", 80)
    with StatusServer("[::1]:0", {"/": lambda: Document("x")}) as server:
        assert ask(server, "/")[2] == b"x"
