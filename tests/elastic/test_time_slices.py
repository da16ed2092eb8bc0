"""All threads of a job's driver and workers have short time slices of the processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from time_slices import has_slices_of_threads

HERE = Path(__file__).parent
EDLRUN = str(Path(sys.executable).with_name("edlrun"))


@pytest.mark.skipif(not has_slices_of_threads(), reason="Linux before 6.12 has one slice for all threads")
def test_horovods_thread_and_all_others_of_driver_and_workers_have_short_slices(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "SUPPORT": str(HERE.parent / "support")}
    script = str(HERE / "time_slice_script.py")
    printed = subprocess.run(
        [EDLRUN, "-np", "2", "-H", "localhost:2", "--output-filename", "output", sys.executable, script],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stdout
    lines = [line for file in (tmp_path / "output").rglob("stdout") for line in file.read_text().splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 2, printed.stdout
    for slices in found:
        assert len(slices["worker"]) >= 3, "Python's, Horovod's and Gloo's"
        assert {*slices["worker"].values(), *slices["driver"].values()} == {100_000}, slices
