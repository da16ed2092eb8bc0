"""A batch sampler whose order of samples does not depend on the world that consumes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from edl_hvd.data.order import IndexOrder, Order, ShuffledOrder
from edl_hvd.errors import EdlHvdWarning, StateError, UsageError
from edl_hvd.rescale.partition import Slice, partition
from edl_hvd.rescale.policy import BatchPolicy, GlobalBatch


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step: which samples of the epoch's order it takes and which of them are ours.

    Attributes:
        offset: Position of its first sample in the epoch's order.
        samples: Samples in the whole global batch, at least 1.
        share: This rank's micro-batches, as sample ranges relative to ``offset``; may be empty.
    """

    offset: int
    samples: int
    share: tuple[Slice, ...]


class StepsUnknownError(UsageError, TypeError):
    """How many steps an epoch has depends on the world; also a ``TypeError``, as of anything without a length."""


class BatchIndices(list[int]):
    """The indices of a micro-batch, which also say whose they are; this travels with them to a loader's process.

    Attributes:
        seed: Of the sampler.
        epoch: They belong to.
        position: In the epoch's order, of the first of them.
        order: Its name.
        repeats: A sample may come more than once in an epoch.
    """

    def __init__(self, indices: list[int], seed: int, epoch: int, position: int, order: Order) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.position = position
        self.order = order.name
        self.repeats = order.repeats


@dataclass(frozen=True)
class DealtBatch:
    """A micro-batch, known by where it stands; its indices are computed when they are asked for.

    Attributes:
        seed: Of the sampler.
        epoch: It belongs to.
        position: In the epoch's order, of its first sample.
        samples: Number of samples, at least 1.
        order: Order of the epoch.
    """

    seed: int
    epoch: int
    position: int
    samples: int
    order: Order

    def indices(self) -> BatchIndices:
        """The indices, as the sampler yields them."""
        indices = self.order.samples(self.seed, self.epoch, self.position, self.position + self.samples)
        return BatchIndices(indices, self.seed, self.epoch, self.position, self.order)


