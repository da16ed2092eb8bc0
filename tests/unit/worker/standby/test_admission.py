"""A donor waits for one standby, and for nobody else who connects meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack

import pytest
from waiting import LONG_S, soon

from edl_hvd.tensor_threads import run_in_tensor_thread
from edl_hvd.worker.standby import admission
from edl_hvd.worker.standby.admission import admit

SECRET = "only the job knows"


class Donor:
    """The side that waits, in a thread, and those who call it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.admitted: Future[socket.socket] = run_in_tensor_thread(
            lambda: admit(self.listener, SECRET, LONG_S), "donor"
        )

    def call(self, *words: bytes) -> socket.socket:
        caller = self._stack.enter_context(socket.create_connection(self.listener.getsockname()))
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for word in words:
            caller.sendall(word)
        return caller

    def check_admits(self, caller: socket.socket) -> None:
        with soon(self.admitted) as admitted:
            assert admitted.getpeername() == caller.getsockname()


@pytest.fixture
def donor() -> Iterator[Donor]:
    with ExitStack() as stack:
        yield Donor(stack)


def has_hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_strangers_do_not_keep_the_standby_out(donor):
    strangers = [donor.call(), donor.call(b"only"), donor.call(SECRET.encode())]
    donor.check_admits(donor.call(SECRET.encode(), b"\n"))
    assert all(map(has_hung_up, strangers))


@pytest.mark.parametrize(
    "words", [b"\n", b"wrong\n", SECRET.encode() + b"!\n", b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_stranger_that_says_something_else_is_hung_up_on(donor, words):
    assert has_hung_up(donor.call(words))
    donor.check_admits(donor.call(SECRET.encode() + b"\n"))


def test_of_many_strangers_the_first_give_way(donor, monkeypatch):
    monkeypatch.setattr(admission, "_MOST_STRANGERS", 4)
    strangers = [donor.call() for _ in range(12)]
    assert all(map(has_hung_up, strangers[:8]))
    donor.check_admits(donor.call(SECRET.encode() + b"\n"))
    assert all(map(has_hung_up, strangers[8:]))


def test_the_wait_ends_whoever_has_connected():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as silent:
        with pytest.raises(TimeoutError, match="no standby has connected within 0 s"):
            admit(listener, SECRET, 0.0)
        listener.close()
        assert has_hung_up(silent)


def test_the_wait_ends_where_the_listener_is_shut_down(donor):
    stranger = donor.call()
    donor.listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match="Invalid argument"):
        soon(donor.admitted)
    donor.listener.close()
    assert has_hung_up(stranger)
