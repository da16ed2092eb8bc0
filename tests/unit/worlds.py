"""A world simulated in one process: ranks run one after the other, their sums are made afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
