"""Worlds simulated in one process: ranks that run one after the other, or at once as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from edl_hvd.worker import process
from edl_hvd.worker.collectives import SoloCollectives
from edl_hvd.worker.rendezvous import Joined
from edl_hvd.worker.solo_rendezvous import SoloRendezvous
from edl_hvd.world import World


class RecordingCollectives(SoloCollectives):
    """Keeps what one rank puts into each sum."""

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> None:
        assert name not in self.parts, f"{name} was summed twice in one step"
        self.parts[name] = tensor.double() * scale


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[RecordingCollectives]:
    """Be this rank inside the block."""
    process.shutdown()
    process.init(SoloRendezvous())
    collectives = RecordingCollectives()
    world = World(1, rank, size, members=tuple(f"host:{i}" for i in range(size)))
    process.current().joined = Joined(world, collectives, -1)
    try:
        yield collectives
    finally:
        process.current().joined = None
        process.shutdown()


@contextmanager
def alone() -> Iterator[None]:
    """A process initialised as a world of one."""
    process.shutdown()
    process.init(SoloRendezvous())
    try:
        yield
    finally:
        process.shutdown()


class ThreadCollectives(SoloCollectives):
    """One rank among several that are threads of this process; all of them share a ``Table``."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        given = self._table.exchange(self._rank, tensor.clone() if self._rank == root else None)[root]
        assert given is not None
        assert given.shape == tensor.shape
        tensor.copy_(given)

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        return self._table.exchange(self._rank, [int(number) for number in row])


class Table:
    """Where the threads of a world lay down what they have for each other."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._places: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._places[rank] = value
        self._barrier.wait(60)
        found = list(self._places)
        self._barrier.wait(60)
        return found


def together(size: int, work: Callable[[ThreadCollectives, World], Any]) -> list[Any]:
    """What ``work`` returns or raises on each rank of a world of threads."""
    table = Table(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        world = World(1, rank, size, members=tuple(f"host:{i}" for i in range(size)))
        try:
            results[rank] = work(ThreadCollectives(table, rank), world)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
