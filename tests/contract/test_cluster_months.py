"""The benchmark that plays months of a recorded cluster."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from recorded_trace import write_trace

ROOT = Path(__file__).parents[2]


def test_each_play_is_made_once(tmp_path: Path) -> None:
    write_trace(tmp_path / "elasticflow" / "cluster04.csv", jobs=60, gap_s=400.0)
    words = [sys.executable, str(ROOT / "benchmarks" / "cluster_months.py"), str(tmp_path), str(tmp_path / "out")]
    words += ["--gpus", "64", "--policies", "fifo,ranked", "--laws", "0.85,0.6", "--stretch", "4", "--first", "50"]
    words += ["--picture", str(tmp_path / "months.png")]
    first, second = (subprocess.run(words, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.count("'trace': 'cluster04'") == 3, "gangs do not look at the law"
    assert second.count("'trace': 'cluster04'") == 0, "they are there already"
    assert "| 64 | fifo | - | 1 | 0 | own |" in second
    with (tmp_path / "out" / "months.csv").open() as file:
        rows = {(row["policy"], row["law"]): row for row in csv.DictReader(file)}
    gang, better, worse = (
        float(rows[key]["average_h"]) for key in (("fifo", "-"), ("ranked", "0.85"), ("ranked", "0.6"))
    )
    assert better < worse < gang
    assert (tmp_path / "months.png").read_bytes().startswith(b"\x89PNG")
