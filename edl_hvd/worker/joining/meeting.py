"""The members of a new world meet before they start Horovod, and stay connected while it lives.

``hvd.init()`` waits for the Gloo timeout when a peer does not come. So the members first gather at rank 0 over TCP,
and only when all are there does rank 0 say "go". From then on a member that dies closes its connection, which the
others learn in milliseconds, whatever Horovod is doing.

    guest → host   {"token", "rank", "name", "generation", "known_step"}     hello
    host  → guest  {"generation", "members", "known_step", "store"}           go
    host  → guest  {"abort": reason}                                          before go
    guest ↔ host   {"leaving": true}                                          after go: a regular end
    host  → guest  {"gone": who}                                              after go: another guest's death

Messages are JSON, one per line. A connection that ends without a word is a death.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from edl_hvd.key_value_store import StoreAddress

_LONGEST_LINE_BYTES = 1 << 20  # a go lists every member: 64 KiB hold 1,000 of them


@dataclass(frozen=True)
class Hello:
    """What a member tells the others: its rank, name, last generation and the furthest step it heard of."""

    rank: int
    name: str
    generation: int
    known_step: int


@dataclass(frozen=True)
class Go:
    """What rank 0 tells everybody once all are there."""

    generation: int
    members: tuple[str, ...]
    known_step: int
    store: StoreAddress


class Connection:
    """Lines of JSON over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """False if the other side is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message; ``None`` if the other side is gone, silent for too long, or talks nonsense."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while b"\n" not in self._buffer:
                if len(self._buffer) > _LONGEST_LINE_BYTES:
                    return None
                self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(65536)
                if not data:
                    return None
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\n")
            message = json.loads(line)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def leave(self, regular: bool) -> None:
        """End it for both sides, and wake a thread of this side that reads."""
        if regular:
            self.send({"leaving": True})
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.leave(regular=False)
        self._socket.close()


class Host:
    """Rank 0's side.

    Args:
        address: Local address to listen on.
        size: Members expected, this one included.
    """

    def __init__(self, address: str, size: int) -> None:
        self._listener = socket.create_server((address, 0), backlog=size)
        self._size = size
        self._guests: dict[int, Connection] = {}
        self._hellos: dict[int, Hello] = {}
        self._left = False
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(16)

    def gather(self, own: Hello, timeout_s: float) -> list[Hello] | None:
        """Wait until every rank is connected. ``None`` if one is missing after the timeout or one left."""
        self._hellos[own.rank] = own
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self._hellos) < self._size:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    return None
                for key, _ in ready:
                    if key.fileobj is not self._listener:
                        return None  # a guest speaks only when it leaves
                    guest = self._welcome()
                    if guest is not None:
                        selector.register(guest, selectors.EVENT_READ)
        return [self._hellos[rank] for rank in range(self._size)]

    def _welcome(self) -> Connection | None:
        guest = Connection(self._listener.accept()[0])
        message = guest.receive(timeout_s=5) or {}
        rank = message.get("rank", -1)
        expected = isinstance(rank, int) and 0 < rank < self._size and rank not in self._guests
        if not expected or message.pop("token", None) != self.token:
            guest.close()
            return None
        self._guests[rank] = guest
        self._hellos[rank] = Hello(**message)
        return guest

    def announce(self, go: Go) -> None:
        self._listener.close()  # nobody else is to come
        for guest in self._guests.values():
            guest.send(asdict(go))

    def watch(self, died: Callable[[str], None]) -> threading.Thread:
        """Tell who dies, here and to the others, in a thread, until :meth:`leave`."""

        def run() -> None:
            with selectors.DefaultSelector() as selector:
                for rank, guest in self._guests.items():
                    selector.register(guest, selectors.EVENT_READ, rank)
                while selector.get_map():
                    for key, _ in selector.select():
                        selector.unregister(key.fileobj)
                        if not self._left:
                            self._pass_on(key.data, died)
            for guest in self._guests.values():
                guest.close()

        return _start(run)

    def _pass_on(self, rank: int, died: Callable[[str], None]) -> None:
        message = self._guests[rank].receive(timeout_s=5)
        if message is not None and "leaving" in message:
            return
        who = f"rank {rank} ({self._hellos[rank].name})"
        died(who)
        for other, guest in self._guests.items():
            if other != rank:
                guest.send({"gone": who})

    def leave(self, regular: bool) -> None:
        """End the watch; the guests notice, and hear it when the end is a regular one."""
        self._left = True
        for guest in self._guests.values():
            guest.leave(regular)

    def abort(self, reason: str) -> None:
        for guest in self._guests.values():
            guest.send({"abort": reason})
        self.close()

    def close(self) -> None:
        self._listener.close()
        for guest in self._guests.values():
            guest.close()


class Guest:
    """The side of every other rank.

    Raises:
        OSError: The host cannot be reached.
    """

    def __init__(self, address: str, port: int, token: str, hello: Hello) -> None:
        self._host = Connection(socket.create_connection((address, port), timeout=5))
        self._host.send({"token": token, **asdict(hello)})
        self._left = False

    def wait(self, timeout_s: float) -> Go | None:
        """Block until rank 0 says go; ``None`` if it gives up, is gone or silent for too long."""
        message = self._host.receive(timeout_s)
        if message is None or "abort" in message:
            return None
        store = StoreAddress(**message["store"])
        return Go(message["generation"], tuple(message["members"]), message["known_step"], store)

    def watch(self, died: Callable[[str], None]) -> threading.Thread:
        """Tell who dies, in a thread, until :meth:`leave`."""

        def run() -> None:
            while (message := self._host.receive(timeout_s=None)) and "gone" in message:
                died(message["gone"])
            if not self._left and not (message is not None and "leaving" in message):
                died("rank 0")
            self._host.close()

        return _start(run)

    def leave(self, regular: bool) -> None:
        """End the watch; rank 0 notices, and hears it when the end is a regular one."""
        self._left = True
        self._host.leave(regular)

    def close(self) -> None:
        self._host.close()


def _start(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="edl-meeting", daemon=True)
    thread.start()
    return thread
