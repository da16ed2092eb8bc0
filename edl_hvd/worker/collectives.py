"""What the members of a world can compute together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

OPERATIONS = ("sum", "max", "min")


class Collectives(Protocol):
    """Collectives of one world. Every rank makes the same calls in the same order, names aside.

    Every method raises :class:`~edl_hvd.errors.WorldBrokenError` when a member is gone.
    """

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> Any:
        """Begin replacing ``tensor`` in place by the sum over the ranks of ``scale · tensor``.

        Does not block. Calls of one step may be made in any order: ranks are matched by ``name``.

        Returns:
            A handle for :meth:`finish`.
        """

    def finish(self, handles: Sequence[Any]) -> None:
        """Block until the given sums are in place."""

    def allreduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A new tensor with the "sum", "max" or "min" over the ranks. Blocks."""

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """Fill ``tensor`` in place with that of rank ``root``. Blocks."""

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of 64-bit integers, in rank order; rows have one length. Blocks."""


class SoloCollectives:
    """The collectives of a world of one."""

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> None:
        if scale != 1.0:
            tensor.mul_(scale)

    def finish(self, handles: Sequence[Any]) -> None:
        pass

    def allreduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor.clone()

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]
