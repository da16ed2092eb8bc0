"""A world: the ordered set of workers that can allreduce with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl_hvd.errors import InternalError


@dataclass(frozen=True)
class World:
    """One worker's view of the world it is in. Ranks and sizes have Horovod's meanings.

    Attributes:
        generation: Rises with every new world of a job; the first world is 1.
        rank: This worker's number, in [0, size).
        size: Number of workers, at least 1.
        local_rank: This worker's number on its host, in [0, local_size).
        local_size: Workers on this host.
        cross_rank: This host's number among the hosts that have this local rank.
        cross_size: Number of hosts that have this local rank.
        members: ``host:local_rank`` of every worker, in rank order; its length is ``size``.
    """

    generation: int
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    members: tuple[str, ...] = ("localhost:0",)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or len(self.members) != self.size:
            raise InternalError(f"not a world: {self}")

    @classmethod
    def of(cls, generation: int, members: Sequence[str], rank: int) -> World:
        """The view of one member, from the names of all in rank order.

        Local ranks count the members of a host, not its slots, because Horovod wants them without gaps; hosts are
        numbered by their first member.

        >>> world = World.of(3, ("a:0", "a:2", "b:0"), rank=1)
        >>> world.local_rank, world.local_size, world.cross_rank, world.cross_size
        (1, 2, 0, 1)
        """
        hosts = [member.rpartition(":")[0] for member in members]
        local_ranks = [hosts[:place].count(host) for place, host in enumerate(hosts)]
        peers = [place for place, local_rank in enumerate(local_ranks) if local_rank == local_ranks[rank]]
        return cls(
            generation=generation,
            rank=rank,
            size=len(members),
            local_rank=local_ranks[rank],
            local_size=hosts.count(hosts[rank]),
            cross_rank=peers.index(rank),
            cross_size=len(peers),
            members=tuple(members),
        )

    @property
    def hosts(self) -> int:
        """The number of hosts that the members are on."""
        return len({member.rpartition(":")[0] for member in self.members})

    @property
    def name(self) -> str:
        """This worker as ``host:local_rank``, the same for its whole life."""
        return self.members[self.rank]


SOLO = World(generation=1, rank=0, size=1)
