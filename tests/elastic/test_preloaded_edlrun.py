"""A worker that is forked finds what one finds that is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import HERE, PRELOADED_EDLRUN, REPOSITORY

EDLRUN = [str(Path(sys.executable).with_name("edlrun"))]


def run(launcher: list[str], folder: Path) -> tuple[int, dict, str]:
    """The exit code of a job whose worker ends with exit code 3, what the worker found, and the job's output."""
    words = ["-np", "1", "-H", "localhost:1", sys.executable, str(HERE / "place_script.py")]
    done = subprocess.run(
        [*launcher, *words, "3"], cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "GIVEN": "a b"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = next(line.partition("found ")[2] for line in done.stdout.splitlines() if "found {" in line)
    return done.returncode, json.loads(found), done.stdout


def test_a_forked_worker_finds_what_a_started_one_finds(tmp_path):
    code, found, output = run(PRELOADED_EDLRUN, tmp_path)
    assert found["given"] == "a b"
    assert found["leads a session"]
    assert found["parent"]
    assert "half a line" in output
    assert "exit code 3" in output
    assert (code, found) == run(EDLRUN, tmp_path)[:2]
