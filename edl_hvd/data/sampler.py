"""A batch sampler whose order of samples does not depend on the world that consumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from edl_hvd.data.randomness import seed_of
from edl_hvd.errors import StateError, UsageError
from edl_hvd.rescale.deal import Slice, deal
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


class ElasticBatchSampler(Sampler[list[int]]):
    """Yields this worker's micro-batches; give it to a ``DataLoader`` as ``batch_sampler``.

    The order of an epoch is one permutation of the data set, fixed by seed and epoch. A position in
    it, ``(epoch, offset)``, says what is consumed; it moves when ``State.batches`` has seen an
    optimizer step through, not when a loader prefetches. Any world can go on from any position.

    Args:
        length: Samples in the data set, at least 1.
        global_batch: Samples per optimizer step over the whole world; short for
            ``policy=GlobalBatch(global_batch, micro_batch)``.
        micro_batch: Samples per forward and backward pass on one worker.
        policy: A batch policy, instead of ``global_batch`` and ``micro_batch``.
        seed: Fixes every epoch's order.
        shuffle: ``False`` takes the samples in index order.
        drop_last: Leave out the last global batch of an epoch when it is not full.
        limit_batches: End every epoch after this many global batches; for trial runs.

    Raises:
        UsageError: An argument is out of range, or none or both of the two forms of policy are given.
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
        drop_last: bool = False,
        limit_batches: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"the data set has {length} samples; expected at least 1")
        if (global_batch is None) == (policy is None) or (policy is not None and micro_batch is not None):
            raise UsageError(
                "batch size is not clear; expected either global_batch=… (and, if wanted, micro_batch=…) "
                "or policy=GlobalBatch(…) / WorkerBatch(…)"
            )
        if limit_batches is not None and limit_batches < 1:
            raise UsageError(f"limit_batches is {limit_batches}; expected at least 1, or None for whole epochs")
        self.policy = policy if policy is not None else GlobalBatch(global_batch or 0, micro_batch)
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.limit_batches = limit_batches
        self.epoch = 0
        self.offset = 0
        self._rank, self._size = 0, 1
        self._order: tuple[int, torch.Tensor] | None = None

    def set_world(self, rank: int, size: int) -> None:
        """Deal to ``rank`` of ``size`` from the next iteration on. Called by ``State`` after every join."""
        self._rank, self._size = rank, size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is already inside it."""
        if epoch != self.epoch:
            self.epoch, self.offset = epoch, 0

    def advance(self, step: GlobalStep) -> None:
        """Count a step's samples as consumed."""
        self.offset = step.offset + step.samples

    def global_batch(self, size: int) -> int:
        """Samples per optimizer step in a world of ``size`` workers."""
        return self.policy.global_batch(size)

    def epoch_samples(self) -> int:
        """Samples that this epoch consumes if the world stays, after ``drop_last`` and ``limit_batches``."""
        batch = self.global_batch(self._size)
        samples = self.length
        if self.limit_batches is not None:
            samples = min(samples, self.limit_batches * batch)
        if self.drop_last:
            samples -= (samples - self.offset) % batch
        return samples

    def steps(self) -> Iterator[GlobalStep]:
        """The optimizer steps left in this epoch, from the present position on, for the present world."""
        rank, size, offset = self._rank, self._size, self.offset
        batch = self.global_batch(size)
        end = self.epoch_samples()
        while offset < end:
            samples = min(batch, end - offset)
            yield GlobalStep(offset, samples, deal(samples, rank, size, self.policy.micro_batch))
            offset += samples

    def __iter__(self) -> Iterator[list[int]]:
        order = self._epoch_order()
        for step in self.steps():
            for first, last in step.share:
                yield order[step.offset + first : step.offset + last].tolist()

    def __len__(self) -> int:
        """Micro-batches this worker has left in this epoch."""
        return sum(len(step.share) for step in self.steps())

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "offset": self.offset, "seed": self.seed, "length": self.length}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position.

        Raises:
            StateError: The position was taken in another data set or another order of samples.
        """
        if (state["seed"], state["length"]) != (self.seed, self.length):
            raise StateError(
                f"the saved position belongs to {state['length']} samples in the order of seed {state['seed']}, "
                f"this sampler has {self.length} samples and seed {self.seed}; go on with the same data set and "
                "seed, or leave `batches` out of what is restored to start its epoch anew"
            )
        self.epoch, self.offset = state["epoch"], state["offset"]

    def _epoch_order(self) -> torch.Tensor:
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
            order = torch.randperm(self.length, generator=generator) if self.shuffle else torch.arange(self.length)
            self._order = (self.epoch, order)
        return self._order[1]
