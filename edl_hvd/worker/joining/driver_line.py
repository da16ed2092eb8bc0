"""A worker's connection to its driver (``edlrun``): what it says is read by a thread as soon as it comes."""

from __future__ import annotations

import atexit
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from edl_hvd import protocol
from edl_hvd.errors import ProtocolError, RendezvousError
from edl_hvd.settings import Driver
from edl_hvd.worker.joining.rendezvous import Following
from edl_hvd.worker.progress import progress

_CONNECT_TIMEOUT_S = 10.0
_BEAT_S = 0.25
# A driver's host that vanishes without a word leaves what is sent to it unanswered.
_UNANSWERED_S = 8.0
_LONGEST_LINE_BYTES = 1 << 20  # a world lists every member: 64 KiB hold 1,000 of them


@dataclass(frozen=True)
class Work:
    """Something has come for this follower of a world."""

    following: Following


@dataclass(frozen=True)
class Silence:
    """Nothing has come for as long as the main thread was to wait."""


@dataclass(frozen=True)
class Lost:
    """The driver is gone."""


AtOnce: TypeAlias = protocol.Gone | protocol.Guide | protocol.Explain | Lost
News: TypeAlias = protocol.World | protocol.Follow | protocol.Dismiss | Work | Silence | Lost


class DriverLine:
    """See the module.

    Args:
        driver: Where it listens, and who this worker is for it.
        beat: What this worker does, asked several times a second.
        at_once: Gets what cannot wait for the main thread, in the reading thread, as soon as it comes.

    Attributes:
        change: Generation of the world that is to change at its next commit; 0 for none.
        lost: The driver is gone.

    Raises:
        RendezvousError: The driver cannot be reached.
    """

    def __init__(self, driver: Driver, beat: Callable[[], protocol.Beat], at_once: Callable[[AtOnce], None]) -> None:
        self.change = 0
        self.lost = False
        self._wants_to_go = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._beat = beat
        self._at_once = at_once
        self._news: queue.Queue[News] = queue.Queue()
        self._one_at_a_time = threading.Lock()
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
        self.say(protocol.Hello(driver.token, driver.worker, driver.incarnation))
        threading.Thread(target=self._read, name="edl-driver", daemon=True).start()
        threading.Thread(target=self._beat_on, name="edl-heart", daemon=True).start()
        atexit.register(self._beat_last, os.getpid())

    def say(self, message: protocol.Hello | protocol.FromWorker) -> None:
        """Tell the driver something; that it is gone shows in ``lost``."""
        with suppress(OSError), self._one_at_a_time:
            self._socket.sendall(protocol.encode(message))

    def ask_to_go(self) -> None:
        """Ask to be drained. For signal handlers, which must not wait for a lock: another thread says it."""
        self._wants_to_go = True
        with suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def put(self, news: News) -> None:
        """Let :meth:`next` return this in its turn. Any thread."""
        self._news.put(news)

    def next(self, timeout_s: float | None = None) -> News:
        """Block until there is something for the main thread, or the timeout is over."""
        try:
            return self._news.get(timeout=timeout_s)
        except queue.Empty:
            return Silence()

    def _read(self) -> None:
        with suppress(OSError, ValueError, ProtocolError), self._socket.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE_BYTES)).endswith(b"\n"):
                self._take(protocol.decode(line, protocol.TO_WORKER))
        self.lost = True
        self._at_once(Lost())
        self._news.put(Lost())

    def _take(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.Change(generation):
                self.change = generation
            case protocol.Straggler():
                progress.stragglers.append(message)
            case protocol.Gone() | protocol.Guide() | protocol.Explain():
                self._at_once(message)
            case protocol.World() | protocol.Follow() | protocol.Dismiss():
                self._news.put(message)

    def _beat_on(self) -> None:
        waking = select.poll()
        waking.register(self._woken, select.POLLIN)
        while not self.lost:
            if self._wants_to_go:
                self._wants_to_go = False
                self.say(protocol.Drain())
            self.say(self._beat())
            if waking.poll(1000 * _BEAT_S):
                os.read(self._woken, 64)

    def _beat_last(self, pid: int) -> None:
        """The last steps, and the last checkpoint, are often complete only when the process is about to end."""
        if not self.lost and os.getpid() == pid:
            self.say(self._beat())
