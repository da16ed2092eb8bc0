"""The port on which workers talk with their driver: JSON, one object per line, both ways, as long as a worker lives.

A worker's first line has to hold the job's token, its name and its life; anything else ends the connection without
an answer. The token travels in the worker's environment, never on a command line. What a line says is checked before
anybody acts on it; a line that says nothing known ends the connection.

    worker → driver  hello {token, worker, life, pid}, ready {step}, warm {generation},
                     guiding {generation, follower, address, port}, formed {generation}, beat {…},
                     raised {step, error, hopeless}, done, drain, notice {left_s},
                     waits {generation, waits, collective, started, place, stack}
    driver → worker  world {generation, members, store, interface, address, known_step}, change {generation},
                     gone {generation, worker}, straggler {…}, dismiss {save, left_s},
                     guide {generation, follower, address}, follow {generation, address, port},
                     explain {generation, collectives}
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl_hvd.driver.network import Line

LONGEST_LINE_BYTES = 1 << 16
_HELLO_TIMEOUT_S = 10.0
# Silent strangers must not use up the descriptors that workers need.
_MOST_STRANGERS = 64
# A host whose cable is pulled says nothing, not even that it is gone. Its system answers, whatever its processes do, so
# after so long without an answer it is given up. Three times what a network needs to find another way (rapid spanning
# tree), and nearly all that a lost host costs the others.
_UNANSWERED_S = 3.0
_LOOK_EVERY_S = 0.25
_OWN_PAUSE_S = 1.0
# A driver that slept so long first looks at what has come meanwhile.

Grammar: TypeAlias = Mapping[str, Mapping[str, type]]
"""What may be said: by the word that a line has for ``what``, its other fields and their types; a list is of ints."""

WORKER: Grammar = {
    "ready": {"step": int},
    "warm": {"generation": int},
    "guiding": {"generation": int, "follower": str, "address": str, "port": int},
    "formed": {"generation": int},
    "beat": {
        "generation": int, "pid": int, "step": int, "samples": int, "saved_step": int,
        "phase": str, "phase_s": float, "compute_s": float,
        "waits": int, "steps": int, "batches": int, "slowest_s": float, "collective": str,
    },
    "raised": {"step": int, "error": str, "hopeless": bool},
    "done": {},
    "drain": {},
    "notice": {"left_s": float},
    "waits": {"generation": int, "waits": int, "collective": str, "started": list, "place": str, "stack": str},
}  # fmt: skip


@dataclass(frozen=True)
class Message:
    """What one worker said."""

    worker: str
    life: int
    what: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Beat:
    """What a worker says of itself several times a second.

    Attributes:
        generation: Of its world; 0 before the first.
        pid: Of its process, on its host.
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint that it knows to be complete; -1 for none.
        phase: What it is doing, see :mod:`edl_hvd.worker.progress`.
        phase_s: For how long.
        compute_s: Seconds that it has spent in phase "compute" since it was started.
        waits: Calls that end only when every member has made them, and that it has come through in this world.
        steps: Optimizer steps that its process took part in.
        batches: Micro-batches that it has begun to compute since it was started.
        slowest_s: Its longest recent phase "compute", "input" or "commit".
        collective: Name of the collective that it waits for; empty if it waits for none, or nobody knows.
    """

    generation: int
    pid: int
    step: int
    samples: int
    saved_step: int
    phase: str
    phase_s: float
    compute_s: float
    waits: int
    steps: int
    batches: int
    slowest_s: float
    collective: str = ""


class Control:
    """The driver's side.

    Args:
        knows: Whether a worker of this name and life is expected to call.
        heard: Gets every message, in the event loop's thread; a call with ``what="hello"`` comes first. One with
            ``what="unreachable"`` is ours: the worker's host has not answered for three seconds.
        grammar: What may be said.
    """

    def __init__(
        self, knows: Callable[[str, int], bool], heard: Callable[[Message], None], grammar: Grammar = WORKER
    ) -> None:
        self._grammar = grammar
        self.token = secrets.token_urlsafe(32)
        self._knows = knows
        self._heard = heard
        self._lines: dict[str, tuple[int, asyncio.StreamWriter]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen on every address of this host; the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=LONGEST_LINE_BYTES, backlog=1024)
        self._watch = asyncio.get_running_loop().create_task(self._watch_hosts())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def send(self, worker: str, what: str, /, **fields: Any) -> bool:
        """Say something to a worker; false if it is not connected."""
        if worker not in self._lines:
            return False
        writer = self._lines[worker][1]
        writer.write(json.dumps({"what": what, **fields}).encode() + b"\n")
        return not writer.is_closing()

    def hang_up(self, worker: str, life: int) -> None:
        """End the connection of a worker that belongs to the job no more: should it live on, it leaves."""
        known_life, writer = self._lines.get(worker, (0, None))
        if writer is not None and known_life == life:
            writer.close()

    def lines(self, workers: Sequence[str]) -> dict[str, Line]:
        """The connections of those of the workers that are connected."""
        writers = {worker: self._lines[worker][1] for worker in workers if worker in self._lines}
        ends = {worker: [writer.get_extra_info(end) for end in ("peername", "sockname")]
                for worker, writer in writers.items()}  # fmt: skip
        return {worker: Line(there[0], here[0]) for worker, (there, here) in ends.items()}

    def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        if self._watch is not None:
            self._watch.cancel()
        for _, writer in self._lines.values():
            writer.close()

    async def _watch_hosts(self) -> None:
        clock = asyncio.get_running_loop()
        while True:
            before_s = clock.time()
            await asyncio.sleep(_LOOK_EVERY_S)
            slept = clock.time() - before_s > _OWN_PAUSE_S
            for worker, (life, writer) in list(self._lines.items()):
                if not slept and _unanswered_s(writer) > _UNANSWERED_S:
                    self._heard(Message(worker, life, "unreachable", {}))
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _ask_for_answers(writer)
            caller = await self._greet(reader, writer)
            if caller is not None:
                await self._listen(*caller, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # it is gone, or talks nonsense: in both cases there is nobody to tell
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int] | None:
        if len(self._strangers) >= _MOST_STRANGERS:
            next(iter(self._strangers)).close()  # the one that has been silent for longest
        self._strangers[writer] = None
        try:
            hello = _parse(await asyncio.wait_for(reader.readuntil(), _HELLO_TIMEOUT_S))
        finally:
            self._strangers.pop(writer, None)
        token, worker, life = hello.get("token"), hello.get("worker"), hello.get("life")
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        if not isinstance(worker, str) or type(life) is not int or not self._knows(worker, life):
            return None
        return worker, life

    async def _listen(self, worker: str, life: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines[worker] = (life, writer)
        self._heard(Message(worker, life, "hello", {}))
        try:
            while True:
                line = _parse(await reader.readuntil())
                message = _understand(worker, life, line, self._grammar)
                if message is None:
                    return
                self._heard(message)
        finally:
            if self._lines.get(worker, (0, None))[1] is writer:
                del self._lines[worker]


def _ask_for_answers(writer: asyncio.StreamWriter) -> None:
    """Let the system ask the other one every second whether it is there, when there is nothing else to answer."""
    stream: socket.socket = writer.get_extra_info("socket")
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), 1)


def _unanswered_s(writer: asyncio.StreamWriter) -> float:
    """Since when nothing at all has come from the other system; 0 where ours does not tell (it is not Linux)."""
    if not hasattr(socket, "TCP_INFO") or writer.is_closing():
        return 0.0
    stream: socket.socket = writer.get_extra_info("socket")
    # tcpi_last_data_recv and tcpi_last_ack_recv, in milliseconds, see struct tcp_info in <linux/tcp.h>.
    data_ms, answer_ms = struct.unpack_from("II", stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60), 52)
    return float(min(data_ms, answer_ms)) / 1000


def _parse(line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _understand(worker: str, life: int, line: dict[str, Any], grammar: Grammar) -> Message | None:
    """The message that a line holds, or ``None``."""
    what = line.pop("what", None)
    fields = grammar.get(what) if isinstance(what, str) else None
    if fields is None or line.keys() != fields.keys():
        return None
    if any(type(line[name]) is not kind for name, kind in fields.items()):
        return None
    if any(type(item) is not int for value in line.values() if isinstance(value, list) for item in value):
        return None
    assert isinstance(what, str)
    return Message(worker, life, what, line)
