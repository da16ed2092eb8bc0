"""The state of a job on one worker: the present one, and the last commit of it."""

from __future__ import annotations

from typing import Any

import torch

from edl_hvd.checkpoint import Snapshot
from edl_hvd.checkpoint.format.snapshot import DeferredSnapshot
from edl_hvd.errors import InternalError
from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.checkpoint_copy import CheckpointCopies
from edl_hvd.worker.commits.commit import NOTHING, Commit, DeltaCommit, Freshness, FullCommit
from edl_hvd.worker.commits.live_state import LiveState
from edl_hvd.worker.commits.snapshot import SnapshotBuffers


class StateStore(LiveState):
    """The present state of a ``State``, and the last commit of it.

    Args:
        attributes: Everything given to ``State``, by name.

    Attributes:
        is_unverified: Whether the state was taken over from a world that trained on meanwhile, and nobody has compared
            it yet.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__(attributes)
        self._last: Commit | None = None
        self._buffers = SnapshotBuffers()
        self._checkpoint_copies = CheckpointCopies()
        self.tracker.stepped.before_step.append(self._finish_checkpoint_copy)
        self.is_unverified = False

    # --- the last commit ---

    @property
    def last(self) -> Commit | None:
        """The last commit; ``None`` where there is none, or nobody can come back to it."""
        return self._last

    @property
    def held(self) -> int:
        """The commit number that this worker could give to others; -1 if none."""
        return self._last.number if self._last is not None else -1

    @property
    def held_step(self) -> int:
        """The optimizer step of that commit; -1 if none."""
        return self._last.step if self._last is not None else -1

    @property
    def is_light(self) -> bool:
        """Whether the last commit left out what optimizer steps change."""
        return isinstance(self._last, DeltaCommit)

    @property
    def freshness(self) -> Freshness:
        """How good a state this worker could give to others."""
        return self._last.freshness(self) if self._last is not None else NOTHING

    def save(self, number: int, light: bool = False) -> None:
        """Keep the present state as commit ``number``. All or nothing.

        Args:
            number: Number of the commit.
            light: Whether to copy only what optimizer steps do not change, where that will do: the rest stays as it is
                until the next step. A worker that then loses its world goes on from there (see ``DeltaCommit``).
        """
        self._check_changes()
        if number != self.commit:
            self.step_writes = frozenset()
        is_delta = light and self.can_skip_parameters and self.tracker.is_clean
        kind: type[Commit] = DeltaCommit if is_delta else FullCommit
        state = kind.capture(self, number)
        buffers = self._buffers.reserve(state.tensors)
        self._overwrite(kind, state, buffers, state.tensors)
        self.tracker.set_copied(state.tensors)
        self.same_objects.keep(state.plain["counters"]["same_objects"])
        self._begin_commit(number)

    def resave(self) -> None:
        """Take the last commit once more, of the present state; copies only what has been written since."""
        last = self._last
        if last is None or (isinstance(last, DeltaCommit) and not self.tracker.is_clean):
            self.save(self.commit)
            return
        self._checkpoint_copies.finish()
        state = last.capture(self, self.commit)
        written = self.tracker.written(state.tensors)
        buffers = last.state.tensors
        if state.tensors.keys() == buffers.keys() and self._buffers.can_refill(buffers, written):
            self._overwrite(type(last), state, buffers, written)
            self.tracker.update_copied(written)
        else:
            self.save(self.commit, light=isinstance(last, DeltaCommit))

    def skip(self, number: int) -> None:
        """Commit ``number`` is one that nobody can come back to: keep nothing, until the next :meth:`save`."""
        self._check_changes()
        self.step_writes = frozenset()
        self._last = None
        self._begin_commit(number)

    def restore(self) -> None:
        """Make the last commit the present state again; does nothing where there is none.

        What a :class:`DeltaCommit` left out stays as it is: at the commit, or some steps ahead of it.
        """
        self._checkpoint_copies.finish()
        self.kept_change = ""
        if self._last is None:
            return
        self._last = self._last.restore(self)
        self.tracker.stepped.forget_changes()
        self.tracker.set_copied(self._last.capture(self, self.commit).tensors)  # they are equal now

    def export(self) -> Encoded:
        """Return the state of the last commit, for the others; tensors may be live and stay until the next step.

        Raises:
            InternalError: There is no commit.
        """
        return self._committed().export(self)

    def pin(self) -> Encoded:
        """Return the state of the last commit, whose tensors stay as they are: the next one takes other memory.

        Raises:
            InternalError: There is no commit.
        """
        if isinstance(self._committed(), DeltaCommit):
            self.save(self.commit)
        self._buffers.release()
        return self._committed().state

    def clear(self) -> None:
        """Hold no state any more: what the objects hold is that of no commit."""
        self._last = None
        self._buffers.release()
        self.commit, self.is_unverified = -1, False

    def _committed(self) -> Commit:
        if self._last is None:
            raise InternalError("a commit was read where there is none")
        return self._last

    def _check_changes(self) -> None:
        """Find out what the script has done since the last commit."""
        self._checkpoint_copies.finish()
        self.notice_new_parameters()
        if self.reduction is not None:
            if self.reduction.is_interleaved:
                # A round after a step may be made of what was computed before it: it cannot be made again after it
                # alone.
                self.tracker.stepped.never_clean()
            self.reduction.has_stepped = False
        self.tracker.check()

    def _overwrite(
        self, kind: type[Commit], state: Encoded, buffers: dict[str, torch.Tensor], written: dict[str, torch.Tensor]
    ) -> None:
        """Copy what was written into the buffers; an interruption leaves no commit."""
        self._last = None
        self._buffers.fill(buffers, written)
        self._last = kind.of(Encoded(state.plain, buffers))

    def _begin_commit(self, number: int) -> None:
        self.commit = number
        self.tracker.stepped.begin_commit()

    # --- the state of another ---

    def load(self, plain: Any, tensors: dict[str, torch.Tensor], light: bool = False) -> None:
        """Take over a state from another member or from storage, as the present state and as the last commit.

        Args:
            plain: Plain state.
            tensors: Tensors by name.
            light: Whether the commits of the member leave out what optimizer steps change, so that this one need not
                copy it either: the same script runs here.

        Raises:
            StateError: The names of the attributes differ, or an object does not accept its saved state.
        """
        self._checkpoint_copies.finish()
        self.load_live(Encoded(plain, self._placed(plain["attributes"], tensors)))
        if light:
            self.tracker.stepped.trust()
        self.save(self.commit, light)

    def apply_delta(self, plain: Any, moved: dict[str, torch.Tensor], light: bool = False) -> None:
        """Become the commit that ``plain`` is of, where the live tensors are those of it but for ``moved``.

        Args:
            plain: Plain state of that commit.
            moved: The tensors that differ, by name.
            light: As for :meth:`load`.
        """
        self._checkpoint_copies.finish()
        self.load_moved(plain, moved)
        kind: type[Commit] = FullCommit
        if light and self.can_skip_parameters:
            kind = DeltaCommit
            self.tracker.stepped.trust()
        state = kind.capture(self, self.commit)
        buffers = self._buffers.reserve(state.tensors)
        self._overwrite(kind, state, buffers, self.tracker.written(state.tensors))
        self.tracker.set_copied(state.tensors)
        self.is_unverified = True

    def take_over(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """See :meth:`LiveState.take_over`."""
        self._checkpoint_copies.finish()
        super().take_over(plain, tensors)

    # --- copies for checkpoints ---

    def snapshot(self) -> Snapshot:
        """Return the last commit as a value whose tensors stay as they are until the next call."""
        return self._checkpoint_copies.make(self.export())

    def deferred_snapshot(self) -> Snapshot | DeferredSnapshot:
        """Return the same; where possible it is copied later, beside the next batch."""
        state = self.export()
        if isinstance(self._last, DeltaCommit) and all(tensor.is_cpu for tensor in state.tensors.values()):
            return self._checkpoint_copies.defer(state, self.tracker.is_dirty)
        return self._checkpoint_copies.make(state)

    def final_snapshot(self) -> Snapshot:
        """Return the present state, which is no commit: nobody goes on from the end of the training."""
        return self._checkpoint_copies.make(self.live(self.commit + 1))

    def drop_snapshot(self) -> None:
        """Give up the snapshot that was made last."""
        self._checkpoint_copies.drop()

    def _finish_checkpoint_copy(self, is_dirty: bool) -> None:
        """An optimizer is about to step: copy what is left."""
        if self._checkpoint_copies.is_pending:
            self._checkpoint_copies.finish(is_whole=not is_dirty and not self.tracker.frozen.is_dirty())
