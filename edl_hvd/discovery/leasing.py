"""Holding a lease, see ``sources/leases.py``: a thread writes the object again and again until it is given back.

Any process of a host may do so; ``edl-hvd lease`` does.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable

from edl_hvd.discovery.sources.leases import key_of, parse_key
from edl_hvd.errors import EdlHvdError, StorageError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.storage import open_storage

EVERY_S = 2.0
_CLOSE_S = 10.0


class HeldHostLease:
    """A lease that is held until it is closed. Making it blocks until it is written for the first time.

    Older leases of the same host, as a host leaves them that is lost and comes back, are removed.

    Args:
        url: Folder, ``s3://bucket/prefix``, or another URL of a storage; made if need be.
        entry: Host as others reach it, and its slots.
        every_s: Seconds between two writes.
        problem: Told why a write failed, once for each series of failures; empty when it works again.

    Raises:
        UsageError: The URL is none.
        StorageError: The lease cannot be written.
    """

    def __init__(
        self, url: str, entry: HostSlots, every_s: float = EVERY_S, problem: Callable[[str], None] = lambda text: None
    ) -> None:
        self._storage = open_storage(url)
        self._key, self._every_s, self._problem = key_of(entry), every_s, problem
        self._holder, self._count = secrets.token_hex(8), 0
        self._closing = threading.Event()
        for one in self._storage.list(f"{entry.host}="):
            if one.key != self._key and _is_of(one.key, entry.host):
                self._storage.delete(one.key)
        self._write()
        self._thread = threading.Thread(target=self._hold, name="edl_hvd lease", daemon=True)
        self._thread.start()

    @property
    def where(self) -> str:
        """Where it is, for people."""
        return f"{self._storage.url}/{self._key}"

    def close(self) -> None:
        """Give the lease back. Blocks for 10 s at most; a storage that fails then lets it lapse."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _hold(self) -> None:
        is_failing = False
        while not self._closing.wait(self._every_s):
            try:
                self._write()
                if is_failing:
                    self._problem("")
                is_failing = False
            except (OSError, EdlHvdError) as error:
                if not is_failing:
                    self._problem(" ".join(str(error).split()))
                is_failing = True
        try:
            self._storage.delete(self._key)
        except StorageError as error:
            self._problem(" ".join(str(error).split()))
        self._storage.close()

    def _write(self) -> None:
        self._count += 1
        content = json.dumps({"holder": self._holder, "count": self._count})
        self._storage.write(self._key, content.encode())


def _is_of(key: str, host: str) -> bool:
    try:
        return parse_key(key).host == host
    except UsageError:
        return False
