"""What a run has found out about its own learning; kept with the counters, so it survives resizes and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edl_hvd.rescale.noise import Noise, Observation
from edl_hvd.timings import Timing


@dataclass
class Learning:
    """The same on every rank at a commit.

    Attributes:
        noise: Noise of the gradient.
        scale_invariant_steps: Sum of the learning-rate factors of all steps; under AdaScale the number of steps of the
            script's own batch that they equal (Johnson et al. 2020, arXiv:2007.05105, section 3).
        worker_batch: Samples per worker that were chosen for the next step; ``None`` where nobody chooses.
        chosen_at: Optimizer step at which that was looked at last.
        timings: How long steps took, of each batch plan that was tried.
    """

    noise: Noise = field(default_factory=Noise)
    scale_invariant_steps: float = 0.0
    worker_batch: int | None = None
    chosen_at: int = 0
    timings: tuple[Timing, ...] = ()

    def count(self, factor: float, observation: Observation | None, scale: float) -> None:
        """One more optimizer step has been made.

        Args:
            factor: What its learning rate was multiplied with.
            observation: What it showed of the noise, if that was measured.
            scale: How many base batches it had.
        """
        self.scale_invariant_steps += factor
        if observation is not None:
            self.noise = self.noise.after(observation, scale)

    def as_dict(self) -> dict[str, Any]:
        return {
            "noise": self.noise.as_dict(),
            "scale_invariant_steps": self.scale_invariant_steps,
            "worker_batch": self.worker_batch,
            "chosen_at": self.chosen_at,
            "timings": [timing.as_list() for timing in self.timings],
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Learning:
        return cls(
            Noise(**saved["noise"]),
            saved["scale_invariant_steps"],
            saved["worker_batch"],
            saved["chosen_at"],
            tuple(Timing(*row) for row in saved["timings"]),
        )
