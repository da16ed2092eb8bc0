"""How fast all ranks of a world find each other: Horovod's own rendezvous server against ours.

    python benchmarks/rendezvous.py [--ranks N] [--clients N] [--limit SECONDS]

Each simulated rank does what Horovod's ``HTTPStore`` does for a Gloo context: PUT its addresses, one of 136 bytes
for each other rank; GET those of every other rank in turn, again 10 ms after a miss and 0.5 s after a failure; when
all have everything, DELETE its key. (Gloo asks once more for every key that it has found; that is left out.) Every
request has a connection of its own, and a rank has one at a time. Horovod's ranks end the job at the third failure
of a request; these try again until the time limit.

Horovod's server lets five connections queue (``socketserver.TCPServer.request_queue_size``); the system drops the
others, whose ranks try again after 1 s, 3 s, 7 s. With many ranks it is idle for most of the time and stopped at the
limit. So it is measured a second time with a queue as long as ours, which tells how fast it handles requests. Speed
counts requests that were answered with what was asked for, not misses, so that a server that was stopped compares.

The ranks share a few client processes, each of which waits for all its connections at once. A client that is busy
nearly all the time is the bottleneck itself: then the server is faster than the table says. Server and clients
share this machine. When others compute there as well, the clients take their part of what is left and the ratio
shrinks; CPU time per request depends less on that.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from errno import EINPROGRESS
from functools import cache
from itertools import count
from typing import Any, NamedTuple

MISS_S = 0.01  # HTTPStore::wait, horovod/common/gloo/http_store.cc
RETRY_S = 0.5  # RETRY_WAITING_TIME_MILLSEC, http_store.h
SERVERS = ("KeyValueStore", "RendezvousServer", LONGER_QUEUE := "RendezvousServer, longer queue")
ADDRESS_BYTES = 136  # sockaddr_storage and a sequence number, gloo/transport/tcp/address.h

Talk = Generator[bytes, "Answer", None]  # yields the requests of a rank, gets their answers


class Answer(NamedTuple):
    status: int
    body: bytes


class Mesh(NamedTuple):
    """What a rendezvous took."""

    complete: bool
    seconds: float
    requests: int  # misses not among them
    misses: int
    retries: int
    client_busy: float  # part of the time in which the busiest client computed


# --- one rank ---


@cache
def addresses(rank: int, size: int) -> bytes:
    """What a rank puts: as many bytes as Gloo's, and different for each rank."""
    return rank.to_bytes(ADDRESS_BYTES, "big") * (size - 1)


def request(method: str, key: int, body: bytes = b"") -> bytes:
    """As HTTPRequest.hpp writes it."""
    return f"{method} /global/{key} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def meet(rank: int, size: int) -> Talk:
    yield request("PUT", rank, addresses(rank, size))
    for other in range(size):
        if other != rank:
            answer = Answer(404, b"")
            while answer.status == 404:
                answer = yield request("GET", other)
            if answer.body != addresses(other, size):
                raise RuntimeError(f"rank {rank} got {len(answer.body)} wrong bytes for rank {other}")


def part(rank: int, size: int) -> Talk:
    yield request("DELETE", rank)


# --- a client: a process that carries out the talks of several ranks ---


