"""A standby, when it is asked to exit or its driver goes; the driver is a real connection."""

from __future__ import annotations

import signal
import socket

import pytest

from edl_hvd.protocol import (
    FROM_WORKER,
    DonorLost,
    Explain,
    Message,
    Ready,
    ReceiveState,
    ShutDown,
    Waits,
    WorldAssigned,
    decode,
    encode,
)
from edl_hvd.settings import Driver
from edl_hvd.worker.joining.driver_rendezvous import DriverRendezvous
from edl_hvd.worker.joining.rendezvous import GracefulExit, StateTransfer

RECEIVE = ReceiveState(1, "127.0.0.1", 1)
SHUT_DOWN = ShutDown(save=False, left_s=None)


class Replica:
    """Has not caught up."""

    caught_up = closed = abandoned = False
    inputs_ended = 0

    def apply_next(self) -> None:
        raise AssertionError("nothing has come")

    def end_input(self) -> None:
        self.inputs_ended += 1
        self.closed = True

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture(autouse=True)
def own_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("news", [[RECEIVE, SHUT_DOWN], [RECEIVE]], ids=["asked to exit", "driver gone"])
def test_a_standby_that_leaves_stops_receiving(news: list[Message]):
    replica = Replica()
    transfer = StateTransfer(lambda address, secret: 0, lambda address, port, secret, deliver: replica, lambda: -1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = DriverRendezvous(Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 1))
        driver, _ = listener.accept()
        with driver:
            driver.sendall(b"".join(map(encode, news)))
            driver.shutdown(socket.SHUT_WR)
            with pytest.raises(GracefulExit):
                rendezvous.join(-1, -1, transfer)
    assert replica.abandoned


def test_a_standby_that_was_given_the_state_says_so_when_its_first_world_does_not_form(monkeypatch):
    """Else the others go on without it, and give it all once more."""
    held = iter((5, 5))
    transfer = StateTransfer(lambda address, secret: 0, lambda *_: Replica(), lambda: next(held))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = DriverRendezvous(Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 1))
        monkeypatch.setattr(rendezvous, "_enter", lambda told: None)
        driver, _ = listener.accept()
        with driver, driver.makefile("rb") as words:
            worlds = [WorldAssigned(number, ("b:0",), "127.0.0.1", 1, "lo", None, 5) for number in (1, 2)]
            driver.sendall(b"".join(map(encode, [*worlds, SHUT_DOWN])))
            with pytest.raises(GracefulExit):
                rendezvous.join(5, -1, transfer)
            words.readline()  # hello
            said = (decode(line, FROM_WORKER) for line in words)
            steps = [next(message.step for message in said if isinstance(message, Ready)) for _ in range(3)]
    assert steps == [-1, 5, 5]


def test_a_standby_whose_donor_is_dead_enters_its_world_at_once(monkeypatch):
    replica = Replica()
    transfer = StateTransfer(lambda address, secret: 0, lambda address, port, secret, deliver: replica, lambda: -1)
    entered = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = DriverRendezvous(Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 1))
        monkeypatch.setattr(rendezvous, "_enter", lambda told: entered.append((told.generation, replica.inputs_ended)))
        driver, _ = listener.accept()
        with driver:
            world = WorldAssigned(2, ("a:0", "b:0"), "127.0.0.1", 1, "lo", None, 5)
            # Once more for a worker that receives nothing: one of the others' donors may have been the same.
            driver.sendall(b"".join(map(encode, [RECEIVE, world, DonorLost(), DonorLost(), SHUT_DOWN])))
            with pytest.raises(GracefulExit):
                rendezvous.join(5, -1, transfer)
    assert entered == [(2, 1)]
    assert replica.inputs_ended == 1
    assert not replica.abandoned


def test_a_worker_explains_what_it_waits_for_in_the_present_world_and_no_other():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = DriverRendezvous(Driver("127.0.0.1", listener.getsockname()[1], "token", "b:0", 1))
        rendezvous._started = {"A": 3, "B": 1}
        driver, _ = listener.accept()
        with driver, driver.makefile("rb") as words:
            for generation in (7, 0):
                driver.sendall(encode(Explain(generation, ("B", "C", "A"))))
            words.readline()  # hello
            answers = (decode(line, FROM_WORKER) for line in words)
            answer = next(answer for answer in answers if isinstance(answer, Waits))
    assert (answer.generation, answer.started) == (0, (1, 0, 3))
    assert answer.place.startswith("test_driver_rendezvous.py:")
