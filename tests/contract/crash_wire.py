"""A wire between clients and a server: counts what goes over it, and lets things happen at an exact byte.

    with Wire() as wire:
        wire.target = proxy.address
        wire.at(AtByte(1_000_000), kill)          # that byte is not passed on before ``kill`` has returned
        wire.at(AtMessage(7), kill, sever=True)   # and the connection breaks
        ... clients talk to wire.url ...
        wire.break_down(0.5)                      # as if the server was killed, and started again after half a second

What is sent before a client dies has left it: the wire still carries it, as a network does, unless it is severed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from crash_plans import AtByte, AtMessage, AtRequest
from tcp_proxy import TcpProxy

_PIECE_BYTES = 64 * 1024


@dataclass
class _Link:
    """One client's connection, at both ends of the wire, and which end has spoken last."""

    client: socket.socket
    server: socket.socket
    speaker: socket.socket | None = None


@dataclass(frozen=True)
class _Planned:
    moment: AtByte | AtMessage | AtRequest
    act: Callable[[], None]
    sever: bool
    passed: Iterator[int] = field(default_factory=lambda: count(1))  # requests that hold the word


class Wire(TcpProxy):
    """Listens on a free port as long as it lives, and carries everything to ``target``, which may change.

    Attributes:
        target: Host and port of the server.
        bytes, messages: What has gone over it, in both directions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.target = ("127.0.0.1", 0)
        self.bytes = self.messages = 0
        self._planned: list[_Planned] = []
        self._down_until_s = 0.0

    def at(self, moment: AtByte | AtMessage | AtRequest, act: Callable[[], None], sever: bool = False) -> None:
        """Call ``act`` once at a moment, counted from now; with ``sever`` the connection on which it came breaks."""
        with self.lock:
            gone = {AtByte: self.bytes, AtMessage: self.messages}.get(type(moment), 0)
            self._planned.append(_Planned(replace(moment, number=gone + moment.number), act, sever))

    def break_down(self, duration_s: float) -> None:
        """Break every connection, and for a while each one that is made."""
        self._down_until_s = time.monotonic() + duration_s
        self.cut()

    def clear(self) -> None:
        """Break every connection; nothing is planned any more, and nothing is down."""
        with self.lock:
            self._planned.clear()
        self._down_until_s = 0.0
        self.cut()

    def serve(self, client: socket.socket) -> None:
        """Carry what both ends say, unless the server is down."""
        if time.monotonic() < self._down_until_s:
            return
        with self.kept(socket.create_connection(self.target)) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            back = threading.Thread(target=self._carry, args=(link, server, client), daemon=True)
            back.start()
            self._carry(link, client, server)
            back.join(600)  # a stalled answer takes as long

    def _carry(self, link: _Link, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_PIECE_BYTES):
                self._pass_on(link, source, sink, data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self.cut((link.client, link.server))

    def _pass_on(self, link: _Link, source: socket.socket, sink: socket.socket, data: bytes) -> None:
        passed = 0
        for place, planned in self._counted(link, source, data):
            sink.sendall(data[passed:place])
            passed = place
            planned.act()
            if planned.sever:
                self.cut((link.client, link.server))
        sink.sendall(data[passed:])

    def _counted(self, link: _Link, source: socket.socket, data: bytes) -> list[tuple[int, _Planned]]:
        """Count a piece; what is to happen within it, by the bytes of it that go before."""
        with self.lock:
            before, self.bytes = self.bytes, self.bytes + len(data)
            begins = link.speaker is not source
            link.speaker = source
            self.messages += begins
            due = []
            for planned in self._planned:
                number = planned.moment.number
                if isinstance(planned.moment, AtRequest):
                    first_line = data.partition(b"\r\n")[0] if begins and source is link.client else b""
                    if planned.moment.word.encode() in first_line and next(planned.passed) == number:
                        due.append((0, planned))
                elif isinstance(planned.moment, AtMessage):
                    if begins and number == self.messages:
                        due.append((0, planned))
                elif before <= number < self.bytes:
                    due.append((number - before, planned))
            self._planned = [planned for planned in self._planned if planned not in [one for _, one in due]]
        return sorted(due, key=lambda one: one[0])
