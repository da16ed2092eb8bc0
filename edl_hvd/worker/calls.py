"""The collectives that a script calls, for tensors of every type, made of the few that a world offers.

Each begins with an allreduce, of one name for Horovod. So ranks that call different collectives, or pass different
shapes, get an error that says so. Under different names each rank would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.joining.rendezvous import RendezvousInfo
from edl_hvd.worker.position import position

Operation: TypeAlias = Literal["sum", "mean", "average", "max", "min"]
OPERATIONS: tuple[Operation, ...] = ("sum", "mean", "average", "max", "min")

_NAME = "edl_hvd.call"
_DATA = "edl_hvd.call.data"  # once all ranks are known to do the same
_CALLS = ("barrier", "allgather", "broadcast")
_MOST_DIMENSIONS = 12
_KINDS = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
# What Horovod can reduce each type as without loss; a complex number as its two parts.
_REDUCED_AS = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, torch.complex64), torch.float32),
    **dict.fromkeys((torch.float64, torch.complex128), torch.float64),
    **dict.fromkeys((torch.int32, torch.uint8, torch.int8, torch.int16, torch.bool), torch.int32),
    torch.int64: torch.int64,
}


def _joined(call: str) -> RendezvousInfo:
    """The present world, for one of the calls below.

    Raises:
        UsageError: There is no world, or a micro-batch is being computed, of which workers may have different numbers.
    """
    present = process.current()
    position.refuse_inside(f"edl_hvd.{call}()")
    return present.require_joined(call)


def allreduce(tensor: torch.Tensor, op: Operation | None = None) -> torch.Tensor:
    """Combine a tensor over the present world. Collective: every rank calls it; blocks until all have.

    No gradient flows through the result; ``backward()`` through it is a ``UsageError``.

    Args:
        tensor: Any shape, equal on all ranks; any numeric type, or bool for "max" and "min"; on any device. It is not
            changed.
        op: "sum", "mean" (or "average"), "max" or "min". It has no default, because Horovod's is the average.

    Returns:
        A new tensor of the same shape, type and device, equal on all ranks. Types of less than 32 bits are computed in
        32 bits.

    Raises:
        WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
        UsageError: ``op`` is left out, is not one of these, or does not fit the tensor's type (a mean of whole
            numbers). Or the ranks passed different shapes, called different collectives, or there is no world.
    """
    joined = _joined("allreduce")
    if op not in OPERATIONS:
        raise UsageError(
            f'allreduce with op={op!r} is not known; expected one of {", ".join(OPERATIONS)}; write op="mean" '
            '(Horovod\'s default), op="sum", op="max" or op="min" instead of its constants Average, Sum, Max and Min'
        )
    _check_is_dense("allreduce", tensor)
    kind = tensor.dtype
    is_mean = op in ("mean", "average")
    if is_mean and not (kind.is_floating_point or kind.is_complex):
        raise UsageError(
            f'allreduce with op="{op}" got a tensor of {kind}, and the mean of whole numbers is not one; convert it '
            'to float first, e.g. allreduce(tensor.float(), op="mean")'
        )
    if kind is torch.bool and op == "sum":
        raise UsageError(
            'allreduce with op="sum" got a tensor of torch.bool; write op="max" for "on any rank", op="min" for "on '
            'every rank", or allreduce(tensor.int(), op="sum") to count'
        )
    if kind.is_complex and op in ("max", "min"):
        raise UsageError(f'allreduce with op="{op}" got a tensor of {kind}, and complex numbers have no order')
    carried = _REDUCED_AS.get(kind)
    if carried is None:
        known = ", ".join(str(one).removeprefix("torch.") for one in _REDUCED_AS)
        raise UsageError(f"allreduce got a tensor of {kind}; expected one of {known}; convert it first")
    with torch.no_grad(), torch.inference_mode(False):
        given = torch.view_as_real(tensor.detach().clone().resolve_conj()) if kind.is_complex else tensor.detach()
        result = joined.collectives.allreduce(given.to(carried), "sum" if is_mean else op, _NAME)
        if is_mean:
            result.div_(joined.world.size)
        result = torch.view_as_complex(result) if kind.is_complex else result.to(kind)
    return _without_gradient("allreduce", tensor, result)


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate the tensors of all ranks along dimension 0. Collective: every rank calls it; blocks until all have.

    No gradient flows through the result; ``backward()`` through it is a ``UsageError``.

    Args:
        tensor: Any numeric type or bool, equal on all ranks; on any device; at most 12 dimensions. The first dimension
            may differ between ranks, and may be 0; the others are equal. A tensor without dimensions counts as shape
            [1]. It is not changed.

    Returns:
        A new tensor of the same type and device, shape [sum of the first dimensions, …], in rank order, equal on all
        ranks.

    Raises:
        WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
        UsageError: The ranks passed tensors that do not fit together, called different collectives, or there is no
            world.
    """
    joined = _joined("allgather")
    _check_is_dense("allgather", tensor)
    with torch.no_grad(), torch.inference_mode(False):
        given = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
        given = given.reshape(1) if given.dim() == 0 else given
        table = _announce(joined, _Announcement.of("allgather", given))
        if len({(one.kind, one.shape[1:]) for one in table}) > 1:
            raise UsageError(
                f"allgather got tensors that cannot lie one after the other: {_each_by_rank(table)}; expected one type "
                "and equal sizes in all dimensions but the first"
            )
        total, row = sum(one.shape[0] for one in table), given.shape[1:]
        if total * row.numel() == 0:
            return given.new_empty((total, *row))
        collectives = joined.collectives
        collected = collectives.result(collectives.start_gather(_bytes_of(given), _DATA))
        result = collected.view(given.dtype).view(total, *row)
    return _without_gradient("allgather", tensor, result)


