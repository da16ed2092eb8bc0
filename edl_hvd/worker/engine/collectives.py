"""What the members of a world can compute together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from edl_hvd.errors import WorldBrokenError


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


class WorldCollectives:
    """The collectives of the world that a process is in, which remember that it is broken.

    A script may catch the error of a collective, as ``except Exception`` around the body of a loop does. Then the next
    call raises it again, and so do the loops of the package (``process.refuse_broken_world``).

    Args:
        collectives: Collectives of the same world.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._failure: WorldBrokenError | None = None

    def refuse_broken(self) -> None:
        """Raise the first failure again, if there was one.

        Raises:
            WorldBrokenError: A collective of this world has failed.
        """
        if self._failure is not None:
            raise WorldBrokenError(*self._failure.args) from self._failure

    @contextmanager
    def _remembering(self) -> Iterator[Collectives]:
        self.refuse_broken()
        try:
            yield self._collectives
        except WorldBrokenError as error:
            self._failure = error
            raise

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> Any:
        with self._remembering() as collectives:
            return collectives.start_sum(tensor, name, scale)

    def finish(self, handles: Sequence[Any]) -> None:
        with self._remembering() as collectives:
            collectives.finish(handles)

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> Any:
        with self._remembering() as collectives:
            return collectives.start_exchange(tensor, sizes, name)

    def start_gather(self, tensor: torch.Tensor, name: str) -> Any:
        with self._remembering() as collectives:
            return collectives.start_gather(tensor, name)

    def result(self, handle: Any) -> torch.Tensor:
        with self._remembering() as collectives:
            return collectives.result(handle)

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        with self._remembering() as collectives:
            return collectives.allreduce(tensor, op, name)

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        with self._remembering() as collectives:
            collectives.broadcast_(tensor, root, name)

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        with self._remembering() as collectives:
            return collectives.gather_integers(row, name)
