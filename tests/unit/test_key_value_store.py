import asyncio
import importlib.util
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from clocks import FakeClock
from descriptors import no_descriptor_left
from waiting import soon

from edl_hvd import key_value_store
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.key_value_store import KeyValueStore, StoreAddress

TIMEOUT_S = 120  # for what takes milliseconds
LARGEST = 1 << 20


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    with closing(KeyValueStore("127.0.0.1")) as store:
        yield store


def connect(store: KeyValueStore) -> socket.socket:
    return socket.create_connection((store.address, store.port), TIMEOUT_S)


def slow_reader(store: KeyValueStore) -> socket.socket:
    """A connection whose window and segments are so small that the store cannot send all at once."""
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    stream.settimeout(TIMEOUT_S)
    stream.connect((store.address, store.port))
    return stream


def read_all(stream: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    return b"".join(iter(lambda: stream.recv(1 << 16), b""))


def ask(store: KeyValueStore, sent: bytes) -> bytes:
    with connect(store) as stream:
        stream.sendall(sent)
        return read_all(stream)


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """As Horovod's HTTPRequest.hpp writes it."""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


# --- what Horovod does ---


def test_the_store_keeps_and_misses_like_horovods(store):
    assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) is None
    key_value_store.put(store.place, "/global/0", b"\x00address", TIMEOUT_S)
    assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) == b"\x00address"
    with pytest.raises(OSError, match="status 413"):
        key_value_store.put(store.place, "/global/1", bytes(2 << 20), TIMEOUT_S)
    assert store.get("/global/1") is None


def test_each_request_of_horovods_client_is_answered_and_its_connection_ended(store):
    assert ask(store, request("PUT", "/local_host-1/rank_0", b"a\r\n\r\nb")).startswith(b"HTTP/1.1 200 OK\r\n")
    head, _, body = ask(store, request("GET", "/local_host-1/rank_0")).partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"a\r\n\r\nb")
    assert b"\r\nContent-Length: 6" in head  # the case matters to HTTPRequest.hpp
    missing = ask(store, request("GET", "/local_host-1/rank_1"))
    assert missing.startswith(b"HTTP/1.1 404 ")
    assert missing.endswith(b"\r\nContent-Length: 0\r\n\r\n")


def test_a_key_that_its_rank_deletes_is_gone_for_the_next_context_of_that_name(store):
    store.put("/global.process_set/0", b"address of a closed socket")
    store.put("/global.process_set/1", b"another")
    for _ in range(2):  # Horovod tries again when the answer got lost
        assert status(ask(store, request("DELETE", "/global.process_set/0"))) == 200
    assert status(ask(store, request("GET", "/global.process_set/0"))) == 404
    assert store.get("/global.process_set/1") == b"another"


def test_a_request_may_come_in_pieces(store):
    sent = request("PUT", "/global/0", b"value")
    with connect(store) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in sent:
            stream.sendall(bytes([byte]))
        assert status(read_all(stream)) == 200
    assert store.get("/global/0") == b"value"


def test_the_largest_value_travels_both_ways(store):
    value = random.Random(0).randbytes(LARGEST)
    key_value_store.put(store.place, "/global/0", value, TIMEOUT_S)
    with slow_reader(store) as stream:
        stream.sendall(request("GET", "/global/0"))
        # While this one does not read, others are served.
        assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) == value
        assert read_all(stream).partition(b"\r\n\r\n")[2] == value


def test_eight_ranks_find_each_other(store):
    path = Path(__file__).parents[2] / "benchmarks" / "rendezvous.py"
    specification = importlib.util.spec_from_file_location("benchmark_of_the_rendezvous", path)
    assert specification is not None
    assert specification.loader is not None
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    mesh = benchmark.measure_mesh(store.port, size=8, clients=2, limit_s=TIMEOUT_S)
    assert mesh.complete
    assert mesh.requests == 8 * (1 + 7 + 1)
    assert [store.get(f"/global/{rank}") for rank in range(8)] == [None] * 8


# --- the owner ---


