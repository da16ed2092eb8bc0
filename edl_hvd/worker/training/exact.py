"""Summing gradients so that the sum's very bits do not depend on the world.

The sum over a step's micro-batches is taken in the order of one tree (``rescale/summation.py``). A worker adds the
whole nodes of the tree among its own micro-batches while it computes them. The rest is added in two messages per bucket
of parameters, with as much on the wire as a ring allreduce where every worker holds one node: each rank is sent its
part of all nodes, adds them, and gives the sum to all. The first message starts while backward still runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.errors import UsageError
from edl_hvd.rescale.partition import partition_range
from edl_hvd.rescale.summation import Node, Summation, additions, nodes_of
from edl_hvd.worker.training.gradient_sum import GradientSum
from edl_hvd.worker.training.micro_batch import MicroBatch
from edl_hvd.worker.training.process_group import ProcessGroup

_BUCKET_BYTES = 16 << 20
# A message takes a millisecond whatever its size; smaller ones leave more of the transfer to the time of backward.


class ExactGradientSum(GradientSum):
    """See the module, and :class:`~edl_hvd.worker.training.gradient_sum.GradientSum`.

    Attributes:
        passes_infinity: Gradients may overflow, because a ``GradScaler`` looks after that; else it is an error.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str], group: ProcessGroup) -> None:
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._term = 0
        super().__init__(names, group)
        self.passes_infinity = False
        if any(parameter.device.type != "cpu" for parameter in names):
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False  # it chooses kernels by their speed of the moment

    # --- what is summed ---

    def begin_round(self) -> None:
        super().begin_round()
        self._started: dict[_Bucket, Any] = {}
        self._used: set[torch.nn.Parameter] = set()  # this rank has a gradient of them, of an earlier term
        self._terms = 0

    def begin(self, micro_batch: MicroBatch) -> None:
        if not micro_batch.first:
            self._end_term()
        super().begin(micro_batch)
        self._term = micro_batch.index

    def weigh(self, weight: float) -> None:
        if not float(weight).is_integer():
            raise UsageError(
                f"step.weigh() was given {weight}; with exact=True expected a whole number, because sums of others "
                "depend on their order"
            )
        super().weigh(weight)

    # --- this rank's part ---

    def present(self) -> list[torch.nn.Parameter]:
        there = {*self._held, *self._used, *self._dropped}
        return [parameter for parameter in self._names if parameter in there]

    @property
    def row(self) -> int:
        """A row for each micro-batch: they are added in one order."""
        return 0 if self.micro_batch is None else self.micro_batch.index

    @property
    def rows(self) -> int:
        part = self.micro_batch
        return 1 if part is None else -(-part.global_samples // part.unit)

    def _is_started(self, parameter: torch.nn.Parameter) -> bool:
        return bool(self._started) and self._bucket_of[parameter] in self._started

    def _first_unit(self) -> float:
        return self._least_unit

    @property
    def _least_unit(self) -> float:
        """The weight whose gradient counts as it is; the same in every world."""
        part = self.micro_batch
        return 1.0 if part is None else float(min(part.unit, part.global_samples))

    def _expect(self) -> None:
        """Begin to take in the terms of this round, unless that is under way."""
        if self._terms:
            return
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        if self._bucket_of.keys() != set(trained):
            self._buckets = list(_buckets_of(trained))
            self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        part = self.micro_batch
        if part is None:  # every worker computes one term, of equal weight
            self._terms, self._term = self.group.size, self.group.rank
        else:
            self._terms = -(-part.global_samples // part.unit)
        for bucket in self._buckets:
            bucket.begin(self._terms)

    def _end_term(self) -> None:
        """A micro-batch is through: what it has made of the gradients is the next term."""
        self._expect()
        for bucket in self._buckets:
            self._add_term(bucket)
        self._used.update(self._held)
        self._held.clear()

    @torch.no_grad()
    def _add_term(self, bucket: _Bucket) -> None:
        held = self._held
        bucket.add(self._term, [held[p] if p in held else torch.zeros_like(p) for p in bucket.parameters])

    # --- the sum ---

    def start_early(self, parameter: torch.nn.Parameter, may_grow: bool) -> None:
        if may_grow:
            return  # gradients that came later would be added in another order
        self._expect()
        bucket = self._bucket_of[parameter]
        bucket.ready.add(parameter)
        if len(bucket.ready) == len(bucket.parameters):
            self._start_bucket(bucket)

    def start(self, used: Sequence[torch.nn.Parameter]) -> None:
        self._expect()
        for bucket in self._buckets_with(used):
            if bucket not in self._started:
                self._start_bucket(bucket)

    def _buckets_with(self, used: Sequence[torch.nn.Parameter]) -> list[_Bucket]:
        return [bucket for bucket in self._buckets if not set(used).isdisjoint(bucket.parameters)]

    def _start_bucket(self, bucket: _Bucket) -> None:
        if self.micro_batch is None or self.micro_batch.samples:
            self._add_term(bucket)
        size = self.group.size
        if size == 1:
            self._started[bucket] = None
            return
        sizes = [last - first for first, last in (partition_range(bucket.elements, rank, size) for rank in range(size))]
        rows = bucket.rows
        if len(rows) == 1:
            message = rows[0].flat
        else:
            parts_by_rank = zip(*(row.flat.split(sizes) for row in rows), strict=True)
            message = torch.cat([bucket.nothing, *itertools.chain.from_iterable(parts_by_rank)])
        self._started[bucket] = self.group.collectives.start_exchange(
            message, [len(rows) * part for part in sizes], f"edl_hvd.exact.{bucket.number}"
        )

    def finish(
        self, used: Sequence[torch.nn.Parameter], weight: float, is_late: bool, others: Sequence[Any]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        collectives, size, buckets = self.group.collectives, self.group.size, self._buckets_with(used)
        scale = 1 / self._terms if self.micro_batch is None else self._least_unit / (weight or 1.0)
        if size > 1:
            for bucket in buckets:
                total = _sum_of(collectives.result(self._started[bucket]), self._terms, size).mul_(scale)
                self._started[bucket] = collectives.start_gather(total, f"edl_hvd.exact.sum.{bucket.number}")
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for bucket in buckets:
            total = collectives.result(self._started[bucket]) if size > 1 else bucket.take().mul_(scale)
            row = bucket.row_of(total)
            self._refuse_infinity(bucket, row)
            sums.update((p, view.to(p.dtype)) for p, view in zip(bucket.parameters, row.views, strict=True))
        collectives.finish(others)
        return {parameter: sums[parameter] for parameter in used}

    def _refuse_infinity(self, bucket: _Bucket, sums: _Row) -> None:
        # A sum costs one pass over memory. One that overflows by itself is looked at once more.
        if self.passes_infinity or sums.flat.sum().isfinite() or sums.flat.isfinite().all():
            return
        parts = zip(bucket.parameters, sums.views, strict=True)
        names = [self._names[parameter] for parameter, part in parts if not part.isfinite().all()]
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
        """Begin a sum of ``terms`` terms, over all ranks."""
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

    def take(self) -> torch.Tensor:
        """The value of the only node, which becomes the caller's: the next terms take other memory."""
        return self.rows.pop().flat


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
    nodes = [node for rank in range(size) for node in nodes_of(*partition_range(terms, rank, size), terms)]
    return len(nodes), additions(nodes, terms)
