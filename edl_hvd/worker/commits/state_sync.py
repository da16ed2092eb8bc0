"""Making the members of a world equal: the freshest state for those of a new one; the mean of buffers."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch

from edl_hvd.errors import UsageError
from edl_hvd.teacher_models import OtherModel, teacher_models
from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.commit import NOTHING, Freshness
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.training.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# Large enough to run at network bandwidth, small enough to cost little memory beside the model.
_BUCKET_BYTES = 64 << 20


def broadcast_json(collectives: Collectives, value: Any, root: int, rank: int) -> Any:
    """Return rank ``root``'s JSON value, on every rank. Collective; blocks."""
    # A copy, in memory that torch frees without Python.
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone() if rank == root else None
    length = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64)
    collectives.broadcast_(length, root)
    if data is None:
        data = torch.empty(int(length.item()), dtype=torch.uint8)
    collectives.broadcast_(data, root)
    return json.loads(data.numpy().tobytes())


def _gather_json(collectives: Collectives, value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in rank order. Collective; blocks."""
    data = json.dumps(value).encode()
    sizes = [row[0] for row in collectives.gather_integers([len(data)])]
    words = numpy.frombuffer(data.ljust(-(-max(sizes) // 8) * 8), dtype=numpy.int64)
    rows = collectives.gather_integers(words.tolist())
    return [json.loads(numpy.array(row, dtype=numpy.int64).tobytes()) for row in rows]


def agree_on_teachers(collectives: Collectives, generations: Sequence[int]) -> list[OtherModel]:
    """Let all ranks learn from the same models: those that the rank of the latest world has met. Collective; blocks.

    Args:
        collectives: Of the world.
        generations: Generation of the world that each rank comes from, in rank order.

    Returns:
        The places in which another rank has met another model; the same on all ranks.
    """
    met = _gather_json(collectives, dict(teacher_models.met))
    order = sorted(range(len(met)), key=lambda rank: -generations[rank])
    return teacher_models.agree([met[rank] for rank in order])


def broadcast_state(
    collectives: Collectives, plain: Any, tensors: dict[str, torch.Tensor], root: int, rank: int
) -> Encoded:
    """Return rank ``root``'s plain state and tensors, on every rank. Collective; blocks.

    Tensors travel through the host's memory in flat buckets of one dtype each.

    Returns:
        On ``root`` its own arguments; elsewhere the received ones, tensors on the CPU.
    """
    layout = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    plain, layout = broadcast_json(collectives, [plain, layout], root, rank)
    if rank != root:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in layout}
    for bucket in _buckets(tensors):
        flat = torch.cat([t.detach().reshape(-1).cpu() for t in bucket]) if rank == root else _empty_like_all(bucket)
        collectives.broadcast_(flat, root)
        if rank != root:
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))
    return Encoded(plain, tensors)


def numeric_options(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the options of each parameter group of the optimizers that are numbers, such as the rate."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{key: value for key, value in group.items() if type(value) in (int, float, bool)} for group in groups]


def share_options(optimizers: Sequence[Any], group: ProcessGroup, root: int) -> None:
    """Give the optimizers of all ranks those options of rank ``root``'s that are numbers. Collective; blocks."""
    if group.size == 1:
        return
    given = broadcast_json(group.collectives, numeric_options(optimizers), root, group.rank)
    parameter_groups = [parameters for optimizer in optimizers for parameters in optimizer.param_groups]
    for parameters, options in zip(parameter_groups, given, strict=True):
        parameters.update(options)


def drop_diverged(
    collectives: Collectives, fingerprint: Callable[[], int], held: list[Freshness], unverified: list[bool]
) -> list[Freshness]:
    """Return what each member holds: nothing for a newcomer whose state is that of none of the other members.

    Collective where a member's state is unverified; blocks.

    Args:
        collectives: Collectives of the new world.
        fingerprint: Returns a digest of this worker's live state.
        held: Freshness of each member.
        unverified: Whether each has taken its state over from a world that trained on.
    """
    freshest = max(held)
    if not freshest.holds_state or not any(unverified):
        return held
    digests = [row[0] for row in collectives.gather_integers([fingerprint()])]
    holders = [rank for rank, freshness in enumerate(held) if freshness == freshest]
    # Each member has running statistics of its own, and a newcomer those of its donor.
    expected = {digests[rank] for rank in holders if not unverified[rank]} or {digests[holders[0]]}
    diverged = {rank for rank in holders if unverified[rank] and digests[rank] not in expected}
    if diverged:
        logger.warning("ranks %s took over another state than expected, so they get it again", sorted(diverged))
    return [NOTHING if rank in diverged else freshness for rank, freshness in enumerate(held)]


class AveragedBuffers:
    """The buffers of some models, which each rank changes by itself, and which are averaged over the ranks.

    BatchNorm's running statistics are those of the samples that a worker has seen. So floating-point buffers become
    their mean, weighted by the micro-batches that each worker has computed; counters (``num_batches_tracked``) become
    the largest. With ``exact=True`` all of them are equal already.

    Args:
        models: Models of the state.
        is_exact: Whether its optimizers have ``exact=True``.

    Attributes:
        group: Workers of the present world; ``None`` outside a world.
        passes: Micro-batches that this worker has computed since the buffers were averaged.
    """

    def __init__(self, models: Iterable[torch.nn.Module], is_exact: bool) -> None:
        self._models = list(models)
        self._is_exact = is_exact
        self.group: ProcessGroup | None = None
        self.passes = 0

    def sync(self) -> bool:
        """Make the buffers equal on all ranks. Collective; blocks.

        Returns:
            Whether any may have changed.

        Raises:
            UsageError: They have other shapes than on another rank; on all ranks.
        """
        group = self.group
        if group is None or self._is_exact:
            return False
        passes, self.passes = self.passes, 0
        # A buffer may be None here, and a tensor where a forward pass has set it: then all have to take part.
        if group.size == 1 or not any(module._buffers for model in self._models for module in model.modules()):
            return False
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        _average(group, buffers, passes)
        return True


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy().tobytes())


