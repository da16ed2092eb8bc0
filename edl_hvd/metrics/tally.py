"""What a metric has counted: numbers that come together over updates and over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Layout:
    """What a tally of one kind of metric is made of.

    Attributes:
        sums: Integers that are added up.
        largest: Numbers of which the largest counts.
        row_bytes: Bytes of each sample's row, where all samples are kept.
    """

    sums: int = 0
    largest: int = 0
    row_bytes: int = 0


@dataclass
class Tally:
    """Counts of one rank, or of the world.

    Attributes:
        sums: int64, shape [layout.sums].
        largest: float64, shape [layout.largest]; -infinity before any.
        rows: Samples, each uint8 of shape [n, layout.row_bytes]; their order means nothing.
        summands: Number of values in sums that have to be carried (``exact_sum``), since they were; else 0.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)
    summands: int = 0

    @classmethod
    def empty(cls, layout: Layout, device: torch.device | str = "cpu") -> Tally:
        sums = torch.zeros(layout.sums, dtype=torch.int64, device=device)
        return cls(sums, torch.full((layout.largest,), -torch.inf, dtype=torch.float64, device=device))

    def add(self, other: Tally) -> None:
        """Take in another tally of the same layout, on the same device."""
        self.sums += other.sums
        self.largest = torch.maximum(self.largest, other.largest)  # a NaN stays
        self.rows += other.rows
        self.summands += other.summands

    def plus(self, other: Tally) -> Tally:
        """Both together; neither is touched."""
        return Tally(self.sums + other.sums, torch.maximum(self.largest, other.largest), [*self.rows, *other.rows])

    def to(self, device: torch.device | str) -> Tally:
        rows = [rows.to(device) for rows in self.rows]
        return Tally(self.sums.to(device), self.largest.to(device), rows, self.summands)

    def row_count(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def all_rows(self, layout: Layout) -> torch.Tensor:
        """uint8, shape [n, layout.row_bytes]; joined once and kept so."""
        if len(self.rows) != 1:
            self.rows = [torch.cat([torch.empty((0, layout.row_bytes), dtype=torch.uint8), *self.rows])]
        return self.rows[0]


def in_bytes(columns: Iterable[torch.Tensor]) -> torch.Tensor:
    """Rows of bytes from columns: each of shape [n], on one device; uint8, shape [n, bytes of all]."""
    return torch.cat([_dense(column).view(torch.uint8).view(len(column), -1) for column in columns], dim=1)


def of_bytes(rows: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    """The column of rows of bytes that begins at byte ``first``; shape [n]."""
    return _dense(rows[:, first : first + dtype.itemsize]).view(dtype).view(-1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape. A tensor of one element counts as contiguous, whatever its strides."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
