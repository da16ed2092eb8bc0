"""A world of one takes SIGTERM while it lasts, and only where the script does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from clocks import FakeClock

from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def leave(rendezvous: SoloRendezvous) -> None:
    rendezvous.leave(broken=False)


def end(rendezvous: SoloRendezvous) -> None:
    rendezvous.ended(0, None)


@pytest.mark.parametrize("over", [leave, end])
def test_sigterm_is_taken_in_each_world_and_in_no_other_time(over):
    rendezvous = SoloRendezvous()
    for _ in range(2):
        rendezvous.join(-1, -1)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        over(rendezvous)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("over", [leave, end])
@pytest.mark.parametrize("when", ["before", "in the world"])
def test_a_handler_of_the_script_stays_whenever_it_was_set(over, when):
    rendezvous = SoloRendezvous()
    if when == "in the world":
        rendezvous.join(-1, -1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if when == "before":
        rendezvous.join(-1, -1)
    over(rendezvous)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_sigterm_that_is_sent_twice_at_once_is_one_request(monkeypatch):
    """GNU timeout sends it to the process and to its group."""
    clock, killed = FakeClock(), []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    rendezvous = SoloRendezvous(clock)
    rendezvous.join(-1, -1)
    signal.raise_signal(signal.SIGTERM)
    clock.sleep(0.9)
    signal.raise_signal(signal.SIGTERM)
    assert rendezvous.change_pending()
    leave(rendezvous)
    signal.raise_signal(signal.SIGTERM)
    assert killed == [], "it saves and leaves"
    clock.sleep(1.0)
    signal.raise_signal(signal.SIGTERM)
    assert killed == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
