"""A worker's connection to its driver (``edlrun``): what it says is read by a thread as soon as it comes."""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from edl_hvd.errors import RendezvousError
from edl_hvd.events import Straggler
from edl_hvd.settings import Driver
from edl_hvd.worker.progress import progress

_CONNECT_TIMEOUT_S = 10.0
_BEAT_S = 0.25
# A driver's host that vanishes without a word leaves what is sent to it unanswered.
_UNANSWERED_S = 8.0
_LONGEST_LINE_BYTES = 1 << 20  # a world lists every member: 64 KiB hold 1,000 of them


class DriverLine:
    """See the module.

    Args:
        driver: Where it listens, and who this worker is for it.
        beat: The fields of a beat (``driver/control.py``), asked several times a second.

    Attributes:
        change: Generation of the world that is to change at its next commit; 0 for none.
        lost: The driver is gone.

    Raises:
        RendezvousError: The driver cannot be reached.
    """

    def __init__(self, driver: Driver, beat: Callable[[], Mapping[str, Any]]) -> None:
        self.change = 0
        self.lost = False
        self._wants_to_go = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._beat = beat
        self._news: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self._at_once: dict[str, Callable[..., None]] = {"straggler": _note_straggler, "lost": lambda: None}
        self.local_address = ""
        try:
            self._socket = socket.create_connection((driver.address, driver.port), timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            raise RendezvousError(
                f"worker {driver.worker} cannot reach its driver at {driver.address}:{driver.port}: {error}; check "
                "that this host can connect to the one where edlrun runs, and --network-interfaces"
            ) from error
        self.local_address = self._socket.getsockname()[0]
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNANSWERED_S))
        self._say({"token": driver.token, "worker": driver.worker, "life": driver.life, "pid": os.getpid()})
        threading.Thread(target=self._read, name="edl-driver", daemon=True).start()
        threading.Thread(target=self._beat_on, name="edl-heart", daemon=True).start()
        atexit.register(self._beat_last, os.getpid())

    def say(self, what: str, **fields: Any) -> None:
        """Tell the driver something; that it is gone shows in ``lost``."""
        self._say({"what": what, **fields})

    def ask_to_go(self) -> None:
        """Ask to be drained. For signal handlers, which must not wait for a lock: another thread says it."""
        self._wants_to_go = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def at_once(self, what: str, act: Callable[..., None]) -> None:
        """Call ``act`` with the fields of each such message, in the reading thread, as soon as it comes.

        For ``"lost"`` it is called once, when the driver is gone.
        """
        self._at_once[what] = act

    def put(self, news: dict[str, Any]) -> None:
        """Let :meth:`next` return this in its turn. Any thread."""
        self._news.put(news)

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Block until the driver has something for the main thread; ``None`` when it is gone.

        After the timeout it is ``{"what": "silence"}``.
        """
        try:
            return self._news.get(timeout=timeout_s)
        except queue.Empty:
            return {"what": "silence"}

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError), self._one_at_a_time:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE_BYTES)).endswith(b"\n"):
                self._take(json.loads(line))
        self.lost = True
        self._at_once["lost"]()
        self._news.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        what = message.pop("what")
        if what == "change":
            self.change = message["generation"]
        elif what in self._at_once:
            self._at_once[what](**message)
        else:
            self._news.put({"what": what, **message})

    def _beat_on(self) -> None:
        waking = select.poll()
        waking.register(self._woken, select.POLLIN)
        while not self.lost:
            if self._wants_to_go:
                self._wants_to_go = False
                self.say("drain")
            self.say("beat", **self._beat())
            if waking.poll(1000 * _BEAT_S):
                os.read(self._woken, 64)

    def _beat_last(self, pid: int) -> None:
        """The last steps, and the last checkpoint, are often complete only when the process is about to end."""
        if not self.lost and os.getpid() == pid:
            self.say("beat", **self._beat())


def _note_straggler(**fields: Any) -> None:
    progress.stragglers.append(Straggler(**fields))
