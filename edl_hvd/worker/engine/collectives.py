"""What the members of a world can compute together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


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

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> Any:
        """Begin to give each rank its part of a flat tensor, ``sizes[rank]`` elements, and to get one from each.

        As :meth:`start_sum`. The result is what came, in rank order, one after the other.

        Returns:
            A handle for :meth:`result`.
        """

    def start_gather(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to lay the ranks' flat tensors, which may differ in length, one after the other. As above."""

    def result(self, handle: Any) -> torch.Tensor:
        """What has come of an exchange or a gathering, in memory of its own. Blocks."""

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        """A new tensor with the "sum", "max" or "min" over the ranks, matched by ``name``, if given. Blocks."""

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        """Fill ``tensor`` in place with that of rank ``root``. As above."""

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        """Every rank's row of 64-bit integers, in rank order; rows have one length. As above."""


class SoloCollectives:
    """The collectives of a world of one."""

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> None:
        if scale != 1.0:
            tensor.mul_(scale)

    def finish(self, handles: Sequence[Any]) -> None:
        pass

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
        return tensor.clone()

    def start_gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.clone()

    def result(self, handle: torch.Tensor) -> torch.Tensor:
        return handle

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        return tensor.clone()

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        pass

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        return [list(row)]