def broadcast(tensor: torch.Tensor, root_rank: int = 0) -> torch.Tensor:
    """Copy the tensor of one rank to every rank. Collective: every rank calls it; blocks until all have.

    No gradient flows through the result; ``backward()`` through it is a ``UsageError``.

    Args:
        tensor: Any numeric type or bool; one type and shape on all ranks; on any device; at most 12 dimensions. It is
            not changed.
        root_rank: Rank whose tensor is copied, in [0, size()), equal on all ranks. Only rank 0 exists in every world.

    Returns:
        A new tensor of the same shape, type and device, with the values of ``root_rank``'s tensor.

    Raises:
        WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
        UsageError: There is no such rank, the ranks passed tensors of different types or shapes, called different
            collectives, or there is no world.
    """
    joined = _joined("broadcast")
    _check_is_dense("broadcast", tensor)
    size = joined.world.size
    if not 0 <= root_rank < size:
        raise UsageError(
            f"broadcast got root_rank={root_rank!r} in a world of {size}; expected 0 to {size - 1}; only rank 0 exists "
            "in every world"
        )
    with torch.no_grad(), torch.inference_mode(False):
        result = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
        table = _announce(joined, _Announcement.of("broadcast", result, root_rank))
        if len(set(table)) > 1:
            raise UsageError(
                f"broadcast got different tensors or roots: {_each_by_rank(table)}; expected the same type, shape and "
                "root_rank on all ranks"
            )
        if result.numel():
            joined.collectives.broadcast_(_bytes_of(result), root_rank, _DATA)
    return _without_gradient("broadcast", tensor, result)


def barrier() -> None:
    """Wait until every rank of the present world has called it. Collective: every rank calls it; blocks.

    Raises:
        WorldBrokenError: A member is gone. Do not catch it: the elastic function recovers from it.
        UsageError: The ranks called different collectives, or there is no world.
    """
    joined = _joined("barrier")
    _announce(joined, _Announcement("barrier"))


def _without_gradient(call: str, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result of a collective; backward() through it is refused where the tensor that was given has a gradient."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return result
    # The graph behind the tensor is not kept by the result.
    refused: torch.Tensor = _Refused.apply(result, torch.zeros((), requires_grad=True), call)
    return refused


class _Refused(torch.autograd.Function):
    """A tensor through which no gradient flows, and which says so."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor, call: str) -> torch.Tensor:
        ctx.call = call
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise UsageError(
            f"backward() came to what edl_hvd.{ctx.call} has returned, and no gradient flows through it; give it "
            "tensor.detach() where its result is a constant of the loss; a loss over the samples of all workers at "
            "once is not supported"
        )


class _Announcement(NamedTuple):
    """What a rank is about to do."""

    call: str
    kind: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    root: int = 0

    @classmethod
    def of(cls, call: str, tensor: torch.Tensor, root: int = 0) -> _Announcement:
        if tensor.dim() > _MOST_DIMENSIONS:
            raise UsageError(
                f"{call} got a tensor of {tensor.dim()} dimensions; expected at most {_MOST_DIMENSIONS}; flatten it"
            )
        return cls(call, tensor.dtype, tuple(tensor.shape), root)

    def as_row(self) -> list[int]:
        sizes = [*self.shape, *[-1] * (_MOST_DIMENSIONS - len(self.shape))]
        return [_CALLS.index(self.call), _KINDS.index(self.kind), self.root, *sizes]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> _Announcement:
        call, kind, root, *sizes = row
        return cls(_CALLS[call], _KINDS[kind], tuple(size for size in sizes if size >= 0), root)

    def __str__(self) -> str:
        shape = f"{str(self.kind).removeprefix('torch.')} {list(self.shape)}"
        return f"{shape} from {self.root}" if self.call == "broadcast" else shape


def _announce(joined: RendezvousInfo, own: _Announcement) -> list[_Announcement]:
    """Tell all ranks what this one is about to do; returns what each is about to do, in rank order.

    By an allreduce, because Horovod does not tell a cached allreduce from an allgather of another rank, and waits.
    """
    row = own.as_row()
    table = torch.zeros((joined.world.size, 1, len(row)), dtype=torch.int64)
    table[joined.world.rank, 0] = torch.tensor(row)
    rows = joined.collectives.allreduce(table, "sum", _NAME)[:, 0].tolist()
    announced = [_Announcement.from_row(row) for row in rows]
    if len({one.call for one in announced}) > 1:
        called = ", ".join(f"rank {place} {one.call}" for place, one in enumerate(announced))
        raise UsageError(
            f"the workers called different collectives: {called}; every worker must make the same calls in the same "
            "order, so none of them may stand under a condition that holds on some ranks only"
        )
    return announced


def _each_by_rank(table: Sequence[_Announcement]) -> str:
    return ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(table))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor that Horovod carries, whatever its type."""
    return tensor.view(-1).view(torch.uint8)


def _check_is_dense(call: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"{call} got {type(tensor).__name__} instead of a tensor; write {call}(torch.tensor(value), …)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(
            f"{call} got a sparse or quantized tensor; expected a dense one, as tensor.to_dense() or "
            "tensor.dequantize() makes it"
        )
