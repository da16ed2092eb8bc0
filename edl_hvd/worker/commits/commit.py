"""One commit as a frozen value: a copy of everything, or a delta that leaves out what stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.live_state import LiveState

_DIRTY = 0
_AT_COMMIT = 1 << 32  # better than any number of steps ahead of it


class Freshness(NamedTuple):
    """How good a state a worker could give to the others; compared as a tuple, the larger the better.

    A later commit is better than an earlier one. Of one commit, the state at it is the best. Next are the states whose
    optimizers have moved on: the more steps, the better. Last is a state that the script has changed by itself.

    Attributes:
        commit: Number of the commit; -1 for none.
        quality: Quality of the state among those of one commit, at least 0.
    """

    commit: int
    quality: int

    @property
    def holds_state(self) -> bool:
        """Whether there is a state at all."""
        return self.commit >= 0

    @property
    def is_dirty(self) -> bool:
        """Whether the script has changed parameters by itself since the commit."""
        return self.holds_state and self.quality == _DIRTY


NOTHING = Freshness(-1, 0)


@dataclass(frozen=True)
class _CopiedState:
    """What both kinds of commit have.

    Attributes:
        state: Copy that the commit has made.
    """

    state: Encoded

    @property
    def number(self) -> int:
        """The number of the commit."""
        return int(self._counters["commit"])

    @property
    def step(self) -> int:
        """The optimizer step of the commit."""
        return int(self._counters["step"])

    @property
    def _counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.state.plain["counters"]
        return counters


@dataclass(frozen=True)
class FullCommit(_CopiedState):
    """A commit that is a copy of the whole state."""

    @staticmethod
    def capture(live: LiveState, number: int) -> Encoded:
        """Return what such a commit copies."""
        return live.live(number)

    @classmethod
    def of(cls, state: Encoded) -> FullCommit:
        """Return the commit that this copy is."""
        return cls(state)

    def freshness(self, live: LiveState) -> Freshness:
        """Return how good the state of this commit is."""
        return Freshness(self.number, _quality(self._counters["ahead"]))

    def export(self, live: LiveState) -> Encoded:
        """Return the state of the commit, for others."""
        return self.state

    def restore(self, live: LiveState) -> FullCommit:
        """Make the commit the present state again; returns what it is from then on."""
        live.load_live(self.state)
        return self


@dataclass(frozen=True)
class DeltaCommit(_CopiedState):
    """A commit that leaves out what only optimizer steps change, and what nothing changes.

    Until the next step, the parameters are what they were at the commit. Later they are some steps ahead of it. A
    worker that loses its world goes on from there: the script makes these steps again, and they change nothing.

    Attributes:
        ahead: Number of steps of each optimizer that the parameters have, and the copy lacks, besides those that the
            tracker has counted since.
        is_dirty: Whether the script has changed parameters by itself since the commit.
    """

    ahead: tuple[int, ...]
    is_dirty: bool = False

    @staticmethod
    def capture(live: LiveState, number: int) -> Encoded:
        """Return what such a commit copies."""
        return live.delta(number)

    @classmethod
    def of(cls, state: Encoded) -> DeltaCommit:
        """Return the commit that this copy is."""
        return cls(state, tuple(state.plain["counters"]["ahead"]))

    def freshness(self, live: LiveState) -> Freshness:
        """Return how good the state is that this commit would restore."""
        return Freshness(self.number, _DIRTY if self.is_dirty else _quality(self._ahead_by_now(live)))

    def export(self, live: LiveState) -> Encoded:
        """Return the whole state that this commit would restore, for others; what it left out is live."""
        return live.merged(self.state, self._ahead_by_now(live))

    def restore(self, live: LiveState) -> DeltaCommit:
        """Make the commit the present state again, but for what it left out; returns what it is from then on."""
        live.notice_new_parameters()
        ahead, state = self._ahead_by_now(live), self.state
        is_dirty = live.tracker.is_dirty_since_commit()
        if is_dirty:
            names = live.names_of(live.tracker.moved())
            if live.is_behind_step_top and not any(ahead):
                state = self._with_step_writes(names)
            else:
                live.kept_change = f"state.{min(names).replace('/', '.')}" if names else "weights"
            live.tracker.mark_dirty()
        live.load_delta(state, ahead)
        return replace(self, state=state, ahead=ahead, is_dirty=self.is_dirty or is_dirty)

    def _with_step_writes(self, names: frozenset[str]) -> Encoded:
        """The copy of the commit, with the names of what the top of the step after it has written."""
        plain = self.state.plain
        return self.state._replace(plain={**plain, "counters": {**self._counters, "step_writes": sorted(names)}})

    def _ahead_by_now(self, live: LiveState) -> tuple[int, ...]:
        since = live.tracker.stepped.steps
        return tuple(steps + more for steps, more in zip(self.ahead, since, strict=True))


Commit: TypeAlias = FullCommit | DeltaCommit


def _quality(ahead: Sequence[int]) -> int:
    return sum(ahead) or _AT_COMMIT
