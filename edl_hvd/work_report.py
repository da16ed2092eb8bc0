"""What rank 0 tells the driver about the work: how a step's batch is divided, and how many samples are left."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.timings import Timing


@dataclass(frozen=True)
class WorkReport:
    """How a job divides its batch in the present world, and what is left of its work.

    Attributes:
        global_batch: Samples per optimizer step, at least 1.
        micro_batch: Samples per micro-batch at most; ``None``: each worker computes its share at once.
        grows: Whether each worker has a batch of its own, so that the global batch grows with the world.
        samples_left: Samples left of ``state.epochs(N)``; ``None`` where the script has named no number of epochs.
        sample_worth: Progress that a sample makes, in samples of the script's own batch; 1 unless the batch is chosen
            while the job runs.
        sizes: Numbers of workers of which rank 0 knows the goodput; with ``WorkerBatch("auto")`` only.
        goodput: Goodput with each of them, in samples of the script's own batch per second.
        timings: How long steps took, of which rank 0 has made that.
    """

    global_batch: int
    micro_batch: int | None = None
    grows: bool = False
    samples_left: int | None = None
    sample_worth: float = 1.0
    sizes: tuple[int, ...] = ()
    goodput: tuple[float, ...] = ()
    timings: tuple[Timing, ...] = ()
