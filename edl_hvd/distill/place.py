"""What a micro-batch is, wherever and whenever it is read: its place in an epoch's order."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Place:
    """The place of a micro-batch. Its inputs, and so a teacher's answer, are a pure function of it.

    Attributes:
        seed: Seed of the sampler.
        epoch: Number of the epoch.
        position: Position of the first sample in the epoch's order.
        samples: Number of samples, at least 1.
        order: Name of the order; empty if the batch sampler is none of this package.
    """

    seed: int
    epoch: int
    position: int
    samples: int
    order: str = ""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, positions {self.position} to {self.position + self.samples - 1}"


def is_beyond(place: Place, other: Place) -> bool:
    """Whether a pass that has come to ``place`` will not come to ``other`` any more.

    >>> is_beyond(Place(0, 1, 8, 4), Place(0, 1, 4, 4)), is_beyond(Place(0, 1, 8, 4), Place(0, 1, 12, 4))
    (True, False)
    """
    is_same = (place.seed, place.epoch, place.order) == (other.seed, other.epoch, other.order)
    return not is_same or other.position <= place.position


def show_indices(indices: tuple[int, ...]) -> str:
    """Indices of samples as a message shows them.

    >>> show_indices((4, 2)), show_indices(())
    ('samples 4, 2', 'whose indices the batch sampler does not tell')
    """
    if not indices:
        return "whose indices the batch sampler does not tell"
    shown = ", ".join(str(index) for index in indices[:_MOST_SHOWN])
    return f"samples {shown}" + (f" and {len(indices) - _MOST_SHOWN} more" if len(indices) > _MOST_SHOWN else "")
