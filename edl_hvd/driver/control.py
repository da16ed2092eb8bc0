"""The port on which workers talk with their driver: JSON, one object per line, both ways, as long as a worker lives.

A worker's first line has to hold the job's token, its name and its life; anything else ends the connection without
an answer. The token travels in the worker's environment, never on a command line. What a line says is checked before
anybody acts on it; a line that says nothing known ends the connection.

    worker → driver  hello {token, worker, life, pid}, ready {step}, formed {generation}, beat {…},
                     raised {step, error}, done, drain
    driver → worker  world {generation, members, store, interface, known_step}, change {generation},
                     gone {generation, worker}, dismiss {save}
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LONGEST_LINE_BYTES = 1 << 16
_HELLO_TIMEOUT_S = 10.0
# Silent strangers must not use up the descriptors that workers need.
_MOST_STRANGERS = 64

_FIELDS: Mapping[str, Mapping[str, type]] = {
    "ready": {"step": int},
    "formed": {"generation": int},
    "beat": {
        "generation": int, "step": int, "samples": int, "saved_step": int,
        "phase": str, "phase_s": float, "compute_s": float,
    },
    "raised": {"step": int, "error": str},
    "done": {},
    "drain": {},
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
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint that it knows to be complete; -1 for none.
        phase: What it is doing, see :mod:`edl_hvd.worker.progress`.
        phase_s: For how long.
        compute_s: Seconds that it has spent in phase "compute" since it was started.
    """

    generation: int
    step: int
    samples: int
    saved_step: int
    phase: str
    phase_s: float
    compute_s: float


class Control:
    """The driver's side.

    Args:
        knows: Whether a worker of this name and life is expected to call.
        heard: Gets every message, in the event loop's thread; a call with ``what="hello"`` comes first.
    """

    def __init__(self, knows: Callable[[str, int], bool], heard: Callable[[Message], None]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._knows = knows
        self._heard = heard
        self._lines: dict[str, tuple[int, asyncio.StreamWriter]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on every address of this host; the port."""
        self._server = await asyncio.start_server(self._serve, "0.0.0.0", 0, limit=LONGEST_LINE_BYTES, backlog=1024)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def send(self, worker: str, what: str, /, **fields: Any) -> bool:
        """Say something to a worker; false if it is not connected."""
        if worker not in self._lines:
            return False
        writer = self._lines[worker][1]
        writer.write(json.dumps({"what": what, **fields}).encode() + b"\n")
        return not writer.is_closing()

    def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        for _, writer in self._lines.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
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
                message = _understand(worker, life, line)
                if message is None:
                    return
                self._heard(message)
        finally:
            if self._lines.get(worker, (0, None))[1] is writer:
                del self._lines[worker]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _understand(worker: str, life: int, line: dict[str, Any]) -> Message | None:
    """The message that a line holds, or ``None``."""
    what = line.pop("what", None)
    fields = _FIELDS.get(what) if isinstance(what, str) else None
    if fields is None or line.keys() != fields.keys():
        return None
    if any(type(line[name]) is not kind for name, kind in fields.items()):
        return None
    assert isinstance(what, str)
    return Message(worker, life, what, line)
