"""A forward or backward pass for which the GPU's memory does not suffice: which argument to change, and to what."""

from __future__ import annotations

from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import BatchPolicy, GlobalBatch
from edl_hvd.worker.training.reduction import MicroBatch


def explained(policy: BatchPolicy, part: MicroBatch, error: Exception) -> UsageError:
    """What to tell the user.

    Args:
        policy: Of the batch.
        part: The micro-batch that was computed.
        error: Torch's own.

    >>> part = MicroBatch(samples=64, global_samples=256, first=True, last=True)
    >>> print(explained(GlobalBatch(256, micro_batch=64), part, MemoryError("tried to allocate 2 GiB")))
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
