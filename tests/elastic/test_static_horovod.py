"""The script of docs/from_static_horovod.md, alone and under ``edlrun``; and its diff, whose result it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edl_hvd

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCUMENT = (REPOSITORY / "docs" / "from_static_horovod.md").read_text()
EDLRUN = [str(Path(sys.executable).with_name("edlrun")), "-np", "2", "--min-np", "1", "-H", "localhost:2"]


def block(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    return code


def test_the_diff_leads_to_the_script():
    """Line by line, in order; the script has data and a model besides."""
    after = [line[1:] for line in block("diff").splitlines() if line[:1] != "-" and line.strip(" +")]
    script = iter(block("python").splitlines())
    assert [line for line in after if line not in script] == []


def test_the_script_before_the_diff_is_one():
    before = "\n".join(line[1:] for line in block("diff").splitlines() if line[:1] != "+")
    compile(before, "before.py", "exec")
    assert "import horovod.torch as hvd" in before


@pytest.mark.skipif(not hasattr(edl_hvd.State, "steps"), reason="state.steps is not there yet")
@pytest.mark.parametrize("launcher", [[], EDLRUN], ids=["alone", "edlrun"])
def test_the_script_trains_and_goes_on_from_its_checkpoint(launcher, tmp_path):
    (tmp_path / "train.py").write_text(block("python"))
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [*launcher, sys.executable, "train.py"], cwd=tmp_path, timeout=180, check=False, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
    size = 2 if launcher else 1
    assert all(f"finished on rank {rank} of {size}" in outputs[0] for rank in range(size)), outputs[0]
    assert outputs[0].count("accuracy") == 3, outputs[0]
    assert "step 10: loss" in outputs[0]
    assert "accuracy" not in outputs[1], "the second run had nothing left to train"
