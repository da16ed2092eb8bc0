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
