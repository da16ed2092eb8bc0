"""Durable checkpoints: shards of tensors, a manifest that makes them visible, and nothing executable.

Reading order: ``snapshot`` (what is kept), ``layout`` (where), ``shares`` (who writes what), ``shards``
(tensors into bytes and back), ``entries`` and ``manifest`` (what makes it a checkpoint), then ``writer``,
``attempt``, ``retention``, ``collector`` for writing and ``restoring`` for reading. What the command line does works
without torch: ``files`` and ``tensor_bytes`` read, ``inspection``, ``copying``, ``retention`` and ``export`` act.

``import edl_hvd.checkpoint`` alone does not import torch; the names below load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_hvd.checkpoint.restoring import restore, restore_newest, steps
    from edl_hvd.checkpoint.snapshot import Snapshot
    from edl_hvd.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "Snapshot", "restore", "restore_newest", "steps"]

_HOMES = {"CheckpointWriter": "writer", "Snapshot": "snapshot", "restore": "restoring",
          "restore_newest": "restoring", "steps": "restoring"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
