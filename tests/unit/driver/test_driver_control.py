"""The driver's control port: who may speak, what is understood, and what becomes of everything else."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading

import pytest

from edl_hvd.driver.control import Connected, Control, ProcessEnding
from edl_hvd.protocol import FROM_WORKER, TO_WORKER, Done, Hello, Ready, ShutDown, Waits, WatchHello, decode, encode

WAITS = Waits(1, 7, "a", (1, 2), "t.py:1 in f", "f")


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Port:
    """A control port in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.loop = asyncio.new_event_loop()
        self.control = Control(lambda worker, incarnation: (worker, incarnation) == ("a:0", 1), self.hear, FROM_WORKER)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = self.do(self.control.start())

    def hear(self, worker: str, incarnation: int, said: object) -> None:
        assert (worker, incarnation) == ("a:0", 1)
        self.heard.append(said)

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def hello(self, **changes) -> bytes:
        return line({"what": "hello", "token": self.control.token, "worker": "a:0", "incarnation": 1, **changes})

    def close(self) -> None:
        async def end() -> None:
            self.control.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait({task}, timeout=30)

        self.do(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


@pytest.fixture
def port():
    port = Port()
    yield port
    port.close()


def ends(connection: socket.socket) -> bool:
    """Whether the other side hangs up, saying nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_worker_is_heard_and_answered(port):
    with port.connect() as worker:
        worker.sendall(encode(Hello(port.control.token, "a:0", 1)) + encode(Ready(7)) + encode(WAITS) + encode(Done()))
        while len(port.heard) < 4:
            threading.Event().wait(0.01)
        assert port.heard == [Connected(), Ready(7), WAITS, Done()]

        async def answer() -> bool:
            return port.control.send("a:0", ShutDown(save=True, left_s=None))

        assert port.do(answer())
        assert decode(worker.makefile("rb").readline(), TO_WORKER) == ShutDown(save=True, left_s=None)


@pytest.mark.parametrize(("how", "heard"), [("killed", [ProcessEnding()]), ("in order", []), ("connection reset", [])])
def test_a_connection_that_ends_in_silence_says_that_the_process_ends(port, how, heard):
    with port.connect() as watch:
        watch.sendall(encode(WatchHello(port.control.token, "a:0", 1)))
        if how == "in order":
            watch.sendall(b"\n")
        elif how == "connection reset":
            watch.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with port.connect() as worker:  # which is heard after that one
        worker.sendall(port.hello() + encode(Done()))
        while Done() not in port.heard:
            threading.Event().wait(0.01)
    for _ in range(100):
        if len(port.heard) > 2:
            break
        threading.Event().wait(0.01)
    assert [said for said in port.heard if said not in (Connected(), Done())] == heard


def test_what_a_process_has_said_before_it_ends_is_heard_first(port):
    for number in range(1, 31):
        with port.connect() as watch, port.connect() as worker:
            watch.sendall(encode(WatchHello(port.control.token, "a:0", 1)))
            worker.sendall(port.hello())
            while port.heard.count(Connected()) < number:
                threading.Event().wait(0.001)
            worker.sendall(encode(Done()))
            watch.close()
            while port.heard.count(ProcessEnding()) < number:
                threading.Event().wait(0.001)
    said = [what for what in port.heard if what != Connected()]
    assert said == [Done(), ProcessEnding()] * 30


def test_a_stranger_cannot_say_that_a_process_ends(port):
    with port.connect() as stranger:
        stranger.sendall(encode(WatchHello("wrong", "a:0", 1)))
        assert ends(stranger)
    assert port.heard == []


def test_who_is_not_connected_cannot_be_told_anything(port):
    async def tell() -> bool:
        return port.control.send("a:0", ShutDown(save=True, left_s=None))

    assert not port.do(tell())


@pytest.mark.parametrize(
    "changes",
    [{"token": "wrong"}, {"token": "\ud800"}, {"token": None}, {"token": 5}, {"worker": "b:0"}, {"worker": 3},
     {"incarnation": 2}, {"incarnation": True}, {"what": "ready"}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_strangers_are_turned_away_without_an_answer(port, changes):
    with port.connect() as stranger:
        stranger.sendall(port.hello(**changes))
        assert ends(stranger)
    assert port.heard == []


@pytest.mark.parametrize(
    "words",
    [b"nonsense\n", line({"what": "ready", "step": "7"}), encode(Hello("token", "a:0", 1)),
     encode(ShutDown(False, None)), b"[" * 60_000 + b"\n", encode(WAITS).replace(b"t.py", b"t" * 65_536)],
    ids=["no JSON", "another type", "hello again", "what drivers say", "deep", "too long"],
)  # fmt: skip
def test_what_is_not_understood_ends_the_connection(port, words):
    with port.connect() as worker:
        worker.sendall(port.hello() + words + encode(Done()))
        assert ends(worker)
    assert port.heard == [Connected()]


def test_a_line_that_never_ends_ends_the_connection(port):
    with port.connect() as stranger:
        try:
            for _ in range(100):
                stranger.sendall(b"x" * 10_000)
        except OSError:
            return
        assert ends(stranger)


def test_ten_thousand_malformed_requests_change_nothing(port):
    chance = random.Random(0)
    good = [
        port.hello(),
        line({"what": "ready", "step": 1}),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95",
        b"",
    ]
    for _ in range(10_000):
        request = bytearray(chance.choice(good) + chance.randbytes(chance.randrange(60)))
        for _ in range(chance.randint(1, 4)):
            if request:
                request[chance.randrange(len(request))] = chance.randrange(256)
        if (place := request.find(port.control.token.encode())) >= 0:
            request[place] ^= 1  # nobody guesses it
        with port.connect() as stranger:
            stranger.sendall(bytes(request) + chance.choice((b"", b"\n")))
    assert port.heard == []
    with port.connect() as worker:
        worker.sendall(port.hello() + encode(Ready(7)))
        while len(port.heard) < 2:
            threading.Event().wait(0.01)
    assert port.heard[1] == Ready(7)
