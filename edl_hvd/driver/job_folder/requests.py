"""What other terminals ask of a running job: one JSON line each way, through a socket in the job's folder.

    {"what": "drain", "target": "b" or "b:0", "notice_s": 120}
        → {"ok": true, "workers": ["b:0"], "stay": 3, "slots": 4, "least": 1}
        → {"ok": false, "problem": "…", "hosts": ["a", "c"]}

The socket is for this user alone. What is not understood is answered with a problem, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edl_hvd.driver.job_folder.files import CONTROL
from edl_hvd.driver.membership.events import DrainRequested
from edl_hvd.driver.membership.state import LIVE, Membership, host_of
from edl_hvd.errors import PlatformError
from edl_hvd.json_values import show
from edl_hvd.process_identity import is_stopped

LONGEST_LINE_BYTES = 4096
LONGEST_NOTICE_S = 86_400.0
_PATIENCE_S = 5.0
# To write one line takes no time; who does not is stuck, or plays.
_MOST_CALLERS = 256
# Who finds a busy process may wait with a hundred others, and each has a descriptor, of which there are often 1024.
_BACKLOG = 1024
# Linux refuses who comes to a full one at once, and a busy driver may not take anybody for a while.
_ANSWER_S = 10.0
# The driver answers within milliseconds, unless its machine is very busy.
_LONGEST_ANSWER_BYTES = 1 << 28
# Of a fleet with fifty thousand jobs that have each measured a lot.
_CREDENTIALS = struct.Struct("3i")
# Process, user and group of the other end of a socket (unix(7), SO_PEERCRED).
_HINT = "it takes requests from this user on its own host once it has found its first hosts"


@dataclass(frozen=True)
class Reply:
    """To one request.

    Attributes:
        fields: What is said.
        event: What happens to the job thereby, or ``None``.
    """

    fields: Mapping[str, Any]
    event: DrainRequested | None = None


def answer(line: bytes, membership: Membership, now_s: float) -> Reply:
    """What to say to this line, and what to do. Pure; accepts anything.

    Args:
        line: What was received, with or without its newline.
        membership: Of the job.
        now_s: On its clock.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return _refuse("that is no JSON; expected one object in one line")
    if not isinstance(request, dict) or request.keys() != {"what", "target", "notice_s"} or request["what"] != "drain":
        return _refuse('that is not understood; expected {"what": "drain", "target": "HOST", "notice_s": 120}')
    target, notice_s = request["target"], request["notice_s"]
    if type(notice_s) not in (int, float) or not 0 <= notice_s <= LONGEST_NOTICE_S:
        return _refuse(f"notice_s is {show(notice_s)}; expected seconds, 0 to {LONGEST_NOTICE_S:.0f}")
    if membership.end is not None:
        return _refuse("the job has just ended")
    hosts = _hosts(membership)
    if not isinstance(target, str) or not _is_known(target, membership):
        known = ", ".join(hosts) or "none"
        return _refuse(f"the job has no host or worker {show(target)}; its hosts are {known}", hosts)
    return _drain(DrainRequested(target, float(notice_s)), membership, now_s)


def _drain(asked: DrainRequested, membership: Membership, now_s: float) -> Reply:
    """``stay`` workers and ``slots`` are what the job has besides; it needs ``least`` workers."""
    alive = membership.having("starting", "ready", "member")
    leaving = [worker for worker in alive if asked.target in (worker, host_of(worker))]
    slots = replace(membership, drains={**membership.drains, asked.target: now_s}).wanted(now_s)
    stay = [worker for worker in slots if worker in alive]
    least = membership.rules.min_np
    return Reply({"ok": True, "workers": leaving, "stay": len(stay), "slots": len(slots), "least": least}, asked)


def _hosts(membership: Membership) -> list[str]:
    listed = [entry.host for entry in membership.hosts]
    return sorted({*listed, *(host_of(worker) for worker in membership.having(*LIVE))})


def _is_known(target: str, membership: Membership) -> bool:
    listed = {f"{entry.host}:{number}" for entry in membership.hosts for number in range(entry.slots)}
    return target in listed or target in membership.having(*LIVE) or target in _hosts(membership)


