import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from waiting import soon

from edl_hvd.key_value_store import KeyValueStore, StoreAddress
from edl_hvd.worker.joining.meeting import Hello, Meeting

PATIENCE_S = 60


def hello(rank):
    return Hello(rank, f"{'abc'[rank]}:0", generation=2, known_step=rank * 10)


HELLOS = [hello(rank) for rank in range(3)]


@pytest.fixture
def store():
    with closing(KeyValueStore("127.0.0.1", token="secret")) as store:
        yield store


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def come(store, pool):
    return lambda rank, timeout_s=PATIENCE_S: pool.submit(Meeting, store.place, 3, hello(rank), timeout_s)


@pytest.fixture
def world(come):
    """The meetings of all members, what each hears of deaths, and the threads that listen."""
    meetings = [soon(coming) for coming in [come(2), come(0), come(1)]]
    meetings.append(meetings.pop(0))
    assert [meeting.hellos for meeting in meetings] == [HELLOS] * 3
    deaths = [queue.Queue() for _ in meetings]
    threads = [meeting.watch(heard.put) for meeting, heard in zip(meetings, deaths, strict=True)]
    yield meetings, deaths, threads
    for meeting in meetings:
        meeting.leave(regular=False)
    for thread in threads:  # each closes what it watches
        thread.join(PATIENCE_S)


def waiting(store, count):
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(len(exchange.parts) for exchange in [*store._exchanges.values()]) < count:
        assert time.monotonic() < deadline_s, f"{count} members have not come"
        time.sleep(0.001)


def test_a_member_that_does_not_come_ends_the_meeting_for_all(store, come):
    patient = come(1)
    waiting(store, 1)
    with pytest.raises(OSError, match="timed out"):
        soon(come(0, timeout_s=0.2))
    with pytest.raises(OSError, match="status 410"):
        soon(patient)


def test_a_member_that_leaves_while_others_come_ends_the_meeting(store, come):
    patient = come(0)
    waiting(store, 1)
    with socket.create_connection((store.address, store.port)) as leaver:
        leaver.sendall(b"PUT /edl_hvd.meeting/1?of=3&stay HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
                       b"Content-Length: 2\r\n\r\n{}")  # fmt: skip
        waiting(store, 2)
    with pytest.raises(OSError, match="status 410"):
        soon(patient)


def test_the_death_of_a_member_reaches_every_other(world):
    meetings, deaths, _ = world
    meetings[2].leave(regular=False)
    assert deaths[0].get(timeout=PATIENCE_S) == deaths[1].get(timeout=PATIENCE_S) == "rank 2 (c:0)"
    assert deaths[2].empty()


def test_the_death_of_rank_0_reaches_every_member(store, world):
    _, deaths, _ = world
    store.close(broken=True)  # as the store of a process that is killed
    assert [heard.get(timeout=PATIENCE_S) for heard in deaths] == ["rank 0 (a:0)"] * 3


@pytest.mark.parametrize("first", ["the members", "the store"])
def test_when_all_leave_nothing_goes_on_and_nobody_died(store, world, first):
    meetings, deaths, threads = world
    if first == "the store":
        store.close()
    for meeting in meetings:
        meeting.leave(regular=True)
        meeting.leave(regular=True)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    store.close()
    assert all(heard.empty() for heard in deaths)
    assert (store._exchanges, store._bytes) == ({}, 0)


def test_a_death_after_others_have_left_reaches_those_who_are_left(world):
    meetings, deaths, _ = world
    meetings[1].leave(regular=True)
    meetings[2].leave(regular=False)
    assert deaths[0].get(timeout=PATIENCE_S) == "rank 2 (c:0)"
    assert deaths[1].empty()


def test_a_store_that_says_nonsense_is_no_meeting():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        coming = pool.submit(Meeting, StoreAddress(*server.getsockname()), 2, hello(1), PATIENCE_S)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n\0\0\0\7{}")
        with pytest.raises((OSError, ValueError)):
            soon(coming)


@pytest.mark.parametrize("intruder", ["wrong token", "garbage"])
def test_strangers_are_turned_away(store, come, intruder):
    first = come(1)
    if intruder == "garbage":
        with socket.create_connection((store.address, store.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    else:
        with pytest.raises(OSError, match="status 401"):
            Meeting(StoreAddress(store.address, store.port, "?"), 3, hello(2), PATIENCE_S)
    others = [come(2), come(0)]
    assert [soon(coming).hellos for coming in (first, *others)] == [HELLOS] * 3
    for coming in (first, *others):
        soon(coming).leave(regular=True)
        soon(coming).watch(lambda who: None).join(PATIENCE_S)
