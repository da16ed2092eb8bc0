"""Whose the checkpoint URL is: the job holds it by a lease, which one worker renews for all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from edl_hvd.checkpoint import lease
from edl_hvd.checkpoint.lease import Heartbeat, LeaseHolder, LossHistory
from edl_hvd.clock import Clock
from edl_hvd.errors import OwnedError, StorageError
from edl_hvd.storage import Storage
from edl_hvd.worker.commits.state_sync import broadcast_json
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.world import World

logger = logging.getLogger(__name__)


class CheckpointLease:
    """The job's lease of its checkpoint URL, as this worker knows it; see ``checkpoint/lease.py``.

    Args:
        storage: Storage at the URL; ``None`` where the job writes no checkpoints, and needs no lease.
        run: Name of this run of the job, the same on every worker.
        take_over: Whether to take the URL over from a job that still holds it.
        clock: Clock of this worker.

    Attributes:
        number: Number of the lease; 0 while this worker knows of none.
        history: What became of the URL's former owners, as far as this worker has heard.
    """

    def __init__(self, storage: Storage | None, run: str, take_over: bool, clock: Clock) -> None:
        self._storage = storage
        self._run = run
        self._take_over = take_over
        self._clock = clock
        self._heartbeat: Heartbeat | None = None
        self.number = 0
        self.history = LossHistory()

    @property
    def lost(self) -> str:
        """The reason why the job holds the lease no more, as far as this worker knows; empty while it holds it."""
        return str(self._heartbeat.lost) if self._heartbeat is not None and self._heartbeat.lost is not None else ""

    @property
    def renews(self) -> bool:
        """Whether this worker renews it."""
        return self._heartbeat is not None

    def acquire(self, collectives: Collectives, world: World, known: Sequence[int]) -> None:
        """Acquire the lease for the job, unless a member knows that it has it. Every rank; collective; blocks.

        Rank 0 renews it from then on.

        Args:
            collectives: Collectives of the world.
            world: World of this worker.
            known: Number of the lease that each rank knows, in rank order; 0 for none.

        Raises:
            OwnedError: Another job holds the lease; on every rank.
            StorageError: The storage does not answer; on every rank.
        """
        number = max(known)
        if self._storage is not None and not number:
            found: dict[str, Any] = {"owner": 0, "owned": False, "error": "", "history": vars(LossHistory())}
            if world.rank == 0:
                try:
                    process = LeaseHolder.this_process(self._run, self._clock)
                    found["owner"] = lease.acquire(self._storage, process, self._clock, self._take_over)
                    found["history"] = vars(lease.history(self._storage, found["owner"]))
                except Exception as error:  # told to every rank, which then all end with it
                    found.update(owned=isinstance(error, OwnedError), error=str(error))
            found = broadcast_json(collectives, found, 0, world.rank)
            if found["error"]:
                raise (OwnedError if found["owned"] else StorageError)(found["error"])
            number, self.history = int(found["owner"]), LossHistory(**found["history"])
        self.set(number, renews=world.rank == 0)

    def set(self, number: int, renews: bool) -> None:
        """Note which lease the job holds. Any rank; does not block.

        Args:
            number: Number of the lease; 0 for none.
            renews: Whether this worker renews it.
        """
        if self._heartbeat is not None and not (renews and number == self.number):
            self._heartbeat.stop(ended=False)
            self._heartbeat = None
        self.number = number
        if renews and number and self._storage is not None and self._heartbeat is None:
            self._heartbeat = Heartbeat(self._storage, number, LeaseHolder.this_process(self._run, self._clock))

    def release(self, has_peers: bool = False) -> None:
        """Give the lease back, because the job has ended: another may have the URL at once. Blocks for one write.

        Args:
            has_peers: Whether other workers of the job may live, unseen from here. Then only the one that renews the
                lease gives it back; another one notes that no state is lost with this worker.
        """
        if self._storage is None or not self.number:
            return
        if has_peers and not self.renews:
            lease.note_saved(self._storage, self.number, LeaseHolder.this_process(self._run, self._clock))
        else:
            self.set(self.number, renews=True)
            assert self._heartbeat is not None
            self._heartbeat.stop(ended=True)
            self._heartbeat = None

    def leave(self) -> None:
        """Note that this worker goes though its host stays: by an error of the script, or because it was told to.

        So no loss of hosts is counted where no other worker renews the lease after it. Blocks for one write at most.
        """
        if self._heartbeat is not None:
            self._heartbeat.stop(ended=False, failed=True)
            self._heartbeat = None

    def check_soon(self) -> None:
        """Look now, not at the next renewal, whether the job still holds the lease. Does not block."""
        if self._heartbeat is not None:
            self._heartbeat.renew()
