"""What the processes of the contract tests run. Light to import: each of them imports it anew."""

from __future__ import annotations

import os
from multiprocessing.context import ForkServerContext

import forked
import torch

from edl_hvd.checkpoint import CheckpointWriter, Snapshot
from edl_hvd.events import CheckpointFailed
from edl_hvd.storage import open_storage


def process_context() -> ForkServerContext:
    """Processes that have the imports of these tests."""
    return forked.process_context("edl_hvd.checkpoint.writing.writer", "edl_hvd.storage.s3", "fsspec", "pytest")


def snapshot_of(step: int) -> Snapshot:
    """About a megabyte whose every value follows from ``step``."""
    numbers = torch.Generator().manual_seed(step)
    tensors = {f"layer.{n}": torch.randn(100 + n, 300, generator=numbers) for n in range(8)}
    tensors["half"] = torch.randn(999, generator=numbers).bfloat16()
    tensors["count"] = torch.tensor(step)
    return Snapshot(tensors, {"step": step}, step, step // 100, 32 * step)


def write_for_ever(
    url: str, environment: dict[str, str], ranks: list[int], first_step: int, attempt: str, keep: int
) -> None:
    """Write one checkpoint after the other as these ranks of a world of two, until killed."""
    os.environ.update(environment)
    storage = open_storage(url)
    writers = {rank: CheckpointWriter(storage, keep) for rank in ranks}
    for step in range(first_step, first_step + 100_000):
        for rank, writer in writers.items():
            writer.begin(snapshot_of(step), rank, 2, f"{attempt}-{step}")
        for writer in writers.values():
            writer.wait(600)
            if any(isinstance(event, CheckpointFailed) for event in writer.poll()):
                raise SystemExit("a checkpoint failed although nobody was killed")
