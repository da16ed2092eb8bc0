"""Bringing together what the ranks' metrics have counted: one sum over the world, for all metrics at once.

The message is one vector of 64-bit integers. It holds an integer of the caller's; of each metric whether it was
updated, whether it started anew, and its sums; and for what does not add up (extremes, numbers of rows) a place for
each rank, in which the others have zeros. Rows, where a metric has any, follow in a message of their own.

Between batches of the training this is done only where a metric may have been updated. In its first epoch any may. A
metric that was not, in a whole epoch, is not waited for in the next ones: a rank on which it is updated after all says
so with the first gradient of a step. So what it has counted after that gradient waits for the next step, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from edl_hvd.data.evaluation import EvaluationSampler
from edl_hvd.metrics.metric import Metric, Pending
from edl_hvd.metrics.tally import Tally
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.training.process_group import ProcessGroup


def sync_metrics(metrics: Sequence[Metric], group: ProcessGroup, loop: str | None, piggyback: int) -> int:
    """Make what every rank has counted since the last time part of the totals that all ranks hold. Collective; blocks.

    Args:
        metrics: Metrics, the same on every rank.
        group: Workers that have counted.
        loop: Name of the loop under way, the same on every rank; ``None`` for none.
        piggyback: Integer that travels along.

    Returns:
        The sum of the integers that travelled along.
    """
    collectives, rank, size = group.collectives, group.rank, group.size
    pending = [metric.pending or Pending(Tally.empty(metric.layout), False, None) for metric in metrics]
    tallies = [part.tally.to("cpu") for part in pending]
    added = [_added(metric, part, tally) for metric, part, tally in zip(metrics, pending, tallies, strict=True)]
    apart = [_apart(tally) for tally in tallies]
    widths = [len(numbers) for numbers in apart]
    places = torch.zeros((size, sum(widths)), dtype=torch.int64)
    if apart:
        places[rank] = torch.cat(apart)
    parts = [torch.tensor([piggyback]), *added, places.view(-1)]
    message = collectives.allreduce(torch.cat(parts), "sum")
    total, *added, all_places = message.split([len(part) for part in parts])
    numbers = all_places.view(size, -1).split(widths, dim=1) if apart else []
    rows = [
        _all_rows(metric, tally, own_numbers[:, -1].tolist(), collectives, rank)
        for metric, tally, own_numbers in zip(metrics, tallies, numbers, strict=True)
    ]
    for i, metric in enumerate(metrics):
        touched, anew = added[i][:2].bool().tolist()
        largest = numbers[i][:, :-1].contiguous().view(torch.float64).view(size, -1).amax(0)
        metric.merge(touched, anew, Tally(added[i][2:], largest, rows[i]), loop)
    return int(total)


def _added(metric: Metric, pending: Pending, tally: Tally) -> torch.Tensor:
    flags = torch.tensor([metric.pending is not None, pending.anew], dtype=torch.int64)
    return torch.cat([flags, tally.sums])


def _apart(tally: Tally) -> torch.Tensor:
    return torch.cat([tally.largest.view(torch.int64), torch.tensor([tally.row_count()])])


def _all_rows(
    metric: Metric, tally: Tally, counts: list[int], collectives: Collectives, rank: int
) -> list[torch.Tensor]:
    """The rows of all ranks, ``counts`` of each; collective, where any rank has some."""
    if not any(counts):
        return []
    width = metric.layout.row_bytes
    first, last, size_bytes = (sum(counts[:i]) * width for i in (rank, rank + 1, len(counts)))
    # Horovod sums no bytes. In whole words nothing is carried: where one rank has a byte, the others have zeros.
    places = torch.zeros(-(-size_bytes // 8) * 8, dtype=torch.uint8)
    places[first:last] = tally.all_rows(metric.layout).view(-1)
    return [collectives.allreduce(places.view(torch.int64), "sum").view(torch.uint8)[:size_bytes].view(-1, width)]


class MetricSync:
    """What a state counts samples with, in which loop, and together with which workers.

    Args:
        metrics: Metrics of the state.
        samplers: Samplers of its evaluations.
    """

    def __init__(self, metrics: Iterable[Metric], samplers: Iterable[EvaluationSampler]) -> None:
        self._metrics = list(metrics)
        self._samplers = list(samplers)
        self._loop: str | None = None
        self._left: str | None = None  # a loop that the script left early, and nothing has been synced since
        self._group: ProcessGroup | None = None

    def bind(self, group: ProcessGroup | None) -> None:
        """Sync metrics with these workers from now on; ``None`` for with nobody."""
        self._group = group

    def set_world(self, rank: int, size: int) -> None:
        """What is dealt out to evaluate, and counted, is that of this world from now on."""
        for sampler in self._samplers:
            sampler.set_world(rank, size)
        for metric in self._metrics:
            metric.set_world(size)

    def begin_attempt(self) -> None:
        """The script is about to run again from its top."""
        self.begin_loop(None)
        self._left = None
        for sampler in self._samplers:
            sampler.begin_attempt()

    @property
    def is_in_loop(self) -> bool:
        """A loop of ``state.batches`` or ``state.evaluate`` is under way."""
        return self._loop is not None

    def is_evaluated(self, epoch: int, step: int) -> bool:
        """An evaluation has begun at this point of the training."""
        return any(sampler.place == (epoch, step) for sampler in self._samplers)

    def begin_loop(self, name: str | None) -> None:
        """What metrics count from now on belongs to this loop, by a name of its own; ``None`` for to none."""
        self._loop = name
        for metric in self._metrics:
            metric.begin_loop(name)

    @property
    def is_behind(self) -> bool:
        """This rank has counted something that the others do not know of."""
        return any(metric.pending is not None for metric in self._metrics)

    @property
    def may_have_trained(self) -> bool:
        """Some rank may have counted something in a step of the training; the same on all ranks."""
        return any(metric.trains for metric in self._metrics)

    def leave_loop(self) -> None:
        """The script has left the loop under way, perhaps to go on with it later."""
        self._left = self._loop or self._left
        self.begin_loop(None)

    def end_loop(self) -> None:
        """The loop under way is through on every rank. Collective, like :meth:`sync`."""
        self.sync()
        self.begin_loop(None)

    def end_training_loop(self) -> None:
        """The same of an epoch's batches."""
        self.sync()
        for metric in self._metrics:
            metric.end_training_loop()
        self.begin_loop(None)

    def sync(self, piggyback: int | None = None) -> int:
        """Bring together what the ranks' metrics have counted. Collective; blocks, where there is anything to do.

        Args:
            piggyback: Number of this rank that is to travel along.

        Returns:
            The sum of the ranks' numbers.
        """
        if self._group is None or (piggyback is None and not self._metrics):
            return piggyback or 0
        loop, self._left = self._loop or self._left, None
        if self._group.size == 1:
            return piggyback or 0  # metrics see to themselves
        return sync_metrics(self._metrics, self._group, loop, piggyback or 0)
