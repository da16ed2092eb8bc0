"""Where the run is, in the units that schedules count by, and what moves with it: schedulers and the learning rate."""

from __future__ import annotations

from typing import Any

from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import UsageError
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.training.scheduler import SCALE_INVARIANT, GatedScheduler, PacedScheduler


class Schedules:
    """The schedules of one ``State``.

    Args:
        store: State of the job.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._samplers: list[ElasticBatchSampler] = list(store.of_kind(ElasticBatchSampler))
        self._gated: list[Any] = list(store.of_kind(GatedScheduler))
        self._paced: list[Any] = list(store.of_kind(PacedScheduler))
        if store.reduction is not None and self._gated:
            store.reduction.on_round.add(self.allow_step)

    # --- where the run is ---

    def epoch_position(self, samples: int = 0) -> float:
        """The number of epochs finished, with the fraction of the present one, after ``samples`` more samples."""
        epoch = self._store.epoch
        return epoch + sum((s.offset + samples) / s.positions for s in self._samplers if s.epoch == epoch)

    def ends_epoch(self, samples: int = 0) -> bool:
        """Whether ``samples`` more samples complete the epoch's batches, so that the script goes on behind the loop."""
        epoch = self._store.epoch
        return any(s.epoch == epoch and s.offset + samples >= s.epoch_samples() for s in self._samplers)

    def samples_of_epochs(self, count: int) -> int | None:
        """The samples of the whole run when ``count`` epochs are complete; ``None`` where that is not known."""
        if len(self._samplers) != 1:
            return None
        sampler, store = self._samplers[0], self._store
        return store.samples + sampler.epoch_samples() * (count - store.epoch) - sampler.offset

    def steps_of_epochs(self, count: int) -> int:
        """The optimizer steps of ``count`` whole epochs.

        Raises:
            UsageError: There is no sampler, or more than one, or its steps depend on the world.
        """
        if len(self._samplers) != 1:
            raise UsageError(
                f"state.total_steps() cannot tell how batches are dealt: State holds {len(self._samplers)} "
                "ElasticBatchSampler(s); expected one, State(batches=batches, …)"
            )
        return count * self._samplers[0].steps_per_epoch

    # --- what moves with it ---

    @property
    def learning_rate_factor(self) -> float:
        """What ``optimizer.step()`` multiplies the learning rate with at the next step."""
        store = self._store
        factor = store.ramp.factor(store.samples)
        return self._samplers[0].policy.adapted(factor, store.learning.noise) if self._samplers else factor

    def move(self) -> None:
        """Move the schedulers of ``edl_hvd.schedule`` to where the run is; every rank alike."""
        store = self._store
        for scheduler in self._paced:
            scheduler.edl_move(
                {
                    "samples": store.samples,
                    "epochs": self.epoch_position(),
                    "steps": store.step,
                    SCALE_INVARIANT: store.learning.scale_invariant_steps,
                }
            )

    def allow_step(self) -> None:
        """A step's gradient is complete: the script may move its schedulers by a step."""
        for scheduler in self._gated:
            scheduler.edl_ready = True
