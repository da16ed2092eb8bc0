import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from waiting import soon, until

from edl_hvd.key_value_store import KeyValueStore, StoreAddress
from edl_hvd.worker.joining.barrier import Barrier, JoinRequest

PATIENCE_S = 60


def request_of(rank):
    return JoinRequest(rank, f"{'abc'[rank]}:0", generation=2, known_step=rank * 10)


REQUESTS = [request_of(rank) for rank in range(3)]


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
    return lambda rank, timeout_s=PATIENCE_S: pool.submit(Barrier, store.place, 3, request_of(rank), timeout_s)


@pytest.fixture
def world(come):
    """The barriers of all members, what each hears of deaths, and the threads that listen."""
    barriers = [soon(coming) for coming in [come(2), come(0), come(1)]]
    barriers.append(barriers.pop(0))
    assert [barrier.requests for barrier in barriers] == [REQUESTS] * 3
    deaths = [queue.Queue() for _ in barriers]
    threads = [barrier.watch(heard.put) for barrier, heard in zip(barriers, deaths, strict=True)]
    yield barriers, deaths, threads
    for barrier in barriers:
        barrier.leave(regular=False)
    for thread in threads:  # each closes what it watches
        thread.join(PATIENCE_S)


def waiting(store, count):
    until(lambda: sum(len(exchange.parts) for exchange in [*store._exchanges.values()]) >= count, every_s=0.001)


def test_a_member_that_does_not_come_ends_the_barrier_for_all(store, come):
    patient = come(1)
    waiting(store, 1)
    with pytest.raises(OSError, match="timed out"):
        soon(come(0, timeout_s=0.2))
    with pytest.raises(OSError, match="status 410"):
        soon(patient)


def test_a_member_that_leaves_while_others_come_ends_the_barrier(store, come):
    patient = come(0)
    waiting(store, 1)
    with socket.create_connection((store.address, store.port)) as leaver:
        leaver.sendall(b"PUT /edl_hvd.meeting/1?of=3&stay HTTP/1.1\r\nAuthorization: Bearer secret\r\n"
                       b"Content-Length: 2\r\n\r\n{}")  # fmt: skip
        waiting(store, 2)
    with pytest.raises(OSError, match="status 410"):
        soon(patient)


def test_the_death_of_a_member_reaches_every_other(world):
    barriers, deaths, _ = world
    barriers[2].leave(regular=False)
    assert deaths[0].get(timeout=PATIENCE_S) == deaths[1].get(timeout=PATIENCE_S) == "rank 2 (c:0)"
    assert deaths[2].empty()


def test_the_death_of_rank_0_reaches_every_member(store, world):
    _, deaths, _ = world
    store.close(broken=True)  # as the store of a process that is killed
    assert [heard.get(timeout=PATIENCE_S) for heard in deaths] == ["rank 0 (a:0)"] * 3


@pytest.mark.parametrize("first", ["the members", "the store"])
def test_when_all_leave_nothing_goes_on_and_nobody_died(store, world, first):
    barriers, deaths, threads = world
    if first == "the store":
        store.close()
    for barrier in barriers:
        barrier.leave(regular=True)
        barrier.leave(regular=True)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    store.close()
    assert all(heard.empty() for heard in deaths)
    assert (store._exchanges, store._bytes) == ({}, 0)


def test_a_death_after_others_have_left_reaches_those_who_are_left(world):
    barriers, deaths, _ = world
    barriers[1].leave(regular=True)
    barriers[2].leave(regular=False)
    assert deaths[0].get(timeout=PATIENCE_S) == "rank 2 (c:0)"
    assert deaths[1].empty()


def test_a_store_that_says_nonsense_is_no_barrier():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        coming = pool.submit(Barrier, StoreAddress(*server.getsockname()), 2, request_of(1), PATIENCE_S)
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
            Barrier(StoreAddress(store.address, store.port, "?"), 3, request_of(2), PATIENCE_S)
    others = [come(2), come(0)]
    assert [soon(coming).requests for coming in (first, *others)] == [REQUESTS] * 3
    for coming in (first, *others):
        soon(coming).leave(regular=True)
        soon(coming).watch(lambda who: None).join(PATIENCE_S)
