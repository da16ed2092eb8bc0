"""The state of a worker whose process is run anew, kept in files from the one life to the next."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from edl_hvd.checkpoint import CheckpointWriter, restore_newest
from edl_hvd.storage import open_storage
from edl_hvd.worker.keeping.host_copy import host_copy
from edl_hvd.worker.keeping.memory import Memory

_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory, on Linux


def keep(memory: Memory) -> str | None:
    """Write the last commit to files, in memory where it fits; their folder, or ``None`` without a commit."""
    if memory.held < 0:
        return None
    plain, tensors = memory.share()
    folder = tempfile.mkdtemp(prefix="edl_hvd-", dir=_roomy_folder(memory.size_bytes))
    writer = CheckpointWriter(open_storage(folder), keep=1)
    writer.begin(host_copy(plain, tensors), 0, 1, "life")
    writer.wait(timeout_s=600)
    writer.close()
    return folder


def take_back(memory: Memory, folder: str) -> None:
    """Let it be the last commit again. The folder stays."""
    snapshot = restore_newest(open_storage(folder), report=lambda event: None)
    if snapshot is not None:
        memory.receive(snapshot.plain, dict(snapshot.tensors))


def _roomy_folder(size_bytes: int) -> Path | None:
    """The file system in memory if it takes that much (a container may give it 64 MB), else the default."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size_bytes * 1.1 + (1 << 20):
        return _SHARED_MEMORY
    return None
