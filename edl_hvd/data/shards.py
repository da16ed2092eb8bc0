"""Samples that lie in shards, large files read from front to back, dealt out to whatever world there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy
from torch.utils.data import Dataset

from edl_hvd.data.sampler import BatchIndices, ElasticBatchSampler
from edl_hvd.data.seeded import seeded
from edl_hvd.data.shard_order import ShardOrder, lanes_for
from edl_hvd.errors import UsageError
from edl_hvd.rescale.policy import BatchPolicy

Shard = TypeVar("Shard")


class ElasticShards(Dataset[Any], Generic[Shard]):
    """A data set of shards; its :meth:`sampler` deals them so that each is read once, from front to back.

    Every rank makes one with the same arguments. Not collective; it opens no shard before samples are taken::

        shards = edl_hvd.ElasticShards(paths, counts, read=edl_hvd.TarSamples, transform=decode)
        batches = shards.sampler(global_batch=1024, micro_batch=64, seed=0)
        loader = DataLoader(shards, batch_sampler=batches, num_workers=8, persistent_workers=True)
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    The number of samples in each shard is known beforehand (see :func:`~edl_hvd.count_samples`), so a position in the
    epoch is a number, as for any other data set. Every sample counts exactly once per epoch in the steps that were
    committed, whatever dies and whatever loaders have prefetched. A worker that takes over opens the shards that its
    micro-batches lie in, and skips the samples that others have used; that costs bytes read, never samples. The order
    is original here.

    Random numbers drawn while a sample is read or transformed follow seed, epoch and sample, as in
    :class:`~edl_hvd.SeededDataset`, which is not needed around this. That holds if ``read`` does not read ahead.

    Args:
        shards: Sequence of what ``read`` takes, such as paths; equal on every worker, in the same order.
        counts: Number of samples in each shard, at least 0.
        read: Function that returns an iterable over the samples of a shard, always in the same order; or a class of
            iterables, such as an ``IterableDataset`` of your own. If its iterator has ``skip(count)``, which returns
            the number of samples skipped, samples are skipped with it; otherwise they are read and dropped. If it has
            ``close()``, that is called.
        transform: Function applied to the samples that are dealt, not to those skipped: decode here rather than in
            ``read``.
        open_shards: Number of shards that a process keeps open, at least 1. A process that reads more lanes than that
            opens shards repeatedly.

    Raises:
        UsageError: ``counts`` does not fit ``shards``, or an argument is out of range.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        counts: Sequence[int] | Any,
        *,
        read: Callable[[Shard], Iterable[Any]],
        transform: Callable[[Any], Any] | None = None,
        open_shards: int = 256,
    ) -> None:
        self.shards = list(shards)
        self.counts = _checked(counts, len(self.shards))
        if open_shards < 1:
            raise UsageError(f"open_shards={open_shards}; expected at least 1")
        self._read = read
        self._transform = transform
        self._ends = numpy.cumsum(self.counts)
        self._open_shards = open_shards
        self._open: dict[tuple[int, int], _Reader] = {}  # by shard and place; the one used last at the end
        self._opened_by = (0, -1)  # process and epoch

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sampler(
        self,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        policy: BatchPolicy | None = None,
        interleave: int = 8,
        shuffle: bool = True,
        **options: Any,
    ) -> ElasticBatchSampler:
        """The sampler for these shards.

        Args:
            global_batch: Samples per optimizer step, as for :class:`~edl_hvd.ElasticBatchSampler`.
            micro_batch: Samples per forward and backward pass, as there.
            policy: Batch policy, as there.
            interleave: Number of shards, at least 1, that successive micro-batches come from in turn. More mix better.
                With the loader's ``num_workers``, or a multiple of it, each shard is read by one of its processes. It
                is part of the order: a position saved with another value is refused. Fewer are used when there are few
                shards.
            shuffle: Whether to shuffle the shards, differently in each epoch; inside a shard samples keep their order.
            **options: Other arguments of ``ElasticBatchSampler``: ``seed``, ``drop_last``, ``limit_batches``.

        Returns:
            The sampler, for the loader's ``batch_sampler`` and for ``State``.

        Raises:
            UsageError: An argument is out of range.
        """
        if interleave < 1:
            raise UsageError(f"interleave={interleave}; expected at least 1 shard")
        plain = ElasticBatchSampler(len(self), global_batch=global_batch, micro_batch=micro_batch, policy=policy)
        order = ShardOrder(self.counts, *lanes_for(plain.policy, len(self.shards), interleave), shuffle)
        return ElasticBatchSampler(len(self), policy=plain.policy, order=order, **options)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of a micro-batch; called by the ``DataLoader``, in its processes."""
        if not isinstance(indices, BatchIndices) or not indices.order.startswith("shards-"):
            order = getattr(indices, "order", f"a {type(indices).__name__}")
            raise UsageError(
                f"ElasticShards was given indices in another order ({order}), in which each sample would open a shard; "
                "expected those of its own sampler: DataLoader(shards, batch_sampler=shards.sampler(…))"
            )
        self._enter(indices.epoch)
        return seeded(indices, self.__getitem__, self._reach)

    def __getitem__(self, index: int) -> Any:
        """One sample, by its number; costs next to nothing if it follows the one asked for last in its shard."""
        shard, reader = self._reach(index)
        del self._open[shard, reader.place]
        sample = reader.take()
        if reader.place < reader.count:
            self._keep(shard, reader)
        return sample if self._transform is None else self._transform(sample)

    def _reach(self, index: int) -> tuple[int, _Reader]:
        """The shard of a sample, and a reader of it that stands right before the sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(numpy.searchsorted(self._ends, index, side="right"))
        place = index - int(self._ends[shard] - self.counts[shard])
        reader = self._open.get((shard, place))
        if reader is None:
            # Where two lanes meet in a shard, each soon has a reader of its own.
            before = [at for of, at in self._open if of == shard and at < place]
            if before:
                reader = self._open.pop((shard, max(before)))
            else:
                reader = _Reader(self.shards[shard], int(self.counts[shard]), self._read(self.shards[shard]))
            reader.pass_over(place - reader.place)
            self._keep(shard, reader)
        return shard, reader

    def _keep(self, shard: int, reader: _Reader) -> None:
        twin = self._open.pop((shard, reader.place), None)
        if twin is None and len(self._open) >= self._open_shards:
            twin = self._open.pop(next(iter(self._open)))
        if twin is not None:
            twin.close()
        self._open[shard, reader.place] = reader

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def _enter(self, epoch: int) -> None:
        """Let go of what was opened in another epoch, or before this process was forked from the one that opened it."""
        process, _ = self._opened_by
        if self._opened_by != (os.getpid(), epoch):
            if process == os.getpid():
                for reader in self._open.values():
                    reader.close()
            self._open = {}  # a forked process must not move the files of its parent
            self._opened_by = (os.getpid(), epoch)


