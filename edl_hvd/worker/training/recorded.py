"""What the means of a script's own numbers are, over the global batch: see ``Step.record`` and ``Step.mean``.

Values are kept by name and **row**. Where the order of the addition must not depend on the world (``exact.py``), each
micro-batch of the global batch has a row of its own; elsewhere there is one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from edl_hvd.worker.engine.collectives import Collectives

# Recorded numbers in six: multiples of 2^24, 2^12, 1, 2^-12 and 2^-24, and the rest. Each is a whole number below 2^12
# but the first and the rest, so that float32 holds sums of 4,096 of them. Up to 2^48 the error is below 2^-47.
_HIGH, _MIDDLE, _LARGEST = 2.0**24, 2.0**12, 2.0**48
_PARTS = 6
_NOTHING = (0.0,) * (2 * _PARTS)  # of one name and row: the total and the weight


class Recorded(NamedTuple):
    """What a rank has recorded by one name: the sum of weight times value, and of the weights."""

    total: float = 0.0
    weight: float = 0.0


class RecordedValues:
    """The values that this rank has recorded since the last round, and the means of that round.

    Attributes:
        means: Means over the world of all that was recorded, by name, of the last round.
    """

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self._own: dict[str, dict[int, Recorded]] = {}
        self._unread: list[tuple[torch.Tensor, dict[int, Recorded], int, float]] = []  # as well, still on the device
        self._known_names: list[str] = []  # the same on every rank

    def begin_step(self) -> None:
        """A global batch begins."""
        self.means = {}

    def forget(self) -> None:
        """Drop what was recorded since the last round."""
        self._own.clear()
        self._unread.clear()

    def forget_names(self) -> None:
        """The next world is another one: its ranks know other names."""
        self._known_names.clear()

    def add(self, name: str, value: float | torch.Tensor, weight: float, row: int) -> None:
        """Add a value of the present micro-batch.

        Args:
            name: Name of the value.
            value: Number, or tensor of one element on any device.
            weight: Weight of the micro-batch.
            row: Row that the value is added to.
        """
        rows = self._own.setdefault(name, {})
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            # Read when the round is made: every read waits for the device.
            self._unread.append((value.detach().reshape(()).double(), rows, row, weight))
        else:
            _add(rows, row, float(value), weight)

    def _read(self) -> None:
        """Take in the values that are still on a device. Waits for it once."""
        if not self._unread:
            return
        values = torch.stack([value for value, *_ in self._unread]).tolist()
        for value, (_, rows, row, weight) in zip(values, self._unread, strict=True):
            _add(rows, row, value, weight)
        self._unread.clear()

    @property
    def is_unnamed(self) -> bool:
        """Whether a value was recorded by a name that the other ranks do not know."""
        return not self._own.keys() <= set(self._known_names)

    def numbers(self, rows: int) -> list[float]:
        """The values as they travel, by the names that all ranks know. Waits for the device of those that are on one.

        Args:
            rows: Number of rows of each name.
        """
        self._read()
        found: list[float] = []
        for name in self._known_names:
            own = self._own.get(name, {})
            for row in range(rows):
                if row in own:
                    found += (*_parts(own[row].total), *_parts(own[row].weight))
                else:
                    found += _NOTHING
        return found

    def take(self, sums: Sequence[float], rows: int) -> None:
        """Make means of the sums over the ranks of what :meth:`numbers` returned, and begin anew.

        Args:
            sums: Sums over the ranks.
            rows: Number of rows of each name.
        """
        width = len(_NOTHING) * rows
        for place, name in enumerate(self._known_names):
            own = sums[place * width : (place + 1) * width]
            numbers = [_number(own[i : i + _PARTS]) for i in range(0, width, _PARTS)]
            weight = math.fsum(numbers[1::2])
            if weight > 0:
                self.means[name] = math.fsum(numbers[::2]) / weight
            else:  # as torch has it for a mean of nothing, and as where all labels are to be ignored
                self.means.setdefault(name, math.nan)
        self._own.clear()

    def take_alone(self, rows: int) -> None:
        """Make means of what this rank has recorded, in a world of one.

        Args:
            rows: Number of rows of each name.
        """
        if self._own:
            self._known_names = sorted({*self._known_names, *self._own})
            # As a message would have them: the same numbers as in any other world.
            self.take(torch.tensor(self.numbers(rows), dtype=torch.float32).tolist(), rows)

    def sums_by_new_names(self, rows: int, collectives: Collectives) -> list[float]:
        """Have all ranks know all names, and sum the values by them. Collective, once for each new name; blocks.

        Args:
            rows: Number of rows of each name.
            collectives: Collectives of the world.
        """
        own = "".join(f"{name}\n" for name in self._own).encode()
        text = collectives.result(
            collectives.start_gather(torch.tensor(list(own), dtype=torch.uint8), "edl_hvd.recorded_names")
        )
        names = bytes(text.tolist()).decode().split("\n")[:-1]
        self._known_names = sorted({*self._known_names, *names})
        values = torch.tensor(self.numbers(rows), dtype=torch.float32)
        collectives.finish([collectives.start_sum(values, "edl_hvd.recorded", 1.0)])
        found: list[float] = values.tolist()
        return found


def _add(rows: dict[int, Recorded], row: int, value: float, weight: float) -> None:
    before = rows.get(row, Recorded())
    rows[row] = Recorded(before.total + weight * value if weight else before.total, before.weight + weight)


def _parts(number: float) -> tuple[float, ...]:
    """A number such that float32 holds it, and sums of its like, to the last digit of a float64."""
    if not abs(number) < _LARGEST:  # also of NaN
        return (number / _HIGH, 0.0, 0.0, 0.0, 0.0, 0.0)
    fraction, whole = math.modf(abs(number))
    high, rest = divmod(whole, _HIGH)
    middle, low = divmod(rest, _MIDDLE)
    upper, rest = divmod(fraction * _MIDDLE, 1.0)
    lower, rest = divmod(rest * _MIDDLE, 1.0)
    sign = math.copysign(1.0, number)
    return (sign * high, sign * middle, sign * low, sign * upper, sign * lower, sign * rest)


def _number(parts: Sequence[float]) -> float:
    high, middle, low, upper, lower, rest = parts
    return math.fsum((high * _HIGH, middle * _MIDDLE, low, upper / _MIDDLE, lower / _HIGH, rest / _HIGH))
