"""Without a driver the members of a new world wait for each other at a barrier, before they start Horovod.

It is in the key-value store of rank 0. Each member puts its join request there, which is answered when all have come.
The connection stays open while the world lives. The death of a member closes it, which the others learn in
milliseconds, whatever Horovod is doing (``key_value_protocol.py``).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection

from edl_hvd.key_value_protocol import END, GONE, LEAVE
from edl_hvd.key_value_store import StoreAddress

_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class JoinRequest:
    """What a member tells the others.

    Attributes:
        rank: Rank in the new world.
        name: Name of the member, as ``host:slot``.
        generation: Generation of its last world, also of one that did not form: the next one must have another.
        known_step: The furthest step that it has heard of.
    """

    rank: int
    name: str
    generation: int
    known_step: int


class Barrier:
    """One member's part in the barrier of a new world. Blocks until all have come.

    Args:
        store: Address of the key-value store of rank 0.
        size: Number of members expected, this one included.
        own: Request of this member.
        timeout_s: Seconds that this member waits for the others.

    Attributes:
        store: Address of the key-value store of rank 0.
        requests: Requests of all members, in rank order.

    Raises:
        OSError: A member did not come in time, or left, or the store is gone.
        HTTPException: The store is gone.
    """

    def __init__(self, store: StoreAddress, size: int, own: JoinRequest, timeout_s: float) -> None:
        self.store = store
        self._left = False
        path, headers = f"/edl_hvd.meeting/{own.rank}?of={size}&stay", {"Authorization": f"Bearer {store.token}"}
        with closing(HTTPConnection(store.address, store.port, timeout=_CONNECT_TIMEOUT_S)) as connection:
            connection.connect()
            self._socket: socket.socket = connection.sock
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.settimeout(timeout_s)
            connection.request("PUT", path, json.dumps(asdict(own)).encode(), headers)
            self._response = connection.getresponse()  # which has the socket from now on
        try:
            if self._response.status != 200:
                raise OSError(f"a member left, or is not one of {size}: status {self._response.status}")
            self.requests = [JoinRequest(**json.loads(self._next())) for _ in range(size)]
        except BaseException:
            self._response.close()
            raise
        self._socket.settimeout(None)

    def _next(self) -> bytes:
        value = self._response.read(int.from_bytes(self._response.read(4), "big"))
        if not value:
            raise ConnectionResetError("the store closed in the middle of its answer")
        return value

    def watch(self, on_death: Callable[[str], None]) -> threading.Thread:
        """Call ``on_death`` with the name of a member that dies, in a thread, until :meth:`leave`."""

        def run() -> None:
            word = b""
            with suppress(OSError):
                word = self._response.read()
            if not self._left and word != END:
                rank = int(word.removeprefix(GONE) or 0)  # without a word the store is gone
                on_death(f"rank {rank} ({self.requests[rank].name})")
            self._response.close()

        thread = threading.Thread(target=run, name="edl-barrier", daemon=True)
        thread.start()
        return thread

    def leave(self, regular: bool) -> None:
        """End the watch. Any thread, any number of times.

        Args:
            regular: Whether this member leaves with the others; else it counts as dead for them.
        """
        self._left = True
        with suppress(OSError):
            if regular:
                self._socket.sendall(LEAVE)
            self._socket.shutdown(socket.SHUT_RDWR)
