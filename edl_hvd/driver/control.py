"""The port on which workers talk with their driver: JSON, one object per line, both ways, as long as a worker lives.

The messages are those of ``protocol.py``. A worker's first line has to hold the job's token, its name and its
incarnation; anything else ends the connection without an answer. A later line that holds no known message ends it, too.

A worker holds further connections, on which nothing is said: the system ends them when the worker's process begins to
end.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic

from edl_hvd import protocol
from edl_hvd.driver.network import Connection
from edl_hvd.errors import ProtocolError
from edl_hvd.protocol import Message, MessageT, Vocabulary
from edl_hvd.silence import UNANSWERED_S, ask_for_answers, unanswered_s

LONGEST_LINE_BYTES = 1 << 16
_HELLO_TIMEOUT_S = 10.0
# Silent strangers must not use up the descriptors that workers need.
_MOST_UNAUTHENTICATED = 64
_LOOK_EVERY_S = 0.25
_OWN_PAUSE_S = 1.0
# A driver that slept for longer first looks at what has come meanwhile.


@dataclass(frozen=True)
class Connected:
    """A worker has said hello."""


@dataclass(frozen=True)
class Unreachable:
    """The host of a worker has not answered for three seconds."""


@dataclass(frozen=True)
class ProcessEnding:
    """The process of a worker ends, and not in order: its threads are gone, its memory will be freed."""


class Control(Generic[MessageT]):
    """The driver's side.

    Args:
        is_expected: Whether a worker of this name and incarnation is expected to call.
        on_message: Gets the name and the incarnation of a worker and what it said, in the event loop's thread. Must not
            raise: it is called in tasks whose results nobody looks at.
        known: What may be said after the hello.
    """

    def __init__(
        self,
        is_expected: Callable[[str, int], bool],
        on_message: Callable[[str, int, MessageT | Connected | Unreachable | ProcessEnding], None],
        known: Vocabulary[MessageT],
    ) -> None:
        self._known = known
        self.token = secrets.token_urlsafe(32)
        self._is_expected = is_expected
        self._on_message = on_message
        self._connections: dict[str, tuple[int, asyncio.StreamWriter]] = {}
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen on every address of this host; the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=LONGEST_LINE_BYTES, backlog=1024)
        self._watch = asyncio.get_running_loop().create_task(self._watch_hosts())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def send(self, worker: str, message: Message) -> bool:
        """Say something to a worker; false if it is not connected."""
        if worker not in self._connections:
            return False
        writer = self._connections[worker][1]
        writer.write(protocol.encode(message))
        return not writer.is_closing()

    def disconnect(self, worker: str, incarnation: int) -> None:
        """End the connection of a worker that belongs to the job no more: should it live on, it leaves."""
        known_incarnation, writer = self._connections.get(worker, (0, None))
        if writer is not None and known_incarnation == incarnation:
            writer.close()

    def connections(self, workers: Sequence[str]) -> dict[str, Connection]:
        """The connections of those of the workers that are connected."""
        writers = {worker: self._connections[worker][1] for worker in workers if worker in self._connections}
        ends = {worker: [writer.get_extra_info(end) for end in ("peername", "sockname")]
                for worker, writer in writers.items()}  # fmt: skip
        return {worker: Connection(there[0], here[0]) for worker, (there, here) in ends.items()}

    def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        if self._watch is not None:
            self._watch.cancel()
        for _, writer in self._connections.values():
            writer.close()

    async def _watch_hosts(self) -> None:
        clock = asyncio.get_running_loop()
        while True:
            before_s = clock.time()
            await asyncio.sleep(_LOOK_EVERY_S)
            slept = clock.time() - before_s > _OWN_PAUSE_S
            for worker, (incarnation, writer) in list(self._connections.items()):
                if slept or writer.is_closing():
                    continue
                if unanswered_s(writer.get_extra_info("socket")) > UNANSWERED_S:
                    self._on_message(worker, incarnation, Unreachable())
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ask_for_answers(writer.get_extra_info("socket"))
            hello = await self._greet(reader, writer)
            if isinstance(hello, protocol.WatchHello):
                await self._watch_process(hello, reader)
            elif hello is not None:
                await self._listen(hello.worker, hello.incarnation, reader, writer)
        except (OSError, ProtocolError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # it is gone, or talks nonsense: in both cases there is nobody to tell
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> protocol.Hello | None:
        if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
            next(iter(self._unauthenticated)).close()  # the one that has been silent for longest
        self._unauthenticated[writer] = None
        try:
            line = await asyncio.wait_for(reader.readuntil(), _HELLO_TIMEOUT_S)
        finally:
            self._unauthenticated.pop(writer, None)
        hello = protocol.decode(line, protocol.HELLO)
        is_ours = hmac.compare_digest(hello.token.encode(errors="replace"), self.token.encode())
        is_expected = is_ours and self._is_expected(hello.worker, hello.incarnation)
        return hello if is_expected else None

    async def _watch_process(self, hello: protocol.WatchHello, reader: asyncio.StreamReader) -> None:
        if not await reader.read(1):
            self._on_message(hello.worker, hello.incarnation, ProcessEnding())

    async def _listen(
        self, worker: str, incarnation: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._connections[worker] = (incarnation, writer)
        self._on_message(worker, incarnation, Connected())
        try:
            while True:
                self._on_message(worker, incarnation, protocol.decode(await reader.readuntil(), self._known))
        finally:
            if self._connections.get(worker, (0, None))[1] is writer:
                del self._connections[worker]
