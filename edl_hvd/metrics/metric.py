"""What all metrics do: count, come together over the ranks, start anew, be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from edl_hvd.errors import StateError, UsageError
from edl_hvd.metrics.exact_sum import MOST_SUMMANDS
from edl_hvd.metrics.tally import Layout, Tally


@dataclass
class Pending:
    """What this rank has counted since the ranks last brought together what they have.

    Attributes:
        tally: Counted.
        anew: What was counted before it is to be forgotten.
        loop: Name of the loop it was counted in; ``None`` outside of any.
    """

    tally: Tally
    anew: bool
    loop: str | None


class Metric:
    """A number about many samples, each of which counts once, whatever happens to the world; base class of all metrics.

    Every rank makes an equal one and gives it to ``State``. Every commit then adds up what the ranks have counted since
    the last one; the sum is part of the commit, the same on all ranks. Counts since the last commit are lost with a
    rank, and made again by the ranks that go through the same batches again.

    Any rank may call ``update`` as often as it has samples: that is not collective. ``compute`` reads the last commit,
    which was collective.

    **Loops.** A metric updated in a loop of ``state.steps`` or ``state.batches`` is about this epoch's training, in a
    loop of ``state.evaluate`` about this evaluation. It starts from zero by itself with the first update in another
    loop, so a script need not call ``reset``. Updated elsewhere, it goes on until it is reset.

    Without ``State`` it counts what this process gives it.

    A subclass sets ``layout``, counts in ``update`` with ``self._count(tally)``, and reads ``self._counted()`` in
    ``compute``. Its constructor's arguments are not kept with the state.

    Attributes:
        layout: Numbers that the metric counts.
    """

    layout: ClassVar[Layout]

    def __init__(self) -> None:
        self._total = Tally.empty(self.layout)  # of the world, at the last commit
        self._total_loop: str | None = None
        self._pending: Pending | None = None
        self._loop: str | None = None  # what is counted now belongs to it
        self._starts_anew = False  # with the next update outside of any loop
        self._trains = True  # it may be updated in the training loop; known after a whole epoch
        self._size = 1

    # --- for its user ---

    def reset(self) -> None:
        """Forget everything. Every rank calls it; not collective; does not block.

        Outside of the loops, what was counted in a loop stays until the next update. For a training function that runs
        again after a resize calls it once more, and then goes on with the loop, or finds it complete.
        """
        self._settle()
        if self._loop is None and self._total_loop is not None:
            self._starts_anew = True
            return
        self._total, self._total_loop = Tally.empty(self.layout), None
        self._pending = Pending(Tally.empty(self.layout), True, None)

    def state_dict(self) -> dict[str, Any]:
        """The counts up to the last commit, or up to now in a world of one. Any rank; not collective.

        Waits for a GPU in a world of one, if counts are there.
        """
        self._settle()
        rows = self._total.all_rows(self.layout) if self.layout.row_bytes else None
        return {
            "kind": type(self).__name__, "sums": self._total.sums, "largest": self._total.largest, "rows": rows,
            "pass": self._total_loop, "trains": self._trains,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to saved counts; later ones are forgotten. Every rank; not collective.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            StateError: It is the state of a metric of another kind.
        """
        sums, largest, rows = state["sums"], state["largest"], state["rows"]
        fits = len(sums) == self.layout.sums and len(largest) == self.layout.largest
        if state["kind"] != type(self).__name__ or not fits or (rows is None) != (self.layout.row_bytes == 0):
            raise StateError(
                f"the saved metric is a {state['kind']} with {len(sums)} sums, this one a {type(self).__name__} with "
                f"{self.layout.sums}; give State the metrics that it had when it was saved"
            )
        self._total = Tally(sums.cpu().clone(), largest.cpu().clone(), [] if rows is None else [rows.cpu().clone()])
        self._total_loop, self._trains = state["pass"], state["trains"]
        self._pending, self._starts_anew = None, False

    # --- for its subclass ---

    def _count(self, tally: Tally) -> None:
        """Add what an update has counted, on any device."""
        pending, device = self._pending, tally.sums.device
        before = self._total_loop if pending is None else pending.loop
        starts_anew = self._starts_anew if self._loop is None else self._loop != before
        self._starts_anew = False
        if pending is None or starts_anew:
            pending = self._pending = Pending(Tally.empty(self.layout, device), starts_anew, self._loop)
        elif pending.tally.sums.device != device:
            pending.tally = pending.tally.to(device)
        pending.tally.add(tally)
        if pending.tally.summands > MOST_SUMMANDS:
            pending.tally = self._compacted(pending.tally)
            pending.tally.summands = 0

    def _counted(self) -> Tally:
        """The counts of the whole world, on the CPU."""
        self._settle()
        if self._pending is not None and self._loop is None:
            raise UsageError(
                f"{type(self).__name__}.compute() was called before the ranks have brought together what they counted; "
                "call state.commit() on every rank first, as state.batches and state.evaluate do at their ends"
            )
        return self._total

    def _settle(self) -> None:
        """In a world of one everything counted is the world's."""
        if self._size == 1 and self._pending is not None:
            pending = self._pending
            self.merge(True, pending.anew, pending.tally.to("cpu"), pending.loop)

    # --- for the loop; see ``worker/training/metric_sync.py`` ---

    @property
    def pending(self) -> Pending | None:
        """The counts of this rank since the ranks last added up theirs; ``None`` if there are none."""
        return self._pending

    @property
    def trains(self) -> bool:
        """Whether it may be updated in the training loop."""
        return self._trains

    def end_training_loop(self) -> None:
        """Note that an epoch's training is complete on every rank, and added up. Called by ``State``."""
        self._settle()
        self._trains = self._total_loop == self._loop

    def set_world(self, size: int) -> None:
        """Belong to another world from now on. Called by ``State``.

        Args:
            size: Number of workers, at least 1.
        """
        self._size = size

    def begin_loop(self, name: str | None) -> None:
        """Begin a loop that later counts belong to. Called by ``State``.

        Args:
            name: Name of the loop; ``None`` for none.
        """
        self._loop = name

    def merge(self, touched: bool, anew: bool, tally: Tally, loop: str | None) -> None:
        """Take the counts of the whole world since the last time, in place of what is pending here.

        Called by ``State``, on every rank.

        Args:
            touched: Whether any rank has counted.
            anew: Whether any rank has started from zero.
            tally: Counts of all ranks, on the CPU.
            loop: Name of the loop that they belong to; ``None`` for none.
        """
        if anew:
            self._total = Tally.empty(self.layout)
        self._total = self._compacted(self._total.plus(tally))
        if touched:
            self._total_loop = loop
        self._pending = None

    def _compacted(self, tally: Tally) -> Tally:
        """The same, with room for more. Does not wait for a GPU."""
        return tally
