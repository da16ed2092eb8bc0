"""Durable checkpoints: shards of tensors, a manifest that makes them visible, and nothing executable.

Reading order: ``snapshot`` (what is kept), ``layout`` (where), ``shares`` (who writes what), ``shards``
(tensors as bytes), ``manifest`` (what makes it a checkpoint), then ``writer``, ``attempt``, ``retention``
for writing and ``reading``, ``restore`` for reading.
"""

from edl_hvd.checkpoint.restore import restore, restore_newest, steps
from edl_hvd.checkpoint.snapshot import Snapshot
from edl_hvd.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "Snapshot", "restore", "restore_newest", "steps"]
