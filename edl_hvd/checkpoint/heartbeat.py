"""Tells others that the owner of a URL lives, and this process when it is the owner no more."""

from __future__ import annotations

import logging
import threading

from edl_hvd.checkpoint import layout
from edl_hvd.checkpoint.ownership import BEAT_S, Owner, Sign, check_owner
from edl_hvd.errors import OwnedError, StorageError
from edl_hvd.storage import Storage

_LOG = logging.getLogger(__name__)

_CLOSING_S = 5.0
# A write that takes longer is left to the end of the process.


class Heartbeat:
    """Gives signs of life in the background until it is stopped.

    Args:
        storage: Where.
        owner: Number of the owner.
        process: Who speaks for it from now on.
        beat_s: How often, in seconds.

    Attributes:
        lost: Why this process may write there no more; ``None`` while it may.
    """

    def __init__(self, storage: Storage, owner: int, process: Owner, beat_s: float = BEAT_S) -> None:
        self.lost: OwnedError | None = None
        self._storage = storage
        self._owner = owner
        self._process = process
        self._beat_s = beat_s
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._beat, name="edl-hvd-heartbeat", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Look now, not at the next beat, whether this is the owner still. Does not block."""
        self._wake.set()

    def stop(self, ended: bool) -> None:
        """Give no more signs; with ``ended`` one more, that the URL is free. Blocks for that one only.

        Raises nothing: without the last sign the next owner waits some seconds.
        """
        self._stopped = True
        self._wake.set()
        if not ended or self.lost is not None:
            return
        self._thread.join(_CLOSING_S)
        if not self._thread.is_alive():
            self._write(0, ended=True)

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            self._write(number, ended=False)
            self._wake.wait(self._beat_s)
            self._wake.clear()
            if self._stopped:
                return

    def _write(self, number: int, ended: bool) -> None:
        try:
            check_owner(self._storage, self._owner)
            self._storage.write(layout.alive_key(self._owner), Sign(self._process, number, ended).encode())
        except OwnedError as error:
            self.lost = error
            self._stopped = True
            self._wake.set()
        except StorageError as error:
            _LOG.warning("cannot tell that this job still uses %s: %s", self._storage.url, error)