def _refuse(problem: str, hosts: list[str] | None = None) -> Reply:
    fields: dict[str, Any] = {"ok": False, "problem": problem}
    return Reply(fields if hosts is None else {**fields, "hosts": hosts})


# --- the driver's side ---


class Requests:
    """Listens in a job's folder. Belongs to the running event loop.

    Args:
        take: Gets each line, in the event loop; what it returns is sent back.
        longest_line_bytes: Longest line that is taken.
    """

    def __init__(
        self, take: Callable[[bytes], Mapping[str, Any]], longest_line_bytes: int = LONGEST_LINE_BYTES
    ) -> None:
        self._take = take
        self._longest_line_bytes = longest_line_bytes
        self._callers: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def start(self, folder: Path) -> None:
        """Begin to listen.

        Raises:
            OSError: The folder's file system has no sockets.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before there is anything to connect to
            with suppress(FileNotFoundError):
                (folder / CONTROL).unlink()  # of an edlrun that was killed
            with _short(folder) as path:
                listening.bind(path)
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listening, limit=self._longest_line_bytes, backlog=_BACKLOG
            )
        except BaseException:
            listening.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._callers) >= _MOST_CALLERS:
            next(iter(self._callers)).close()  # the one that has been silent for longest
        self._callers[writer] = None
        try:
            line = await asyncio.wait_for(_read_line(reader), _PATIENCE_S)
            if line:
                writer.write(json.dumps(self._take(line)).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), _PATIENCE_S)
        except (OSError, asyncio.TimeoutError):
            pass  # it is gone, or silent
        finally:
            self._callers.pop(writer, None)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return b"too long"


# --- the other side ---


def ask(folder: Path, request: Mapping[str, Any], whom: str = "the edlrun", hint: str = _HINT) -> dict[str, Any]:
    """Ask the process that listens in this folder. Blocks until it answers, ten seconds at most.

    Args:
        folder: Folder of the job, or another with such a socket.
        request: What is asked; one line of JSON.
        whom: Process that listens, for the message.
        hint: What is expected of it, for the message.

    Raises:
        PlatformError: Nobody answers.
    """
    pid = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as calling:
            calling.settimeout(_ANSWER_S)
            with _short(folder) as path:
                calling.connect(path)
            pid = _peer(calling)
            calling.sendall(json.dumps(request).encode() + b"\n")
            with calling.makefile("rb") as lines:
                line = lines.readline(_LONGEST_ANSWER_BYTES)
        if not line.endswith(b"\n") and len(line) < _LONGEST_ANSWER_BYTES:
            raise PlatformError(
                f"asked {whom} of {folder}, which ended before its answer was whole, so what was asked for may have "
                f"been done; look before you ask again; {hint}"
            )
        said = json.loads(line)
    except TimeoutError as error:
        raise PlatformError(f"asked {whom} of {folder}, {_silence(pid)}") from error
    except (OSError, ValueError) as error:
        raise PlatformError(f"asked {whom} of {folder}, which did not answer: {error}; {hint}") from error
    if not isinstance(said, dict):
        raise PlatformError(f"asked {whom} of {folder}, which answered {show(said)}; expected a JSON object")
    return said


def _peer(connected: socket.socket) -> int:
    """The process that listens at the other end; 0 if it is of another container."""
    return int(_CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0])


def _silence(pid: int) -> str:
    """What a process has not done that took a request and gave no answer, and what to do about it."""
    silent = f"which has not answered within {_ANSWER_S:g} s"
    if not pid:
        return f"{silent}: it is busy or hangs; look before you ask again: what was asked for may be done later"
    if is_stopped(pid):
        return (
            f"process {pid}, {silent}: it was stopped (SIGSTOP, or a debugger); let it go on with 'kill -CONT {pid}', "
            "and look before you ask again: what was asked for may be done then"
        )
    return (
        f"process {pid}, {silent}: it is busy or hangs; look at it with 'ps -p {pid} -o stat,time,args', and look "
        "before you ask again: what was asked for may be done later"
    )


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path to the socket that fits into an address, which has 108 bytes for it (unix(7))."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{CONTROL}"
    finally:
        os.close(directory)
