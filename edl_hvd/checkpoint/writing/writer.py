"""Writing checkpoints in the background, one at a time."""

from __future__ import annotations

import threading

import torch

from edl_hvd.checkpoint.format.object_keys import is_attempt_name
from edl_hvd.checkpoint.format.snapshot import DeferredSnapshot, Snapshot, check_snapshot
from edl_hvd.checkpoint.retention.collector import Collector
from edl_hvd.checkpoint.retention.policy import RetentionPolicy
from edl_hvd.checkpoint.writing.assembly import Task
from edl_hvd.checkpoint.writing.attempt import Attempt
from edl_hvd.checkpoint.writing.throttle import CpuThrottle
from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import InternalError
from edl_hvd.events import Event
from edl_hvd.storage import Storage
from edl_hvd.values import Best, Interval

_PATIENCE_S = 60.0
# Ranks begin within one step of each other and write equal shares; a minute covers a slow start of an upload.

_CLOSING_S = 5.0
# A thread still uploading after this is left to the end of the process.


class CheckpointWriter:
    """One rank's part in writing checkpoints of the state that all ranks of a world hold.

    None of the methods is collective, and none but ``wait`` blocks for the storage's sake. They are
    called from one thread. Failures never raise: ``poll`` returns them as events.

    Args:
        storage: Storage to write to; the same on every rank. It stays the caller's to close.
        keep: Number of newest checkpoints that are kept, at least 1.
        clock: Clock that measures and waits.
        patience_s: Time in seconds for which rank 0 waits for the other ranks' shares; at least four times what its
            own took.
        keep_every: Interval whose milestones are kept for good, see ``policy.milestones``.
        keep_best: Metric whose best checkpoint is kept.
    """

    def __init__(
        self, storage: Storage, keep: int = 3, clock: Clock = SYSTEM_CLOCK, patience_s: float = _PATIENCE_S,
        keep_every: Interval | None = None, keep_best: Best | None = None,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise InternalError(f"keep={keep}; expected at least 1")
        self._storage = storage
        self._collector = Collector(storage, RetentionPolicy(keep, keep_every, keep_best), clock)
        self._clock = clock
        self._patience_s = patience_s
        self._attempt: Attempt | None = None
        self._seen: dict[str, torch.Tensor] | None = None
        self._left_behind: list[threading.Thread] = []
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def begin(
        self, snapshot: Snapshot | DeferredSnapshot, rank: int, size: int, attempt: str, owner: int = 0,
        cpu: CpuThrottle | None = None,
    ) -> None:  # fmt: skip
        """Start writing this rank's share of a checkpoint; returns at once.

        Called by every rank of the world with an equal snapshot. The caller leaves tensors and plain
        state as they are until ``busy`` is false. If the plain state is no JSON, the checkpoint fails.

        Args:
            snapshot: Snapshot to write. A deferred one is materialised in the background; the checkpoint fails if that
                raises.
            rank: Rank of this worker.
            size: Number of ranks that take part.
            attempt: Name of this attempt, equal on all ranks and never used before at this URL, not even
                by an earlier run of the job (so with something random in it); letters, digits, ``_.-``.
            owner: Number that ``lease.acquire`` gave the job; 0 if no other job can write to this storage.
            cpu: Throttle of what writing computes; ``None``: it may take all processors.

        Raises:
            StateError: The snapshot has tensors, metrics or counters that cannot be written.
            InternalError: The checkpoint before is not finished.
        """
        if self.busy:
            raise InternalError("a checkpoint was begun while another is being written; check busy first")
        if not 0 <= rank < size or not is_attempt_name(attempt):
            raise InternalError(f"not an attempt: rank={rank}, size={size}, attempt={attempt!r}")
        deferred = None if isinstance(snapshot, Snapshot) else snapshot
        value = snapshot if isinstance(snapshot, Snapshot) else snapshot.value
        check_snapshot(value, self._seen)
        self._seen = dict(value.tensors)
        cpu = cpu or CpuThrottle(None, 0.0, self._clock)
        task = Task(self._storage, value, rank, size, attempt, self._collector, self._patience_s, cpu, owner, deferred)
        self._attempt = Attempt(task, self._clock, self._collect)
        self._attempt.thread.start()

    @property
    def busy(self) -> bool:
        """Whether an attempt is under way; it ends some day, since every wait in it is bounded."""
        return self._attempt is not None and self._attempt.thread.is_alive()

    def poll(self) -> list[Event]:
        """Events since the last call: ``CheckpointFailed`` on any rank, ``CheckpointWritten`` on rank 0 only."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def expedite(self) -> None:
        """Let the attempt under way take all processors, because somebody waits for it."""
        if self._attempt is not None:
            self._attempt.expedite()

    def fail(self, reason: str) -> None:
        """Let the attempt under way end as one that has failed: a share that it waits for will not come. Rank 0.

        Args:
            reason: Reason that its event gives.
        """
        if self._attempt is not None:
            self._attempt.fail(reason)

    def wait(self, timeout_s: float) -> bool:
        """Block until no attempt is under way, at most ``timeout_s``; whether that is so."""
        if self._attempt is not None:
            self.expedite()
            self._attempt.thread.join(timeout_s)
        return not self.busy

    def abandon(self) -> None:
        """Give up the attempt under way, without an event; the writer is ready for the next one.

        On return the snapshot is the caller's again and no manifest will be written any more. Blocks for
        a memory copy of some megabytes, or for one small write, never for an upload: what is on the wire ends
        as a file that no manifest names, and a later checkpoint removes it, see ``collector.py``.
        """
        if self._attempt is None:
            return
        self._attempt.cancel()
        self._left_behind = [thread for thread in (*self._left_behind, self._attempt.thread) if thread.is_alive()]
        self._attempt = None

    def close(self) -> None:
        """Give up the attempt under way and wait some seconds for its thread to end."""
        self.abandon()
        for thread in self._left_behind:
            thread.join(_CLOSING_S)

    def _collect(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
