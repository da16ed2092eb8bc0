"""EDL's experiment with Nginx on a real API server, in a fifteenth of its time: too short for its numbers to hold."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import missing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "edl_api_server.py"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_jobs_and_services_share_nodes_and_few_requests_are_made(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--cases", "services", "--short", "15"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [costs], [play], seconds = (rows(tmp_path / f"{name}.csv") for name in ("costs", "plays", "seconds"))
    assert play["case"] == "services"
    assert {row["services"] for row in seconds} == {"400", "300", "200", "100"}
    assert max(int(row["trainers"]) for row in seconds) > 100, "jobs use what services leave"
    assert int(costs["pods_created"]) > 100
    assert 0 < float(costs["writes_per_pod_change"]) <= 3
    assert int(costs["reads"]) <= 5, "the Lease at the start; all else is listed and watched"
