"""A batch sampler for evaluations: every sample once, in order, whoever is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from edl_hvd.errors import StateError, UsageError
from edl_hvd.rescale.deal import Slice, deal


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
    """Yields this worker's batches of a validation set; give it to a ``DataLoader`` as ``batch_sampler``.

    Samples come in index order, in batches cut at multiples of ``batch_size`` (after a saved position of another batch
    size: from there on). Each batch is dealt to one worker, none is padded. See ``State.evaluate``.

    Args:
        length: Samples in the data set, at least 1.
        batch_size: Samples per forward pass on one worker, at least 1; the last batch may be smaller.

    Raises:
        UsageError: An argument is out of range.

    Attributes:
        place: Epoch and optimizer step at which it was used last.
        finished: Evaluations finished there.
        offset: Samples counted of the one under way.
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
        """Deal to ``rank`` of ``size`` from the next iteration on. Called by ``State`` after every join."""
        self.rank, self._size = rank, size

    def begin_life(self) -> None:
        """The script is run again from its top."""
        self._calls = 0

    def begin(self, epoch: int, step: int) -> int | None:
        """Begin an evaluation, or go on with it.

        Args:
            epoch: Of the training.
            step: Of the training; what is evaluated is its model there.

        Returns:
            Its number at this place, from 0; ``None`` if it was finished before the script was run again.
        """
        if self.place != (epoch, step):
            self.place, self.finished, self.offset, self._calls = (epoch, step), 0, 0, 0
        self._calls += 1
        return None if self._calls <= self.finished else self.finished

    def finish(self) -> None:
        """Every sample is counted."""
        self.finished += 1
        self.offset = 0

    def rounds(self) -> Iterator[Round]:
        """What is left, from the present position on, for the present world; as many on every rank."""
        rank, size, offset = self.rank, self._size, self.offset
        while offset < self.length:
            samples = min(size * self.batch_size, self.length - offset)
            share = deal(samples, rank, size, self.batch_size)
            yield Round(offset + samples, tuple((offset + first, offset + last) for first, last in share))
            offset += samples

    def __iter__(self) -> Iterator[list[int]]:
        for round_ in self.rounds():
            for first, last in round_.share:
                yield list(range(first, last))

    def __len__(self) -> int:
        """Batches this worker has left."""
        return sum(len(round_.share) for round_ in self.rounds())

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "place": list(self.place), "finished": self.finished, "offset": self.offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            StateError: It was taken in a data set of another length.
        """
        if state["length"] != self.length:
            raise StateError(
                f"the saved evaluation is of {state['length']} samples, this sampler has {self.length}; go on with the "
                "same validation set"
            )
        epoch, step = state["place"]
        self.place, self.finished, self.offset = (epoch, step), state["finished"], state["offset"]
