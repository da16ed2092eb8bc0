"""A worker's connection to its driver, when the driver goes."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from edl_hvd.errors import RendezvousError
from edl_hvd.settings import Driver
from edl_hvd.worker.joining.driver_line import DriverLine


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def driver_at(listener: socket.socket) -> Driver:
    return Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 3)


def test_that_the_driver_is_gone_is_told_at_once_and_in_its_turn(listener):
    line = DriverLine(driver_at(listener), dict)
    driver, _ = listener.accept()
    with driver, driver.makefile("rb") as words:
        hello = json.loads(words.readline())
        assert (hello["token"], hello["worker"], hello["life"]) == ("token", "b:0", 3)
        told = threading.Event()
        line.at_once("lost", told.set)
        driver.sendall(b'{"what": "dismiss", "save": false}\n')
        driver.shutdown(socket.SHUT_RDWR)
    assert told.wait(60)
    assert line.lost
    assert line.next() == {"what": "dismiss", "save": False}
    assert line.next() is None


def test_a_driver_that_has_to_be_there_and_is_not_is_an_error(listener):
    driver = driver_at(listener)
    listener.close()
    with pytest.raises(RendezvousError, match=r"worker b:0 cannot reach its driver at 127\.0\.0\.1"):
        DriverLine(driver, dict)
