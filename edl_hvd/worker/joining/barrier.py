"""Without a driver the members of a new world meet in the key-value store of rank 0, before they start Horovod.

Each puts its hello there, by a request that is answered when all have come, and that stays open while the world lives:
who dies closes it, which the others learn in milliseconds, whatever Horovod is doing (``key_value_store.py``).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection

from edl_hvd.key_value_store import END, GONE, LEAVE, StoreAddress

_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Hello:
    """What a member tells the others: its rank, name, last generation and the furthest step it heard of.

    The last generation may be that of a world that did not form: the next one must have another.
    """

    rank: int
    name: str
    generation: int
    known_step: int


class Meeting:
    """One member's part in it. Blocks until all have come.

    Args:
        store: Of rank 0.
        size: Members expected, this one included.
        own: Of this member.
        timeout_s: How long the others are waited for.

    Attributes:
        store: Of rank 0.
        hellos: Of all members, in rank order.

    Raises:
        OSError: A member did not come in time, or left, or the store is gone.
        HTTPException: The store is gone.
    """

    def __init__(self, store: StoreAddress, size: int, own: Hello, timeout_s: float) -> None:
        self.store = store
        self._left = False
        path, headers = f"/edl_hvd.meeting/{own.rank}?of={size}&stay", {"Authorization": f"Bearer {store.token}"}
        with closing(HTTPConnection(store.address, store.port, timeout=_CONNECT_TIMEOUT_S)) as connection:
            connection.connect()
            self._socket: socket.socket = connection.sock
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.settimeout(timeout_s)
            connection.request("PUT", path, json.dumps(asdict(own)).encode(), headers)
            self._words = connection.getresponse()  # which has the socket from now on
        try:
            if self._words.status != 200:
                raise OSError(f"a member left, or is not one of {size}: status {self._words.status}")
            self.hellos = [Hello(**json.loads(self._next())) for _ in range(size)]
        except BaseException:
            self._words.close()
            raise
        self._socket.settimeout(None)

    def _next(self) -> bytes:
        value = self._words.read(int.from_bytes(self._words.read(4), "big"))
        if not value:
            raise ConnectionResetError("the store closed in the middle of its answer")
        return value

    def watch(self, died: Callable[[str], None]) -> threading.Thread:
        """Tell who dies, in a thread, until :meth:`leave`."""

        def run() -> None:
            word = b""
            with suppress(OSError):
                word = self._words.read()
            if not self._left and word != END:
                rank = int(word.removeprefix(GONE) or 0)  # without a word it is the store that is gone
                died(f"rank {rank} ({self.hellos[rank].name})")
            self._words.close()

        thread = threading.Thread(target=run, name="edl-meeting", daemon=True)
        thread.start()
        return thread

    def leave(self, regular: bool) -> None:
        """End the watch; the others are told of a death unless it is ``regular``. Any thread, any number of times."""
        self._left = True
        with suppress(OSError):
            if regular:
                self._socket.sendall(LEAVE)
            self._socket.shutdown(socket.SHUT_RDWR)
