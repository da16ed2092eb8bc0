"""Summing gradients so that the sum's very bits do not depend on the world.

The sum over a step's micro-batches is taken in the order of one tree (``rescale/summation.py``). A worker adds the
whole nodes of the tree among its own micro-batches while it computes them. The rest is added in two messages per bucket
of parameters, with as much on the wire as a ring allreduce where every worker holds one node: each rank is sent its
part of all nodes, adds them, and gives the sum to all. The first message starts while backward still runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from edl_hvd.errors import UsageError
from edl_hvd.rescale.deal import share
from edl_hvd.rescale.summation import Node, Summation, additions, nodes_of
from edl_hvd.worker import process
from edl_hvd.worker.training.reduction import MicroBatch, Reduction

_BUCKET_BYTES = 16 << 20
# A message takes a millisecond whatever its size; smaller ones leave more of the transfer to the time of backward.


class ExactReduction(Reduction):
    """See the module, and :class:`~edl_hvd.worker.training.reduction.Reduction`.

    Attributes:
        passes_infinity: Gradients may overflow, because a ``GradScaler`` looks after that; else it is an error.
    """

    def __init__(self, named_parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(named_parameters)
        self.passes_infinity = False
        if any(parameter.device.type != "cpu" for parameter in self.names):
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False  # it chooses kernels by their speed of the moment
        self._buckets = list(_buckets_of([parameter for parameter in self.names if parameter.requires_grad]))
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._sums: dict[_Bucket, Any] = {}  # those under way
        self._term = self._terms = 0

    def begin(self, micro_batch: MicroBatch) -> None:
        if not micro_batch.first:
            for bucket in self._buckets:
                self._add(bucket)
        super().begin(micro_batch)
        if micro_batch.first:
            self._expect(-(-micro_batch.global_samples // micro_batch.unit))
        self._term = micro_batch.index
        self._unit = micro_batch.unit

    def forget(self) -> None:
        super().forget()
        self._sums.clear()
        self._terms = 0

    def _expect(self, terms: int) -> None:
        self._terms = terms
        self._sums.clear()
        for bucket in self._buckets:
            bucket.begin(terms)

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if self.noise is not None:
            self.noise.small(parameter)
        if self.paused or not self.at_boundary:
            return
        bucket = self._bucket_of[parameter]
        if self.micro_batch is None and not self._sums and not self._finish_queued:
            self._begin_alone()
        if self.done or bucket in self._sums or parameter in bucket.ready:
            raise self._computed_twice(parameter)
        bucket.ready.add(parameter)
        if len(bucket.ready) == len(bucket.parameters):
            self._start_bucket(bucket)
        if not self._finish_queued:
            self._finish_queued = True
            Variable._execution_engine.queue_callback(self.complete)

    def _begin_alone(self) -> None:
        """Outside of ``State.batches`` every worker computes one term, of equal weight."""
        self._expect(process.size())
        self._term = process.rank()

    @torch.no_grad()
    def _add(self, bucket: _Bucket) -> None:
        """What backward has left is the next term."""
        part = self.micro_batch
        gradients = [self._gradient_of(parameter) for parameter in bucket.parameters]
        if part is not None and part.samples != self._least_unit:
            torch._foreach_mul_(gradients, part.samples / self._least_unit)
        bucket.add(self._term, gradients)
        for parameter in bucket.parameters:
            parameter.grad = None

    @property
    def _least_unit(self) -> int:
        """Samples whose mean gradient counts as it is."""
        assert self.micro_batch is not None
        return min(self._unit, self.micro_batch.global_samples)

    def _start_bucket(self, bucket: _Bucket) -> None:
        self._start_wishes()
        if self.micro_batch is None or self.micro_batch.samples:
            self._add(bucket)
        size = process.size()
        if size == 1:
            self._sums[bucket] = None
            return
        sizes = [last - first for first, last in (share(bucket.elements, rank, size) for rank in range(size))]
        rows = bucket.rows
        if len(rows) == 1:
            message = rows[0].flat
        else:
            parts_by_rank = zip(*(row.flat.split(sizes) for row in rows), strict=True)
            message = torch.cat([bucket.nothing, *itertools.chain.from_iterable(parts_by_rank)])
        self._sums[bucket] = process.current().collectives.start_exchange(
            message, [len(rows) * part for part in sizes], f"edl_hvd.exact.{bucket.number}"
        )

    @torch.no_grad()
    def complete(self) -> None:
        collectives = process.current().collectives
        if self.micro_batch is None and not self._terms:
            self._begin_alone()
        for bucket in self._buckets:
            if bucket not in self._sums:
                self._start_bucket(bucket)
        measured = self.noise.start() if self.noise is not None else []
        scale = 1 / self._terms if self.micro_batch is None else self._least_unit / self.micro_batch.global_samples
        world = process.size()
        if world > 1:
            for bucket in self._buckets:
                total = _sum_of(collectives.result(self._sums[bucket]), self._terms, world).mul_(scale)
                self._sums[bucket] = collectives.start_gather(total, f"edl_hvd.exact.sum.{bucket.number}")
        for bucket in self._buckets:
            total = collectives.result(self._sums[bucket]) if world > 1 else bucket.rows[0].flat.mul_(scale)
            sums = bucket.row_of(total)
            self._refuse_infinity(bucket, sums)
            bucket.give(sums.views)
        collectives.finish([*self._handles.values(), *measured])
        if self.noise is not None:
            self.noise.large(self.names)
        self._sums.clear()
        self._handles.clear()
        self._terms = 0
        self._finish_queued = False
        self.wishes = None
        self.done = True

    def _refuse_infinity(self, bucket: _Bucket, sums: _Row) -> None:
        # A sum costs one pass over memory. One that overflows by itself is looked at once more.
        if self.passes_infinity or sums.flat.sum().isfinite() or sums.flat.isfinite().all():
            return
        parts = zip(bucket.parameters, sums.views, strict=True)
        names = [self.names[parameter] for parameter, part in parts if not part.isfinite().all()]
        raise UsageError(
            f"the gradient of {names[0]!r} (and of {len(names) - 1} more parameters), summed over all workers, is "
            "infinite or not a number; lower the learning rate, look for a division by zero in the loss, or, with "
            "float16, give State an edl_hvd.GradScaler, which leaves such a step out"
        )


@dataclass(frozen=True)
class _Row:
    """The value of one node, for all parameters of a bucket.

    Attributes:
        flat: One dimension.
        views: Its part for each parameter, in the parameter's shape and order of memory.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]


