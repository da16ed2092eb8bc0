"""The key-value store through which the Gloo contexts of one world find each other; see ``key_value_protocol.py``.

All ranks ask at the same moment, so what counts is requests per second: one thread takes a connection, reads, answers
and closes it, mostly without waiting for the socket once.

Every world gets a store of its own. A straggler of an older world, which knows an older port, meets nobody here.
Whoever does not know its token is refused before the body of the request is read.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError, UsageError
from edl_hvd.key_value_protocol import (
    END,
    GONE,
    LARGEST_VALUE_BYTES,
    LEAVE,
    ExchangeRequest,
    RequestRefused,
    StoreRequest,
    is_path,
    joined,
    read_exchange,
    read_request,
    staying_answer,
    whole_answer,
)

logger = logging.getLogger(__name__)

_MOST_BYTES = 32 << 20  # of all values; a thousand reports of long waits take a third
_MOST_KEYS = 1 << 16
_DISCARDED_BYTES = 16 << 20  # read from a peer that was refused, so that it gets to read why
_READ_BYTES = 64 << 10
_BACKLOG = 4096  # every rank connects at the same moment
_MOST_WAITING = 1024  # connections whose request or answer is under way
_PATIENCE_S = 10.0  # for one connection, from the first byte to the last
_CROWDED_PATIENCE_S = 1.0  # when others cannot come in
_PAUSE_S = 0.1  # after the system had no descriptor for a newcomer
_ACCEPTED_AT_ONCE = 64  # then those who wait have their turn


class _Connection:
    """A peer whose request, or the answer to it, is under way."""

    __slots__ = (
        "discarded_bytes", "event", "exchange", "received", "refused", "request", "socket", "unsent",
        "waits_since_s",
    )  # fmt: skip

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self.waits_since_s = 0.0
        self.received: bytes | bytearray = b""
        self.request: StoreRequest | None = None  # as soon as its head is there
        self.unsent: bytes | memoryview = b""
        self.event = 0  # what is waited for
        self.refused = False
        self.discarded_bytes = 0
        self.exchange: _Exchange | None = None  # while the other ranks are waited for, or stayed with


@dataclass
class _Exchange:
    """What the ranks of one context have put so far."""

    scope: str
    size: int
    stays: bool
    parts: dict[int, tuple[_Connection, bytes]] = field(default_factory=dict)
    answered: bool = False


@dataclass(frozen=True)
class StoreAddress:
    """Where a store listens, and the secret of those who may use it; empty where anybody may."""

    address: str
    port: int
    token: str = ""


class KeyValueStore:
    """A store served from a thread of this process until :meth:`close`.

    All methods may be called from any thread; none waits for a peer.

    Args:
        address: Local IPv4 address, or host name, to listen on. The system chooses the port.
        allowed: Whether the peer with this IP address may use the store. Called for every connection, from the
            store's thread; a peer that is not allowed is disconnected without an answer. ``None`` allows all.
        token: What peers have to know, in the header ``Authorization: Bearer``; empty for none.
        clock: Measures how long a peer takes over its request.

    Raises:
        PlatformError: Cannot listen on that address.
    """

    def __init__(
        self,
        address: str,
        allowed: Callable[[str], bool] | None = None,
        *,
        token: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.address = address
        self._token = token.encode()
        self._allowed = allowed
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._exchanges: dict[str, _Exchange] = {}
        self._waiting: dict[_Connection, None] = {}  # the longest waiting first
        self._listening = False
        self._closing = False
        self._last_word = END
        try:
            self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        except OSError as error:
            raise PlatformError(
                f"no key-value store on {address}: {error}; give an IPv4 address of this host, such as those that "
                "`ip -4 address` lists"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.place = StoreAddress(address, self.port, token)
        # A pair of sockets, not a pipe: the worker keeps sockets from the processes that it forks.
        self._bell, self._bell_rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="edl-key-value-store", daemon=True)
        self._thread.start()

    def get(self, path: str) -> bytes | None:
        """The value at ``/scope/key``, or ``None`` if there is none."""
        return self._values.get(path)

    def put(self, path: str, value: bytes) -> None:
        """Set the value at ``/scope/key``.

        Raises:
            UsageError: A peer could not put this: the path has another form, or the value or the store is too large.
        """
        if not is_path(path):
            raise UsageError(f"no value can be put at {path!r}: a path is /scope/key of visible ASCII characters")
        if len(value) > LARGEST_VALUE_BYTES:
            raise UsageError(f"the value for {path} has {len(value)} bytes; the most is {LARGEST_VALUE_BYTES}")
        if not self._keep(path, bytes(value)):
            raise UsageError(f"no room for {path}: a store takes {_MOST_KEYS} keys and {_MOST_BYTES} bytes")

    def close(self, broken: bool = False) -> None:
        """End the connections and the thread, and free the port. What was put can still be read with :meth:`get`.

        Args:
            broken: Do not tell those who stay connected that this is a regular end.
        """
        self._last_word = b"" if broken else END
        self._closing = True
        with suppress(OSError):  # closed already
            self._bell_rope.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread ---

    def _serve(self) -> None:
        try:
            exhausted = False
            while not self._closing:
                patience_s = self._expire(exhausted)
                self._listen(not exhausted and len(self._waiting) < _MOST_WAITING)
                ready = self._selector.select(_PAUSE_S if exhausted else patience_s)
                exhausted = False
                for key, _ in ready:
                    if key.data is not None:
                        self._go_on(key.data)
                    elif key.fileobj is self._listener:
                        exhausted = not self._accept()
        finally:
            staying = [member for exchange in [*self._exchanges.values()] for member in self._end(exchange)]
            for member in staying:
                with suppress(OSError):
                    member.socket.send(bytes(member.unsent) + self._last_word)
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self._drop(key.data)
            for resource in (self._selector, self._listener, self._bell, self._bell_rope):
                resource.close()

    def _expire(self, exhausted: bool) -> float | None:
        """Drop those who took too long. Returns how long the next of them has left."""
        crowded = exhausted or len(self._waiting) >= _MOST_WAITING
        patience_s = _CROWDED_PATIENCE_S if crowded else _PATIENCE_S
        while self._waiting:
            oldest = next(iter(self._waiting))
            left_s = oldest.waits_since_s + patience_s - self._clock.monotonic_s()
            if left_s > 0:
                return left_s
            self._drop(oldest)
        return None

    def _listen(self, listening: bool) -> None:
        # While nobody is let in, newcomers queue in the system, and the selector must not report them.
        if listening != self._listening:
            self._listening = listening
            if listening:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> bool:
        """Serve newcomers. False if the system had no descriptor, or no memory, for the next."""
        for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_WAITING - len(self._waiting))):
            try:
                stream, peer = self._listener.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                break  # nobody is there, or no more
            except OSError:
                return False
            if self._allowed is not None and not self._admits(peer[0]):
                stream.close()
                continue
            stream.setblocking(False)
            self._go_on(_Connection(stream))
        return True

    def _admits(self, peer: str) -> bool:
        try:
            return self._allowed is None or self._allowed(peer)
        except Exception:  # the server outlives whatever it is, and lets nobody in that it was not told to
            logger.exception("whether %s may use the key-value store cannot be told, so it may not", peer)
            return False

    def _go_on(self, connection: _Connection) -> None:
        try:
            if connection.unsent:
                self._send(connection)
            elif connection.refused:
                self._discard(connection)
            elif connection.exchange is not None:
                self._hear(connection, connection.exchange)
            else:
                self._receive(connection)
        except BlockingIOError:
            if connection.exchange is not None and not connection.unsent:
                self._stay(connection)
            else:
                self._wait(connection, selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ)
        except OSError:
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        received: bytes | bytearray = connection.socket.recv(_READ_BYTES)
        ended = not received
        if connection.received:
            connection.received += received
            received = connection.received
        try:
            request = connection.request or read_request(received, self._token)
            if request is not None and len(received) == request.body_to:
                self._act(connection, request, bytes(received[request.body_from :]))
            elif ended or (request is not None and len(received) > request.body_to):
                raise RequestRefused(400)  # before anything is done: half a request, or more than one
            else:
                connection.request = request
                connection.received = received if connection.received else bytearray(received)
                self._wait(connection, selectors.EVENT_READ)
        except RequestRefused as refused:
            connection.refused = True
            self._answer(connection, refused.status)

    def _act(self, connection: _Connection, request: StoreRequest, body: bytes) -> None:
        if request.method == b"GET":
            value = self._values.get(request.path)
            self._answer(connection, 404 if value is None else 200, value or b"")
        elif request.method == b"DELETE":
            # HTTPStore deletes its rank's key when all members of its context have connected. A later context of the
            # same name, such as that of a process set added again, must not find the address of this one.
            self._bytes -= len(self._values.pop(request.path, b""))
            self._answer(connection, 200)
        elif "?" not in request.path:
            if not self._keep(request.path, body):
                raise RequestRefused(507)
            self._answer(connection, 200)
        else:
            self._exchange(connection, read_exchange(request.path), body)

    def _keep(self, path: str, value: bytes) -> bool:
        """False if there is no room for it."""
        more = len(value) - len(self._values.get(path, b""))
        if self._bytes + more > _MOST_BYTES or (len(self._values) >= _MOST_KEYS and path not in self._values):
            return False
        self._values[path] = value
        self._bytes += more
        return True

    def _exchange(self, connection: _Connection, asked: ExchangeRequest, value: bytes) -> None:
        """Answer all ranks of a context with what each has put, once all have."""
        known = self._exchanges.get(asked.scope)
        if known is not None and (known.size, known.stays) != (asked.size, asked.stays):
            raise RequestRefused(400)
        if self._bytes + len(value) > _MOST_BYTES:
            raise RequestRefused(507)
        if known is not None and asked.rank in known.parts:
            self._drop(known.parts[asked.rank][0])  # who asks anew has given that one up
        exchange = self._exchanges.setdefault(asked.scope, _Exchange(asked.scope, asked.size, asked.stays))
        exchange.parts[asked.rank] = (connection, value)
        self._bytes += len(value)
        connection.exchange = exchange
        connection.received = b""
        if len(exchange.parts) < exchange.size:
            self._stay(connection)
            return
        parts = [exchange.parts[rank] for rank in range(exchange.size)]
        values = joined(part for _, part in parts)
        if exchange.stays:
            exchange.answered = True
            self._bytes -= sum(len(part) for _, part in parts)
            exchange.parts = {rank: (member, b"") for rank, (member, _) in exchange.parts.items()}
        else:
            self._end(exchange)
        for member, _ in parts:
            if member.exchange is exchange or not exchange.stays:  # a member may end as another is answered
                member.unsent = staying_answer(values) if exchange.stays else whole_answer(200, values)
                self._go_on(member)

    def _end(self, exchange: _Exchange) -> list[_Connection]:
        """Forget an exchange. Returns the connections of its members."""
        del self._exchanges[exchange.scope]
        members = [member for member, _ in exchange.parts.values()]
        self._bytes -= sum(len(part) for _, part in exchange.parts.values())
        for member in members:
            member.exchange = None
        return members

    def _hear(self, connection: _Connection, exchange: _Exchange) -> None:
        """A member of an exchange goes, with a word or without."""
        if connection.socket.recv(len(LEAVE) + 1) == LEAVE and exchange.answered:
            exchange.parts = {rank: part for rank, part in exchange.parts.items() if part[0] is not connection}
            connection.exchange = None
            if not exchange.parts:
                self._end(exchange)
        self._drop(connection)

    def _go_without(self, connection: _Connection, exchange: _Exchange) -> None:
        """A member of an exchange is gone: the others would wait for it, or work with it, for ever."""
        (rank,) = (rank for rank, (member, _) in exchange.parts.items() if member is connection)
        for member in self._end(exchange):
            if member is not connection:
                word = GONE + b"%d" % rank if exchange.answered else whole_answer(410, b"%d" % rank)
                member.unsent = bytes(member.unsent) + word  # behind what is left of the answer to a slow reader
                self._go_on(member)

    def _answer(self, connection: _Connection, status: int, body: bytes = b"") -> None:
        connection.received = b""
        connection.unsent = whole_answer(status, body)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        sent = connection.socket.send(connection.unsent)
        if sent < len(connection.unsent):
            connection.unsent = memoryview(connection.unsent)[sent:]
            self._wait(connection, selectors.EVENT_WRITE)
        elif connection.exchange is not None:
            connection.unsent = b""
            self._stay(connection)
        elif not connection.refused:
            self._drop(connection)
        else:
            # Closing while the peer still sends would reset the connection, and it would not get to read why.
            connection.unsent = b""
            connection.socket.shutdown(socket.SHUT_WR)
            self._wait(connection, selectors.EVENT_READ)

    def _discard(self, connection: _Connection) -> None:
        count = len(connection.socket.recv(_READ_BYTES))
        connection.discarded_bytes += count
        if not count or connection.discarded_bytes > _DISCARDED_BYTES:
            self._drop(connection)

    def _wait(self, connection: _Connection, event: int) -> None:
        if connection not in self._waiting:
            connection.waits_since_s = self._clock.monotonic_s()
            self._waiting[connection] = None
        if not connection.event:
            self._selector.register(connection.socket, event, connection)
        elif connection.event != event:
            self._selector.modify(connection.socket, event, connection)
        connection.event = event

    def _stay(self, connection: _Connection) -> None:
        """Listen to a member, however long it is silent."""
        self._wait(connection, selectors.EVENT_READ)
        del self._waiting[connection]

    def _drop(self, connection: _Connection) -> None:
        self._waiting.pop(connection, None)
        if connection.event:
            connection.event = 0
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.exchange is not None:
            self._go_without(connection, connection.exchange)


def get(store: StoreAddress, path: str, timeout_s: float) -> bytes | None:
    """The value at ``/scope/key`` of a store elsewhere, or ``None``. Raises ``OSError`` or ``HTTPException``."""
    return _request("GET", store, path, None, timeout_s)


def put(store: StoreAddress, path: str, value: bytes, timeout_s: float) -> None:
    """Set the value at ``/scope/key`` of a store elsewhere. Raises ``OSError`` or ``HTTPException``."""
    _request("PUT", store, path, value, timeout_s)


def _request(method: str, store: StoreAddress, path: str, body: bytes | None, timeout_s: float) -> bytes | None:
    connection = HTTPConnection(store.address, store.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {store.token}"} if store.token else {})
        response = connection.getresponse()
        value = response.read()
        if response.status == 404:
            return None
        if response.status != 200:
            raise OSError(f"{method} {path} was answered with status {response.status}")
        return value
    finally:
        connection.close()
