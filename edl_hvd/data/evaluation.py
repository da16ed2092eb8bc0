"""A batch sampler for evaluations: every sample once, in order, whoever is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from edl_hvd.errors import StateError, UsageError
from edl_hvd.rescale.partition import Slice, partition


@dataclass(frozen=True)
class Round:
    """One batch for each rank, or none for some at the end.

    Attributes:
        end: Position after it.
        share: This rank's batches as ranges of sample indices; one or none.
    """

    end: int
    share: tuple[Slice, ...]


class EvaluationSampler(Sampler[list[int]]):
    """Batch sampler that yields this worker's batches of a validation set; a ``DataLoader``'s ``batch_sampler``.

    Samples come in index order, in batches cut at multiples of ``batch_size`` (after a saved position of another batch
    size: from there on). Each batch is dealt to one worker, none is padded, and every sample comes once. Every rank
    makes one with the same arguments, gives it to ``State`` and to the loader, and iterates through ``State.evaluate``.
    Nothing of it is collective or blocks.

    Seven samples in batches of two, on two workers; the last batch has one sample:

    >>> sampler = EvaluationSampler(7, batch_size=2)
    >>> sampler.set_world(rank=0, size=2)
    >>> list(sampler)
    [[0, 1], [4, 5]]
    >>> sampler.set_world(rank=1, size=2)
    >>> list(sampler)
    [[2, 3], [6]]

    Args:
        length: Number of samples in the data set, at least 1.
        batch_size: Samples per forward pass on one worker, at least 1; the last batch may be smaller.

    Raises:
        UsageError: An argument is out of range.

    Attributes:
        place: Epoch and optimizer step at which it was used last.
        finished: Number of evaluations finished there.
        offset: Number of samples counted of the evaluation under way.
    """

    def __init__(self, length: int, batch_size: int) -> None:
        for name, value in (("length", length), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"EvaluationSampler got {name}={value!r}; expected a whole number of at least 1")
        self.length = length
        self.batch_size = batch_size
        self.place = (-1, -1)
        self.finished = 0
        self.offset = 0
        self.rank, self._size = 0, 1
        self._calls = 0  # at this place, since the script was last run from its top

    def set_world(self, rank: int, size: int) -> None:
        """Deal to one rank of a world from the next iteration on. Called by ``State`` after every join.

        Args:
            rank: Rank to deal to, in [0, size).
            size: Number of workers, at least 1.
        """
        self.rank, self._size = rank, size

    def begin_attempt(self) -> None:
        """Note that the training function runs again from its top. Called by ``State``."""
        self._calls = 0

    def begin(self, epoch: int, step: int) -> int | None:
        """Begin an evaluation, or go on with it. Called by ``State``.

        Args:
            epoch: Epoch of the training, at least 0.
            step: Optimizer step of the training, at least 0, whose model is evaluated.

        Returns:
            Its number at this place, from 0; ``None`` if it was finished before the script was run again.
        """
        if self.place != (epoch, step):
            self.place, self.finished, self.offset, self._calls = (epoch, step), 0, 0, 0
        self._calls += 1
        return None if self._calls <= self.finished else self.finished

    def finish(self) -> None:
        """Note that every sample is counted. Called by ``State``."""
        self.finished += 1
        self.offset = 0

    def rounds(self) -> Iterator[Round]:
        """The rounds left from the present position on, for the present world; equally many on every rank."""
        rank, size, offset = self.rank, self._size, self.offset
        while offset < self.length:
            samples = min(size * self.batch_size, self.length - offset)
            share = partition(samples, rank, size, self.batch_size)
            yield Round(offset + samples, tuple((offset + first, offset + last) for first, last in share))
            offset += samples

    def __iter__(self) -> Iterator[list[int]]:
        for round_ in self.rounds():
            for first, last in round_.share:
                yield list(range(first, last))

    def __len__(self) -> int:
        """The number of batches that this worker has left."""
        return sum(len(round_.share) for round_ in self.rounds())

    def state_dict(self) -> dict[str, Any]:
        """The position in the evaluation, with the length of the data set."""
        return {"length": self.length, "place": list(self.place), "finished": self.finished, "offset": self.offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            StateError: The position was taken in a data set of another length.
        """
        if state["length"] != self.length:
            raise StateError(
                f"the saved evaluation is of {state['length']} samples, this sampler has {self.length}; go on with the "
                "same validation set"
            )
        epoch, step = state["place"]
        self.place, self.finished, self.offset = (epoch, step), state["finished"], state["offset"]