class _Bucket:
    """Parameters whose gradients travel in one message.

    Attributes:
        number: Among the buckets of the optimizer.
        parameters: Of one element type, on one device.
        elements: Of all their gradients.
        nothing: A flat tensor of no elements.
        ready: Those whose gradient of the last micro-batch is there.
        rows: The values of the nodes at hand, from left to right.
    """

    def __init__(self, number: int, parameters: list[torch.nn.Parameter]) -> None:
        self.number = number
        self.parameters = parameters
        self.elements = sum(parameter.numel() for parameter in parameters)
        # Half precision is summed in single precision.
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.nothing = torch.empty(0, dtype=dtype, device=parameters[0].device)
        self.ready: set[torch.nn.Parameter] = set()
        self.rows: list[_Row] = []
        self._free: list[_Row] = []
        self._summation = Summation(1)
        self._sizes = [parameter.numel() for parameter in parameters]
        self._layouts = [(p.shape, torch.empty_like(p, device="meta").stride()) for p in parameters]

    def begin(self, terms: int) -> None:
        """Expect so many terms, over all ranks."""
        self._free += self.rows
        self.rows = []
        self.ready.clear()
        self._summation = Summation(terms)

    def add(self, term: int, gradients: list[torch.Tensor]) -> None:
        """Take in the gradients of one term, right of those that came before."""
        due = self._summation.push(Node(0, term))
        if due:
            torch._foreach_add_(self.rows[-1].views, gradients)
        else:
            row = self._free.pop() if self._free else self.row_of(self.nothing.new_empty(self.elements))
            torch._foreach_copy_(row.views, gradients)
            self.rows.append(row)
        for _ in range(due - 1):
            right = self.rows.pop()
            self.rows[-1].flat.add_(right.flat)
            self._free.append(right)

    def row_of(self, flat: torch.Tensor) -> _Row:
        parts = zip(flat.split(self._sizes), self._layouts, strict=True)
        return _Row(flat, [part.as_strided(*layout) for part, layout in parts])

    def give(self, sums: list[torch.Tensor]) -> None:
        """Make these the parameters' gradients."""
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            parameter.grad = gradient.to(parameter.dtype)


def _buckets_of(parameters: list[torch.nn.Parameter]) -> Iterator[_Bucket]:
    """Filled in the order in which backward tends to finish gradients: the last parameter first."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.nn.Parameter]]] = {}
    for parameter in reversed(parameters):
        groups = kinds.setdefault((parameter.dtype, parameter.device), [[]])
        if groups[-1] and sum(other.nbytes for other in groups[-1]) + parameter.nbytes > _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(parameter)
    for number, group in enumerate(group for groups in kinds.values() for group in groups):
        yield _Bucket(number, group)


def _sum_of(received: torch.Tensor, terms: int, size: int) -> torch.Tensor:
    """The sum over all nodes, of what every rank has sent of the nodes it holds."""
    count, pairs = _plan(terms, size)
    rows = received.view(count, received.numel() // count)
    for left, right in pairs:
        rows[left] += rows[right]
    return rows[0]


@functools.lru_cache
def _plan(terms: int, size: int) -> tuple[int, list[tuple[int, int]]]:
    """How many nodes the ranks of a world hold together, and how their values become the sum."""
    nodes = [node for rank in range(size) for node in nodes_of(*share(terms, rank, size), terms)]
    return len(nodes), additions(nodes, terms)
