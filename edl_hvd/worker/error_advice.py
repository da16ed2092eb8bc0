"""What to tell the user where an error of a script says little of what to do."""

from __future__ import annotations

import re
import traceback

import torch

from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import BatchPolicy, GlobalBatch
from edl_hvd.worker.training.micro_batch import MicroBatch


def explain(
    error: Exception, part: MicroBatch | None, policy: BatchPolicy | None, has_computed: bool, is_behind_steps: bool
) -> UsageError | None:
    """The error to raise instead of one that the elastic function has raised; ``None`` where that one is clear.

    Args:
        error: Error of the script.
        part: Micro-batch that is being computed; ``None`` outside the loops over batches.
        policy: Batch policy of the state's sampler; ``None`` where there is no sampler.
        has_computed: Whether this worker has been dealt a micro-batch in this run of the script.
        is_behind_steps: Whether this run of the script has begun behind all steps of the epoch.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):  # torch.OutOfMemoryError is the same, from torch 2.5 on
        return None if part is None or policy is None else out_of_memory_error(policy, part, error)
    if isinstance(error, NameError):
        if has_computed:
            return None
        return _assigned_before(error) if is_behind_steps else _never_assigned(error)
    if isinstance(error, (AttributeError, TypeError)):
        return None if part is None else _gradient_missing(error)
    return None


def _assigned_before(error: NameError) -> UsageError:
    """A variable is missing that a loop has assigned whose steps are not made again."""
    named = re.search(r"'(\w+)'", str(error))
    return UsageError(
        f"{error}: the function runs again behind the steps of this epoch, so what its loop assigns is not there; "
        f"keep it in State{f', as state.{named[1]}' if named else ''}"
    )


def _never_assigned(error: NameError) -> UsageError:
    """A variable is missing that only the loop over micro-batches assigns."""
    return UsageError(
        f"{error}: this worker was dealt no micro-batch so far, so what the loop over them assigns is not there; "
        "give the variable a value before the loop, or log with step.record(loss=loss) in the loop and "
        "step.mean('loss') after it"
    )


def _gradient_missing(error: Exception) -> UsageError | None:
    """``.grad`` is None in the loop over micro-batches, because it is not complete."""
    frames = traceback.extract_tb(error.__traceback__)
    if "NoneType" not in str(error) or not any(".grad" in (frame.line or "") for frame in frames[-1:]):
        return None
    return UsageError(
        f"{error}: in the loop over micro-batches .grad is None while the gradient of the global batch is not "
        "complete; move what uses it behind the loop over a step, into the body of `for step in "
        "state.steps(loader):`, or, in that of state.batches(), under `if optimizer.at_boundary:`"
    )


def out_of_memory_error(policy: BatchPolicy, part: MicroBatch, error: Exception) -> UsageError:
    """A micro-batch does not fit into the memory of the GPU: which argument to change, and to what.

    Args:
        policy: Policy of the batch.
        part: Micro-batch that was being computed.
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
