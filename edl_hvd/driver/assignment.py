"""What workers are told about their place in the job before they are members of a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edl_hvd.driver.membership.state import LIVE, Membership, Slot, host_of


@dataclass(frozen=True)
class ExpectedRank:
    """As it is expected when a process starts; its worlds decide later.

    Attributes:
        rank: Its number.
        size: Workers of its first world, as far as known; above ``rank``.
        local_size: Workers on its host.
    """

    rank: int
    size: int
    local_size: int


def assign(membership: Membership, told: Mapping[str, int], started: Sequence[str]) -> dict[str, ExpectedRank]:
    """The places of processes that start together.

    Before the first world they get the lowest numbers that no living process was told, in the order of the hosts, and
    the number of workers that the first world will have. Afterwards members keep their place before newcomers, so the
    numbers begin with that of the other living processes: nobody is told 0 while anybody else lives.

    Args:
        membership: After the decision to start them.
        told: The number that each worker was told at its last start.
        started: The workers that start, in order.
    """
    rules = membership.rules
    others = [worker for worker in membership.having(*LIVE) if worker not in started]
    count = min(len(others) + len(started), rules.max_np)
    first = 0
    if membership.world.generation:
        first = len(others)
        others = [worker for worker in others if _is_to_join(membership.slots[worker])]
    else:
        count = max(count, rules.num_proc)
    taken = {told[worker] for worker in others if worker in told}
    ranks: list[int] = []
    for _ in started:
        while first in taken:
            first += 1
        ranks.append(first)
        first += 1
    size = max([count, *(rank + 1 for rank in ranks)])
    hosts = [host_of(worker) for worker in membership.having(*LIVE)]
    return {
        worker: ExpectedRank(rank, size, max(hosts.count(host_of(worker)), int(worker.rpartition(":")[2]) + 1))
        for worker, rank in zip(started, ranks, strict=True)
    }


def _is_to_join(slot: Slot) -> bool:
    """It is in no world yet, and so keeps the number that it was told."""
    return slot.state == "starting" or (slot.state == "ready" and slot.step < 0)
