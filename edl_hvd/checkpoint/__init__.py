"""Durable checkpoints: shards of tensors, a manifest that makes them visible, and nothing executable.

Imports point downward in this order:

- ``tools``: what the command line does with checkpoints, without torch
- ``writing``: a rank's share of a checkpoint, written in the background
- ``retention``: which checkpoints stay
- ``reading``: which checkpoints are listed, their manifests, and their tensors
- ``lease``: who may write at a URL
- ``format``: what is stored, as bytes and as values

``import edl_hvd.checkpoint`` alone does not import torch; the names below load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edl_hvd.checkpoint.format.snapshot import Snapshot
    from edl_hvd.checkpoint.reading.restoring import restore, restore_newest, steps
    from edl_hvd.checkpoint.writing.writer import CheckpointWriter

__all__ = ["CheckpointWriter", "Snapshot", "restore", "restore_newest", "steps"]

_HOMES = {"CheckpointWriter": "writing.writer", "Snapshot": "format.snapshot", "restore": "reading.restoring",
          "restore_newest": "reading.restoring", "steps": "reading.restoring"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
