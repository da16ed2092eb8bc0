"""A worker's connection to its driver: what is told at once, what in its turn, and when the driver goes."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from edl_hvd.errors import RendezvousError
from edl_hvd.protocol import HELLO, Beat, Hello, PeerLost, ResizeRequested, ShutDown, WatchHello, decode, encode
from edl_hvd.settings import Driver
from edl_hvd.worker.engine import mended
from edl_hvd.worker.joining.driver_connection import DriverConnection, DriverLost, Urgent

BEAT = Beat(0, 1, 0, 0, -1, "start", 0.0, 0.0, 0, 0, 0, 0.0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def driver_at(listener: socket.socket) -> Driver:
    return Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 3)


def test_what_cannot_wait_is_told_at_once_and_the_rest_in_its_turn(listener):
    told: queue.Queue[Urgent] = queue.Queue()
    connection = DriverConnection(driver_at(listener), lambda: BEAT, told.put)
    driver, _ = listener.accept()
    with driver, driver.makefile("rb") as words:
        assert decode(words.readline(), HELLO) == Hello("token", "b:0", 3)
        driver.sendall(
            encode(ResizeRequested(7)) + encode(ShutDown(save=False, left_s=None)) + encode(PeerLost(7, "a:0"))
        )
        driver.shutdown(socket.SHUT_RDWR)
    assert [told.get(timeout=60), told.get(timeout=60)] == [PeerLost(7, "a:0"), DriverLost()]
    assert connection.lost
    assert connection.change == 7
    assert [connection.next(), connection.next()] == [ShutDown(save=False, left_s=None), DriverLost()]


@pytest.mark.parametrize(
    "words",
    [b"nonsense\n", b'{"what": "beat"}\n', b'{"what": "gone", "generation": 7}\n', b"x" * (1 << 20) + b"\n"],
    ids=["no JSON", "no message to a worker", "a field is missing", "too long"],
)
def test_a_driver_that_is_not_understood_is_gone(listener, words):
    told: queue.Queue[Urgent] = queue.Queue()
    connection = DriverConnection(driver_at(listener), lambda: BEAT, told.put)
    driver, _ = listener.accept()
    with driver:
        driver.sendall(words + encode(PeerLost(7, "a:0")))
        assert told.get(timeout=60) == DriverLost()
    assert connection.next() == DriverLost()


def test_a_driver_that_has_to_be_there_and_is_not_is_an_error(listener):
    driver = driver_at(listener)
    listener.close()
    with pytest.raises(RendezvousError, match=r"worker b:0 cannot reach its driver at 127\.0\.0\.1"):
        DriverConnection(driver, lambda: BEAT, lambda news: None)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_connection_that_cannot_be_held_does_not_say_that_the_process_ends(listener, monkeypatch, is_held):
    kept: list[int] = []
    monkeypatch.setattr(mended, "watch_death", lambda descriptor: is_held and not kept.append(os.dup(descriptor)))
    DriverConnection(driver_at(listener), lambda: BEAT, lambda news: None)
    own, *watches = [listener.accept()[0] for _ in range(3)]
    for watch in watches:
        watch.setblocking(is_held is False)
        with watch, watch.makefile("rb") as words:
            assert decode(words.readline(), HELLO) == WatchHello("token", "b:0", 3)
            assert (words.readline() or b"") == (b"" if is_held else b"\n")
    own.close()
    for descriptor in kept:
        os.close(descriptor)


@pytest.mark.parametrize("how", ["lives", "is gone", "is about to be gone"])
def test_whether_a_lost_driver_lives_shows_when_it_is_called(listener, how):
    told: queue.Queue[Urgent] = queue.Queue()
    connection = DriverConnection(driver_at(listener), lambda: BEAT, told.put)
    for _ in range(3):  # its own, and two that say only that its process ends
        listener.accept()[0].close()
    assert told.get(timeout=60) == DriverLost()
    if how == "is gone":
        listener.close()
    elif how == "is about to be gone":
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
    assert connection.takes_calls() == (how == "lives")