def _average(group: ProcessGroup, tensors: list[torch.Tensor], weight: int) -> None:
    """Make tensors equal on all ranks, in place: floating-point ones become their mean, others their maximum.

    Those that are equal already stay as they are: the mean of ones may be a little less than 1, which is no mask.
    Collective; blocks.

    Args:
        group: Workers of the world.
        tensors: Tensors of this rank.
        weight: Weight of this rank's tensors in the mean; where all have 0 they weigh the same.

    Raises:
        UsageError: They have other shapes than on another rank; on all ranks.
    """
    collectives = group.collectives
    shapes = [list(tensor.shape) for tensor in tensors]
    digests = [_digest(tensor) for tensor in tensors]
    rows = collectives.gather_integers([weight, len(tensors), zlib.crc32(json.dumps(shapes).encode())])
    if len({(row[1], row[2]) for row in rows}) > 1:
        raise UsageError(
            "the buffers of the models have other shapes on some workers than on others, such as those of an observer "
            "(quantisation) or a lazy layer that a worker without a micro-batch has not run; run one forward pass "
            "before State is made, or choose a micro_batch of which every worker gets one"
        )
    tables = zip(*collectives.gather_integers(digests), strict=True)
    tensors = [tensor for tensor, digest in zip(tensors, tables, strict=True) if len(set(digest)) > 1]
    weights = [row[0] for row in rows]
    share = weights[group.rank] / sum(weights) if any(weights) else 1 / len(weights)
    for bucket in _buckets(dict(enumerate(tensors))):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        if flat.is_floating_point():
            flat = flat if flat.element_size() >= 4 else flat.float()  # of eight bits there is no product
            # A tensor that weighs nothing may hold anything.
            flat = collectives.allreduce(flat.mul_(share) if share else torch.zeros_like(flat), "sum")
        else:
            flat = collectives.allreduce(flat.to(torch.int64), "max").to(flat.dtype)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: dict[Any, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield groups of one dtype, each of at most ``_BUCKET_BYTES`` or a single tensor."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[torch.Tensor] = []
        bucket_bytes = 0
        for tensor in group:
            size_bytes = tensor.numel() * tensor.element_size()
            if bucket and bucket_bytes + size_bytes > _BUCKET_BYTES:
                yield bucket
                bucket, bucket_bytes = [], 0
            bucket.append(tensor)
            bucket_bytes += size_bytes
        yield bucket


def _empty_like_all(bucket: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype)
