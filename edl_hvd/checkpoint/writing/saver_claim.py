"""Which worker writes the last checkpoint, where several hold the same commit and no launcher is left to name one.

The worker that creates the claim of a step writes its checkpoint; the others wait until its manifest is listed. When
the claim is given up, or is not renewed any more, another worker takes it. A claim spares uploads, and decides nothing
else: two workers that write the same step do no harm, because its manifest is created once.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from edl_hvd.checkpoint.format import document, object_keys
from edl_hvd.checkpoint.lease import BEAT_S, PATIENCE_S, check_owner
from edl_hvd.clock import Clock
from edl_hvd.errors import ObjectExistsError, ObjectMissingError, StorageError
from edl_hvd.storage import Storage

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SLOWER = 0.1, 2.0, 1.3
# Between looks at the storage while another worker writes.


class SaverClaim:
    """The claim to write the checkpoint of one step, as one worker sees it.

    Args:
        storage: Storage at the URL.
        step: Step of the commit that this worker holds.
        owner: Number of the lease that the job holds.
        clock: Clock that measures and waits.
    """

    def __init__(self, storage: Storage, step: int, owner: int, clock: Clock) -> None:
        self._storage = storage
        self._step = step
        self._owner = owner
        self._clock = clock
        self._key = object_keys.saver_key(step, owner)
        self._number = 0
        self._renewed_s = clock.monotonic_s()

    def acquire(self) -> bool:
        """Become the worker that writes the checkpoint. Blocks while another one does.

        Returns:
            Whether this worker is to write it; if not, it is in storage.

        Raises:
            OwnedError: Another job has taken the URL over.
            StorageError: The storage does not answer.
        """
        seen: bytes | None = None
        changed_s, pause_s = self._clock.monotonic_s(), _FIRST_PAUSE_S
        while True:
            # In this order: a claim is given up after the manifest is there.
            found = self._read()
            if self._is_written():
                return False
            now_s = self._clock.monotonic_s()
            if found != seen:
                seen, changed_s = found, now_s
            if found is not None and now_s - changed_s >= PATIENCE_S:
                self._storage.delete(self._key)
                found = None
            if found is None:
                check_owner(self._storage, self._owner)
                with suppress(ObjectExistsError):  # another worker was faster
                    self._storage.write_new(self._key, self._content())
                    return True
            self._clock.sleep(pause_s)
            pause_s = min(_SLOWER * pause_s, _LONGEST_PAUSE_S)

    def renew(self) -> None:
        """Show, every few seconds, that this worker is still writing. Raises nothing; blocks for one write at most."""
        if self._clock.monotonic_s() - self._renewed_s >= BEAT_S:
            self._number += 1
            with suppress(StorageError):
                self._storage.write(self._key, self._content())
            self._renewed_s = self._clock.monotonic_s()

    def give_up(self) -> None:
        """Leave it to others: the checkpoint is written, or could not be written from here. Raises nothing."""
        with suppress(StorageError):
            self._storage.delete(self._key)

    def _read(self) -> bytes | None:
        try:
            return self._storage.read(self._key, limit_bytes=document.LARGEST_BYTES)
        except ObjectMissingError:
            return None

    def _is_written(self) -> bool:
        found = object_keys.manifests(self._storage.list(object_keys.folder(self._step)))
        return any(object_keys.owner_of(key) == self._owner for key in found.get(self._step, ()))

    def _content(self) -> bytes:
        return document.encode({"host": socket.gethostname(), "pid": os.getpid(), "number": self._number})
