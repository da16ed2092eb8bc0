"""What a script changes at the top of an epoch, before its loop over batches, counts once.

Where an epoch is continued, in another world or from a checkpoint, its top runs again: the rate would be cut twice, a
counter would begin anew in mid-epoch. The state that the epoch is continued from is that behind its top. So what the
top has changed of it is put back when the loop goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.commit import DeltaCommit
from edl_hvd.worker.commits.dirty import TensorVersion, versions_of
from edl_hvd.worker.commits.state_store import StateStore


@dataclass(frozen=True)
class EpochTop:
    """The state in which the body of an epoch that is continued has begun.

    Attributes:
        state: Copy of it.
        versions: Versions of the live tensors, by name.
        is_light: Whether it leaves out what optimizer steps change, and what nothing changes.
        was_dirty: Whether the script had changed that by itself before.
    """

    state: Encoded
    versions: Mapping[str, TensorVersion]
    is_light: bool
    was_dirty: bool

    @classmethod
    def of(cls, store: StateStore) -> EpochTop:
        """Return the present state. Of its tensors nothing is copied that the last commit holds."""
        last = store.last
        is_light = last is None or isinstance(last, DeltaCommit)
        live = store.delta(store.commit) if is_light else store.live(store.commit)
        copies = {name: tensor.clone() for name, tensor in live.tensors.items()} if last is None else last.state.tensors
        return cls(Encoded(live.plain, copies), versions_of(live.tensors), is_light, store.tracker.is_dirty())

    def restore(self, store: StateStore) -> tuple[str, ...]:
        """Make what has changed since as it was; nothing where there was a commit meanwhile.

        Returns:
            Names of what was put back.
        """
        if store.commit != self.state.plain["counters"]["commit"]:
            return ()
        return tuple(store.load_changed(self.state, self.versions, self.is_light))

    def has_lost(self, store: StateStore) -> bool:
        """Whether the script has changed weights since, of which no copy was at hand."""
        return self.is_light and not self.was_dirty and store.tracker.is_dirty()
