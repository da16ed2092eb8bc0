"""The gradient of real ranks against that of one process, for dealings that do not come out even."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.learning

SCRIPT = Path(__file__).with_name("gradient_script.py")
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))


@pytest.mark.parametrize("micro_batch", [0, 2], ids=["even-split", "micro-batches"])
def test_the_gradient_of_three_workers_is_that_of_one(micro_batch):
    command = [HOROVODRUN, "--gloo", "-np", "3", "-H", "localhost:2,127.0.0.1:1", "--network-interfaces", "lo"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent)}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), str(micro_batch)],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"error=(\S+) rank=(\d)", done.stdout)
    # Batches of 10, 10, 10, 10 and 3 samples; the last of them gives the third worker one or none.
    assert len(errors) >= 13
    assert {rank for _, rank in errors} == {"0", "1", "2"}
    assert max(float(error) for error, _ in errors) < 1e-6
