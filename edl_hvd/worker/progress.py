"""What this worker is doing right now, for whoever watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Written by the main thread, read by others.

    Attributes:
        step: Optimizer steps of the whole run.
        phase: "start", "compute", "collective", "input", "commit", "join", or "end".
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = "start"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of a block; afterwards it is the one before."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


progress = Progress()
"""Of this process."""
