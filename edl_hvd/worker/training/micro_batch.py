"""What one forward and backward pass computes, and what to say where the GPU's memory does not suffice for it."""

from __future__ import annotations

from dataclasses import dataclass

from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import BatchPolicy, GlobalBatch


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


def out_of_memory_error(policy: BatchPolicy, part: MicroBatch, error: Exception) -> UsageError:
    """The error that says which argument to change, and to what.

    Args:
        policy: Policy of the batch.
        part: Micro-batch that was computed.
        error: Error of torch.

    >>> part = MicroBatch(samples=64, global_samples=256, first=True, last=True)
    >>> print(out_of_memory_error(GlobalBatch(256, micro_batch=64), part, MemoryError("tried to allocate 2 GiB")))
    the memory of the GPU does not suffice for a micro-batch of 64 samples (micro_batch=64): tried to allocate 2 GiB; \
give ElasticBatchSampler(…) or its policy micro_batch=32: the batch of a step stays as it is, computed in more parts
    """
    given = f"micro_batch={policy.micro_batch}" if policy.micro_batch else "micro_batch is left out"
    cause = str(error).strip().partition("\n")[0].rstrip(".")
    said = f"the memory of the GPU does not suffice for a micro-batch of {part.samples} samples ({given}): {cause}; "
    half = _half(policy, part.samples)
    if half is None:
        return UsageError(
            said + "a single sample does not fit, so micro_batch cannot help; use a smaller model or input, mixed "
            "precision, or activation checkpointing (torch.utils.checkpoint)"
        )
    return UsageError(
        f"{said}give ElasticBatchSampler(…) or its policy micro_batch={half}: the batch of a step stays as it is, "
        "computed in more parts"
    )


def _half(policy: BatchPolicy, samples: int) -> int | None:
    """Half of it or less, such that the policy accepts it; ``None`` where one sample was too much."""
    if samples == 1:
        return None
    half = samples // 2
    if isinstance(policy, GlobalBatch):
        return max(part for part in range(1, half + 1) if policy.size % part == 0)
    return half
