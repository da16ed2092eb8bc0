"""What one rank is to write of a checkpoint, and the manifest that all their parts make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import torch

import edl_hvd
from edl_hvd.checkpoint.format.entries import TensorEntry
from edl_hvd.checkpoint.format.manifest import Manifest, Part
from edl_hvd.checkpoint.format.shards import DTYPE_NAMES
from edl_hvd.checkpoint.format.snapshot import DeferredSnapshot, Snapshot
from edl_hvd.checkpoint.retention.collector import Collector
from edl_hvd.checkpoint.writing.shares import Extent, Rows, share_out
from edl_hvd.checkpoint.writing.throttle import CpuThrottle
from edl_hvd.errors import StorageError
from edl_hvd.storage import Storage


@dataclass(frozen=True)
class Task:
    """What one attempt is to do.

    Attributes:
        storage: Storage to write to.
        snapshot: Snapshot to write; equal on every rank.
        rank, size: Rank of this worker, and number of ranks that take part.
        name: Name of the attempt; the same on every rank, never used before.
        collector: Collector of what is not kept.
        patience_s: Least time in seconds for which rank 0 waits for the other ranks.
        owner: Number of the job as owner of the storage, see ``lease.py``; 0 if it has none.
        cpu: Throttle of what the attempt computes.
        deferred: Snapshot that is materialised before it is read; ``None`` where its tensors hold what they should.
    """

    storage: Storage
    snapshot: Snapshot
    rank: int
    size: int
    name: str
    collector: Collector
    patience_s: float
    cpu: CpuThrottle
    owner: int = 0
    deferred: DeferredSnapshot | None = None


def assemble(task: Task, parts: Mapping[int, Part], created_s: float) -> Manifest:
    """The manifest of a checkpoint whose parts are all there.

    Raises:
        StorageError: The ranks did not write equal snapshots, so together they wrote none.
    """
    snapshot = task.snapshot
    for part in parts.values():
        if (part.step, part.epoch, part.samples) != (snapshot.step, snapshot.epoch, snapshot.samples):
            raise StorageError(
                f"rank {part.rank} wrote step {part.step}, epoch {part.epoch}, {part.samples} samples; rank 0 wrote "
                f"step {snapshot.step}, epoch {snapshot.epoch}, {snapshot.samples} samples; both must checkpoint "
                "the same commit"
            )
    _check_equal_shares(task, parts)
    tensors: dict[str, TensorEntry] = {}
    # In the order of ranks the pieces of a tensor are its rows in order.
    for rank in range(task.size):
        for name, entry in parts[rank].tensors.items():
            before = tensors[name].pieces if name in tensors else []
            tensors[name] = replace(entry, pieces=[*before, *entry.pieces])
    return Manifest(
        attempt=task.name,
        step=snapshot.step,
        epoch=snapshot.epoch,
        samples=snapshot.samples,
        metrics=dict(snapshot.metrics),
        world_size=task.size,
        created=datetime.fromtimestamp(created_s, timezone.utc).isoformat(timespec="milliseconds"),
        versions={"edl_hvd": edl_hvd.__version__, "torch": torch.__version__},
        plain=snapshot.plain,
        files={name: entry for rank in range(task.size) for name, entry in parts[rank].files.items()},
        tensors={name: tensors[name] for name in snapshot.tensors},
    )


def shares_of(task: Task) -> list[list[Rows]]:
    """The rows that each rank writes, by rank."""
    tensors = task.snapshot.tensors
    return share_out({name: Extent(tensor.nbytes, rows_of(tensor)) for name, tensor in tensors.items()}, task.size)


def rows_of(tensor: torch.Tensor) -> int:
    """Number of rows, along which a tensor is cut; one without a dimension has one."""
    return tensor.shape[0] if tensor.dim() else 1


def _check_equal_shares(task: Task, parts: Mapping[int, Part]) -> None:
    """Raises ``StorageError`` unless each rank wrote what rank 0 would have written in its place."""
    different: set[str] = set()
    for rank, share in enumerate(shares_of(task)):
        expected = {}
        for rows in share:
            tensor = task.snapshot.tensors[rows.name]
            place = [(rows.first, rows.count)]
            expected[rows.name] = (DTYPE_NAMES[tensor.dtype], list(tensor.shape), place)
        written = {
            name: (entry.dtype, entry.shape, [(piece.first_row, piece.rows) for piece in entry.pieces])
            for name, entry in parts[rank].tensors.items()
        }
        different.update(name for name in written.keys() | expected.keys() if written.get(name) != expected.get(name))
    if different:
        raise StorageError(
            f"the ranks do not hold the same tensors: {', '.join(sorted(different)[:5])} differ between rank 0 and the "
            "others; every rank must build the same State"
        )
