"""What writing and restoring take beside the state, as the operating system counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STATE_BYTES = 200 * 1024 * 1024
SLACK_BYTES = 24 * 1024 * 1024
# For what is loaded on the first use, and one chunk.

SCRIPT = """
import sys
import torch
from edl_hvd.checkpoint import CheckpointWriter, Snapshot, restore
from edl_hvd.checkpoint.format.shards import pack
from edl_hvd.storage import open_storage

def told(field):
    [line] = [line for line in open("/proc/self/status") if line.startswith(field)]
    return 1024 * int(line.split()[1])

storage = open_storage(sys.argv[1])
tensors = {f"layer.{n}": torch.full((1000, 128), n, dtype=torch.float32) for n in range(40)}
pack(tensors)  # What is only taken once.
few_bytes = sum(tensor.nbytes for tensor in tensors.values())
tensors["embedding"] = torch.full(((int(sys.argv[2]) - few_bytes) // 1024, 256), 3.0)
before = told("VmRSS")
for rank in (1, 0):
    writer = CheckpointWriter(storage)
    writer.begin(Snapshot(tensors, step=1), rank, 2, "attempt")
    assert writer.wait(100)
written = told("VmHWM") - before
before = told("VmRSS")
found = restore(storage, 1).tensors
print(written, told("VmHWM") - before)
assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory")
def test_writing_and_restoring_take_next_to_nothing_beside_the_state(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(STATE_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written_bytes, restored_bytes = map(int, done.stdout.split())
    assert written_bytes < SLACK_BYTES
    assert 0.9 * STATE_BYTES < restored_bytes < STATE_BYTES + SLACK_BYTES
