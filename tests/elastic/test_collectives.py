"""The public collectives in real worlds, and what ranks hear that do not make the same calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import prepared
import pytest
from prepared import PRELOADED_EDLRUN

SCRIPT = Path(__file__).with_name("calls_script.py")
EDLRUN = [*PRELOADED_EDLRUN, "-np", "3", "--min-np", "3", "-H", "localhost:3"]
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "-np", "3", "-H", "localhost:2,127.0.0.1:1",
              "--network-interfaces", "lo"]  # fmt: skip


def run(launcher: list[str], *words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent)}
    if launcher == EDLRUN:
        return prepared.run([*launcher, sys.executable, str(SCRIPT), *words], environment, SCRIPT.parent)
    # The deadline is many times what the job needs; it is there so that a hang shows its output.
    done = subprocess.run([*launcher, sys.executable, str(SCRIPT), *words], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=180, check=False)  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("launcher", [EDLRUN, HOROVODRUN], ids=["edlrun", "horovodrun"])
def test_every_collective_works_for_every_type_in_a_world_of_three(launcher):
    code, output = run(launcher)
    assert code == 0, output
    assert all(f"all agreed on rank {rank} of 3" in output for rank in range(3)), output


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shapes", "the workers called different collectives"),
        ("one shape", "the workers called different collectives"),
        ("operations", "the workers called different collectives"),
        ("calls", "the workers called different collectives"),
        ("more calls", "different collectives: rank 0 allgather, rank 1 barrier, rank 2 barrier"),
        ("rows", "rank 0: float32 [2, 3], rank 1: float32 [2, 4], rank 2: float32 [2, 5]"),
        ("roots", "rank 0: float32 [2] from 0, rank 1: float32 [2] from 1"),
    ],
)
def test_ranks_that_do_not_make_the_same_call_end_in_one_error_and_do_not_wait(how, said):
    code, output = run(EDLRUN, how)
    assert code == 1, output
    assert said in output, output
    assert "all agreed" not in output