class _Reader:
    """A shard that is being read.

    Attributes:
        place: Of the sample that comes next, in the shard.
        count: Samples that there should be.
    """

    def __init__(self, name: Any, count: int, samples: Iterable[Any]) -> None:
        self.place = 0
        self.count = count
        self._name = name
        self._samples: Iterator[Any] = iter(samples)

    def take(self) -> Any:
        """Read the next sample; after the last one, make sure that it is."""
        try:
            sample = next(self._samples)
        except StopIteration:
            raise self._wrong(f"{self.place} samples") from None
        self.place += 1
        if self.place == self.count:
            if next(self._samples, _NOTHING) is not _NOTHING:
                raise self._wrong(f"more than {self.count} samples")
            self.close()
        return sample

    def close(self) -> None:
        close = getattr(self._samples, "close", None)
        if close is not None:
            close()

    def pass_over(self, count: int) -> None:
        skip = getattr(self._samples, "skip", None)
        passed = skip(count) if skip is not None else sum(1 for _ in zip(range(count), self._samples))  # noqa: B905
        self.place += passed
        if passed < count:
            raise self._wrong(f"{self.place} samples")

    def _wrong(self, found: str) -> UsageError:
        return UsageError(
            f"the shard {self._name!r} has {found}, and its count says {self.count}; expected as many. Count its "
            "samples again (edl_hvd.count_samples) and begin the epoch anew, because positions follow from the counts"
        )


_NOTHING = object()


def _checked(counts: Sequence[int] | Any, shards: int) -> Any:
    try:
        numbers = numpy.asarray(counts).astype(numpy.int64, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise UsageError(f"counts cannot be used ({error}); expected one whole number for each shard") from error
    if numbers.shape != (shards,):
        raise UsageError(f"there are {shards} shards and counts of shape {numbers.shape}; expected one for each shard")
    wrong = numpy.flatnonzero(numbers < 0)
    if len(wrong):
        raise UsageError(f"counts[{wrong[0]}] is {numbers[wrong[0]]}; expected at least 0 samples in each shard")
    if not numbers.sum():
        raise UsageError(f"there are no samples in {shards} shards; expected at least 1")
    return numbers