class ElasticBatchSampler(Sampler[list[int]]):
    """Batch sampler that yields this worker's micro-batches; give it to a ``DataLoader`` as ``batch_sampler``.

    The order of an epoch is one permutation of the data set, fixed by seed and epoch, and computed where it is needed:
    it takes no memory, and any place in it is reached at once. A position in it, ``(epoch, offset)``, tells which
    samples are consumed. It moves when ``State`` has counted an optimizer step, not when a loader prefetches. Any world
    can go on from any position. The scheme is original here; the permutation is a Feistel cipher (Black and Rogaway
    2002, section 5).

    Every rank makes one with the same arguments, and gives it to ``State`` and to the loader. Nothing of it is
    collective or blocks.

    With N samples and a global batch of G, an epoch has ceil(N / G) steps. The last one has the remaining N mod G
    samples, or G if nothing remains. Its gradient is the mean over n samples, so each of them weighs as much as G / n
    samples of another step. With ``drop_last=True`` an epoch has floor(N / G) steps, all of them full: N mod G samples
    do not occur in it, and other ones in the next epoch, whose order differs. (With ``WorkerBatch``, G is that of the
    world which comes to the end of the epoch.)

    Ten samples in steps of four, on two workers, in index order:

    >>> sampler = ElasticBatchSampler(10, global_batch=4, micro_batch=2, shuffle=False)
    >>> sampler.set_world(rank=0, size=2)
    >>> list(sampler)
    [[0, 1], [4, 5]]
    >>> sampler.set_world(rank=1, size=2)
    >>> list(sampler), len(sampler)
    ([[2, 3], [6, 7], [8, 9]], 3)

    Attributes:
        is_watched: Whether an elastic function is running, and this sampler is part of its state.
        is_bypassed: Whether a loader was iterated there, but not through ``State``, so that no sample was counted.
        was_watched: Whether an elastic function has been running with it, so that it deals for a world.
        has_stepped: Whether an optimizer has stepped outside of the loops of ``State`` since a loader was iterated.
        committed: Epoch and offset at the last commit of the ``State``; (0, 0) before the first.

    Args:
        length: Number of samples in the data set, at least 1.
        global_batch: Samples per optimizer step over the whole world, at least 1; short for
            ``policy=GlobalBatch(global_batch, micro_batch)``.
        micro_batch: Samples per forward and backward pass on one worker, a divisor of ``global_batch``. Left out, a
            step is split evenly over the workers.
        policy: Batch policy, instead of ``global_batch`` and ``micro_batch``.
        seed: Integer that fixes every epoch's order, and the random numbers of :class:`~edl_hvd.SeededDataset`.
        shuffle: Whether to shuffle; ``False`` takes the samples in index order.
        order: Another order: ``WeightedOrder``, ``GroupedOrder``, that of ``ElasticShards``, or one of your own.
        drop_last: Whether to leave out the last global batch of an epoch when it is not full.
        limit_batches: Number of global batches after which every epoch ends, at least 1; for trial runs.

    Raises:
        UsageError: An argument is out of range, contradicts another, or leaves nothing to train on.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        policy: BatchPolicy | None = None,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        drop_last: bool = False,
        limit_batches: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"the data set has {length} samples; expected at least 1")
        if limit_batches is not None and limit_batches < 1:
            raise UsageError(f"limit_batches is {limit_batches}; expected at least 1, or None for whole epochs")
        self.policy = _policy_of(global_batch, micro_batch, policy)
        self.order = _order_of(length, shuffle, order)
        self.order.check(self.policy)
        if drop_last and self.order.positions < self.policy.global_batch(1):
            raise UsageError(
                f"drop_last leaves nothing of {self.order.positions} samples in batches of "
                f"{self.policy.global_batch(1)}; expected a smaller batch, or drop_last=False"
            )
        self.length = length
        self.seed = seed
        self.drop_last = drop_last
        self.limit_batches = limit_batches
        self.epoch = 0
        self.offset = 0
        self._rank, self._size = 0, 1
        self._repeated = 0
        self.is_watched = False
        self.is_bypassed = False
        self.was_watched = False
        self.has_stepped = False
        self._has_told = False
        self.committed = (0, 0)
        self._is_dealing = False

    @property
    def positions(self) -> int:
        """The number of samples in a whole epoch, before ``drop_last`` and ``limit_batches``; mostly ``length``."""
        return self.order.positions

    def set_world(self, rank: int, size: int) -> None:
        """Deal to one rank of a world from the next iteration on. Called by ``State`` after every join.

        Args:
            rank: Rank to deal to, in [0, size).
            size: Number of workers, at least 1.
        """
        self._rank, self._size = rank, size

    def repeat(self, samples: int) -> None:
        """Fix the size of the next step, for a step that optimizers have already made in a world of another size.

        Called by ``State`` after every join.

        Args:
            samples: Number of samples of the next step, instead of what the policy says; 0 for what it says.
        """
        self._repeated = samples

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is already inside it. Called by ``State``.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if epoch != self.epoch:
            self.epoch, self.offset = epoch, 0

    def advance(self, step: GlobalStep) -> None:
        """Count a step's samples as consumed. Called by ``State``.

        Args:
            step: Item of :meth:`steps`.
        """
        self.offset = step.offset + step.samples
        self._repeated = 0

    def note_commit(self) -> None:
        """Note that what was consumed up to the present position is committed. Called by ``State``."""
        self.committed = (self.epoch, self.offset)

    def global_batch(self, size: int) -> int:
        """The number of samples per optimizer step in a world of ``size`` workers.

        Args:
            size: Number of workers, at least 1.
        """
        return self.policy.global_batch(size)

    def epoch_samples(self) -> int:
        """The number of samples of this epoch if the world stays, after ``drop_last`` and ``limit_batches``."""
        batch = self.global_batch(self._size)
        samples = self.positions
        if self.limit_batches is not None:
            samples = min(samples, self.limit_batches * batch)
        if self.drop_last:
            samples -= (samples - self.offset - self._repeated) % batch
        return samples

    def steps(self) -> Iterator[GlobalStep]:
        """The optimizer steps left in this epoch, from the present position on, for the present world."""
        rank, size, offset = self._rank, self._size, self.offset
        batch = self.global_batch(size)
        end = self.epoch_samples()
        wanted = self._repeated or batch
        while offset < end:
            samples = min(wanted, end - offset)
            yield GlobalStep(offset, samples, partition(samples, rank, size, self.policy.micro_batch))
            offset, wanted = offset + samples, batch

    @contextmanager
    def dealing(self) -> Iterator[None]:
        """A context in which ``State`` begins to iterate over the loader."""
        self._is_dealing = True
        try:
            yield
        finally:
            self._is_dealing = False

    def __iter__(self) -> Iterator[list[int]]:
        if not self.was_watched or self._is_dealing:
            return self._indices()
        self.is_bypassed = self.is_bypassed or self.is_watched
        return self._passed_over()

    def _passed_over(self) -> Iterator[list[int]]:
        """The same for a pass that ``State`` does not know of; says at its end, once, what it has not seen.

        A pass in which an optimizer steps is a loop of the script's own, which commits or is told that it does not.
        """
        self.has_stepped = False
        epoch, whole, seen = self.epoch, self.epoch_samples(), 0
        for indices in self._indices():
            seen += len(indices)
            yield indices
        if seen < whole and not self.has_stepped and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"a pass over the loader outside of state.steps() and state.batches() saw {seen} of {whole} samples, "
                f"this worker's share of what was left of epoch {epoch}; for evaluation, update_bn() or statistics "
                "make a loader of its own over the data set: DataLoader(dataset, batch_size=…)",
                EdlHvdWarning,
                stacklevel=2,
            )

    def _indices(self) -> Iterator[list[int]]:
        order, seed, epoch = self.order, self.seed, self.epoch
        for step in self.steps():
            if not step.share:
                continue
            begin, end = step.offset + step.share[0][0], step.offset + step.share[-1][1]
            share = order.samples(seed, epoch, begin, end)
            for first, last in step.share:
                position = step.offset + first
                indices = share[position - begin : step.offset + last - begin]
                yield BatchIndices(indices, seed, epoch, position, order)

    def dealt(self) -> Iterator[DealtBatch]:
        """The micro-batches that iterating yields from the present position on, without computing their indices.

        For ``DistillLoader``, which names a micro-batch by its place. Not collective.
        """
        order, seed, epoch = self.order, self.seed, self.epoch
        for step in self.steps():
            for first, last in step.share:
                yield DealtBatch(seed, epoch, step.offset + first, last - first, order)

    def __len__(self) -> int:
        """The number of optimizer steps of a whole epoch, the same in every world; ``len(loader)`` is that, too.

        Raises:
            UsageError: It depends on the world (``WorkerBatch``).
        """
        return self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of a whole epoch, the same in every world.

        Raises:
            UsageError: It depends on the world (``WorkerBatch``).
        """
        batch = self.policy.global_batch(1)
        if batch != self.policy.global_batch(2):
            raise StepsUnknownError(
                f"the number of steps in an epoch depends on the number of workers with {type(self.policy).__name__}; "
                "have schedules count samples or epochs: edl_hvd.schedule(scheduler, every='1000 samples')"
            )
        steps = self.positions // batch if self.drop_last else -(-self.positions // batch)
        return steps if self.limit_batches is None else min(steps, self.limit_batches)

    def state_dict(self) -> dict[str, Any]:
        """The position, with what tells whether it fits another sampler: seed, length and name of the order."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "length": self.length,
            "order": self.order.name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            StateError: The position was taken in another data set or another order of samples.
        """
        if (state["seed"], state["length"]) != (self.seed, self.length):
            raise StateError(
                f"the saved position belongs to {state['length']} samples in the order of seed {state['seed']}, "
                f"this sampler has {self.length} samples and seed {self.seed}; go on with the same data set and "
                "seed, or leave `batches` out of what is restored to start its epoch anew"
            )
        # Before orders had names they were torch.randperm's. At the start of an epoch it makes no difference.
        saved = state.get("order", "torch.randperm")
        if saved != self.order.name and state["offset"]:
            raise StateError(
                f"the saved position, {state['offset']} samples into epoch {state['epoch']}, belongs to the order "
                f"{saved!r}, this sampler has {self.order.name!r}; go on with the order (or the version of "
                "edl_hvd) that it was saved with to the end of that epoch, or leave `batches` out of what is restored"
            )
        self.epoch, self.offset = state["epoch"], state["offset"]


def _policy_of(global_batch: int | None, micro_batch: int | None, policy: BatchPolicy | None) -> BatchPolicy:
    if (global_batch is None) == (policy is None) or (policy is not None and micro_batch is not None):
        raise UsageError(
            "batch size is not clear; expected either global_batch=… (and, if wanted, micro_batch=…) "
            "or policy=GlobalBatch(…) / WorkerBatch(…)"
        )
    return policy if policy is not None else GlobalBatch(global_batch or 0, micro_batch)


def _order_of(length: int, shuffle: bool, order: Order | None) -> Order:
    if order is None:
        return ShuffledOrder(length) if shuffle else IndexOrder(length)
    if not shuffle:
        raise UsageError(f"shuffle=False and order={order.name!r} contradict each other; expected one of them")
    if order.length != length:
        raise UsageError(f"the order is one of {order.length} samples, and the data set has {length}; expected as many")
    return order