def test_an_asyncio_program_can_own_a_store():
    async def own() -> bytes | None:
        store = KeyValueStore("127.0.0.1")
        reader, writer = await asyncio.open_connection(store.address, store.port)
        writer.write(request("PUT", "/global/0", b"value"))
        assert status(await reader.read()) == 200
        writer.close()
        await writer.wait_closed()
        store.close()
        return store.get("/global/0")

    assert asyncio.run(own()) == b"value"


def test_the_owner_puts_only_what_a_peer_could_put(store):
    store.put("/rank_and_size/host:0", bytearray(b"0,1"))
    assert key_value_store.get(store.place, "/rank_and_size/host:0", TIMEOUT_S) == b"0,1"
    with pytest.raises(UsageError, match="/scope/key"):
        store.put("/key", b"")
    with pytest.raises(UsageError, match="the most is 1048576"):
        store.put("/global/0", bytes(LARGEST + 1))


def test_closing_ends_everything_and_may_be_done_twice_and_by_any_thread():
    threads = set(threading.enumerate())
    with no_descriptor_left():
        store = KeyValueStore("127.0.0.1")
        with connect(store) as stream:
            key_value_store.get(store.place, "/global/0", TIMEOUT_S)  # the other one has been accepted
            closers = [threading.Thread(target=store.close) for _ in range(2)]
            for closer in closers:
                closer.start()
            for closer in closers:
                soon(closer)
            assert stream.recv(1) == b""
        store.close()
        with pytest.raises(ConnectionRefusedError):
            connect(store)
    assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended


def test_an_address_of_another_host_is_refused_with_what_to_do():
    with pytest.raises(PlatformError, match=r"no key-value store on 192\.0\.2\.1: .*ip -4 address"):
        KeyValueStore("192.0.2.1")


# --- strangers ---


def test_a_peer_that_is_not_allowed_gets_no_answer():
    asked = []

    def allowed(address: str) -> bool:
        asked.append(address)
        return len(asked) > 1

    with closing(KeyValueStore("127.0.0.1", allowed)) as store:
        with connect(store) as stranger:
            assert stranger.recv(1) == b""
        assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) is None
    assert asked == ["127.0.0.1"] * 2


def test_nobody_is_let_in_while_it_cannot_be_told_who_may(caplog):
    answers: Iterator[Exception | bool] = iter([ZeroDivisionError("no list of hosts"), True])

    def allowed(address: str) -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with closing(KeyValueStore("127.0.0.1", allowed)) as store:
        with connect(store) as stranger:
            assert stranger.recv(1) == b""
        assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) is None
    assert "no list of hosts" in caplog.text


def head(*lines: str) -> bytes:
    return "".join(line + "\r\n" for line in (*lines, "")).encode()


