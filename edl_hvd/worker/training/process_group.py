"""Which workers gradients are summed over: the rank, size and collectives of a world, as its loops hand them down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edl_hvd.errors import UsageError
from edl_hvd.worker import process
from edl_hvd.worker.engine.collectives import Collectives


class ProcessGroup(Protocol):
    """The workers that compute together, and how; the word is that of ``torch.distributed``."""

    @property
    def rank(self) -> int:
        """The number of this worker, in [0, size)."""

    @property
    def size(self) -> int:
        """The number of workers, at least 1."""

    @property
    def hosts(self) -> int:
        """The number of hosts that they are on, at least 1."""

    @property
    def collectives(self) -> Collectives:
        """What they can compute together."""


@dataclass(frozen=True)
class WorldGroup:
    """The members of one world. The elastic loop hands it to the state when the world is entered.

    Attributes:
        rank: Rank of this worker in the world.
        size: Number of its members.
        collectives: Collectives of the world.
        hosts: Number of hosts that they are on.
    """

    rank: int
    size: int
    collectives: Collectives
    hosts: int = 1


class PresentGroup:
    """The members of the present world, whichever it is, as ``edl_hvd.rank`` and ``edl_hvd.allreduce`` see it.

    For an optimizer that no elastic loop has bound to its world.
    """

    @property
    def rank(self) -> int:
        """See :func:`edl_hvd.rank`."""
        return process.rank()

    @property
    def size(self) -> int:
        """See :func:`edl_hvd.size`."""
        return process.size()

    @property
    def hosts(self) -> int:
        """The number of hosts of the present world."""
        world = process.current().world
        return 1 if world is None else world.hosts

    @property
    def collectives(self) -> Collectives:
        """The collectives of the present world.

        Raises:
            UsageError: There is no world, or ``init`` was not called.
        """
        present = process.current()
        if present.world is None:
            raise UsageError(
                "backward() was called outside the elastic function, for a model whose optimizer is a "
                "DistributedOptimizer: it trains only inside the function decorated with @edl_hvd.elastic, where "
                "gradients are summed over the workers; move the training there, or before the call of "
                "DistributedOptimizer"
            )
        return present.collectives


def refuse_broken_world() -> None:
    """See :func:`edl_hvd.worker.process.refuse_broken_world`."""
    process.refuse_broken_world()
