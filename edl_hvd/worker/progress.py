"""What this worker is doing right now, for whoever watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edl_hvd.clock import SYSTEM_CLOCK, Clock


class Progress:
    """Written by the main thread, read by others.

    Attributes:
        step: Optimizer steps of the whole run.
        samples: Samples of the whole run.
        saved_step: Step of the newest checkpoint known to be complete; -1 for none.
        phase: "start", "compute", "collective", "input", "commit", "checkpoint", "join", or "end".
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.step = self.samples = 0
        self.saved_step = -1
        self.phase = "start"
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._compute_s = 0.0

    def enter(self, phase: str) -> str:
        """Begin a phase; the one before is returned."""
        before, now_s = self.phase, self._clock.monotonic_s()
        if before == "compute":
            self._compute_s += now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        return before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of a block; afterwards it is the one before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self, generation: int) -> dict[str, Any]:
        """The fields of a beat, see ``driver/control.py``."""
        phase, since_s = self.phase, self._since_s
        return {
            "generation": generation, "step": self.step, "samples": self.samples, "saved_step": self.saved_step,
            "phase": phase, "phase_s": self._clock.monotonic_s() - since_s, "compute_s": self._compute_s,
        }  # fmt: skip


progress = Progress()
"""Of this process."""