MALFORMED = {
    "nothing": (b"", 400),
    "no HTTP": (head("hello"), 400),
    "other method": (request("POST", "/global/0", b"x"), 400),
    "lower case": (request("put", "/global/0", b"x"), 400),
    "HTTP 2": (head("GET /global/0 HTTP/2.0"), 400),
    "no key": (request("PUT", "/global", b"x"), 400),
    "empty key": (request("PUT", "/global/", b"x"), 400),
    "three parts": (request("PUT", "/global/0/1", b"x"), 400),
    "whole URL": (request("PUT", "http://127.0.0.1/global/0", b"x"), 400),
    "space in the path": (request("PUT", "/global/0 1", b"x"), 400),
    "no ASCII": (request("PUT", "/global/\u00e9", b"x"), 400),
    "no colon": (head("PUT /global/0 HTTP/1.1", "Content-Length 1") + b"x", 400),
    "space before the colon": (head("PUT /global/0 HTTP/1.1", "Content-Length : 1") + b"x", 400),
    "folded line": (head("PUT /global/0 HTTP/1.1", "A: b", " c: d", "Content-Length: 1") + b"x", 400),
    "no length": (head("PUT /global/0 HTTP/1.1", "Host: a"), 400),
    "empty length": (head("PUT /global/0 HTTP/1.1", "Content-Length:"), 400),
    "negative length": (head("PUT /global/0 HTTP/1.1", "Content-Length: -1"), 400),
    "signed length": (head("PUT /global/0 HTTP/1.1", "Content-Length: +1") + b"x", 400),
    "two lengths": (head("PUT /global/0 HTTP/1.1", "Content-Length: 1", "content-length: 1") + b"x", 400),
    "chunks": (head("PUT /global/0 HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked") + b"x", 400),
    "chunks alone": (head("PUT /global/0 HTTP/1.1", "Transfer-Encoding: 1") + b"x", 400),
    "GET with a body": (request("GET", "/global/0", b"x"), 400),
    "too short": (request("PUT", "/global/0", b"xyz")[:-1], 400),
    "too long": (request("PUT", "/global/0", b"xyz") + b"!", 400),
    "two requests": (request("PUT", "/global/0", b"xyz") + request("PUT", "/global/0", b"xyz"), 400),
    "a byte too many": (head("PUT /global/0 HTTP/1.1", f"Content-Length: {LARGEST + 1}"), 413),
    "a long number": (head("PUT /global/0 HTTP/1.1", "Content-Length: " + "9" * 5000), 413),
    "long head": (head("PUT /global/0 HTTP/1.1", "Content-Length: 1", "A: " + "b" * (8 << 10)) + b"x", 431),
    "endless head": (b"GET /" + b"a" * (64 << 10), 431),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_request_is_refused(store, what):
    sent, expected = MALFORMED[what]
    store.put("/global/0", b"kept")
    with connect(store) as stream:
        stream.sendall(sent)
        if what in ("nothing", "too short"):  # the others are refused while the peer could still send
            stream.shutdown(socket.SHUT_WR)
        answer = read_all(stream)
    assert status(answer) == expected
    assert answer.endswith(b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert store.get("/global/0") == b"kept"


def some_malformed(chance: random.Random) -> bytes:
    """A different broken request each time; none may change what is stored."""
    key = chance.randrange(4)
    whole = request("PUT", f"/global/{key}", chance.randbytes(chance.randrange(1, 200)))
    end = whole.index(b"\r\n\r\n") + 4
    kind = chance.randrange(8)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    if kind == 1:
        return whole[: chance.randrange(len(whole))]
    if kind == 2:
        length = chance.choice([chance.randrange(LARGEST + 1, 1 << 40), "9" * chance.randrange(20, 6000), -1, "0x10"])
        return head(f"PUT /global/{key} HTTP/1.1", f"Content-Length: {length}") + chance.randbytes(50)
    if kind == 3:
        method = "".join(chance.choices("GETPUDLabc-\t ", k=chance.randrange(12)))
        return request(method if method not in ("GET", "PUT", "DELETE") else "HEAD", f"/global/{key}", b"x")
    if kind == 4:
        return whole * chance.randrange(2, 20)
    if kind == 5:
        place = chance.randrange(end - 3)
        return whole[:place] + chance.choice([b"\0", b"\n", b"\r"]) + whole[place:]
    if kind == 6:
        return whole[:-1] + chance.randbytes(chance.randrange(2, 100_000))
    return b"PUT /global/0 HTTP/1.1\r\n" + b"a: b\r\n" * chance.randrange(1400, 20_000)


def test_ten_thousand_malformed_requests_change_nothing():
    seed = 1
    chance = random.Random(seed)
    kept = {f"/global/{key}": chance.randbytes(100) for key in range(4)}
    with no_descriptor_left(), closing(KeyValueStore("127.0.0.1")) as store:
        for path, value in kept.items():
            store.put(path, value)
        for number in range(10_000):
            sent = some_malformed(chance)
            with connect(store) as stream:
                try:
                    stream.sendall(sent)
                    if chance.random() < 0.2:
                        continue  # hang up without reading
                    stream.shutdown(socket.SHUT_WR)
                    answer = read_all(stream)
                except ConnectionError:
                    continue  # the store hung up first
            assert status(answer) in (400, 413, 431), (seed, number, sent[:200])
        for path, value in kept.items():
            assert key_value_store.get(store.place, path, TIMEOUT_S) == value


# --- those who keep the store waiting ---


def test_a_peer_that_never_finishes_its_request_is_dropped_after_ten_seconds():
    clock = FakeClock()
    with closing(KeyValueStore("127.0.0.1", clock=clock)) as store, socket.socket() as slow:

        def has_been_served() -> None:
            key_value_store.get(store.place, "/global/0", TIMEOUT_S)

        has_been_served()
        clock.sleep(1_000)  # before the peer comes, so not its fault
        slow.connect((store.address, store.port))
        slow.sendall(b"GET /global/0 HT")
        has_been_served()
        clock.sleep(9.9)
        has_been_served()
        has_been_served()  # by the next turn of the store, which begins with dropping
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        slow.settimeout(TIMEOUT_S)
        clock.sleep(0.2)
        has_been_served()
        assert slow.recv(1) == b""


def test_a_crowd_that_asks_nothing_does_not_keep_others_out(monkeypatch):
    monkeypatch.setattr(key_value_store, "_MOST_WAITING", 8)
    monkeypatch.setattr(key_value_store, "_CROWDED_PATIENCE_S", 0.01)
    with closing(KeyValueStore("127.0.0.1")) as store, ExitStack() as stack:
        crowd = [stack.enter_context(connect(store)) for _ in range(40)]
        assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) is None
        assert crowd[0].recv(1) == b""


SMALL = """
import resource, sys
from edl_hvd import key_value_store
from edl_hvd.key_value_store import KeyValueStore
key_value_store._PATIENCE_S = 100_000
store = KeyValueStore("127.0.0.1")
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
print(store.port, flush=True)
sys.stdin.read()
store.close()
"""


def test_a_process_that_runs_out_of_descriptors_serves_on():
    command = [sys.executable, "-W", "error", "-c", SMALL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server, ExitStack() as stack:
        port = int(server.stdout.readline())
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
        assert key_value_store.get(StoreAddress("127.0.0.1", port), "/global/0", TIMEOUT_S) is None
        server.stdin.close()
        assert soon(server) == 0


def exchange(place: StoreAddress, rank: int, size: int, value: bytes) -> socket.socket:
    """Ask as a member does; the answer is to come."""
    member = socket.create_connection((place.address, place.port), TIMEOUT_S)
    head = f"PUT /global/{rank}?of={size} HTTP/1.1\r\nAuthorization: Bearer {place.token}\r\n"
    member.sendall(f"{head}Content-Length: {len(value)}\r\n\r\n".encode() + value)
    return member


def parts(member: socket.socket) -> list[bytes]:
    with member, member.makefile("rb") as answer:
        assert answer.readline().startswith(b"HTTP/1.1 200 ")
        while answer.readline() != b"\r\n":
            pass
        found = []
        while length := answer.read(4):
            found.append(answer.read(int.from_bytes(length, "big")))
        return found


def test_all_ranks_of_a_context_are_answered_with_what_each_has_put(store):
    values = [b"first", b"", bytes(1000)]
    for _ in range(2):  # a later context of the same name meets nobody of the one before
        members = [exchange(store.place, rank, 3, values[rank]) for rank in (2, 0, 1)]
        assert [parts(member) for member in members] == [values] * 3
    assert (store._exchanges, store._bytes) == ({}, 0)


@pytest.mark.parametrize("end", ["its connection ends", "it asks anew"])
def test_the_others_are_told_when_a_rank_goes_before_all_have_come(store, end):
    with exchange(store.place, 2, 3, b"third") as third, exchange(store.place, 0, 3, b"old") as old:
        while sum(len(one.parts) for one in [*store._exchanges.values()]) < 2:
            time.sleep(0.01)
        if end == "it asks anew":
            new = exchange(store.place, 0, 3, b"new")
        else:
            old.close()
            new = None
        answer = read_all(third)
        assert (status(answer), answer[-1:]) == (410, b"0")
    if new is not None:
        members = [exchange(store.place, rank, 3, b"other") for rank in (1, 2)]
        assert [parts(member) for member in (new, *members)] == [[b"new", b"other", b"other"]] * 3


def come_to_stay(member: socket.socket, rank: int, value: bytes) -> None:
    """Ask as one of three members does that stay."""
    member.sendall(request("PUT", f"/global/{rank}?of=3&stay", value))


def whole_answer(values: list[bytes]) -> bytes:
    """What such a member is answered before the first word."""
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(
        len(value).to_bytes(4, "big") + value for value in values
    )


def test_a_member_that_reads_slowly_gets_its_answer_before_it_is_told_that_another_is_gone(store):
    values = [random.Random(rank).randbytes(LARGEST) for rank in range(3)]
    answer = whole_answer(values)
    with slow_reader(store) as slow, connect(store) as other, connect(store) as dying:
        come_to_stay(slow, 0, values[0])
        come_to_stay(other, 1, values[1])
        come_to_stay(dying, 2, values[2])
        with dying.makefile("rb") as received:
            assert received.read(len(answer)) == answer
        dying.shutdown(socket.SHUT_RDWR)
        assert read_all(other) == answer + b"gone 2"
        assert read_all(slow) == answer + b"gone 2"
    assert (store._exchanges, store._bytes) == ({}, 0)


def test_a_member_that_reads_slowly_gets_the_rest_of_its_answer_before_the_end(store):
    values = [b"first", b"second", b"third"]
    answer = whole_answer(values)
    with ExitStack() as stack:
        members = [stack.enter_context(connect(store)) for _ in values]
        for rank, member in enumerate(members):
            come_to_stay(member, rank, values[rank])
        for member in members:
            assert member.recv(len(answer), socket.MSG_WAITALL) == answer
        [exchange] = store._exchanges.values()
        exchange.parts[0][0].unsent = b"rest"  # as of a larger answer, whose reader has just made room for it
        store.close()
        assert [read_all(member) for member in members] == [b"restend", b"end", b"end"]


@pytest.mark.parametrize("path", ["/global/2?of=2", "/global/0?of=3", "/global/x?of=2", "/global/0?of="])
def test_an_exchange_that_cannot_be_is_refused(store, path):
    with exchange(store.place, 1, 2, b"there"):
        while not store._exchanges:
            time.sleep(0.01)
        with pytest.raises(OSError, match="status 400"):
            key_value_store.put(store.place, path, b"value", TIMEOUT_S)
        assert parts(exchange(store.place, 0, 2, b"own")) == [b"own", b"there"]


def test_only_who_knows_the_token_is_served():
    store = KeyValueStore("127.0.0.1", token="secret")
    try:
        key_value_store.put(store.place, "/global/0", b"value", TIMEOUT_S)
        for token in ("", "secre", "secrets"):
            stranger = StoreAddress(store.address, store.port, token)
            for ask in (
                lambda place: key_value_store.get(place, "/global/0", TIMEOUT_S),
                lambda place: key_value_store.put(place, "/global/0", bytes(1 << 20), TIMEOUT_S),
            ):
                with pytest.raises(OSError, match="status 401"):
                    ask(stranger)
        assert key_value_store.get(store.place, "/global/0", TIMEOUT_S) == b"value"
    finally:
        store.close()


def test_a_store_takes_no_more_than_it_may(store, monkeypatch):
    monkeypatch.setattr(key_value_store, "_MOST_KEYS", 3)
    for number in range(3):
        key_value_store.put(store.place, f"/global/{number}", b"value", TIMEOUT_S)
    with pytest.raises(OSError, match="status 507"):
        key_value_store.put(store.place, "/global/3", b"value", TIMEOUT_S)
    key_value_store.put(store.place, "/global/2", bytes(1 << 20), TIMEOUT_S)
    monkeypatch.setattr(key_value_store, "_MOST_BYTES", (1 << 20) + 20)
    with pytest.raises(OSError, match="status 507"):
        key_value_store.put(store.place, "/global/1", bytes(100), TIMEOUT_S)
    with pytest.raises(UsageError, match="no room for /global/1: a store takes 3 keys and 1048596 bytes"):
        store.put("/global/1", bytes(100))
    assert key_value_store.get(store.place, "/global/1", TIMEOUT_S) == b"value"