class Exchange:
    """The present request of a rank."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.request = next(talk)
        self.stream: socket.socket | None = None
        self.unsent = b""
        self.received = b""

    def step(self, address: tuple[str, int]) -> int:
        """Go on until the socket has to be waited for. Returns the event to wait for, 0 if there is an answer."""
        try:
            if self.stream is None:
                self.stream = socket.socket()
                self.stream.setblocking(False)
                self.unsent, self.received = self.request, b""
                if self.stream.connect_ex(address) not in (0, EINPROGRESS):
                    raise ConnectionError
            if self.unsent:
                # Right after connecting: on one machine the connection mostly stands already.
                self.unsent = self.unsent[self.stream.send(self.unsent) :]
                return select.EPOLLOUT if self.unsent else select.EPOLLIN
            data = self.stream.recv(1 << 16)
            self.received += data
            return select.EPOLLIN if data and self.answer() is None else 0
        except BlockingIOError:
            return select.EPOLLOUT if self.unsent else select.EPOLLIN
        except OSError:
            self.received = b""
            return 0

    def answer(self) -> Answer | None:
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return None
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0] or 0)
        return Answer(int(head[9:12]), body) if len(body) >= length else None


def carry_out(talks: list[Talk], address: tuple[str, int], limit_s: float) -> tuple[int, int, int, int]:
    """Carry out all talks. Returns 1 if there was time for all, and the numbers of requests, misses and retries."""
    poll, order = select.epoll(), count()
    due: list[tuple[float, int, Exchange]] = [(0.0, next(order), Exchange(talk)) for talk in talks]
    waiting: dict[int, Exchange] = {}
    requests = misses = retries = 0
    deadline_s = time.monotonic() + limit_s
    while (due or waiting) and time.monotonic() < deadline_s:
        now_s = time.monotonic()
        ready = []
        while due and due[0][0] <= now_s:
            ready.append(heapq.heappop(due)[2])
        patience_s = 0 if ready else min(due[0][0] if due else deadline_s, deadline_s) - now_s
        ready += [waiting[descriptor] for descriptor, _ in poll.poll(patience_s)]
        for exchange in ready:
            event = exchange.step(address)
            stream = exchange.stream
            assert stream is not None
            if event:
                (poll.modify if stream.fileno() in waiting else poll.register)(stream, event)
                waiting[stream.fileno()] = exchange
                continue
            waiting.pop(stream.fileno(), None)
            stream.close()  # which also makes the poll forget it
            exchange.stream = None
            answer = exchange.answer()
            delay_s = 0.0
            if answer is None or answer.status not in (200, 404):
                retries, delay_s = retries + 1, RETRY_S
            else:
                if answer.status == 404:
                    misses, delay_s = misses + 1, MISS_S
                else:
                    requests += 1
                try:
                    exchange.request = exchange.talk.send(answer)
                except StopIteration:
                    continue
            heapq.heappush(due, (time.monotonic() + delay_s, next(order), exchange))
    poll.close()
    return int(not due and not waiting), requests, misses, retries


def be_client(port: int, size: int, ranks: range, limit_s: float) -> None:
    """Meet when told to, and part when told to; a line on standard input each."""
    for action in (meet, part):
        talks = [action(rank, size) for rank in ranks]
        print("true", flush=True)
        sys.stdin.readline()
        before_s = time.process_time()
        counts = carry_out(talks, ("127.0.0.1", port), limit_s)
        print(json.dumps([*counts, time.process_time() - before_s]), flush=True)


# --- a server ---


def serve(name: str, size: int) -> int:
    """Start the server of this name. Returns its port."""
    if name == "KeyValueStore":
        from edl_hvd.key_value_store import KeyValueStore

        return KeyValueStore("127.0.0.1").port
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHTTPServer, RendezvousServer

    if name == LONGER_QUEUE:
        RendezvousHTTPServer.request_queue_size = 4096
    RendezvousHTTPServer.handle_error = lambda *_: None  # does not report clients that are stopped at the limit
    server = RendezvousServer()
    port: int = server.start()
    server.init(get_host_assignments(parse_hosts(f"127.0.0.1:{size}"), size))
    return port


def be_server(name: str, size: int) -> None:
    """Serve until standard input ends; then tell how much CPU time that took."""
    print(serve(name, size), flush=True)
    before_s = time.process_time()
    sys.stdin.read()
    print(time.process_time() - before_s, flush=True)


# --- the measurement ---


@contextmanager
def helper(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def hear(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended early; see its output above")
    return json.loads(line)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measure_mesh(port: int, size: int, clients: int, limit_s: float) -> Mesh:
    """Have all ranks find each other through the server on this port of this host, as far as they get in that time.

    Raises:
        RuntimeError: A rank got something else than another one had put.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(helper("client", port, size, first, clients, limit_s))
            for first in range(min(clients, size))
        ]
        complete, seconds, counts = True, 0.0, [0] * 3
        busy_s = [0.0] * len(processes)
        for _ in (meet, part):
            for process in processes:
                hear(process)
            started_s = time.perf_counter()
            for process in processes:
                tell(process)
            answers = [hear(process) for process in processes]
            seconds += time.perf_counter() - started_s
            complete = all(answer[0] for answer in answers)
            counts = [total + sum(answer[i + 1] for answer in answers) for i, total in enumerate(counts)]
            busy_s = [total + answer[4] for total, answer in zip(busy_s, answers, strict=True)]
            if not complete:
                break
    return Mesh(complete, seconds, *counts, client_busy=max(busy_s) / seconds)


def measure_server(name: str, size: int, clients: int, limit_s: float) -> tuple[Mesh, float]:
    """The mesh, and the CPU seconds of the server."""
    with helper("server", name, size) as server:
        mesh = measure_mesh(hear(server), size, clients, limit_s)
        assert server.stdin is not None
        server.stdin.close()
        return mesh, hear(server)


def main(size: int, clients: int, limit_s: float) -> None:
    # A rank that has a connection needs one descriptor, in the server as well; helpers inherit the limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(f"load of this machine before: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}")
    titles = ("s", "done", "misses", "retries", "requests/s", "ours / this", "CPU µs/request", "client busy")
    print(f"{f'{size} ranks in {clients} processes':32}" + "".join(f"{title:>{len(title) + 3}}" for title in titles))
    measured = {}
    for name in SERVERS:  # ours first, as the others are compared with it
        mesh, cpu_s = measure_server(name, size, clients, limit_s)
        measured[name] = mesh.requests / mesh.seconds
        cells = (
            f"{mesh.seconds:.2f}" if mesh.complete else f">{limit_s:.0f}",
            f"{mesh.requests / (size * (size + 1)):.0%}",
            str(mesh.misses),
            str(mesh.retries),
            f"{measured[name]:.0f}",
            f"{measured[SERVERS[0]] / measured[name]:.1f}",
            f"{1e6 * cpu_s / (mesh.requests + mesh.misses):.0f}",
            f"{mesh.client_busy:.0%}",
        )
        line = "".join(f"{cell:>{len(title) + 3}}" for cell, title in zip(cells, titles, strict=True))
        print(f"{name:32}{line}", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--clients", type=int, default=2, help="processes that the ranks share")
    parser.add_argument("--limit", type=float, default=20, help="seconds after which a server is stopped")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        port, size, first, step = map(int, sys.argv[2:6])
        be_client(port, size, range(first, size, step), float(sys.argv[6]))
    elif sys.argv[1:2] == ["server"]:
        be_server(sys.argv[2], int(sys.argv[3]))
    else:
        options = parse(sys.argv[1:])
        main(options.ranks, options.clients, options.limit)
