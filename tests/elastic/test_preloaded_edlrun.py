"""A worker that is forked finds what one finds that is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import prepared
import pytest
from harness import HERE, REPOSITORY, TOKEN
from prepared import PRELOADED_EDLRUN

EDLRUN = [str(Path(sys.executable).with_name("edlrun"))]
WORDS = ["-np", "1", "-H", "localhost:1", sys.executable, str(HERE / "place_script.py"), "3"]


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "GIVEN": "a b", TOKEN: uuid.uuid4().hex}


def started(launcher: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [*launcher, *WORDS], cwd=folder, env=variables(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def found_in(output: str) -> dict:
    found: dict = json.loads(next(line.partition("found ")[2] for line in output.splitlines() if "found {" in line))
    return found


@pytest.mark.parametrize("how", ["imports of the job", "imports of all jobs"])
def test_a_forked_worker_finds_what_a_started_one_finds(tmp_path, how):
    """Its job ends with the worker's exit code, 3."""
    if how == "imports of the job":
        code, output = started(PRELOADED_EDLRUN, tmp_path)
    else:
        code, output = prepared.run([*PRELOADED_EDLRUN, *WORDS], variables(), tmp_path)
    found = found_in(output)
    assert found["given"] == "a b"
    assert found["leads a session"]
    assert found["job in /proc"]
    assert found["parent"]
    assert "half a line" in output
    assert "exit code 3" in output
    as_usual, output = started(EDLRUN, tmp_path)
    assert (code, found) == (as_usual, found_in(output))


def test_a_script_that_is_forked_ends_with_its_exit_code_and_what_it_has_written(tmp_path):
    code, output = prepared.run([sys.executable, str(HERE / "place_script.py"), "3"], variables(), tmp_path)
    found = found_in(output)
    assert code == 3
    assert (found["given"], found["folder"], found["job in /proc"]) == ("a b", str(tmp_path), True)
    assert found["leads a session"]
