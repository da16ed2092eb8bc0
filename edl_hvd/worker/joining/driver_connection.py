"""A worker's connection to its driver (``edlrun``): a thread reads what the driver sends, as soon as it comes."""

from __future__ import annotations

import atexit
import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from edl_hvd import protocol
from edl_hvd.errors import ProtocolError, RendezvousError
from edl_hvd.settings import Driver
from edl_hvd.worker.engine import mended
from edl_hvd.worker.joining.rendezvous import Replica
from edl_hvd.worker.progress import progress

_CONNECT_TIMEOUT_S = 10.0
_BEAT_S = 0.25
_WATCHES = 2
# A thread that is the last of the process to end holds its connection until the memory has been freed.
_PROBE_S, _SILENCE_S = 1.0, 0.3
# A driver that lives takes a call within milliseconds, and is then silent for ten seconds; one that ends hangs up.
# A driver's host that vanishes without a word leaves what is sent to it unanswered.
_UNANSWERED_S = 8.0
_LONGEST_LINE_BYTES = 1 << 20  # a world lists every member: 64 KiB hold 1,000 of them


@dataclass(frozen=True)
class DriverLost:
    """The driver is gone."""


Urgent: TypeAlias = protocol.PeerLost | protocol.ServeState | protocol.Explain | DriverLost
Queued: TypeAlias = (
    protocol.WorldAssigned | protocol.ReceiveState | protocol.DonorLost | protocol.ShutDown | Replica | DriverLost
)


class DriverConnection:
    """The connection of one worker to its driver.

    Args:
        driver: Address of the driver, and name of this worker.
        beat: Function for the heartbeat of this worker, called several times a second.
        on_urgent: Function for what cannot wait for the main thread; called in the reading thread.

    Attributes:
        change: Generation of the world that is to change at its next commit; 0 for none.
        lost: Whether the driver is gone.

    Raises:
        RendezvousError: The driver cannot be reached.
    """

    def __init__(self, driver: Driver, beat: Callable[[], protocol.Beat], on_urgent: Callable[[Urgent], None]) -> None:
        self.change = 0
        self.lost = False
        self._drains: queue.SimpleQueue[protocol.Drain] = queue.SimpleQueue()
        self._beat = beat
        self._on_urgent = on_urgent
        self._queue: queue.Queue[Queued] = queue.Queue()
        self._send_lock = threading.Lock()
        self._address = (driver.address, driver.port)
        try:
            self._socket = socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S)
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
        self.send(protocol.Hello(driver.token, driver.worker, driver.incarnation))
        threading.Thread(target=self._read, name="edl-driver", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="edl-heartbeat", daemon=True).start()
        self._hold_watches(protocol.WatchHello(driver.token, driver.worker, driver.incarnation))
        atexit.register(self._end_in_order, os.getpid())

    def _hold_watches(self, hello: protocol.WatchHello) -> None:
        """Let the driver see that this process begins to end, before its memory has been freed."""
        for _ in range(_WATCHES):
            with suppress(OSError), socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S) as watch:
                watch.settimeout(None)
                watch.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                watch.sendall(protocol.encode(hello))
                if not mended.watch_death(watch.fileno()):
                    watch.sendall(protocol.ENDS_IN_ORDER)  # as it ends here

    def send(self, message: protocol.Hello | protocol.FromWorker) -> None:
        """Send a message. That the driver is gone shows in ``lost``. Any thread."""
        with suppress(OSError), self._send_lock:
            self._socket.sendall(protocol.encode(message))

    def request_drain(self) -> None:
        """Ask to be drained. For signal handlers, which must not wait for a lock: another thread says it.

        A handler may interrupt another one in here, which a ``SimpleQueue`` allows, unlike an ``Event`` or a ``Queue``.
        """
        self._drains.put(protocol.Drain())

    def enqueue(self, replica: Replica) -> None:
        """Have :meth:`next` return a replica that has something to apply, after what came before. Any thread."""
        self._queue.put(replica)

    def next(self, timeout_s: float | None = None) -> Queued | None:
        """The next thing for the main thread; blocks until there is one, or ``None`` when the timeout is over."""
        with suppress(queue.Empty):
            return self._queue.get(timeout=timeout_s)
        return None

    def takes_calls(self) -> bool:
        """Whether the driver that is lost lives, and only this connection is gone. Blocks for a second at most."""
        try:
            with socket.create_connection(self._address, timeout=_PROBE_S) as probe:
                probe.settimeout(_SILENCE_S)
                with suppress(TimeoutError):
                    return bool(probe.recv(1))
                return True
        except OSError:
            return False

    def _read(self) -> None:
        with suppress(OSError, ValueError, ProtocolError), self._socket.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE_BYTES)).endswith(b"\n"):
                self._dispatch(protocol.decode(line, protocol.TO_WORKER))
        self.lost = True
        self._on_urgent(DriverLost())
        self._queue.put(DriverLost())

    def _dispatch(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.ResizeRequested(generation):
                self.change = generation
            case protocol.StragglerFound():
                progress.stragglers.append(message)
            case protocol.PeerLost() | protocol.ServeState() | protocol.Explain():
                self._on_urgent(message)
            case protocol.WorldAssigned() | protocol.ReceiveState() | protocol.DonorLost() | protocol.ShutDown():
                self._queue.put(message)

    def _send_heartbeats(self) -> None:
        while not self.lost:
            self.send(self._beat())
            with suppress(queue.Empty):
                self.send(self._drains.get(timeout=_BEAT_S))

    def _end_in_order(self, pid: int) -> None:
        """The last steps, and the last checkpoint, are often complete only when the process is about to end."""
        if os.getpid() != pid:
            return
        if not self.lost:
            self.send(self._beat())
        mended.end_death_watch()
