"""The benchmark that varies load, period and the cost of a change."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from cluster_profiles import write_profile, write_workload

ROOT = Path(__file__).parents[2]


def test_one_of_three_is_varied_at_a_time(tmp_path: Path) -> None:
    write_profile(tmp_path / "profiles", "bert")
    rows = [(30 * number, "bert", 8, 64) for number in range(20)]
    write_workload(tmp_path / "workloads" / "workload-1.csv", rows)
    words = [sys.executable, str(ROOT / "benchmarks" / "cluster_sweeps.py"), str(tmp_path), str(tmp_path / "out")]
    words += ["--workloads", "1", "--policies", "ranked,tiresias", "--picture", str(tmp_path / "sweeps.png")]
    words += ["--loads", "0.1,1", "--periods", "60,480", "--costs", "5,120"]
    first, second = (subprocess.run(words, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.count("'workload': 1") == 12
    assert second.count("'workload': 1") == 0, "they are there already"
    with (tmp_path / "out" / "sweeps.csv").open() as file:
        found = {(row["varied"], row["value"], row["policy"]): float(row["average_s"]) for row in csv.DictReader(file)}
    assert found["load", "1", "ranked"] == found["period", "60", "ranked"], "both are the artifact's costs"
    assert found["load", "0.1", "ranked"] < found["load", "1", "ranked"]
    assert found["period", "60", "ranked"] < found["period", "480", "ranked"]
    assert found["cost", "5", "ranked"] < found["cost", "120", "ranked"]
    assert "| load | 0.1 |" in second
    assert (tmp_path / "sweeps.png").read_bytes().startswith(b"\x89PNG")
