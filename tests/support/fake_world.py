"""Worlds simulated in one process: ranks that run one after the other, or at once as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from waiting import soon

from edl_hvd.worker import process
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.rendezvous import RendezvousInfo
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous
from edl_hvd.worker.position import position
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
    process.current().joined = RendezvousInfo(world, collectives, -1)
    try:
        yield collectives
    finally:
        process.current().joined = None
        process.shutdown()


@contextmanager
def body_of(optimizer: Any, part: Any, per_step: int = 1) -> Iterator[None]:
    """In the block the body of ``state.batches`` computes a micro-batch; ``optimizer`` is part of the state."""
    reduction = optimizer.reduction
    reduction.is_joined = True
    if part.first:
        reduction.begin_step()
    position.per_step = per_step
    position.enter_batch(part.last)
    reduction.begin(part)
    try:
        yield
    finally:
        position.leave()


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

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        given = self._table.exchange(self._rank, tensor.clone() if self._rank == root else None)[root]
        assert given is not None
        assert given.shape == tensor.shape
        tensor.copy_(given)

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        found = torch.stack(self._table.exchange(self._rank, tensor.clone()))
        return {"sum": found.sum, "max": found.amax, "min": found.amin}[op](0)

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        return self._table.exchange(self._rank, [int(number) for number in row])

    def start_gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat(self._table.exchange(self._rank, tensor.clone()))


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
        soon(thread)
    return results


class TurnCollectives(SoloCollectives):
    """One rank of a world of threads that take turns, so that each has the process's globals to itself meanwhile."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank
        self._calls = 0

    def start_sum(self, tensor: torch.Tensor, name: str, scale: float) -> Any:
        return "sum", self._turns.lay_down(self._rank, f"sum.{name}", tensor * scale), tensor

    def finish(self, handles: Sequence[Any]) -> None:
        for _, key, tensor in handles:
            tensor.copy_(torch.stack(self._turns.all_of(self._rank, key)).sum(0))

    def start_exchange(self, tensor: torch.Tensor, sizes: Sequence[int], name: str) -> Any:
        parts = tensor.clone().split(list(sizes))
        return "exchange", self._turns.lay_down(self._rank, f"exchange.{name}", parts), None

    def start_gather(self, tensor: torch.Tensor, name: str) -> Any:
        return "gather", self._turns.lay_down(self._rank, f"gather.{name}", tensor.clone()), None

    def result(self, handle: Any) -> torch.Tensor:
        kind, key, _ = handle
        found = self._turns.all_of(self._rank, key)
        return torch.cat([parts[self._rank] for parts in found] if kind == "exchange" else found)

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        found = torch.stack(self._all(op, tensor.clone()))
        return {"sum": found.sum, "max": found.amax, "min": found.amin}[op](0)

    def broadcast_(self, tensor: torch.Tensor, root: int, name: str | None = None) -> None:
        tensor.copy_(self._all("broadcast", tensor.clone())[root])

    def gather_integers(self, row: Sequence[int], name: str | None = None) -> list[list[int]]:
        return self._all("integers", [int(number) for number in row])

    def _all(self, name: str, value: Any) -> list[Any]:
        return self._turns.all_of(self._rank, self._turns.lay_down(self._rank, name, value))


class Turns:
    """Threads of which one runs at a time, up to where it has to wait for the others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turn = threading.Condition()
        self._whose = 0
        self._over: set[int] = set()
        self._laid: dict[tuple[str, int], dict[int, Any]] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work(rank)`` returns on each rank; raises the first error."""
        results: list[Any] = [None] * self._size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            with self._turn:
                self._turn.wait_for(lambda: self._whose == rank)
            try:
                if not errors:
                    position.leave()
                    world = World(1, rank, self._size, members=tuple(f"host:{i}" for i in range(self._size)))
                    process.shutdown()
                    process.init(SoloRendezvous())
                    process.current().joined = RendezvousInfo(world, TurnCollectives(self, rank), -1)
                    results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
            finally:
                self._over.add(rank)
                process._process = None
                self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            soon(thread)
        if errors:
            raise errors[0]
        return results

    def lay_down(self, rank: int, name: str, value: Any) -> tuple[str, int]:
        count = self._counts[rank, name] = self._counts.get((rank, name), 0) + 1
        self._laid.setdefault((name, count), {})[rank] = value
        return name, count

    def all_of(self, rank: int, key: tuple[str, int]) -> list[Any]:
        while len(self._laid[key]) < self._size:
            if self._over:
                raise RuntimeError(f"rank {rank} waits for {key}, but ranks {self._over} have ended")
            own, where = process._process, dict(position.__dict__)
            self._pass_on(rank)
            with self._turn:
                self._turn.wait_for(lambda: self._whose == rank)
            process._process = own
            position.__dict__.update(where)
        return [self._laid[key][other] for other in range(self._size)]

    def _pass_on(self, rank: int) -> None:
        with self._turn:
            following = [*range(rank + 1, self._size), *range(rank + 1)]
            self._whose = next((other for other in following if other not in self._over), rank)
            self._turn.notify_all()
