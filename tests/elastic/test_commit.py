"""What a commit costs, in things that can be counted; ``benchmarks/checkpoint.py`` has the seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from engines import fails_on_stock

SCRIPT = Path(__file__).with_name("commit_script.py")
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))


@cache
def what_a_commit_does(engine: str) -> dict[str, int | bool]:
    """Of one job for all tests."""
    command = [HOROVODRUN, "--gloo", "-np", "2", "-H", "localhost:2", "--network-interfaces", "lo"]
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), engine],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return next(json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line)


@fails_on_stock("every commit copies the state into new memory (C3)", always=True)
def test_a_commit_copies_into_memory_it_keeps(engine):
    assert what_a_commit_does(engine)["reused"]


@fails_on_stock("the ranks agree by two broadcasts, one after the other (C4)", always=True)
def test_the_ranks_agree_in_one_collective(engine):
    assert what_a_commit_does(engine)["collectives"] == 1
