"""All members of a world wait, and none gets what it waits for: each is asked what that is, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edl_hvd.deadlock import Waiting
from edl_hvd.protocol import Waits


@dataclass(frozen=True)
class WaitPlace:
    """Where a worker waits: the calls that it has come through, and the collective that it waits for."""

    waits: int
    collective: str


@dataclass(frozen=True)
class Standstill:
    """What the members said.

    Attributes:
        generation: Of the world.
        step: Of the training.
        places: Where each worker waits, in rank order.
        incarnations: By worker, which of its processes said so.
        duration_s: For how long this is so.
    """

    generation: int
    step: int
    places: Mapping[str, WaitPlace]
    incarnations: Mapping[str, int]
    duration_s: float

    @property
    def collectives(self) -> list[str]:
        """All that are waited for."""
        return sorted({place.collective for place in self.places.values()})

    def is_still(self, other: Standstill) -> bool:
        """Nobody has moved from this one to the other."""
        return (self.generation, self.places, self.incarnations) == (other.generation, other.places, other.incarnations)


class Inquiry:
    """Into one standstill.

    Args:
        standstill: Which.
        asked_s: When its members were asked.
    """

    def __init__(self, standstill: Standstill, asked_s: float) -> None:
        self.standstill = standstill
        self.asked_s = asked_s
        self._answers: dict[str, Waits] = {}

    def take(self, worker: str, incarnation: int, answer: Waits) -> None:
        """A worker has answered. What it says of another place than it was asked for does not count."""
        still = self.standstill
        if (
            answer.generation == still.generation
            and still.incarnations.get(worker) == incarnation
            and still.places[worker] == WaitPlace(answer.waits, answer.collective)
            and len(answer.started) == len(still.collectives)
        ):
            self._answers[worker] = answer

    @property
    def is_complete(self) -> bool:
        return self._answers.keys() == self.standstill.places.keys()

    @property
    def waiting(self) -> list[Waiting]:
        """Where each of them waits, once all have answered."""
        return [
            Waiting(rank, worker, place.collective,
                    dict(zip(self.standstill.collectives, answer.started, strict=True)), answer.place)
            for rank, (worker, place) in enumerate(self.standstill.places.items())
            for answer in (self._answers[worker],)
        ]  # fmt: skip

    @property
    def stacks(self) -> str:
        """The stack of each, for people; several lines."""
        parts = [f"rank {rank} ({worker}), innermost frame first:\n{self._answers[worker].stack}"
                 for rank, worker in enumerate(self.standstill.places)]  # fmt: skip
        return "\n".join(["where each worker waits:", *parts])
