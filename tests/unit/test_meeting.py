import queue
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from edl_hvd.key_value_store import StoreAddress
from edl_hvd.worker.joining.meeting import Go, Guest, Hello, Host

GO = Go(generation=3, members=("a:0", "b:0", "c:0"), known_step=70, store=StoreAddress("127.0.0.1", 9, "secret"))


def hello(rank):
    return Hello(rank, f"{'abc'[rank]}:0", generation=2, known_step=rank * 10)


@pytest.fixture
def host():
    host = Host("127.0.0.1", size=3)
    yield host
    host.close()


@pytest.fixture
def visit(host):
    guests = []

    def visit(rank, token=None):
        guests.append(Guest(host.address, host.port, token or host.token, hello(rank)))
        return guests[-1]

    yield visit
    for guest in guests:
        guest.close()


@pytest.fixture
def world(host, visit):
    """What everybody hears of deaths, by rank, and the meetings, once all have heard the go."""
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(host.gather, hello(0), 30)
        guests = [visit(1), visit(2)]
        assert gathering.result() == [hello(0), hello(1), hello(2)]
    host.announce(GO)
    assert [guest.wait(30) for guest in guests] == [GO, GO]
    meetings = [host, *guests]
    deaths = [queue.Queue() for _ in meetings]
    threads = [meeting.watch(heard.put) for meeting, heard in zip(meetings, deaths, strict=True)]
    yield meetings, deaths, threads
    for meeting in meetings:
        meeting.leave(regular=False)
    for thread in threads:  # each closes what it watches
        thread.join(30)


def test_a_member_that_does_not_come_ends_the_meeting_for_all(host, visit):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(host.gather, hello(0), 0.2)
        guest = visit(1)
        assert gathering.result() is None
        host.abort("one is missing")
        assert guest.wait(30) is None


def test_a_member_that_leaves_while_others_come_ends_the_meeting(host, visit):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(host.gather, hello(0), 30)
        visit(1).close()
        assert gathering.result() is None


def test_the_death_of_a_guest_reaches_every_member(world):
    meetings, deaths, _ = world
    meetings[2].leave(regular=False)
    assert deaths[0].get(timeout=30) == deaths[1].get(timeout=30) == "rank 2 (c:0)"
    assert deaths[2].empty()


def test_the_death_of_rank_0_reaches_every_member(world):
    meetings, deaths, _ = world
    meetings[0].leave(regular=False)
    assert deaths[1].get(timeout=30) == deaths[2].get(timeout=30) == "rank 0"
    assert deaths[0].empty()


def test_when_all_leave_nothing_goes_on_and_nobody_died(world):
    meetings, deaths, threads = world
    for meeting in meetings:
        meeting.leave(regular=True)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(heard.empty() for heard in deaths)


@pytest.mark.parametrize("intruder", ["wrong token", "garbage", "taken rank"])
def test_strangers_are_turned_away(host, visit, intruder):
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(host.gather, hello(0), 30)
        first = visit(1)
        if intruder == "garbage":
            with socket.create_connection((host.address, host.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        else:
            stranger = visit(2 if intruder == "wrong token" else 1, "?" if intruder == "wrong token" else None)
            assert stranger.wait(30) is None
        visit(2)
        assert gathering.result() == [hello(0), hello(1), hello(2)]
        first.close()
