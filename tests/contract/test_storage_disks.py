"""Disks that are full or can only be read: one clear error, and nothing half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MOUNTED = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o "$1" tmpfs "$2"; shift 2; exec "$@"', "sh"]


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*MOUNTED, "size=1m", "/mnt", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="mounting a file system takes root and unshare (util-linux)")
@pytest.mark.parametrize(("options", "act"), [("size=2m", "fill_up"), ("ro", "write_nowhere")])
@pytest.mark.parametrize("kind", ["file", "fsspec"])
def test_a_disk_that_takes_nothing_is_one_clear_error(tmp_path: Path, kind: str, options: str, act: str) -> None:
    """In a process with mounts of its own: they go with it."""
    program = f"import storage_processes; storage_processes.{act}({kind!r}, {str(tmp_path)!r})"
    command = [*MOUNTED, options, str(tmp_path), sys.executable, "-c", program]
    folder = Path(__file__).parent
    variables = {**os.environ, "PYTHONPATH": str(folder.parent / "support")}
    result = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "as expected"), result.stderr


SCRIPT = """
import edl_hvd, torch
edl_hvd.init()
state = edl_hvd.State(model=torch.nn.Linear(1000, 500))

@edl_hvd.elastic(checkpoint={url!r}, checkpoint_every="1step")
def train(state):
    state.commit()

train(state)
"""


@pytest.mark.skipif(not may_mount(), reason="mounting a file system takes root and unshare (util-linux)")
def test_a_disk_too_small_for_a_checkpoint_is_one_sentence_of_a_real_script(tmp_path: Path) -> None:
    script, disk = tmp_path / "train.py", tmp_path / "disk"
    disk.mkdir()
    script.write_text(SCRIPT.format(url=str(disk)))
    command = [*MOUNTED, "size=256k", str(disk), sys.executable, str(script)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    *tries, last = result.stderr.splitlines()
    assert all("No space left on device; free some of it or choose a larger one" in line for line in tries)
    assert last.startswith("StorageError: training is complete, but its last checkpoint could not be written to")
