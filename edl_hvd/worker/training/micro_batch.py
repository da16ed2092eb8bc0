"""What one forward and backward pass computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """The part of a global batch that the next backward computes.

    Attributes:
        samples: Number of samples n_j; 0 for a worker that was dealt nothing.
        global_samples: Number of samples G in the global batch.
        first: It is this worker's first of the step, or of one loop over it.
        last: It is this worker's last.
        index: Number j, in the global batch.
        unit: Samples of every micro-batch of the step but the last one, which may have fewer; at least 1.
        offset: Position of its first sample, in the epoch's order.
    """

    samples: int
    global_samples: int
    first: bool
    last: bool
    index: int = 0
    unit: int = 1
    offset: int = 0
